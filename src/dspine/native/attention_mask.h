// Which keys a row may see.
#pragma once

#include "attention_shape.h"
#include "avx2.h"

namespace dspine {

namespace {

constexpr uint16_t kHalfMinusInfinity = 0xFC00;

const uint16_t * mask_row(const Tensor * mask, int64_t row, int64_t head, int64_t sequence) {
    return reinterpret_cast<const uint16_t *>(at(mask, row, head % mask->ne[2], sequence % mask->ne[3]));
}

// Whether 16 masks, or fewer at the end, all hide their keys.
inline bool all_hidden(const uint16_t * mask, int64_t from, int64_t to) {
    if (to - from == 16) {
        const __m256i same = _mm256_cmpeq_epi16(load(mask + from), _mm256_set1_epi16(int16_t(kHalfMinusInfinity)));
        return _mm256_movemask_epi8(same) == -1;
    }
    return std::all_of(mask + from, mask + to, [](uint16_t m) { return m == kHalfMinusInfinity; });
}

// First and one past the last key that a row may see; up to 15 hidden ones may stand before the first.
void visible(const uint16_t * mask, int64_t keys, int64_t & first, int64_t & end) {
    end = keys;
    while (end > 0 && all_hidden(mask, (end - 1) / 16 * 16, end)) {
        end = (end - 1) / 16 * 16;
    }
    while (end > 0 && mask[end - 1] == kHalfMinusInfinity) {
        end--;
    }
    first = 0;
    while (first < end && all_hidden(mask, first, std::min(first + 16, end))) {
        first = std::min(first + 16, end);
    }
}

// Whether `count` masks hide nothing and add nothing.
bool adds_nothing(const uint16_t * mask, int count) {
    __m256i any = _mm256_setzero_si256();
    int     j   = 0;
    for (; j + 16 <= count; j += 16) {
        any = _mm256_or_si256(any, load(mask + j));
    }
    return _mm256_testz_si256(any, any) != 0 && std::all_of(mask + j, mask + count, [](uint16_t m) { return m == 0; });
}

// What is added to the scores; up to 7 keys from `count` on get -infinity. No mask hides nothing.
void read_mask(const uint16_t * mask, int count, float * extra) {
    alignas(16) uint16_t halves[8];
    for (int j = 0; j < count; j += 8) {
        const int left = std::min(8, count - j);
        if (left < 8) {
            std::fill(halves, halves + 8, kHalfMinusInfinity);
        }
        if (mask == nullptr) {
            std::fill(halves, halves + left, uint16_t(0));
        } else {
            std::memcpy(halves, mask + j, size_t(left) * sizeof(uint16_t));
        }
        _mm256_storeu_ps(extra + j, load_half(halves));
    }
}

}  // namespace

}  // namespace dspine
