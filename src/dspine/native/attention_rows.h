// The two products of attention for a chunk of keys and values: up to kGroup queries share what is loaded.
// `V` is the family's vectors (`attention_vectors.h`). Each dot product is summed in eight lanes, and each
// element of a result over the keys in their order, whatever the width of the vectors.
#pragma once

#include "attention_vectors.h"
#include "fetch.h"

namespace dspine {

namespace {

// score[r * kChunk + key] = q[r] . key for Q queries and N vectors of keys from `key` on.
template <class V, int Q, int N, bool half>
inline void dot_some(const float * q, int64_t width, const Rows & keys, int key, float * score) {
    using Float     = typename V::Float;
    constexpr int K = N * V::kRows;
    const char *  row[K];
    Float         part[Q][N];
#pragma GCC unroll 16
    for (int j = 0; j < K; j++) {
        row[j] = keys.at(key + j);
    }
    if (keys.ahead != 0) {
#pragma GCC unroll 16
        for (int j = 0; j < K; j++) {
            fetch(row[j] + keys.ahead, size_t(width) * (half ? 2 : 4));
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
#pragma GCC unroll 6
        for (int r = 0; r < Q; r++) {
            part[r][n] = V::zero();
        }
    }
    for (int64_t i = 0; i < width; i += 8) {
        Float x[Q];
#pragma GCC unroll 6
        for (int r = 0; r < Q; r++) {
            x[r] = V::in_register(V::for_rows(q + r * width + i));
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Float y = V::in_register(V::template of_rows<half>(row + n, N, i));
#pragma GCC unroll 6
            for (int r = 0; r < Q; r++) {
                part[r][n] = V::add_product(x[r], y, part[r][n]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Q; r++) {
#pragma GCC unroll 2
        for (int n = 0; n < N; n += 4) {
            V::store_sums(score + r * kChunk + key + n, N, part[r][n], part[r][n + 1], part[r][n + 2], part[r][n + 3]);
        }
    }
}

// All keys of a chunk; up to 7 scores after the last key's repeat it, so that there are whole eights. Not inlined:
// what the caller holds in registers would take those of the sums.
template <class V, int Q, bool half>
__attribute__((noinline)) void dot_rows(const float * q, int64_t width, const Rows & keys, float * score) {
    // One query alone needs more sums at a time: each waits for the one before.
    constexpr int N   = Q == 1 ? 8 : 4;
    const int     end = (keys.count + 7) / 8 * 8;
    int           key = 0;
    for (; key + N * V::kRows <= end; key += N * V::kRows) {
        dot_some<V, Q, N, half>(q, width, keys, key, score);
    }
    if constexpr (N * V::kRows > 8) {
        if (key < end) {
            dot_some<V, Q, 4, half>(q, width, keys, key, score);
        }
    }
}

// Queries that see keys of a chunk: out[r] = factor[r] * out[r] + weights . values. The weight of query r and a key
// is weight[r * query_step + key * key_step].
template <int query_step, int key_step>
struct Shares {
    static constexpr int kQueryStep = query_step, kKeyStep = key_step;

    const float * weight;
    float         factor[kMostQueries];
    float *       out[kMostQueries];
};

// For Q queries from `query` on and the elements of N vectors from i on.
template <class V, int Q, int N, bool half, class S>
inline void add_elements(const S & shares, int query, const Rows & values, int64_t i) {
    using Float = typename V::Float;
    Float sum[Q][N];
#pragma GCC unroll 6
    for (int r = 0; r < Q; r++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            sum[r][n] = V::times(V::load(shares.out[query + r] + i + V::kLanes * n), V::repeat(shares.factor[query + r]));
        }
    }
    const char *  row    = values.first;
    const float * weight = shares.weight + query * S::kQueryStep;
    for (int key = 0; key < values.count; key++, row += values.step, weight += S::kKeyStep) {
        if (values.ahead != 0) {
            constexpr size_t kElement = half ? 2 : 4;
            fetch(row + values.ahead + size_t(i) * kElement, V::kLanes * N * kElement);
        }
        Float w[Q];
#pragma GCC unroll 6
        for (int r = 0; r < Q; r++) {
            w[r] = V::repeat(weight[r * S::kQueryStep]);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Float y = V::in_register(V::template elements<half>(row, i + V::kLanes * n));
#pragma GCC unroll 6
            for (int r = 0; r < Q; r++) {
                sum[r][n] = V::add_product(w[r], y, sum[r][n]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Q; r++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            V::store(shares.out[query + r] + i + V::kLanes * n, sum[r][n]);
        }
    }
}

template <class V, int Q, int N, bool half, class S>
inline void add_while(const S & shares, int query, const Rows & values, int64_t width, int64_t & i) {
    for (; i + V::kLanes * N <= width; i += V::kLanes * N) {
        add_elements<V, Q, N, half>(shares, query, values, i);
    }
}

template <class V, int Q, bool half, class S>
void add_rows(const S & shares, int query, const Rows & values, int64_t width) {
    int64_t i = 0;
    if constexpr (Q == 1) {
        add_while<V, Q, 8, half>(shares, query, values, width, i);
    }
    add_while<V, Q, 4, half>(shares, query, values, width, i);
    add_while<V, Q, 1, half>(shares, query, values, width, i);
    if constexpr (V::kLanes > 8) {
        add_while<Eight, Q, 1, half>(shares, query, values, width, i);
    }
}

// Calls some(vectors, j) for `count` numbers: whole vectors of V, then eights.
template <class V, class Some>
inline void in_vectors(int count, Some some) {
    int j = 0;
    if constexpr (V::kLanes > 8) {
        for (; j + V::kLanes <= count; j += V::kLanes) {
            some(V{}, j);
        }
    }
    for (; j < count; j += 8) {
        some(Eight{}, j);
    }
}

// For `count` of at most Q queries.
template <class V, int Q>
void dot_group(int count, const float * q, int64_t width, const Rows & keys, float * score) {
    if constexpr (Q > 1) {
        if (count < Q) {
            return dot_group<V, Q - 1>(count, q, width, keys, score);
        }
    }
    keys.half ? dot_rows<V, Q, true>(q, width, keys, score) : dot_rows<V, Q, false>(q, width, keys, score);
}

template <class V, int Q, class S>
void add_group(int count, const S & shares, int query, const Rows & values, int64_t width) {
    if constexpr (Q > 1) {
        if (count < Q) {
            return add_group<V, Q - 1>(count, shares, query, values, width);
        }
    }
    values.half ? add_rows<V, Q, true>(shares, query, values, width) : add_rows<V, Q, false>(shares, query, values, width);
}

// Calls visit(first, count) for groups of at most `most`, of nearly equal size.
template <class Visit>
void in_groups(int all, int most, Visit visit) {
    int groups = (all + most - 1) / most;
    for (int first = 0; groups > 0; groups--) {
        const int count = (all - first + groups - 1) / groups;
        visit(first, count);
        first += count;
    }
}

template <class V>
void dot_all(const float * q, int queries, int64_t width, const Rows & keys, float * score) {
    Rows rows = keys;
    in_groups(queries, V::kGroup, [&](int first, int count) {
        dot_group<V, V::kGroup>(count, q + first * width, width, rows, score + first * kChunk);
        rows.ahead = 0;
    });
}

// `needed` says of `count` queries from `first` on whether any of them sees a key.
template <class V, class S, class Needed>
void add_all(const S & shares, int queries, const Rows & values, int64_t width, Needed needed) {
    Rows rows = values;
    in_groups(queries, V::kGroup, [&](int first, int count) {
        if (!needed(first, count)) {
            return;
        }
        add_group<V, V::kGroup>(count, shares, first, rows, width);
        rows.ahead = 0;
    });
}

}  // namespace

}  // namespace dspine
