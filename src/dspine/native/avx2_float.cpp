// F16 and BF16: weights widened to fp32, one fused multiply-add per input.
#include "avx2.h"
#include "avx2_tables.h"
#include "layout_float.h"

namespace dspine {

namespace {

template <bool brain>
inline __m256 widen(const uint8_t * from) {
    if (!brain) {
        return load_half(from);
    }
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

template <bool brain>
struct Unit {
    using Vectors = Vectors256;
    using Inputs  = float;
    static constexpr size_t kBytes  = kFloatUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = kFewerRows;

    static float scale(const float *) { return 1.0f; }

    template <int R>
    static void add(const uint8_t * unit, const float * const (&x)[R], __m256 (&value)[R][2]) {
        const __m256 w[2] = {widen<brain>(unit), widen<brain>(unit + 16)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256 a = _mm256_set1_ps(*x[r]);
            value[r][0]    = _mm256_fmadd_ps(w[0], a, value[r][0]);
            value[r][1]    = _mm256_fmadd_ps(w[1], a, value[r][1]);
        }
    }
};

}  // namespace

const Kernel kAvx2F16  = float_kernel(F16, multiply<Unit<false>, 1>);
const Kernel kAvx2BF16 = float_kernel(BF16, multiply<Unit<true>, 1>);

}  // namespace dspine
