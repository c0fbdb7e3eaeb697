// Q4_K, Q5_K and Q6_K: the smaller scales are applied in fp32, once per 32 inputs (Q6_K: 16).
#include "avx2.h"
#include "avx2_tables.h"
#include "layout_k_quants.h"

namespace dspine {

namespace {

template <KQuant kind, int set, bool high>
inline __m256i weights(const uint8_t * unit, int group, int half) {
    using S            = SubBlock<kind, set, high>;
    const size_t  at   = size_t(64 * group + 32 * half);
    const __m256i raw  = load(unit + S::kNibbles + at);
    const __m256i four = _mm256_and_si256(high ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(15));
    if (kind == KQuant::q4_k) {
        return four;
    }
    const __m256i mask  = _mm256_set1_epi8(kind == KQuant::q6_k ? 0x30 : 0x10);
    __m256i       upper = load(unit + S::kUpper + at);
    if (S::kUp > 0) {
        upper = _mm256_slli_epi16(upper, S::kUp);
    } else if (S::kUp < 0) {
        upper = _mm256_srli_epi16(upper, -S::kUp);
    }
    return _mm256_or_si256(four, _mm256_and_si256(upper, mask));
}

// Sixteen bits hold 8 products of 4-bit weights, 4 of 5-bit ones, 2 of 6-bit ones.
template <KQuant kind>
constexpr int kFlush = kind == KQuant::q4_k ? 8 : kind == KQuant::q5_k ? 4 : 2;
// Groups of 4 inputs that share a scale.
template <KQuant kind>
constexpr int kScaled = kind == KQuant::q6_k ? 4 : 8;

// The sums of the products before one scale: groups `first` and behind it, R rows times 16 outputs.
template <KQuant kind, int set, bool high, int first, int R>
inline void products(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256i (&sum)[R][2]) {
    constexpr int index = SubBlock<kind, set, high>::kIndex;
    __m256i       part[R][2];
#pragma GCC unroll 8
    for (int group = first; group < first + kScaled<kind>; group++) {
        const __m256i w[2] = {weights<kind, set, high>(unit, group, 0), weights<kind, set, high>(unit, group, 1)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i a = repeat32(x[r][index].q + 4 * group);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256i product = _mm256_maddubs_epi16(w[h], a);
                part[r][h] = group % kFlush<kind> == 0 ? product : plus16(part[r][h], product);
                if (group % kFlush<kind> == kFlush<kind> - 1) {
                    const __m256i wide = _mm256_madd_epi16(part[r][h], repeat32(x[r][index].factor));
                    sum[r][h]          = group < first + kFlush<kind> ? wide : plus32(sum[r][h], wide);
                }
            }
        }
    }
}

// The compiler must not move loads across: it would hold factors and values for later and spill the sums.
inline void load_anew() { asm volatile("" ::: "memory"); }

// The same with two groups decoded together, for weights of which sixteen bits hold two products only: no
// 16-bit sum has to wait for the next group.
template <KQuant kind, int set, bool high, int first, int R>
inline void products_by_two(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256i (&sum)[R][2]) {
    static_assert(kFlush<kind> == 2);
    constexpr int index = SubBlock<kind, set, high>::kIndex;
#pragma GCC unroll 2
    for (int group = first; group < first + kScaled<kind>; group += 2) {
        load_anew();
        const __m256i w[2] = {weights<kind, set, high>(unit, group, 0), weights<kind, set, high>(unit, group, 1)};
        const __m256i v[2] = {weights<kind, set, high>(unit, group + 1, 0), weights<kind, set, high>(unit, group + 1, 1)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i a      = repeat32(x[r][index].q + 4 * group);
            const __m256i b      = repeat32(x[r][index].q + 4 * group + 4);
            const __m256i factor = repeat32(x[r][index].factor);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256i part = plus16(_mm256_maddubs_epi16(w[h], a), _mm256_maddubs_epi16(v[h], b));
                const __m256i wide = _mm256_madd_epi16(part, factor);
                sum[r][h]          = group == first ? wide : plus32(sum[r][h], wide);
            }
        }
    }
    load_anew();
}

