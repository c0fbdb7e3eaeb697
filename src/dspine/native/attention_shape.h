// FLASH_ATTN_EXT for few and many rows, in fp32: what is taken over and how it is cut into items.
//
// Keys are taken in chunks of 64 that start at multiples of 64, whatever the batch and the number of
// threads, and each query is summed over them in that order: its result does not depend on the
// queries it is computed with. An item takes all query heads of a key/value head and a few rows, so a
// chunk is read once for them.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace dspine {

namespace {

constexpr int     kChunk       = 64;   // keys
constexpr int     kMostQueries = 16;   // of one item
constexpr int64_t kMostWidth   = 256;  // head size

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

// Keys or values of one chunk: fp32, or 16-bit floats as they lie in the cache.
struct Rows {
    const char * first;
    size_t       step;  // bytes from one to the next
    int          count;
    bool         half;
    size_t       ahead;  // bytes to the same row of the next chunk, which is fetched meanwhile; 0: not that

    const char * at(int i) const { return first + step * size_t(std::min(i, count - 1)); }
};

const char * at(const Tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(t->data) + size_t(i1) * t->nb[1] + size_t(i2) * t->nb[2] + size_t(i3) * t->nb[3];
}

// Buffers of one thread.
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

Work work_in(uint8_t * memory, const Shape & s) {
    Work w{};
    w.keys   = take(memory, kChunk * s.width);
    w.values = take(memory, kChunk * s.value_width);
    w.q      = take(memory, kMostQueries * s.width);
    w.out    = take(memory, kMostQueries * s.value_width);
    w.scores = take(memory, kMostQueries * kChunk);
    return w;
}

size_t work_bytes(const Tensor * op) {
    const Shape s(op);
    return size_t((kChunk + kMostQueries) * (s.width + s.value_width) + kMostQueries * kChunk) * sizeof(float) + 5 * 64;
}

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

}  // namespace

}  // namespace dspine
