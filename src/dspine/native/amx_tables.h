// Kernels that the AMX files define and amx.cpp lists.
#pragma once

#include "kernel.h"

namespace dspine {

extern const Kernel kAmxQ4_0, kAmxQ4_1, kAmxQ5_0, kAmxQ8_0, kAmxQ4_K, kAmxQ5_K, kAmxQ6_K;

}  // namespace dspine
