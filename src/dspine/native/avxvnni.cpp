// What the AVX-VNNI family offers. Compiled without its flags: it must load on any x86-64.
#include <cpuid.h>

#include "avx2_tables.h"
#include "avxvnni_tables.h"

namespace dspine {

namespace {

bool runs_here() {
#ifdef DSPINE_EMULATED
    return true;
#endif
    // Leaf 7, subleaf 1, bit 4 of EAX (Intel, Architecture Instruction Set Extensions); not every compiler
    // knows a name for it.
    unsigned a = 0, b = 0, c = 0, d = 0;
    return avx2_family().runs_here() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 4) != 0;
}

}  // namespace

const Family & avxvnni_family() {
    // 16-bit floats gain nothing from it.
    static const Kernel kernels[] = {kAvxVnniQ4_0, kAvxVnniQ4_1, kAvxVnniQ5_0, kAvxVnniQ8_0, kAvxVnniQ4_K,
                                     kAvxVnniQ5_K, kAvxVnniQ6_K, kAvx2F16,     kAvx2BF16};
    static const Family family = {"avxvnni", runs_here, kernels, sizeof kernels / sizeof kernels[0], &kAvx2Attention};
    return family;
}

}  // namespace dspine
