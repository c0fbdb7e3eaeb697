// One attention operation with the vectors `V`: chunk by chunk with a running maximum and sum, the usual
// online soft-max. A copy for each file that includes it, since families are compiled for different processors.
#pragma once

#include "attention_mask.h"
#include "attention_rows.h"

namespace dspine {

namespace {

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

// Scales and masks `count` scores, and as many after them as complete eight; returns the largest.
template <class V>
inline float add_mask(float * score, const float * extra, int count, float scale) {
    __m256     top  = _mm256_set1_ps(kNone);
    const auto some = [&](auto vectors, int j) {
        using W      = decltype(vectors);
        const auto x = W::add_product(W::load(score + j), W::repeat(scale), W::load(extra + j));
        W::store(score + j, x);
        top = W::larger_eights(top, x);
    };
    in_vectors<V>(count, some);
    return largest(top);
}

// weight = e^(score - top), for as many; returns their sum.
template <class V>
inline float to_weights(const float * score, int count, float top, float * weight) {
    __m256     sum  = _mm256_setzero_ps();
    const auto some = [&](auto vectors, int j) {
        using W      = decltype(vectors);
        const auto x = exponential<W>(W::minus(W::load(score + j), W::repeat(top)));
        W::store(weight + j, x);
        sum = W::add_eights(sum, x);
    };
    in_vectors<V>(count, some);
    return total(sum);
}

template <class V>
class Item {
  public:
    Item(const Shape & shape, const Tensor * op, const Work & work, int64_t sequence, int64_t head, int64_t heads,
         int64_t row, int64_t rows)
        : s_(shape), op_(op), w_(work), sequence_(sequence), head_(head), heads_(heads), row_(row), rows_(rows),
          queries_(int(heads * rows)) {}

    void run() {
        int64_t first = s_.keys, end = 0;
        for (int i = 0; i < queries_; i++) {
            std::memcpy(w_.q + i * s_.width, at(s_.q, row_of(i), head_of(i), sequence_), size_t(s_.width) * sizeof(float));
            std::fill_n(w_.out + i * s_.value_width, s_.value_width, 0.0f);
            top_[i]    = kNone;
            weight_[i] = 0.0f;
            if (has_own_mask(i)) {
                int64_t from = 0, to = s_.keys;
                if (s_.mask != nullptr) {
                    visible(mask_row(s_.mask, row_of(i), head_of(i), sequence_), s_.keys, from, to);
                }
                first = std::min(first, from);
                end   = std::max(end, to);
            }
        }
        for (int64_t key = first / kChunk * kChunk; key < end; key += kChunk) {
            chunk(key, int(std::min<int64_t>(kChunk, end - key)), key + kChunk < end);
        }
        for (int i = 0; i < queries_; i++) {
            store(i);
        }
    }

  private:
    int64_t head_of(int i) const { return head_ + i % heads_; }
    int64_t row_of(int i) const { return row_ + i / heads_; }

    // Whether the mask is not the one of the query before.
    bool has_own_mask(int i) const { return i % heads_ == 0 || (s_.mask != nullptr && s_.mask->ne[2] > 1); }

    // `count` rows of a cache from `first` on; while they are read, those of the next chunk are fetched if it is used
    // (`more`). Rows of one head lie apart, so the processor does not fetch them by itself.
    Rows rows_of(const Tensor * cache, int64_t head, int64_t sequence, int64_t first, int count, bool more,
                 float * wide) const {
        const char * from  = at(cache, first, head, sequence);
        const size_t ahead = more ? kChunk * cache->nb[1] : 0;
        if (read_in_place(cache)) {
            return {from, cache->nb[1], count, cache->type == F16, ahead};
        }
        const int64_t width = cache->ne[0];
        for (int j = 0; j < count; j++) {
            if (more && cache->type == BF16) {  // Q8_0 gains nothing by it
                fetch(from + size_t(j) * cache->nb[1] + ahead, size_t(width) * 2);
            }
            widen(cache->type, from + size_t(j) * cache->nb[1], width, wide + j * width);
        }
        return {reinterpret_cast<const char *>(wide), size_t(width) * sizeof(float), count, false, 0};
    }

    void chunk(int64_t key, int count, bool more) {
        const Tensor * k = s_.k, * v = s_.v;
        const Rows     keys  = rows_of(k, head_ / (s_.heads / k->ne[2]), sequence_ / (s_.q->ne[3] / k->ne[3]), key, count, more, w_.keys);
        dot_all<V>(w_.q, queries_, s_.width, keys, w_.scores);
        float scale;
        std::memcpy(&scale, op_->op_params, sizeof scale);
        alignas(64) float extra[kChunk];
        Shares            shares;
        shares.weight = w_.scores;
        int active    = 0;  // queries that see any of these keys; their weights move up to the front
        for (int i = 0; i < queries_; i++) {
            if (has_own_mask(i)) {
                const uint16_t * mask = s_.mask == nullptr ? nullptr : mask_row(s_.mask, row_of(i), head_of(i), sequence_) + key;
                read_mask(mask, count, extra);
            }
            float *     score = w_.scores + i * kChunk;
            const float top   = std::max(top_[i], add_mask<V>(score, extra, count, scale));
            if (top == kNone) {
                continue;
            }
            const float factor    = top_[i] == kNone ? 0.0f : exponential(top_[i] - top);
            const float sum       = to_weights<V>(score, count, top, w_.scores + active * kChunk);
            top_[i]               = top;
            weight_[i]            = weight_[i] * factor + sum;
            shares.factor[active] = factor;
            shares.out[active++]  = w_.out + i * s_.value_width;
        }
        // Widened only now: keys and values together do not fit into the first cache.
        const Rows values = rows_of(v, head_ / (s_.heads / v->ne[2]), sequence_ / (s_.q->ne[3] / v->ne[3]), key, count, more, w_.values);
        add_all<V>(shares, active, values, s_.value_width);
    }

    void store(int i) const {
        const float   inverse = weight_[i] == 0.0f ? 0.0f : 1.0f / weight_[i];
        const float * from    = w_.out + i * s_.value_width;
        // The result has heads before rows: (value width, heads, rows, sequences).
        float * to = reinterpret_cast<float *>(static_cast<char *>(op_->data) + size_t(head_of(i)) * op_->nb[1] +
                                               size_t(row_of(i)) * op_->nb[2] + size_t(sequence_) * op_->nb[3]);
        for (int64_t j = 0; j < s_.value_width; j += 8) {
            Eight::store(to + j, Eight::times(Eight::load(from + j), Eight::repeat(inverse)));
        }
    }

    const Shape &  s_;
    const Tensor * op_;
    const Work &   w_;
    int64_t        sequence_, head_, heads_, row_, rows_;
    int            queries_;
    float          top_[kMostQueries];     // largest score so far
    float          weight_[kMostQueries];  // sum of the exponentials so far
};

template <class V>
void compute(const Params * params, Tensor * op, uint8_t * memory) {
    const Shape s(op);
    const Work  work = work_in(memory, s);
    const Cut   cut  = choose_cut(s, params->nth);
    // Later rows see more keys, so the items go round the threads in turn.
    for (int64_t item = params->ith; item < cut.items; item += params->nth) {
        const int64_t heads = item % cut.head_items, rest = item / cut.head_items;
        const int64_t row = rest % cut.row_items * cut.rows, sequence = rest / cut.row_items;
        Item<V>(s, op, work, sequence, heads * cut.heads, cut.heads, row, std::min(cut.rows, s.rows - row)).run();
    }
}

}  // namespace

}  // namespace dspine
