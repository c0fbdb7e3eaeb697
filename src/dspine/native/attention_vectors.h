// Vectors of eight numbers for attention, and what attention does with eight numbers in every family.
// Include only in files compiled with -mavx2 -mfma -mf16c.
#pragma once

#include <limits>

#include "attention_shape.h"
#include "avx2.h"

namespace dspine {

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Eight {
    using Float = __m256;
    static constexpr int kLanes = 8;
    static constexpr int kRows  = 1;  // rows of a cache of which a vector holds eight elements each
    static constexpr int kGroup = 3;  // queries that share a loaded key: three by four vectors fill the registers
    // From kMany queries an item on they stand side by side: kVectors vectors of them by kKeys keys.
    static constexpr int kMany = 17, kMost = 16, kVectors = 2, kKeys = 4;

    // What an item of so many queries takes for a chunk, by its parts: widening, queries, groups of them.
    static int64_t cost(int64_t queries, bool in_place) { return (in_place ? 1 : 3) + queries + (queries + 2) / 3 * 3; }

    static Float zero() { return _mm256_setzero_ps(); }
    static Float repeat(float x) { return _mm256_set1_ps(x); }
    static Float load(const float * from) { return _mm256_loadu_ps(from); }
    static void  store(float * to, Float x) { _mm256_storeu_ps(to, x); }
    static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float plus(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float minus(Float a, Float b) { return _mm256_sub_ps(a, b); }
    static Float larger(Float a, Float b) { return _mm256_max_ps(a, b); }
    static bool  any_above(Float a, Float b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
    static Float add_product(Float a, Float b, Float sum) { return _mm256_fmadd_ps(a, b, sum); }

    // The compiler would load a value again for each multiplication that it takes part in.
    static Float in_register(Float x) {
        asm("" : "+x"(x));
        return x;
    }

    // Elements from i on of one row of a cache.
    template <bool half>
    static Float elements(const char * row, int64_t i) {
        return half ? load_half(row + 2 * i) : _mm256_loadu_ps(reinterpret_cast<const float *>(row + 4 * i));
    }

    // Elements i to i + 7 of kRows rows: *row, and in wider vectors the one `step` further on.
    template <bool half>
    static Float of_rows(const char * const * row, int, int64_t i) {
        return elements<half>(*row, i);
    }

    // Eight numbers for each row of a vector.
    static Float for_rows(const float * from) { return load(from); }

    // Sums of the eight lanes of four vectors, always added in the same order.
    static void store_sums(float * to, int, Float a, Float b, Float c, Float d) {
        const __m256d ab  = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
        const __m256d cd  = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
        const __m256  all = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                                          _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }

    // to[i * step + j] = row[j][d + i] for four elements of eight rows.
    static void turn(const float * const * row, int64_t d, float * to, int step) {
        Float x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[i] + d)), _mm_loadu_ps(row[i + 4] + d), 1);
        }
        const __m256d low[2]  = {_mm256_castps_pd(_mm256_unpacklo_ps(x[0], x[1])), _mm256_castps_pd(_mm256_unpacklo_ps(x[2], x[3]))};
        const __m256d high[2] = {_mm256_castps_pd(_mm256_unpackhi_ps(x[0], x[1])), _mm256_castps_pd(_mm256_unpackhi_ps(x[2], x[3]))};
        store(to, _mm256_castpd_ps(_mm256_unpacklo_pd(low[0], low[1])));
        store(to + step, _mm256_castpd_ps(_mm256_unpackhi_pd(low[0], low[1])));
        store(to + 2 * step, _mm256_castpd_ps(_mm256_unpacklo_pd(high[0], high[1])));
        store(to + 3 * step, _mm256_castpd_ps(_mm256_unpackhi_pd(high[0], high[1])));
    }

    // sum + x, and the larger of both, eight lanes at a time.
    static __m256 add_eights(__m256 sum, Float x) { return _mm256_add_ps(sum, x); }
    static __m256 larger_eights(__m256 top, Float x) { return _mm256_max_ps(top, x); }

    // p * 2^n where x is above the limit, else 0; n stands in the lowest bits of `whole`, and the result is normal.
    static Float scaled_above(Float x, float limit, Float p, Float whole) {
        const __m256  live  = _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ);
        const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(whole), 23);
        return _mm256_and_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power)), live);
    }
};

// e^x for x <= 0, exactly 0 from -87.3 down. 2^n * p(r) with r in [-ln2/2, ln2/2], relative error below 2e-7.
template <class V>
inline typename V::Float exponential(typename V::Float x) {
    using Float   = typename V::Float;
    // Added to 1.5 * 2^23 a number is rounded to the nearest whole one, which stands in the sum's lowest bits.
    const Float shift = V::repeat(12582912.0f), whole = V::plus(V::times(x, V::repeat(1.44269504f)), shift), n = V::minus(whole, shift);
    Float       r = V::add_product(n, V::repeat(-0.693145752f), x);   // ln 2, upper bits
    r             = V::add_product(n, V::repeat(-1.42860677e-6f), r);  // and the rest
    Float p       = V::repeat(1.0f / 720);
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) {
        constexpr float kNext[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
        p = V::add_product(p, r, V::repeat(kNext[i]));
    }
    return V::scaled_above(x, -87.3f, p, whole);
}

inline float exponential(float x) { return _mm256_cvtss_f32(exponential<Eight>(_mm256_set1_ps(x))); }

inline float total(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four        = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// One cache row of `width` elements, BF16 or Q8_0, as fp32. Not inlined: it would be slower.
__attribute__((noinline)) void widen(int type, const char * from, int64_t width, float * to) {
    if (type == BF16) {
        for (int64_t i = 0; i < width; i += 8) {
            const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + 2 * i)));
            _mm256_store_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
        }
    } else if (type == Q8_0) {
        for (int64_t i = 0; i < width; i += 32, from += 34) {
            uint16_t half;
            std::memcpy(&half, from, 2);
            const __m256 scale = _mm256_set1_ps(_cvtsh_ss(half));
            for (int j = 0; j < 32; j += 8) {
                const __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + 2 + j)));
                _mm256_store_ps(to + i + j, _mm256_mul_ps(_mm256_cvtepi32_ps(q), scale));
            }
        }
    }
}

}  // namespace

}  // namespace dspine
