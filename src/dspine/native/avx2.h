// Pieces shared by the AVX2 kernels. Include only in files compiled with -mavx2 -mfma -mf16c.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "inputs.h"
#include "kernel.h"
#include "panel.h"

namespace dspine {

// Rows that share one pass over a panel. Six rows by two vectors of outputs fill the registers; formats
// that take more work to decode have room for four.
constexpr int kMostRows = 6, kFewerRows = 4;

namespace {

inline __m256i load(const void * from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

inline __m256i repeat32(const void * from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return _mm256_set1_epi32(value);
}

// Sum of a running total and a product. The compiler must not see a chain of additions: it would
// turn them into a tree, which holds every product at once and spills them all.
inline __m256i plus16(__m256i total, __m256i product) {
    total = _mm256_add_epi16(total, product);
    asm("" : "+x"(total));
    return total;
}

inline __m256i plus32(__m256i total, __m256i product) {
    total = _mm256_add_epi32(total, product);
    asm("" : "+x"(total));
    return total;
}

// Eight 16-bit floats.
inline __m256 load_half(const void * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(from)));
}

// The largest of eight.
inline float largest(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four        = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// A panel of 16 outputs in two registers.
struct Vectors256 {
    using Float = __m256;
    static constexpr int    kLanes = 8, kParts = 2;
    static constexpr size_t kFetchAhead = 2048, kFetchFar = 0;

    static Float zero() { return _mm256_setzero_ps(); }
    static Float repeat(float x) { return _mm256_set1_ps(x); }
    static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }

    static void store(float * to, const Float (&value)[kParts], int outputs) {
        if (outputs == kPanel) {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to + 8, value[1]);
            return;
        }
        float whole[kPanel];
        _mm256_storeu_ps(whole, value[0]);
        _mm256_storeu_ps(whole + 8, value[1]);
        std::memcpy(to, whole, size_t(outputs) * sizeof(float));
    }
};

}  // namespace

}  // namespace dspine
