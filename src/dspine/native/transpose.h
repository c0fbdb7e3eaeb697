// Bytes of 16 rows of a file exchanged so that those of one place stand side by side: how whole panels are
// packed. Include only in files compiled with -mavx2.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernel.h"

namespace dspine {

namespace {

// 16 bytes of two rows in one vector. A row's bytes need no alignment.
inline __m256i two_rows(const uint8_t * first, const uint8_t * second) {
    const __m128i low  = _mm_loadu_si128(reinterpret_cast<const __m128i *>(first));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i *>(second));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline void store_256(uint8_t * to, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), value); }

// 16 rows x 4 words of 4 bytes: word w of row r goes to to[64 * w + 4 * r]. With `by_factor`, bytes 2-3 and
// 4-5 of each 8 change places first.
template <bool by_factor>
inline void words_side_by_side(const uint8_t * rows, size_t step, uint8_t * to) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, to += 32) {
        __m256i x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            x[i] = two_rows(rows + size_t(8 * half + i) * step, rows + size_t(8 * half + i + 4) * step);
            if (by_factor) {
                x[i] = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(x[i], 0xD8), 0xD8);
            }
        }
        const __m256i low[2]  = {_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpacklo_epi32(x[2], x[3])};
        const __m256i high[2] = {_mm256_unpackhi_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[2], x[3])};
        store_256(to, _mm256_unpacklo_epi64(low[0], low[1]));
        store_256(to + 64, _mm256_unpackhi_epi64(low[0], low[1]));
        store_256(to + 128, _mm256_unpacklo_epi64(high[0], high[1]));
        store_256(to + 192, _mm256_unpackhi_epi64(high[0], high[1]));
    }
}

// 16 rows x 8 pairs of bytes: pair p of row r goes to to[32 * p + 2 * r].
inline void pairs_side_by_side(const uint8_t * rows, size_t step, uint8_t * to) {
    __m256i x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        x[i] = two_rows(rows + size_t(i) * step, rows + size_t(i + 8) * step);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // y[2 i], y[2 i + 1]: the first and the last four pairs of rows 2 i, 2 i + 1
        y[2 * i]     = _mm256_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm256_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {  // two pairs each, of rows 0 to 3 (x[0 ... 3]) and 4 to 7 (x[4 ... 7])
        x[4 * i]     = _mm256_unpacklo_epi32(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm256_unpackhi_epi32(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm256_unpacklo_epi32(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm256_unpackhi_epi32(y[4 * i + 1], y[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        store_256(to + 64 * i, _mm256_unpacklo_epi64(x[i], x[i + 4]));
        store_256(to + 64 * i + 32, _mm256_unpackhi_epi64(x[i], x[i + 4]));
    }
}

// 16 rows of 16 bytes: byte i of row r goes to to[16 * i + r]. Four rounds, each of which puts the bytes of
// rows r and r + 8 side by side.
inline void bytes_side_by_side(const __m128i (&rows)[kPanel], uint8_t * to) {
    __m128i x[kPanel], y[kPanel];
    for (int i = 0; i < kPanel; i++) {
        x[i] = rows[i];
    }
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            y[2 * i]     = _mm_unpacklo_epi8(x[i], x[i + 8]);
            y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
        }
        for (int i = 0; i < kPanel; i++) {
            x[i] = y[i];
        }
    }
    for (int i = 0; i < kPanel; i++) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16 * i), x[i]);
    }
}

// Two bytes of each row, side by side.
inline void pair_of_rows(const uint8_t * rows, size_t step, uint8_t * to) {
    for (int row = 0; row < kPanel; row++) {
        std::memcpy(to + 2 * row, rows + size_t(row) * step, 2);
    }
}

// `pack_panel` of a kernel, made of what it does to one unit.
template <void (*one)(const uint8_t *, size_t, uint8_t *), size_t source_bytes, size_t unit_bytes>
void pack_whole_units(const uint8_t * rows, size_t step, int64_t units, uint8_t * unit) {
    for (; units > 0; units--, rows += source_bytes, unit += unit_bytes) {
        one(rows, step, unit);
    }
}

}  // namespace

}  // namespace dspine
