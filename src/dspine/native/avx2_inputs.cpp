// Inputs of a product rounded to integers, per block of 32.
#include <cmath>

#include "avx2.h"
#include "inputs.h"

namespace dspine {

namespace {

constexpr float kLeast = 1e-30f;

__m256 size(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

// Largest size of any input; a multiple of 32 of them.
float largest(const float * input, int64_t inputs) {
    __m256 top[4];
    for (__m256 & t : top) {
        t = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < inputs; i += 32) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            top[j] = _mm256_max_ps(top[j], size(_mm256_loadu_ps(input + i + 8 * j)));
        }
    }
    return largest(_mm256_max_ps(_mm256_max_ps(top[0], top[1]), _mm256_max_ps(top[2], top[3])));
}

// Rounds 32 inputs to integers of at most `limit` in size; returns the scale.
float to_integers(const float * input, float limit, __m256i (&q)[4]) {
    __m256 x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_loadu_ps(input + 8 * i);
    }
    const float  top   = largest(_mm256_max_ps(_mm256_max_ps(size(x[0]), size(x[1])), _mm256_max_ps(size(x[2]), size(x[3]))));
    const __m256 shift = _mm256_set1_ps(top > 0.0f ? limit / top : 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], shift));
    }
    return top / limit;
}

// 16-bit halves of a and b in order (the packing instructions work on 128-bit lanes).
__m256i to_16(__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8); }

// Writes the parts of a block in which the two forms differ. `pair` repeats both factors.
inline void store_inputs(__m256i q, __m256i pair, Inputs8 * block) {
    const int both_factors = _mm_cvtsi128_si32(_mm256_castsi256_si128(pair));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(block->q), q);
    std::memcpy(block->factor, &both_factors, sizeof block->factor);
}

inline void store_inputs(__m256i q, __m256i pair, Inputs8ByFactor * block) {
    const int both_factors = _mm_cvtsi128_si32(_mm256_castsi256_si128(pair));
    q = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(q, 0xD8), 0xD8);  // 16-bit parts 0, 2, 1, 3
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(block->q), q);
    block->factor[0] = both_factors & 0xFFFF;
    block->factor[1] = both_factors >> 16;
}

template <class Block>
inline void prepare_blocks(const float * input, int64_t inputs, uint8_t * prepared) {
    const float top   = largest(input, inputs);
    const float scale = top < kLeast ? 0.0f : top / (127.0f * kMostFactor);
    // Below that, inputs count as zeros: the division would overflow.
    const __m256 to_factor = _mm256_set1_ps(top < kLeast ? 0.0f : kMostFactor / top);
    const __m256 to_q      = _mm256_mul_ps(to_factor, _mm256_set1_ps(127.0f));
    const __m256 one       = _mm256_set1_ps(1.0f);
    // Packing works on 128-bit lanes: 0-3, 8-11, 16-19, 24-27, 4-7, 12-15, 20-23, 28-31.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i pairs = _mm256_set1_epi32(0x09080100);
    Block *       block = reinterpret_cast<Block *>(prepared);
    for (int64_t i = 0; i < inputs; i += 32, block++) {
        __m256 x[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            x[j] = _mm256_loadu_ps(input + i + 8 * j);
        }
        // Largest of either 16 inputs, in the lanes of its inputs: 0, 1, 4, 5 and 2, 3, 6, 7.
        __m256 most = _mm256_max_ps(_mm256_max_ps(size(x[0]), size(x[1])), _mm256_max_ps(size(x[2]), size(x[3])));
        most        = _mm256_max_ps(most, _mm256_permute_ps(most, 0xB1));
        most        = _mm256_max_ps(most, _mm256_permute2f128_ps(most, most, 1));
        const __m256  factor  = _mm256_max_ps(_mm256_ceil_ps(_mm256_mul_ps(most, to_factor)), one);
        const __m256  shift   = _mm256_div_ps(to_q, factor);
        const __m256i factors = _mm256_cvtps_epi32(factor);
        __m256i q[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(x[j], shift));
        }
        const __m256i packed = _mm256_permutevar8x32_epi32(
            _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])), order);
        // Lanes 0, 2 of the factors, again and again, times the sums of neighbours.
        const __m256i pair = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm256_castsi256_si128(factors)), pairs);
        __m256i       sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), packed), pair);
        sums               = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4E));
        sums               = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xB1));
        const int low = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
        const int high = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        store_inputs(packed, pair, block);
        block->row     = scale;
        block->sum     = float(low + high);
        block->half[0] = float(low);
        block->half[1] = float(high);
    }
}

}  // namespace

void prepare8(const float * input, int64_t inputs, uint8_t * prepared) {
    prepare_blocks<Inputs8>(input, inputs, prepared);
}

void prepare8_by_factor(const float * input, int64_t inputs, uint8_t * prepared) {
    prepare_blocks<Inputs8ByFactor>(input, inputs, prepared);
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
