// FLASH_ATTN_EXT for few and many rows, in fp32.
//
// Keys are taken in chunks of 64 that start at multiples of 64, whatever the batch and the number of
// threads, and each query is summed over them in that order: its result does not depend on the
// queries it is computed with. A chunk is widened once for all query heads of its key/value head and
// a few rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "avx2.h"
#include "avx2_tables.h"

namespace dspine {

namespace {

constexpr int     kChunk        = 64;   // keys
constexpr int     kMostQueries  = 16;   // of one item
constexpr int64_t kMostWidth    = 256;  // head size
constexpr float   kNone         = -std::numeric_limits<float>::infinity();

struct Shape {
    explicit Shape(const Tensor * op)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), width(k->ne[0]), value_width(v->ne[0]),
          rows(q->ne[1]), heads(q->ne[2]), sequences(q->ne[3]), keys(k->ne[1]), shared(heads / k->ne[2]) {}

    const Tensor * q, * k, * v, * mask;
    int64_t width, value_width, rows, heads, sequences, keys;
    int64_t shared;  // query heads of one key/value head
};

// How the work is cut: items of `heads` query heads (all of one key/value head) x `rows` rows.
struct Cut {
    int64_t heads, rows;
    int64_t head_items, row_items, items;
};

// The cut that is done soonest on `threads` threads. Widening a chunk costs about as much as one
// query, so many queries an item are cheap, but too few items leave threads idle.
Cut choose_cut(const Shape & s, int threads) {
    Cut     best{};
    int64_t least = -1;
    for (int64_t heads = 1; heads <= s.shared; heads++) {
        if (s.shared % heads != 0 || heads > kMostQueries) {
            continue;
        }
        for (int64_t rows = 1; rows <= std::min<int64_t>(s.rows, kMostQueries / heads); rows++) {
            Cut cut{heads, rows, s.heads / heads, (s.rows + rows - 1) / rows, 0};
            cut.items          = cut.head_items * cut.row_items * s.sequences;
            const int64_t cost = (cut.items + threads - 1) / threads * (1 + heads * rows);
            if (least < 0 || cost < least) {
                least = cost;
                best  = cut;
            }
        }
    }
    return best;
}

// e^x for x <= 0, exactly 0 from -87.3 down. 2^n * p(r) with r in [-ln2/2, ln2/2], relative error below 2e-7.
inline __m256 exponential(__m256 x) {
    const __m256 live = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_GT_OQ);
    const __m256 n    = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693145752f), x);   // ln 2, upper bits
    r        = _mm256_fmadd_ps(n, _mm256_set1_ps(-1.42860677e-6f), r);  // and the rest
    __m256 p = _mm256_set1_ps(1.0f / 720);
    for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), live);
}

inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// Sums of eight vectors as one vector, always added in the same order.
inline __m256 sums(const __m256 (&v)[8]) {
    __m256 pair[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256d a = _mm256_castps_pd(pair[2 * i]), b = _mm256_castps_pd(pair[2 * i + 1]);
        four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

inline float largest(__m256 x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four        = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline float total(__m256 x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four        = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// One cache row of `width` elements as fp32.
void widen(int type, const char * from, int64_t width, float * to) {
    if (type == F16) {
        for (int64_t i = 0; i < width; i += 8) {
            _mm256_store_ps(to + i, load_half(from + 2 * i));
        }
    } else if (type == BF16) {
        for (int64_t i = 0; i < width; i += 8) {
            const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + 2 * i)));
            _mm256_store_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
        }
    } else if (type == Q8_0) {
        for (int64_t i = 0; i < width; i += 32, from += 34) {
            uint16_t half;
            std::memcpy(&half, from, 2);
            const __m256 scale = _mm256_set1_ps(_cvtsh_ss(half));
            for (int j = 0; j < 32; j += 8) {
                const __m256i q = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + 2 + j)));
                _mm256_store_ps(to + i + j, _mm256_mul_ps(_mm256_cvtepi32_ps(q), scale));
            }
        }
    } else {
        std::memcpy(to, from, size_t(width) * sizeof(float));
    }
}

// score[key] = q . key for the 64 keys of a chunk.
void dot_chunk(const float * q, const float * keys, int64_t width, float * score) {
    for (int key = 0; key < kChunk; key += 8, keys += 8 * width) {
        __m256 part[8];
        for (__m256 & p : part) {
            p = _mm256_setzero_ps();
        }
        for (int64_t i = 0; i < width; i += 8) {
            const __m256 x = _mm256_load_ps(q + i);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                part[j] = _mm256_fmadd_ps(x, _mm256_load_ps(keys + j * width + i), part[j]);
            }
        }
        _mm256_store_ps(score + key, sums(part));
    }
}

