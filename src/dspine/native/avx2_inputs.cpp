// Inputs of a product rounded to integers, per block of 32.
#include <cmath>

#include "avx2.h"

namespace dspine {

namespace {

float largest(const __m256 (&x)[4]) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256       top  = _mm256_andnot_ps(sign, x[0]);
    for (int i = 1; i < 4; i++) {
        top = _mm256_max_ps(top, _mm256_andnot_ps(sign, x[i]));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    four        = _mm_max_ps(four, _mm_movehl_ps(four, four));
    four        = _mm_max_ss(four, _mm_movehdup_ps(four));
    return _mm_cvtss_f32(four);
}

// Rounds 32 inputs to integers of at most `limit` in size; returns the scale.
float to_integers(const float * input, float limit, __m256i (&q)[4]) {
    __m256 x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_loadu_ps(input + 8 * i);
    }
    const float  top   = largest(x);
    const __m256 shift = _mm256_set1_ps(top > 0.0f ? limit / top : 0.0f);
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], shift));
    }
    return top / limit;
}

int total(__m256i x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four         = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    four         = _mm_add_epi32(four, _mm_shuffle_epi32(four, 1));
    return _mm_cvtsi128_si32(four);
}

// 16-bit halves of a and b in order (the packing instructions work on 128-bit lanes).
__m256i to_16(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8); }

}  // namespace

void prepare8(const float * input, int64_t inputs, uint8_t * prepared) {
    Inputs8 * block = reinterpret_cast<Inputs8 *>(prepared);
    for (int64_t i = 0; i < inputs; i += 32, block++) {
        __m256i     q[4];
        const float scale = to_integers(input + i, 127.0f, q);
        const int   low = total(_mm256_add_epi32(q[0], q[1])), high = total(_mm256_add_epi32(q[2], q[3]));
        block->scale   = scale;
        block->half[0] = scale * float(low);
        block->half[1] = scale * float(high);
        block->sum     = scale * float(low + high);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(to_16(q[0], q[1]), to_16(q[2], q[3])), 0xD8);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(block->q), packed);
    }
}

void prepare16(const float * input, int64_t inputs, uint8_t * prepared) {
    Inputs16 * block = reinterpret_cast<Inputs16 *>(prepared);
    for (int64_t i = 0; i < inputs; i += 32, block++) {
        __m256i q[4];
        block->scale = to_integers(input + i, 32767.0f, q);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(block->q), to_16(q[0], q[1]));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(block->q + 16), to_16(q[2], q[3]));
    }
}

}  // namespace dspine
