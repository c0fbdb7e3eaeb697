// Kernels that the AVX2 files define and avx2.cpp lists.
#pragma once

#include "kernel.h"

namespace dspine {

extern const Kernel kAvx2Q4_0, kAvx2Q4_1, kAvx2Q5_0, kAvx2Q8_0, kAvx2F16, kAvx2BF16;
extern const Kernel kAvx2Q4_K, kAvx2Q5_K, kAvx2Q6_K;
extern const Attention kAvx2Attention;

}  // namespace dspine
