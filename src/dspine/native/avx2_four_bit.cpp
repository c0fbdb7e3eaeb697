// Q4_0, Q4_1 and Q5_0: one decode of the nibbles serves 16 outputs of up to four rows.
#include "avx2.h"
#include "avx2_tables.h"
#include "layout_small.h"

namespace dspine {

namespace {

// Sixteen bits hold eight products of a 4-bit weight (15 * 127 * 2 * 8), but only four of a 5-bit one
// (31 * 127 * 2 * 4).
template <Small kind>
struct Unit {
    using L       = SmallLayout<kind>;
    using Vectors = Vectors256;
    using Inputs  = Inputs8;
    static constexpr size_t kBytes  = L::kUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = kind == Small::q5_0 ? kFewerRows : kMostRows;

    static float scale(const Inputs8 * x) { return x->row; }

    // Four inputs of 8 outputs: the low or the high nibbles of a group.
    static __m256i weights(const uint8_t * unit, int group, int half, bool high) {
        const __m256i raw  = load(unit + L::kNibbles + 64 * group + 32 * half);
        const __m256i four = _mm256_and_si256(high ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(15));
        if (kind != Small::q5_0) {
            return four;
        }
        const __m256i fifth = load(unit + L::kFifth + 32 * half);
        const __m256i moved = high ? _mm256_srli_epi16(fifth, group) : _mm256_slli_epi16(fifth, 4 - group);
        return _mm256_or_si256(four, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }

    template <int R>
    static void add(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
        constexpr int kFlush = kind == Small::q5_0 ? 4 : 8;  // products that 16 bits hold
        __m256i       part[R][2], sum[R][2];
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
            const int     group = step / 2;
            const bool    high  = step % 2 == 1;
            const __m256i w[2]  = {weights(unit, group, 0, high), weights(unit, group, 1, high)};
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i a = repeat32(x[r]->q + 16 * high + 4 * group);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const __m256i product = _mm256_maddubs_epi16(w[h], a);
                    part[r][h] = step % kFlush == 0 ? product : plus16(part[r][h], product);
                }
            }
            if (step % kFlush != kFlush - 1) {
                continue;
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i factor = repeat32(x[r]->factor);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const __m256i wide = _mm256_madd_epi16(part[r][h], factor);
                    sum[r][h] = step < kFlush ? wide : _mm256_add_epi32(sum[r][h], wide);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256 scale   = load_half(unit + L::kScale + 16 * h);
            const __m256 minimum = kind == Small::q4_1   ? load_half(unit + L::kMinimum + 16 * h)
                                   : kind == Small::q4_0 ? _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f))
                                                         : _mm256_mul_ps(scale, _mm256_set1_ps(-16.0f));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                value[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, value[r][h]);
                value[r][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x[r]->sum), value[r][h]);
            }
        }
    }
};

template <Small kind>
constexpr Kernel kernel(int type) {
    return small_kernel<kind, Lanes::in_order>(type, multiply<Unit<kind>, 32>);
}

}  // namespace

const Kernel kAvx2Q4_0 = kernel<Small::q4_0>(Q4_0);
const Kernel kAvx2Q4_1 = kernel<Small::q4_1>(Q4_1);
const Kernel kAvx2Q5_0 = kernel<Small::q5_0>(Q5_0);

}  // namespace dspine
