// FLASH_ATTN_EXT with 512 bits, to the bits of AVX2: where a sum has eight lanes, a vector holds those of
// two keys.
#include "attention.h"
#include "avx512.h"
#include "avx512_tables.h"

namespace dspine {

namespace {

struct Sixteen {
    using V     = Vectors512;
    using Float = __m512;
    static constexpr int kLanes = 16;
    static constexpr int kRows  = 2;
    static constexpr int kGroup = 6;  // six by four vectors fill three quarters of the registers
    static constexpr int kMany = 9, kMost = 48, kVectors = 3, kKeys = 8;

    // Fitted to times of one core with 256 keys of 64 elements, in tenths of a microsecond; 50 are for memory.
    static int64_t cost(int64_t queries, bool) {
        return queries < kMany ? 56 + 10 * queries : 75 + 34 * ((queries + kLanes - 1) / kLanes) + 4 * queries;
    }

    static Float zero() { return V::zero(); }
    static Float repeat(float x) { return V::repeat(x); }
    static Float load(const float * from) { return _mm512_loadu_ps(from); }
    static void  store(float * to, Float x) { _mm512_storeu_ps(to, x); }
    static Float times(Float a, Float b) { return V::times(a, b); }
    static Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
    static Float larger(Float a, Float b) { return _mm512_maskz_max_ps(V::kAll, a, b); }
    static bool  any_above(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
    static Float add_product(Float a, Float b, Float sum) { return V::add_product(a, b, sum); }

    static Float in_register(Float x) {
#ifndef DSPINE_EMULATED
        asm("" : "+v"(x));
#endif
        return x;
    }

    template <bool half>
    static Float elements(const char * row, int64_t i) {
        return half ? V::half_floats(row + 2 * i) : _mm512_loadu_ps(reinterpret_cast<const float *>(row + 4 * i));
    }

    template <bool half>
    static Float of_rows(const char * const * row, int step, int64_t i) {
        const char * first = row[0], * second = row[step];
        if (half) {
            return V::wide(_mm256_inserti128_si256(_mm256_castsi128_si256(eight_halves(first + 2 * i)), eight_halves(second + 2 * i), 1));
        }
        return both(Eight::elements<false>(first, i), Eight::elements<false>(second, i));
    }

    static Float for_rows(const float * from) {
        return _mm512_castpd_ps(_mm512_maskz_broadcast_f64x4(kAllDoubles, _mm256_castps_pd(Eight::load(from))));
    }

    // Of the first rows' lanes to `to`, of the second ones' `step` further on.
    static void store_sums(float * to, int step, Float a, Float b, Float c, Float d) {
        const __m512d ab  = _mm512_castps_pd(_mm512_add_ps(low_pairs(a, b), high_pairs(a, b)));
        const __m512d cd  = _mm512_castps_pd(_mm512_add_ps(low_pairs(c, d), high_pairs(c, d)));
        const __m512  all = _mm512_add_ps(_mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllDoubles, ab, cd)),
                                          _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllDoubles, ab, cd)));
        const __m256 first = lower(all), second = upper(all);
        _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(first), _mm256_extractf128_ps(first, 1)));
        _mm_storeu_ps(to + step, _mm_add_ps(_mm256_castps256_ps128(second), _mm256_extractf128_ps(second, 1)));
    }

    static void turn(const float * const * row, int64_t d, float * to, int step) {
        Float x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {  // four rows, each in a quarter
            const auto four = [&](int row_of) { return _mm_loadu_ps(row[row_of] + d); };
            __m512     all  = _mm512_castps128_ps512(four(i));
            all             = _mm512_maskz_insertf32x4(V::kAll, all, four(i + 4), 1);
            all             = _mm512_maskz_insertf32x4(V::kAll, all, four(i + 8), 2);
            x[i]            = _mm512_maskz_insertf32x4(V::kAll, all, four(i + 12), 3);
        }
        const __m512d low[2]  = {_mm512_castps_pd(low_pairs(x[0], x[1])), _mm512_castps_pd(low_pairs(x[2], x[3]))};
        const __m512d high[2] = {_mm512_castps_pd(high_pairs(x[0], x[1])), _mm512_castps_pd(high_pairs(x[2], x[3]))};
        store(to, _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllDoubles, low[0], low[1])));
        store(to + step, _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllDoubles, low[0], low[1])));
        store(to + 2 * step, _mm512_castpd_ps(_mm512_maskz_unpacklo_pd(kAllDoubles, high[0], high[1])));
        store(to + 3 * step, _mm512_castpd_ps(_mm512_maskz_unpackhi_pd(kAllDoubles, high[0], high[1])));
    }

    static __m256 add_eights(__m256 sum, Float x) {
        return _mm256_add_ps(_mm256_add_ps(sum, lower(x)), upper(x));
    }
    static __m256 larger_eights(__m256 top, Float x) {
        return _mm256_max_ps(_mm256_max_ps(top, lower(x)), upper(x));
    }

    static Float scaled_above(Float x, float limit, Float p, Float whole) {
        const __mmask16 live  = _mm512_cmp_ps_mask(x, repeat(limit), _CMP_GT_OQ);
        const __m512i   power = _mm512_maskz_slli_epi32(V::kAll, _mm512_castps_si512(whole), 23);
        return _mm512_castsi512_ps(_mm512_maskz_add_epi32(live, _mm512_castps_si512(p), power));
    }

  private:
    static constexpr __mmask8 kAllDoubles = 0xFF;

    static __m128i eight_halves(const char * from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); }

    static Float both(__m256 first, __m256 second) {
        return _mm512_castpd_ps(
            _mm512_maskz_insertf64x4(kAllDoubles, _mm512_castps_pd(_mm512_castps256_ps512(first)), _mm256_castps_pd(second), 1));
    }
    static __m256 lower(Float x) { return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(kAllDoubles, _mm512_castps_pd(x), 0)); }
    static __m256 upper(Float x) { return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(kAllDoubles, _mm512_castps_pd(x), 1)); }
    static Float low_pairs(Float a, Float b) { return _mm512_maskz_unpacklo_ps(V::kAll, a, b); }
    static Float high_pairs(Float a, Float b) { return _mm512_maskz_unpackhi_ps(V::kAll, a, b); }
};

}  // namespace

const Attention kAvx512Attention = {takes, work_bytes, compute<Sixteen>};

}  // namespace dspine
