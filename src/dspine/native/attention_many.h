// Attention of many queries over a chunk of keys: queries stand side by side in the lanes of a vector, so that
// nothing is ever added up or compared across lanes. A score is score[key * kMostQueries + query]. The bits are
// those of `attention_rows.h`: the eight lanes of a sum are kept apart and added in the same order.
#pragma once

#include "attention_rows.h"

namespace dspine {

namespace {

// Keys or values of one chunk as they lie in the cache.
struct Cells {
    const char * first;
    size_t       step;  // bytes from one to the next
    int64_t      width;
    int          count, type;
    size_t       ahead;  // bytes to the same one of the next chunk, which is fetched meanwhile; 0: not that

    // Bytes of a row that are worth fetching. Q8_0 gains nothing by it.
    size_t fetched() const { return type == Q8_0 ? 0 : size_t(width) * (type == F32 ? 4 : 2); }

    template <class V>
    void widen_row(int i, float * to) const {
        const char * from = first + step * size_t(i);
        if (ahead != 0) {
            fetch(from + ahead, fetched());
        }
        if (type == F16) {
            in_vectors<V>(int(width), [&](auto vectors, int d) {
                using W = decltype(vectors);
                W::store(to + d, W::template elements<true>(from, d));
            });
        } else if (type == F32) {
            std::memcpy(to, from, size_t(width) * sizeof(float));
        } else {
            widen(type, from, width, to);
        }
    }
};

// Widened keys lie so far apart, whatever their width: then their places are known when this is compiled, and they
// do not all fall into the same few lines of the cache.
constexpr int kPitch = kMostWidth + 16;

// Scores of N vectors of queries and K keys. turned[d * kMostQueries + query] are the queries.
template <class V, int N, int K>
void dot_keys(const float * turned, int64_t width, const float * keys, float * score) {
    using Float = typename V::Float;
    alignas(64) float held[2][K][N * V::kLanes];
    for (const int lane : {0, 2, 1, 3, 4, 6, 5, 7}) {
        Float sum[K][N];
#pragma GCC unroll 16
        for (int j = 0; j < K; j++) {
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                sum[j][n] = V::zero();
            }
        }
        for (int64_t d = lane; d < width; d += 8) {
            Float x[N];
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                x[n] = V::in_register(V::load(turned + d * kMostQueries + n * V::kLanes));
            }
#pragma GCC unroll 16
            for (int j = 0; j < K; j++) {
                const Float y = N == 1 ? V::repeat(keys[j * kPitch + d]) : V::in_register(V::repeat(keys[j * kPitch + d]));
#pragma GCC unroll 3
                for (int n = 0; n < N; n++) {
                    sum[j][n] = V::add_product(x[n], y, sum[j][n]);
                }
            }
        }
        // ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)), as `store_sums` adds the lanes.
#pragma GCC unroll 16
        for (int j = 0; j < K; j++) {
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                const int i  = n * V::kLanes;
                float *   to = held[0][j] + i;
                if ((lane & 2) != 0) {
                    sum[j][n] = V::plus(V::load(to), sum[j][n]);
                    to        = held[1][j] + i;
                    if ((lane & 1) != 0) {
                        sum[j][n] = V::plus(V::load(to), sum[j][n]);
                        to        = score + j * kMostQueries + i;
                        if ((lane & 4) != 0) {
                            sum[j][n] = V::plus(V::load(to), sum[j][n]);
                        }
                    }
                }
                V::store(to, sum[j][n]);
            }
        }
    }
}

// Scores of `vectors` vectors of queries, at most N, and `count` keys. One vector alone takes twice as many keys at a
// time: each sum waits for the one before.
template <class V, int N>
void dot_vectors(int vectors, const float * turned, int64_t width, const float * keys, int count, float * score) {
    if constexpr (N > 1) {
        if (vectors < N) {
            return dot_vectors<V, N - 1>(vectors, turned, width, keys, count, score);
        }
    }
    constexpr int K = N == 1 ? 2 * V::kKeys : V::kKeys;
    for (int key = 0; key < count; key += K) {
        dot_keys<V, N, K>(turned, width, keys + key * kPitch, score + key * kMostQueries);
    }
}