// out += weight . values for `count` keys and N x 8 elements of each value.
template <int N>
void add_values(const float * weight, int count, const float * values, int64_t width, float factor, float * out) {
    __m256       sum[N];
    const __m256 keep = _mm256_set1_ps(factor);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
        sum[j] = _mm256_mul_ps(_mm256_load_ps(out + 8 * j), keep);
    }
    for (int key = 0; key < count; key++, values += width) {
        const __m256 w = _mm256_set1_ps(weight[key]);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            sum[j] = _mm256_fmadd_ps(w, _mm256_load_ps(values + 8 * j), sum[j]);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
        _mm256_store_ps(out + 8 * j, sum[j]);
    }
}

void add_values(const float * weight, int count, const float * values, int64_t width, float factor, float * out) {
    int64_t i = 0;
    for (; i + 64 <= width; i += 64) {
        add_values<8>(weight, count, values + i, width, factor, out + i);
    }
    for (; i + 32 <= width; i += 32) {
        add_values<4>(weight, count, values + i, width, factor, out + i);
    }
    for (; i < width; i += 8) {
        add_values<1>(weight, count, values + i, width, factor, out + i);
    }
}

const char * at(const Tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(t->data) + size_t(i1) * t->nb[1] + size_t(i2) * t->nb[2] + size_t(i3) * t->nb[3];
}

const uint16_t * mask_row(const Tensor * mask, int64_t row, int64_t head, int64_t sequence) {
    return reinterpret_cast<const uint16_t *>(at(mask, row, head % mask->ne[2], sequence % mask->ne[3]));
}

constexpr uint16_t kHalfMinusInfinity = 0xFC00;

// First and one past the last key that a row may see.
void visible(const uint16_t * mask, int64_t keys, int64_t & first, int64_t & end) {
    end = keys;
    while (end > 0 && mask[end - 1] == kHalfMinusInfinity) {
        end--;
    }
    first = 0;
    while (first < end && mask[first] == kHalfMinusInfinity) {
        first++;
    }
}

struct Work {
    float * keys;    // chunk x width
    float * values;  // chunk x value width
    float * q;       // queries x width
    float * out;     // queries x value width
};

