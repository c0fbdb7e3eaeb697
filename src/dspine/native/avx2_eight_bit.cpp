// Q8_0: 8-bit weights widened to 16 bits, times inputs of 16 bits, summed exactly in 32 bits.
#include "avx2.h"
#include "avx2_tables.h"
#include "layout_small.h"

namespace dspine {

namespace {

inline __m256i widen(const uint8_t * from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

struct Unit {
    using Vectors = Vectors256;
    using Inputs  = Inputs16;
    static constexpr size_t kBytes  = kEightUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = kMostRows;

    static float scale(const Inputs16 *) { return 1.0f; }

    template <int R>
    static void add(const uint8_t * unit, const Inputs16 * const (&x)[R], __m256 (&value)[R][2]) {
        __m256i sum[R][2];
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) {
            const __m256i w[2] = {widen(unit + kEightWeights + 32 * pair), widen(unit + kEightWeights + 32 * pair + 16)};
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i a = repeat32(x[r]->q + 2 * pair);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const __m256i product = _mm256_madd_epi16(w[h], a);
                    sum[r][h] = pair == 0 ? product : plus32(sum[r][h], product);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256 scale = load_half(unit + 16 * h);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x[r]->scale));
                value[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), both, value[r][h]);
            }
        }
    }
};

}  // namespace

const Kernel kAvx2Q8_0 = eight_kernel(multiply<Unit, 32>);

}  // namespace dspine
