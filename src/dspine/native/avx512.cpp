// What the AVX512-VNNI family offers. Compiled without its flags: it must load on any x86-64.
#include "avx2_tables.h"
#include "avx512_tables.h"

namespace dspine {

namespace {

bool runs_here() {
#ifdef DSPINE_EMULATED
    return true;
#endif
    return avx2_family().runs_here() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Family & avx512_family() {
    static const Kernel kernels[] = {kAvx512Q4_0, kAvx512Q4_1, kAvx512Q5_0, kAvx512Q8_0, kAvx512Q4_K,
                                     kAvx512Q5_K, kAvx512Q6_K, kAvx512F16,  kAvx512BF16};
    static const Family family = {"avx512", runs_here, kernels, sizeof kernels / sizeof kernels[0], &kAvx512Attention};
    return family;
}

}  // namespace dspine