float * take(uint8_t *& from, int64_t floats) {
    float * taken = reinterpret_cast<float *>(from);
    from += (size_t(floats) * sizeof(float) + 63) / 64 * 64;
    return taken;
}

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
            int64_t from = 0, to = s_.keys;
            if (s_.mask != nullptr) {
                visible(mask_row(s_.mask, row_of(i), head_of(i), sequence_), s_.keys, from, to);
            }
            first = std::min(first, from);
            end   = std::max(end, to);
        }
        for (int64_t key = first / kChunk * kChunk; key < end; key += kChunk) {
            chunk(key, int(std::min<int64_t>(kChunk, end - key)));
        }
        for (int i = 0; i < queries_; i++) {
            store(i);
        }
    }

  private:
    int64_t head_of(int i) const { return head_ + i % heads_; }
    int64_t row_of(int i) const { return row_ + i / heads_; }

    void chunk(int64_t key, int count) {
        const int64_t k_head = head_ / s_.shared, k_sequence = sequence_ / (s_.q->ne[3] / s_.k->ne[3]);
        const int64_t v_head = head_ / (s_.heads / s_.v->ne[2]), v_sequence = sequence_ / (s_.q->ne[3] / s_.v->ne[3]);
        for (int j = 0; j < count; j++) {
            widen(s_.k->type, at(s_.k, key + j, k_head, k_sequence), s_.width, w_.keys + j * s_.width);
            widen(s_.v->type, at(s_.v, key + j, v_head, v_sequence), s_.value_width, w_.values + j * s_.value_width);
        }
        for (int j = count; j < kChunk; j++) {
            std::fill_n(w_.keys + j * s_.width, s_.width, 0.0f);
        }
        float scale;
        std::memcpy(&scale, op_->op_params, sizeof scale);
        for (int i = 0; i < queries_; i++) {
            alignas(32) float score[kChunk];
            dot_chunk(w_.q + i * s_.width, w_.keys, s_.width, score);
            const uint16_t * mask = s_.mask == nullptr ? nullptr : mask_row(s_.mask, row_of(i), head_of(i), sequence_) + key;
            const float      top  = std::max(top_[i], scores(score, mask, count, scale));
            if (top == kNone) {
                continue;
            }
            const float factor = top_[i] == kNone ? 0.0f : exponential(top_[i] - top);
            __m256      sum    = _mm256_setzero_ps();
            for (int j = 0; j < kChunk; j += 8) {
                const __m256 weight = exponential(_mm256_sub_ps(_mm256_load_ps(score + j), _mm256_set1_ps(top)));
                _mm256_store_ps(score + j, weight);
                sum = _mm256_add_ps(sum, weight);
            }
            top_[i]    = top;
            weight_[i] = weight_[i] * factor + total(sum);
            add_values(score, count, w_.values, s_.value_width, factor, w_.out + i * s_.value_width);
        }
    }

    // Scales and masks the scores; keys from `count` on get -infinity. Returns the largest.
    static float scores(float * score, const uint16_t * mask, int count, float scale) {
        alignas(32) float extra[kChunk];
        for (int j = 0; j < kChunk; j++) {
            extra[j] = j < count ? 0.0f : kNone;
        }
        if (mask != nullptr) {
            alignas(16) uint16_t halves[kChunk];
            std::fill(halves + count, halves + kChunk, kHalfMinusInfinity);
            std::memcpy(halves, mask, size_t(count) * sizeof(uint16_t));
            for (int j = 0; j < kChunk; j += 8) {
                _mm256_store_ps(extra + j, load_half(halves + j));
            }
        }
        __m256 top = _mm256_set1_ps(kNone);
        for (int j = 0; j < kChunk; j += 8) {
            const __m256 x = _mm256_fmadd_ps(_mm256_load_ps(score + j), _mm256_set1_ps(scale), _mm256_load_ps(extra + j));
            _mm256_store_ps(score + j, x);
            top = _mm256_max_ps(top, x);
        }
        return largest(top);
    }

    void store(int i) const {
        const float   inverse = weight_[i] == 0.0f ? 0.0f : 1.0f / weight_[i];
        const float * from    = w_.out + i * s_.value_width;
        // The result has heads before rows: (value width, heads, rows, sequences).
        float * to = reinterpret_cast<float *>(static_cast<char *>(op_->data) + size_t(head_of(i)) * op_->nb[1] +
                                               size_t(row_of(i)) * op_->nb[2] + size_t(sequence_) * op_->nb[3]);
        for (int64_t j = 0; j < s_.value_width; j += 8) {
            _mm256_storeu_ps(to + j, _mm256_mul_ps(_mm256_load_ps(from + j), _mm256_set1_ps(inverse)));
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

bool cache_type(const Tensor * t) {
    const bool halves = t->type == F16 || t->type == BF16, blocks = t->type == Q8_0;
    return (halves && t->nb[0] == 2) || (t->type == F32 && t->nb[0] == 4) || (blocks && t->nb[0] == 34 && t->ne[0] % 32 == 0);
}

bool takes(const Tensor * op) {
    const Tensor * q = op->src[0], * k = op->src[1], * v = op->src[2], * mask = op->src[3];
    float          bias_and_cap[2];
    std::memcpy(bias_and_cap, op->op_params + 1, sizeof bias_and_cap);
    const bool plain = bias_and_cap[0] == 0.0f && bias_and_cap[1] == 0.0f && op->src[4] == nullptr;
    const bool types = q->type == F32 && q->nb[0] == 4 && cache_type(k) && cache_type(v) && op->type == F32 && op->nb[0] == 4 &&
                       (mask == nullptr || (mask->type == F16 && mask->nb[0] == 2));
    const bool sizes = k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && k->ne[0] <= kMostWidth && v->ne[0] <= kMostWidth &&
                       q->ne[2] % k->ne[2] == 0 && q->ne[3] % k->ne[3] == 0 && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] &&
                       (mask == nullptr || (mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1]));
    return plain && types && sizes;
}

size_t work_bytes(const Tensor * op) {
    const Shape s(op);
    return size_t((kChunk + kMostQueries) * (s.width + s.value_width)) * sizeof(float) + 4 * 64;
}

void compute(const Params * params, Tensor * op, uint8_t * work) {
    const Shape s(op);
    Work        w{};
    w.keys   = take(work, kChunk * s.width);
    w.values = take(work, kChunk * s.value_width);
    w.q      = take(work, kMostQueries * s.width);
    w.out    = take(work, kMostQueries * s.value_width);
    const Cut cut = choose_cut(s, params->nth);
    // Later rows see more keys, so the items go round the threads in turn.
    for (int64_t item = params->ith; item < cut.items; item += params->nth) {
        const int64_t heads = item % cut.head_items, rest = item / cut.head_items;
        const int64_t row = rest % cut.row_items * cut.rows, sequence = rest / cut.row_items;
        Item(s, op, w, sequence, heads * cut.heads, cut.heads, row, std::min(cut.rows, s.rows - row)).run();
    }
}

}  // namespace

const Attention kAvx2Attention = {takes, work_bytes, compute};

}  // namespace dspine
