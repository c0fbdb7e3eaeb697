// One attention operation with the vectors `V`: chunk by chunk with a running maximum and sum, the usual
// online soft-max. A copy for each file that includes it, since families are compiled for different processors.
#pragma once

#include "attention_many.h"
#include "attention_mask.h"

namespace dspine {

namespace {

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

// The rows of a tensor with a head and a sequence.
struct Head {
    int64_t head, sequence;
};

// `queries` queries of a key/value head from `start` on; they are counted row after row, all heads of a row together.
template <class V>
class Item {
  public:
    Item(const Shape & shape, const Tensor * op, const Work & work, int64_t sequence, int64_t head, int64_t start, int queries)
        : s_(shape), op_(op), w_(work), sequence_(sequence), head_(head * shape.shared), start_(start), queries_(queries),
          many_(queries >= V::kMany), cache_{head, sequence / (shape.q->ne[3] / shape.k->ne[3])} {
        std::memcpy(&scale_, op->op_params, sizeof scale_);
    }

    void run() {
        int64_t first = s_.keys, end = 0;
        for (int i = 0; i < queries_; i++) {
            mask_[i]     = s_.mask == nullptr ? nullptr : mask_row(s_.mask, row_of(i), head_of(i), sequence_);
            own_mask_[i] = i == 0 || mask_[i] != mask_[i - 1];
            if (own_mask_[i]) {
                int64_t from = 0, to = s_.keys;
                if (s_.mask != nullptr) {
                    visible(mask_[i], s_.keys, from, to);
                }
                first = std::min(first, from);
                end   = std::max(end, to);
            }
        }
        begin(first / kChunk * kChunk, end);
        for (int64_t key = first / kChunk * kChunk; key < end; key += kChunk) {
            const int  count = int(std::min<int64_t>(kChunk, end - key));
            const bool more  = key + kChunk < end;
            if constexpr (kManyAtAll) {
                if (many_) {
                    chunk_of_many(key, count, more);
                    continue;
                }
            }
            chunk(key, count, more);
        }
        for (int i = 0; i < queries_; i++) {
            store(i);
        }
    }

  private:
    static constexpr bool kManyAtAll = V::kMany <= V::kMost;

    int64_t head_of(int i) const { return head_ + (start_ + i) % s_.shared; }
    int64_t row_of(int i) const { return (start_ + i) / s_.shared; }

    const float * query(int i) const { return reinterpret_cast<const float *>(at(s_.q, row_of(i), head_of(i), sequence_)); }

    void begin(int64_t key, int64_t end) {
        // Nobody has fetched the first chunk.
        for (const Tensor * cache : {s_.k, s_.v}) {
            const Cells  found = cells(cache, key, int(std::min<int64_t>(kChunk, end - key)), false);
            const size_t bytes = found.fetched();
            for (int j = 0; j < found.count; j++) {
                fetch(found.first + size_t(j) * found.step, bytes);
            }
        }
        if constexpr (kManyAtAll) {
            if (many_) {
                turn<V>(queries_, s_.width, [&](int i) { return query(i); }, w_.q);
            }
        }
        for (int i = 0; i < queries_ && !many_; i++) {
            std::memcpy(w_.q + i * s_.width, query(i), size_t(s_.width) * sizeof(float));
        }
        std::fill_n(w_.out, queries_ * s_.value_width, 0.0f);
        std::fill_n(now_.top, kMostQueries, kNone);
        std::fill_n(now_.weight, kMostQueries, 0.0f);
    }

    // `count` rows of a cache from `first` on; while they are read, those of the next chunk are fetched if it is used
    // (`more`). Rows of one head lie apart, so the processor does not fetch them by itself.
    Cells cells(const Tensor * cache, int64_t first, int count, bool more) const {
        return {at(cache, first, cache_.head, cache_.sequence), cache->nb[1], cache->ne[0], count, cache->type,
                more ? kChunk * cache->nb[1] : 0};
    }

    // 16-bit floats and fp32 are read in place.
    Rows rows_of(const Tensor * cache, int64_t first, int count, bool more) const {
        const Cells found = cells(cache, first, count, more);
        if (read_in_place(cache)) {
            return {found.first, found.step, count, cache->type == F16, found.ahead};
        }
        const int64_t width = cache->ne[0];
        for (int j = 0; j < count; j++) {
            found.widen_row<V>(j, w_.wide + j * width);
        }
        return {reinterpret_cast<const char *>(w_.wide), size_t(width) * sizeof(float), count, false, 0};
    }

