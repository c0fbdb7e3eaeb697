// What the AVX2 family offers. Compiled without its flags: it must load on any x86-64.
#include "avx2_tables.h"

namespace dspine {

namespace {

bool runs_here() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

const Family & avx2_family() {
    static const Kernel kernels[] = {kAvx2Q4_0, kAvx2Q4_1, kAvx2Q5_0, kAvx2Q8_0, kAvx2Q4_K,
                                     kAvx2Q5_K, kAvx2Q6_K, kAvx2F16,  kAvx2BF16};
    static const Family family = {"avx2", runs_here, kernels, sizeof kernels / sizeof kernels[0], &kAvx2Attention};
    return family;
}

}  // namespace dspine