// All keys of a chunk. They are widened only a few at a time: so many stay in the first cache. What lies between the
// last key's scores and a multiple of 2 * V::kKeys keys is of no use.
template <class V>
void dot_many(const float * turned, int queries, const Cells & keys, float * score) {
    constexpr int     kAtOnce = 2 * V::kKeys;
    alignas(64) float wide[kAtOnce * kPitch];
    for (int first = 0; first < keys.count; first += kAtOnce) {
        const int count = std::min(kAtOnce, keys.count - first);
        for (int j = 0; j < count; j++) {
            keys.widen_row<V>(first + j, wide + j * kPitch);
        }
        in_groups((queries + V::kLanes - 1) / V::kLanes, V::kVectors, [&](int vector, int vectors) {
            const int i = vector * V::kLanes;
            dot_vectors<V, V::kVectors>(vectors, turned + i, keys.width, wide, count, score + first * kMostQueries + i);
        });
    }
}

// Element d of `count` rows of fp32 goes to to[d * kMostQueries + row], for `width` elements, a multiple of 4. What
// follows the last row in its vector repeats it.
template <class V, class RowAt>
void turn(int count, int64_t width, RowAt row_at, float * to) {
    for (int first = 0; first < count; first += V::kLanes) {
        const float * row[V::kLanes];
        for (int j = 0; j < V::kLanes; j++) {
            row[j] = row_at(std::min(first + j, count - 1));
        }
        for (int64_t d = 0; d < width; d += 4) {
            V::turn(row, d, to + d * kMostQueries + first, kMostQueries);
        }
    }
}

// State of the queries of an item between two chunks.
struct Running {
    alignas(64) float top[kMostQueries];     // largest score so far
    alignas(64) float weight[kMostQueries];  // sum of the exponentials so far
    alignas(64) float factor[kMostQueries];  // of what was summed before the newest chunk
};

// Scores of `count` keys and one vector of queries become weights. `extra`, laid out as they are, is added to the
// scores first; null adds 0. Returns whether any query sees any of the keys.
template <class V>
bool to_weights(float * score, int count, const float * extra, float scale, float * top, float * weight, float * factor) {
    using Float      = typename V::Float;
    const Float zero = V::zero(), times = V::repeat(scale), none = V::repeat(kNone);
    Float       most[4] = {none, none, none, none};
    const auto  scaled  = [&](int key) {
        float *     at = score + key * kMostQueries;
        const Float x  = V::add_product(V::load(at), times, extra == nullptr ? zero : V::load(extra + key * kMostQueries));
        V::store(at, x);
        return x;
    };
    int key = 0;
    for (; key + 4 <= count; key += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            most[i] = V::larger(most[i], scaled(key + i));
        }
    }
    for (; key < count; key++) {
        most[0] = V::larger(most[0], scaled(key));
    }
    const Float here = V::larger(V::larger(most[0], most[1]), V::larger(most[2], most[3]));
    if (!V::any_above(here, none)) {
        for (key = 0; key < count; key++) {
            V::store(score + key * kMostQueries, zero);
        }
        V::store(factor, V::repeat(1.0f));
        return false;
    }
    const Float before = V::load(top), now = V::larger(before, here);
    Float       sum[8];
#pragma GCC unroll 8
    for (int lane = 0; lane < 8; lane++) {
        sum[lane] = zero;
    }
    const auto one = [&](int key) {
        float *     at = score + key * kMostQueries;
        const Float x  = exponential<V>(V::minus(V::load(at), now));
        V::store(at, x);
        return x;
    };
    for (key = 0; key + 8 <= count; key += 8) {
#pragma GCC unroll 8
        for (int lane = 0; lane < 8; lane++) {
            sum[lane] = V::plus(sum[lane], one(key + lane));
        }
    }
#pragma GCC unroll 7
    for (int lane = 0; lane < 7; lane++) {
        if (key + lane < count) {
            sum[lane] = V::plus(sum[lane], one(key + lane));
        }
    }
    // As `total` adds the lanes.
    const Float all = V::plus(V::plus(V::plus(sum[0], sum[4]), V::plus(sum[2], sum[6])),
                              V::plus(V::plus(sum[1], sum[5]), V::plus(sum[3], sum[7])));
    const Float less = exponential<V>(V::minus(before, now));
    V::store(top, now);
    V::store(factor, less);
    V::store(weight, V::plus(V::times(V::load(weight), less), all));
    return true;
}

}  // namespace

}  // namespace dspine
