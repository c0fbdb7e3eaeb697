// Pieces shared by the AVX2 kernels. Include only in files compiled with -mavx2 -mfma -mf16c.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernel.h"

namespace dspine {

// Rows that share one pass over a panel: with more, the accumulators no longer fit 16 registers.
constexpr int kRowGroup = 4;

// 32 inputs of one row as 8-bit integers: input = scale * q, at most 127 in size.
struct Inputs8 {
    float  scale;
    float  sum;       // of all 32 inputs as rounded
    float  half[2];   // of the first and the last 16
    int8_t q[32];
};

// 32 inputs of one row as 16-bit integers.
struct Inputs16 {
    float   scale;
    int16_t q[32];
};

void prepare8(const float * input, int64_t inputs, uint8_t * prepared);
void prepare16(const float * input, int64_t inputs, uint8_t * prepared);

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

inline void store_panel(float * to, const __m256 (&value)[2], int outputs) {
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

// Calls group.template run<R>(first_row) for groups of 1 to 4 rows of nearly equal size.
template <class Group>
void in_row_groups(int64_t rows, Group group) {
    int64_t groups = (rows + kRowGroup - 1) / kRowGroup;
    for (int64_t row = 0; groups > 0; groups--) {
        const int64_t count = (rows - row + groups - 1) / groups;
        switch (count) {
            case 1: group.template run<1>(row); break;
            case 2: group.template run<2>(row); break;
            case 3: group.template run<3>(row); break;
            default: group.template run<4>(row); break;
        }
        row += count;
    }
}

}  // namespace dspine
