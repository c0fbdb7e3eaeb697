// Kernels that the AVX-VNNI files define and avxvnni.cpp lists.
#pragma once

#include "kernel.h"

namespace dspine {

extern const Kernel kAvxVnniQ4_0, kAvxVnniQ4_1, kAvxVnniQ5_0, kAvxVnniQ8_0;
extern const Kernel kAvxVnniQ4_K, kAvxVnniQ5_K, kAvxVnniQ6_K;

}  // namespace dspine
