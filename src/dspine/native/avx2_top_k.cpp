// The largest values of a row with AVX2.
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "top_k.h"

namespace dspine {

namespace {

constexpr int kLanes = 8, kVectors = 8, kBlock = kLanes * kVectors;
// Values are dealt out to so many groups in turn, so that large ones that stand close together do not share one.
constexpr int kGroups = 2 * kBlock;
// Values that are looked at together, of which mostly none is large enough.
constexpr int kStep = 4 * kLanes;
// Values that are kept until they are compared with each other.
constexpr int kRoom = 3 * kMostChosen;
// The bound needs no more of its bits: what it lets in too much is few values.
constexpr uint32_t kFinest = 1u << 12;

constexpr float kLeast = -std::numeric_limits<float>::infinity();

// Floats as integers of the same order: the bits of negative ones are inverted but for the sign. Twice gives the
// float's bits again.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float from_ordered(int32_t value) {
    const int32_t bits = ordered(value);
    float         x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The largest value of each group, which is -inf where a group has no numbers.
inline void largest_of_groups(const float * values, int64_t count, __m256 * largest) {
    for (int half = 0; half < 2; half++) {
        __m256 most[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) {
            most[v] = _mm256_set1_ps(kLeast);
        }
        for (int64_t i = half * kBlock; i + kBlock <= count; i += kGroups) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; v++) {
                // Where one is no number the result is the second operand.
                most[v] = _mm256_max_ps(_mm256_loadu_ps(values + i + v * kLanes), most[v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) {
            largest[half * kVectors + v] = most[v];
        }
    }
}

inline int sum(__m256i x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four         = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four         = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
}

// A value that at least `k` values reach and not many more: where k groups have their largest value above it,
// so many values are. It is found bit by bit.
inline float bound_of(const float * values, int64_t count, int k) {
    constexpr int kAll = 2 * kVectors;
    __m256        largest[kAll];
    __m256i       keys[kAll];
    largest_of_groups(values, count, largest);
    for (int v = 0; v < kAll; v++) {
        const __m256i bits = _mm256_castps_si256(largest[v]);
        keys[v]            = _mm256_xor_si256(bits, _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 1));
    }
    uint32_t bound = 1u << 31;
    for (uint32_t bit = 1u << 31; bit >= kFinest; bit >>= 1) {
        const uint32_t next  = bound + bit;
        const __m256i  below = _mm256_set1_epi32(int32_t(next - 1));
        __m256i        above = _mm256_setzero_si256();
#pragma GCC unroll 16
        for (int v = 0; v < kAll; v++) {
            above = _mm256_sub_epi32(above, _mm256_cmpgt_epi32(keys[v], below));
        }
        const int reached = sum(above);
        bound             = reached >= k ? next : bound;
        if (reached == k) {
            break;
        }
    }
    const int32_t least = ordered(bits_of(kLeast));  // what lies below is no number
    return from_ordered(int32_t(bound) > least ? int32_t(bound) : least);
}

// Values with their indices as integers, larger for larger values and, among equals, for lower indices: no two
// are the same.
struct Found {
    int64_t keys[kRoom + 4];
    int     count = 0;

    void add(float x, int64_t index) {
        const uint32_t value = uint32_t(ordered(bits_of(x + 0.0f)));  // -0 is equal to 0
        keys[count++]        = int64_t(uint64_t(value) << 32 | (0xffffffffu - uint32_t(index)));
    }

    // Keeps the k largest, in order. A key's place is the number of those above it: no branch depends on values.
    void keep(int k) {
        for (int i = 0; i < 4; i++) {
            keys[count + i] = std::numeric_limits<int64_t>::min();
        }
        int64_t sorted[kRoom];
        for (int i = 0; i < count; i++) {
            const __m256i key   = _mm256_set1_epi64x(keys[i]);
            __m256i       above = _mm256_setzero_si256();
            for (int j = 0; j < count; j += 4) {
                const __m256i others = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(keys + j));
                above                = _mm256_sub_epi64(above, _mm256_cmpgt_epi64(others, key));
            }
            sorted[sum(above)] = keys[i];
        }
        count = count < k ? count : k;
        std::memcpy(keys, sorted, size_t(count) * sizeof(int64_t));
    }

    float   value(int i) const { return from_ordered(int32_t(keys[i] >> 32)); }
    int32_t index(int i) const { return int32_t(0xffffffffu - uint32_t(keys[i])); }
};

}  // namespace

void avx2_choose_largest(const float * values, int64_t count, int k, int32_t * chosen) {
    Found   found;
    float   bound = count > kRoom ? bound_of(values, count, k) : kLeast;
    __m256  least = _mm256_set1_ps(bound);
    int64_t i     = 0;
    for (; i + kStep <= count; i += kStep) {
        __m256 reached[4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            reached[v] = _mm256_cmp_ps(_mm256_loadu_ps(values + i + v * kLanes), least, _CMP_GE_OQ);
        }
        const __m256 any = _mm256_or_ps(_mm256_or_ps(reached[0], reached[1]), _mm256_or_ps(reached[2], reached[3]));
        if (_mm256_movemask_ps(any) == 0) {
            continue;
        }
        uint32_t lanes = 0;
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            lanes |= uint32_t(_mm256_movemask_ps(reached[v])) << (v * kLanes);
        }
        for (; lanes != 0; lanes &= lanes - 1) {
            const int64_t at = i + __builtin_ctz(lanes);
            found.add(values[at], at);
        }
        if (found.count > kRoom - kStep) {
            found.keep(k);
            // Only what is larger than the last one can still be chosen; above +inf nothing is.
            bound = from_ordered(ordered(bits_of(found.value(k - 1))) + 1);
            least = _mm256_set1_ps(bound);
        }
    }
    for (; i < count; i++) {
        if (values[i] >= bound) {
            found.add(values[i], i);
        }
    }
    found.keep(k);
    for (int j = 0; j < found.count; j++) {
        chosen[j] = found.index(j);
    }
    // Fewer numbers than k: all of them are found by now.
    int filled = found.count;
    for (i = 0; filled < k; i++) {
        if (values[i] != values[i]) {
            chosen[filled++] = int32_t(i);
        }
    }
}

}  // namespace dspine