// Adds what has one scale: all 32 inputs of a sub-block, or half `part` of them (Q6_K).
template <KQuant kind, int set, bool high, int part, int R>
inline void add_scaled(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
    using L             = KLayout<kind>;
    constexpr int index = SubBlock<kind, set, high>::kIndex;
    __m256i       sum[R][2];
    if constexpr (L::kSix) {
        products_by_two<kind, set, high, 4 * part, R>(unit, x, sum);
    } else {
        products<kind, set, high, 0, R>(unit, x, sum);
    }
    constexpr int scaled = L::kSix ? 2 * index + part : index;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        const auto * small  = reinterpret_cast<const __m128i *>(unit + L::kSmall + 16 * scaled + 8 * h);
        const auto   eight  = _mm_loadl_epi64(small);
        const __m256 factor = _mm256_cvtepi32_ps(L::kSix ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
        const __m256 scale  = _mm256_mul_ps(load_half(unit + L::kScale + 16 * h), factor);
        __m256       minimum;
        if (L::kSix) {
            minimum = _mm256_mul_ps(scale, _mm256_set1_ps(-32.0f));
        } else {
            const auto * least = reinterpret_cast<const __m128i *>(unit + L::kSmallMin + 16 * scaled + 8 * h);
            const __m256 size  = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(least)));
            minimum = _mm256_mul_ps(_mm256_xor_ps(load_half(unit + L::kMinimum + 16 * h), _mm256_set1_ps(-0.0f)), size);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Inputs8 & in    = x[r][index];
            const float     total = L::kSix ? in.half[part] : in.sum;
            value[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, value[r][h]);
            value[r][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(total), value[r][h]);
        }
    }
}

// Not inlined: one function for all of a unit takes minutes to compile, and the values would be kept
// in memory all the same.
template <KQuant kind, int set, bool high, int R>
__attribute__((noinline)) void add_sub_block(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
    // An eighth of the unit that is read after the next 2048 bytes: all of it at once would hold up other reads.
    constexpr int lines = int((KLayout<kind>::kUnit / 8 + 63) / 64);
    fetch<Vectors256, lines>(unit + 64 * lines * (2 * set + high));
    add_scaled<kind, set, high, 0, R>(unit, x, value);
    if constexpr (KLayout<kind>::kSix) {
        add_scaled<kind, set, high, 1, R>(unit, x, value);
    }
}

template <KQuant kind>
struct Unit {
    using Vectors = Vectors256;
    using Inputs  = Inputs8;
    static constexpr size_t kBytes  = KLayout<kind>::kUnit;
    static constexpr int    kBlocks = 8;
    static constexpr bool   kFetches = true;  // add does, piece by piece
    static constexpr int    kRows   = kFewerRows;

    static float scale(const Inputs8 * x) { return x->row; }

    template <int R>
    static void add(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
        add_sub_block<kind, 0, false, R>(unit, x, value);
        add_sub_block<kind, 0, true, R>(unit, x, value);
        add_sub_block<kind, 1, false, R>(unit, x, value);
        add_sub_block<kind, 1, true, R>(unit, x, value);
        add_sub_block<kind, 2, false, R>(unit, x, value);
        add_sub_block<kind, 2, true, R>(unit, x, value);
        add_sub_block<kind, 3, false, R>(unit, x, value);
        add_sub_block<kind, 3, true, R>(unit, x, value);
    }
};

template <KQuant kind>
constexpr Kernel kernel(int type) {
    return k_kernel<kind, Lanes::in_order>(type, multiply<Unit<kind>, 256>);
}

}  // namespace

const Kernel kAvx2Q4_K = kernel<KQuant::q4_k>(Q4_K);
const Kernel kAvx2Q5_K = kernel<KQuant::q5_k>(Q5_K);
const Kernel kAvx2Q6_K = kernel<KQuant::q6_k>(Q6_K);

}  // namespace dspine
