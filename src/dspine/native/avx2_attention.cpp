// FLASH_ATTN_EXT for few and many rows, in fp32.
//
// Keys are taken in chunks of 64 that start at multiples of 64, whatever the batch and the number of
// threads, and each query is summed over them in that order: its result does not depend on the
// queries it is computed with. An item takes all query heads of a key/value head and a few rows, so a
// chunk is read once for them.
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

// 16-bit floats are widened where they are read, which costs less than to store them and read them again.
bool read_in_place(const Tensor * cache) { return cache->type == F32 || cache->type == F16; }

struct Shape {
    explicit Shape(const Tensor * op)
        : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]), width(k->ne[0]), value_width(v->ne[0]),
          rows(q->ne[1]), heads(q->ne[2]), sequences(q->ne[3]), keys(k->ne[1]), shared(heads / k->ne[2]),
          in_place(read_in_place(k) && read_in_place(v)) {}

    const Tensor * q, * k, * v, * mask;
    int64_t width, value_width, rows, heads, sequences, keys;
    int64_t shared;    // query heads of one key/value head
    bool    in_place;  // no widening in advance
};

// How the work is cut: items of `heads` query heads (all of one key/value head) x `rows` rows.
struct Cut {
    int64_t heads, rows;
    int64_t head_items, row_items, items;
};

// The cut that is done soonest on `threads` threads. Widening a chunk costs more than one query, so
// many queries an item are cheap, but too few items leave threads idle.
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
            const int64_t queries = heads * rows, widening = s.in_place ? 1 : 3;  // a query is 2
            const int64_t cost    = (cut.items + threads - 1) / threads * (widening + 2 * queries);
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
#pragma GCC unroll 6
    for (int i = 0; i < 6; i++) {
        constexpr float kNext[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(kNext[i]));
    }
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), live);
}

inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// Sums of four vectors, always added in the same order.
inline __m128 sums(const __m256 & a, const __m256 & b, const __m256 & c, const __m256 & d) {
    const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    const __m256  all = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
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

// One cache row of `width` elements, BF16 or Q8_0, as fp32.
void widen(int type, const char * from, int64_t width, float * to) {
    if (type == BF16) {
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
    }
}

// Keys or values of one chunk: fp32, or 16-bit floats as they lie in the cache.
struct Rows {
    const char * first;
    size_t       step;  // bytes from one to the next
    int          count;
    bool         half;

    const char * at(int i) const { return first + step * size_t(std::min(i, count - 1)); }
};

// Elements i to i + 7 of a row.
template <bool half>
inline __m256 eight(const char * row, int64_t i) {
    return half ? load_half(row + 2 * i) : _mm256_loadu_ps(reinterpret_cast<const float *>(row + 4 * i));
}

// The compiler would load a value again for each multiplication that it takes part in.
inline __m256 in_register(__m256 x) {
    asm("" : "+x"(x));
    return x;
}

// score[r * kChunk + key] = q[r] . key for Q queries; up to 7 scores after the last key's repeat it, so
// that there is a whole number of vectors. A loaded key serves all queries.
template <int Q, bool half>
void dot_rows(const float * q, int64_t width, const Rows & keys, float * score) {
    constexpr int K   = Q == 1 ? 8 : 4;
    const int     end = (keys.count + 7) / 8 * 8;
    for (int key = 0; key < end; key += K) {
        const char * row[K];
        __m256       part[Q][K];
#pragma GCC unroll 8
        for (int j = 0; j < K; j++) {
            row[j] = keys.at(key + j);
#pragma GCC unroll 3
            for (int r = 0; r < Q; r++) {
                part[r][j] = _mm256_setzero_ps();
            }
        }
        for (int64_t i = 0; i < width; i += 8) {
            __m256 x[Q];
#pragma GCC unroll 3
            for (int r = 0; r < Q; r++) {
                x[r] = _mm256_load_ps(q + r * width + i);
            }
#pragma GCC unroll 8
            for (int j = 0; j < K; j++) {
                const __m256 y = in_register(eight<half>(row[j], i));
#pragma GCC unroll 3
                for (int r = 0; r < Q; r++) {
                    part[r][j] = _mm256_fmadd_ps(x[r], y, part[r][j]);
                }
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < Q; r++) {
#pragma GCC unroll 2
            for (int j = 0; j < K; j += 4) {
                _mm_store_ps(score + r * kChunk + key + j, sums(part[r][j], part[r][j + 1], part[r][j + 2], part[r][j + 3]));
            }
        }
    }
}

// Queries that see keys of a chunk: out[r] = factor[r] * out[r] + weight[r * kChunk ...] . values.
struct Shares {
    const float * weight;
    float         factor[kMostQueries];
    float *       out[kMostQueries];
};

// For Q queries from `query` on and elements i to i + 8 N - 1; a loaded value serves all queries.
template <int Q, int N, bool half>
inline void add_elements(const Shares & shares, int query, const Rows & values, int64_t i) {
    __m256 sum[Q][N];
#pragma GCC unroll 3
    for (int r = 0; r < Q; r++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            sum[r][n] = _mm256_mul_ps(_mm256_load_ps(shares.out[query + r] + i + 8 * n), _mm256_set1_ps(shares.factor[query + r]));
        }
    }
    const char *  row    = values.first;
    const float * weight = shares.weight + query * kChunk;
    for (int key = 0; key < values.count; key++, row += values.step) {
        __m256 w[Q];
#pragma GCC unroll 3
        for (int r = 0; r < Q; r++) {
            w[r] = _mm256_set1_ps(weight[r * kChunk + key]);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const __m256 y = in_register(eight<half>(row, i + 8 * n));
#pragma GCC unroll 3
            for (int r = 0; r < Q; r++) {
                sum[r][n] = _mm256_fmadd_ps(w[r], y, sum[r][n]);
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < Q; r++) {
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            _mm256_store_ps(shares.out[query + r] + i + 8 * n, sum[r][n]);
        }
    }
}

template <int Q, bool half>
void add_rows(const Shares & shares, int query, const Rows & values, int64_t width) {
    constexpr int N = Q == 1 ? 8 : 4;
    int64_t       i = 0;
    for (; i + 8 * N <= width; i += 8 * N) {
        add_elements<Q, N, half>(shares, query, values, i);
    }
    for (; i < width; i += 8) {
        add_elements<Q, 1, half>(shares, query, values, i);
    }
}

// Calls visit(first, count) for groups of 1 to 3 of nearly equal size: three queries by four
// vectors fill the registers.
template <class Visit>
void in_threes(int all, Visit visit) {
    int groups = (all + 2) / 3;
    for (int first = 0; groups > 0; groups--) {
        const int count = (all - first + groups - 1) / groups;
        visit(first, count);
        first += count;
    }
}

void dot_all(const float * q, int queries, int64_t width, const Rows & keys, float * score) {
    in_threes(queries, [&](int first, int count) {
        const float * from = q + first * width;
        float *       to   = score + first * kChunk;
        switch (count + (keys.half ? 3 : 0)) {
            case 1: dot_rows<1, false>(from, width, keys, to); break;
            case 2: dot_rows<2, false>(from, width, keys, to); break;
            case 3: dot_rows<3, false>(from, width, keys, to); break;
            case 4: dot_rows<1, true>(from, width, keys, to); break;
            case 5: dot_rows<2, true>(from, width, keys, to); break;
            default: dot_rows<3, true>(from, width, keys, to); break;
        }
    });
}

void add_all(const Shares & shares, int queries, const Rows & values, int64_t width) {
    in_threes(queries, [&](int first, int count) {
        switch (count + (values.half ? 3 : 0)) {
            case 1: add_rows<1, false>(shares, first, values, width); break;
            case 2: add_rows<2, false>(shares, first, values, width); break;
            case 3: add_rows<3, false>(shares, first, values, width); break;
            case 4: add_rows<1, true>(shares, first, values, width); break;
            case 5: add_rows<2, true>(shares, first, values, width); break;
            default: add_rows<3, true>(shares, first, values, width); break;
        }
    });
}

const char * at(const Tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(t->data) + size_t(i1) * t->nb[1] + size_t(i2) * t->nb[2] + size_t(i3) * t->nb[3];
}

const uint16_t * mask_row(const Tensor * mask, int64_t row, int64_t head, int64_t sequence) {
    return reinterpret_cast<const uint16_t *>(at(mask, row, head % mask->ne[2], sequence % mask->ne[3]));
}

constexpr uint16_t kHalfMinusInfinity = 0xFC00;

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

struct Work {
    float * keys;    // chunk x width
    float * values;  // chunk x value width
    float * q;       // queries x width
    float * out;     // queries x value width
    float * scores;  // queries x chunk
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
            chunk(key, int(std::min<int64_t>(kChunk, end - key)));
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

    // `count` rows of a cache from `first` on.
    Rows rows_of(const Tensor * cache, int64_t head, int64_t sequence, int64_t first, int count, float * wide) const {
        const char * from = at(cache, first, head, sequence);
        if (read_in_place(cache)) {
            return {from, cache->nb[1], count, cache->type == F16};
        }
        const int64_t width = cache->ne[0];
        for (int j = 0; j < count; j++) {
            widen(cache->type, from + size_t(j) * cache->nb[1], width, wide + j * width);
        }
        return {reinterpret_cast<const char *>(wide), size_t(width) * sizeof(float), count, false};
    }

    void chunk(int64_t key, int count) {
        const Tensor * k = s_.k, * v = s_.v;
        const Rows     keys  = rows_of(k, head_ / (s_.heads / k->ne[2]), sequence_ / (s_.q->ne[3] / k->ne[3]), key, count, w_.keys);
        dot_all(w_.q, queries_, s_.width, keys, w_.scores);
        float scale;
        std::memcpy(&scale, op_->op_params, sizeof scale);
        alignas(32) float extra[kChunk];
        Shares            shares;
        shares.weight = w_.scores;
        int active    = 0;  // queries that see any of these keys; their weights move up to the front
        for (int i = 0; i < queries_; i++) {
            const uint16_t * mask = s_.mask == nullptr ? nullptr : mask_row(s_.mask, row_of(i), head_of(i), sequence_) + key;
            if (has_own_mask(i)) {
                read_mask(mask, count, extra);
            }
            float *     score = w_.scores + i * kChunk;
            const float top   = std::max(top_[i], add_mask(score, extra, count, scale));
            if (top == kNone) {
                continue;
            }
            const float factor = top_[i] == kNone ? 0.0f : exponential(top_[i] - top);
            __m256      sum    = _mm256_setzero_ps();
            for (int j = 0; j < count; j += 8) {
                const __m256 weight = exponential(_mm256_sub_ps(_mm256_load_ps(score + j), _mm256_set1_ps(top)));
                _mm256_store_ps(w_.scores + active * kChunk + j, weight);
                sum = _mm256_add_ps(sum, weight);
            }
            top_[i]               = top;
            weight_[i]            = weight_[i] * factor + total(sum);
            shares.factor[active] = factor;
            shares.out[active++]  = w_.out + i * s_.value_width;
        }
        // Widened only now: keys and values together do not fit into the first cache.
        const Rows values = rows_of(v, head_ / (s_.heads / v->ne[2]), sequence_ / (s_.q->ne[3] / v->ne[3]), key, count, w_.values);
        add_all(shares, active, values, s_.value_width);
    }

    // What is added to the scores; up to 7 keys from `count` on get -infinity.
    static void read_mask(const uint16_t * mask, int count, float * extra) {
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
            _mm256_store_ps(extra + j, load_half(halves));
        }
    }

    // Scales and masks the scores; returns the largest.
    static float add_mask(float * score, const float * extra, int count, float scale) {
        __m256 top = _mm256_set1_ps(kNone);
        for (int j = 0; j < count; j += 8) {
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
    return size_t((kChunk + kMostQueries) * (s.width + s.value_width) + kMostQueries * kChunk) * sizeof(float) + 5 * 64;
}

void compute(const Params * params, Tensor * op, uint8_t * work) {
    const Shape s(op);
    Work        w{};
    w.keys   = take(work, kChunk * s.width);
    w.values = take(work, kChunk * s.value_width);
    w.q      = take(work, kMostQueries * s.width);
    w.out    = take(work, kMostQueries * s.value_width);
    w.scores = take(work, kMostQueries * kChunk);
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
