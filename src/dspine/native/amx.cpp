// What the AMX family offers. Compiled without its flags: it must load on any x86-64.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx_tables.h"
#include "avx512_tables.h"

namespace dspine {

namespace {

// Intel, Software Developer's Manual, volume 1, chapter 18: leaf 7 has AMX-TILE in bit 24 of EDX and AMX-INT8
// in bit 25; the system must have enabled both parts of the state, bits 17 and 18 of XCR0.
bool has_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & 1u << 27) == 0) {  // XGETBV is enabled
        return false;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & 1u << 24) == 0 || (d & 1u << 25) == 0) {
        return false;
    }
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 3u << 17) == 3u << 17;
}

// Linux gives the memory for tiles only to a process that asks, for all its threads (arch_prctl(2)).
bool may_use_tiles() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

bool runs_here() {
#ifdef DSPINE_EMULATED
    return true;
#endif
    static const bool found = avx512_family().runs_here() && has_tiles() && may_use_tiles();
    return found;
}

}  // namespace

const Family & amx_family() {
    // Inputs of floats are fp32: they stay with AVX-512.
    static const Kernel kernels[] = {kAmxQ4_0, kAmxQ4_1, kAmxQ5_0,   kAmxQ8_0,   kAmxQ4_K,
                                     kAmxQ5_K, kAmxQ6_K, kAvx512F16, kAvx512BF16};
    static const Family family = {"amx", runs_here, kernels, sizeof kernels / sizeof kernels[0], &kAvx512Attention};
    return family;
}

}  // namespace dspine
