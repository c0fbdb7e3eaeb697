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
constexpr int     kMostQueries = 48;   // of one item
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

// How the work is cut. The queries of a key/value head, row after row, are cut into blocks; blocks go round the
// threads in turn, and what is left over when no whole round is left is cut into smaller parts.
struct Cut {
    int64_t block, blocks;  // queries of a block, blocks of a key/value head
    int64_t whole;          // blocks that are not cut further
    int64_t part, parts;    // queries of a part, parts of a block
    int64_t items;
};

// The cut that is done soonest on `threads` threads; `cost` is that of an item of so many queries.
template <class Cost>
Cut choose_cut(const Shape & s, int threads, int most, Cost cost) {
    Cut           best{};
    int64_t       least = -1;
    const int64_t all = s.rows * s.shared;
    for (int64_t block = 1; block <= std::min<int64_t>(all, most); block++) {
        Cut cut{};
        cut.block           = block;
        cut.blocks          = (all + block - 1) / block;
        const int64_t total = cut.blocks * s.k->ne[2] * s.sequences, left = total % threads;
        cut.whole           = total - left;
        for (int64_t parts = 1; parts <= (left == 0 ? 1 : std::min<int64_t>(block, threads)); parts++) {
            cut.part  = (block + parts - 1) / parts;
            cut.parts = (block + cut.part - 1) / cut.part;
            cut.items = cut.whole + left * cut.parts;
            const int64_t spent = cut.whole / threads * cost(block) + (left * cut.parts + threads - 1) / threads * cost(cut.part);
            if (least < 0 || spent < least) {
                least = spent;
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
    float * wide;    // chunk x width: keys, then values
    float * q;       // queries x width
    float * out;     // queries x value width
    float * scores;  // queries x chunk
    float * masks;   // queries x chunk, twice
};

float * take(uint8_t *& from, int64_t floats) {
    float * taken = reinterpret_cast<float *>(from);
    from += (size_t(floats) * sizeof(float) + 63) / 64 * 64;
    return taken;
}

Work work_in(uint8_t * memory, const Shape & s) {
    Work w{};
    w.wide   = take(memory, kChunk * std::max(s.width, s.value_width));
    w.q      = take(memory, kMostQueries * s.width);
    w.out    = take(memory, kMostQueries * s.value_width);
    w.scores = take(memory, kMostQueries * kChunk);
    w.masks  = take(memory, 2 * kMostQueries * kChunk);
    return w;
}

size_t work_bytes(const Tensor * op) {
    const Shape s(op);
    return size_t(kChunk * std::max(s.width, s.value_width) + kMostQueries * (s.width + s.value_width + 3 * kChunk)) * sizeof(float) + 5 * 64;
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
