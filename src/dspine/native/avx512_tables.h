// Kernels that the AVX512 files define and avx512.cpp lists.
#pragma once

#include "kernel.h"

namespace dspine {

extern const Kernel kAvx512Q4_0, kAvx512Q4_1, kAvx512Q5_0, kAvx512Q8_0, kAvx512F16, kAvx512BF16;
extern const Kernel kAvx512Q4_K, kAvx512Q5_K, kAvx512Q6_K;
extern const Attention kAvx512Attention;

}  // namespace dspine