    void chunk(int64_t key, int count, bool more) {
        dot_all<V>(w_.q, queries_, s_.width, rows_of(s_.k, key, count, more), w_.scores);
        alignas(64) float extra[kChunk];
        Shares<kChunk, 1> shares;
        shares.weight = w_.scores;
        int active    = 0;  // queries that see any of these keys; their weights move up to the front
        for (int i = 0; i < queries_; i++) {
            if (own_mask_[i]) {
                read_mask(mask_[i] == nullptr ? nullptr : mask_[i] + key, count, extra);
            }
            float *     score = w_.scores + i * kChunk;
            const float top   = std::max(now_.top[i], add_mask<V>(score, extra, count, scale_));
            if (top == kNone) {
                continue;
            }
            const float factor    = now_.top[i] == kNone ? 0.0f : exponential(now_.top[i] - top);
            const float sum       = to_weights<V>(score, count, top, w_.scores + active * kChunk);
            now_.top[i]           = top;
            now_.weight[i]        = now_.weight[i] * factor + sum;
            shares.factor[active] = factor;
            shares.out[active++]  = w_.out + i * s_.value_width;
        }
        // Widened only now: keys and values together do not fit into the first cache.
        add_all<V>(shares, active, rows_of(s_.v, key, count, more), s_.value_width, [](int, int) { return true; });
    }

    // What is added to the scores of a chunk, laid out as they are; null: nothing.
    const float * masks_of_many(int64_t key, int count) const {
        if (s_.mask == nullptr) {
            return nullptr;
        }
        const float * row[kMostQueries];
        float *       wide    = w_.masks;
        bool          nothing = true;
        for (int i = 0; i < queries_; i++) {
            nothing = nothing && (!own_mask_[i] || adds_nothing(mask_[i] + key, count));
        }
        if (nothing) {
            return nullptr;
        }
        for (int i = 0; i < queries_; i++) {
            if (own_mask_[i]) {
                read_mask(mask_[i] + key, count, wide);
                wide += kChunk;
            }
            row[i] = wide - kChunk;
        }
        float * turned = w_.masks + kMostQueries * kChunk;
        turn<V>(queries_, (count + 3) / 4 * 4, [&](int i) { return row[i]; }, turned);
        return turned;
    }

    void chunk_of_many(int64_t key, int count, bool more) {
        dot_many<V>(w_.q, queries_, cells(s_.k, key, count, more), w_.scores);
        const float * extra = masks_of_many(key, count);
        bool          sees[kMostQueries / V::kLanes];
        for (int i = 0; i < queries_; i += V::kLanes) {
            sees[i / V::kLanes] = to_weights<V>(w_.scores + i, count, extra == nullptr ? nullptr : extra + i, scale_, now_.top + i,
                                                now_.weight + i, now_.factor + i);
        }
        Shares<1, kMostQueries> shares;
        shares.weight = w_.scores;
        for (int i = 0; i < queries_; i++) {
            shares.factor[i] = now_.factor[i];
            shares.out[i]    = w_.out + i * s_.value_width;
        }
        add_all<V>(shares, queries_, rows_of(s_.v, key, count, more), s_.value_width, [&](int first, int some) {
            return std::any_of(sees + first / V::kLanes, sees + (first + some - 1) / V::kLanes + 1, [](bool x) { return x; });
        });
    }

    void store(int i) const {
        const float   inverse = now_.weight[i] == 0.0f ? 0.0f : 1.0f / now_.weight[i];
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
    int64_t        sequence_, head_, start_;
    int            queries_;
    bool           many_;
    Head           cache_;
    float          scale_;
    const uint16_t * mask_[kMostQueries];
    bool           own_mask_[kMostQueries];  // whether it is not the one of the query before
    Running        now_;
};

template <class V>
void compute(const Params * params, Tensor * op, uint8_t * memory) {
    const Shape s(op);
    const Work  work = work_in(memory, s);
    const Cut   cut  = choose_cut(s, params->nth, V::kMost, [&](int64_t queries) { return V::cost(queries, s.in_place); });
    // Later rows see more keys, so the items go round the threads in turn.
    for (int64_t item = params->ith; item < cut.items; item += params->nth) {
        const bool    small = item >= cut.whole;
        const int64_t left  = item - cut.whole;
        const int64_t block = small ? cut.whole + left / cut.parts : item;
        const int64_t size = small ? cut.part : cut.block, heads = s.k->ne[2];
        // Blocks of one place of all heads follow each other.
        const int64_t place = block / heads % cut.blocks * cut.block;
        const int64_t end   = std::min(place + cut.block, s.rows * s.shared);
        const int64_t start = place + (small ? left % cut.parts * cut.part : 0);
        if (start < end) {
            Item<V>(s, op, work, block / heads / cut.blocks, block % heads, start, int(std::min(size, end - start))).run();
        }
    }
}

}  // namespace

}  // namespace dspine
