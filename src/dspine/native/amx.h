// Rows times one panel with AMX, for types with fewer than 8 bits, to the bits of the AVX2 kernels.
//
// A tile product adds up all inputs of a row, but inputs of either factor must be summed apart (`Inputs8`).
// So a block of 32 inputs is multiplied by two tiles of weights: one has zeros where inputs have the second
// factor, the other where they have the first. Q6_K, which has a scale per 16, takes two more. The sums are
// stored, multiplied by the factors and added to the results in fp32, 128 inputs later than they were made.
#pragma once

#include <algorithm>

#include "amx_tiles.h"
#include "avx512.h"
#include "inputs.h"
#include "kernel.h"

namespace dspine {

namespace {

constexpr int kTileRows  = 16;
constexpr int kTileBytes = 64;
constexpr int kSlices    = 4;  // blocks of 32 inputs that are decoded at a time
constexpr int kLanes     = 8;  // of four inputs, in a block
constexpr int kFewRows   = 3;  // up to here decoding into memory costs more than the tiles save

// Four blocks of weights and their products with up to 16 rows.
template <int kTiles>
struct Batch {
    alignas(64) uint8_t weights[kSlices][kTiles][kLanes][kTileBytes];  // lanes of the other tiles stay zero
    alignas(64) float scale[kSlices][kTiles / 2][kPanel], minimum[kSlices][kTiles / 2][kPanel];
    alignas(64) int32_t sums[kSlices][kTiles][kTileRows][kPanel];
};

inline void store_weights(uint8_t * to, __m512i x) { _mm512_storeu_si512(to, x); }
inline void store_floats(float * to, __m512 x) {
    const __m512 whole[1] = {x};
    Vectors512::store(to, whole, kPanel);
}

// A `Type` says
//   kTiles                       tiles of weights of a block
//   kShort                       sums fit into 16 bits
//   block(i)                     the i-th block in the order in which results are added up
//   decode(panel, first, count, batch)   `count` blocks from the `first` on
//   few                          the kernel for few rows
template <class Type>
class TileProduct {
  public:
    using V = Vectors512;
    static constexpr int kTiles = Type::kTiles, kScales = kTiles / 2;

    TileProduct(const uint8_t * panel, int64_t blocks, size_t row_bytes, int rows)
        : panel_(panel), blocks_(blocks), row_bytes_(row_bytes), rows_(rows) {}

    // Of `rows` rows from `prepared` on.
    void run(const uint8_t * prepared, float * result, size_t result_step, int outputs) {
        static thread_local Batch<kTiles> batches[2];
        for (int row = 0; row < rows_; row++) {
            store_floats(value_[row], V::zero());
        }
        int64_t before = -1;  // first block of the batch before
        for (int64_t first = 0; first < blocks_ + kSlices; first += kSlices) {
            Batch<kTiles> & now = batches[first / kSlices % 2], & last = batches[(first / kSlices + 1) % 2];
            const int       count = int(std::max<int64_t>(0, std::min<int64_t>(kSlices, blocks_ - first)));
            if (count > 0) {
                Type::decode(panel_, first, count, now);
            }
            for (int i = 0; i < kSlices; i++) {
                if (i < count) {
                    const Inputs8ByFactor * x = reinterpret_cast<const Inputs8ByFactor *>(prepared) + Type::block(first + i);
                    i % 2 == 0 ? multiply_block<4, 5>(x, now, i) : multiply_block<6, 7>(x, now, i);
                }
                for (int row = rows_ * i / kSlices; before >= 0 && row < rows_ * (i + 1) / kSlices; row++) {
                    add_up(prepared, row, before, int(std::min<int64_t>(kSlices, blocks_ - before)), last);
                }
            }
            before = first;
        }
        for (int row = 0; row < rows_; row++) {
            const auto * x        = reinterpret_cast<const Inputs8ByFactor *>(prepared + size_t(row) * row_bytes_);
            const __m512 whole[1] = {V::times(load_floats(value_[row]), V::repeat(x->row))};
            V::store(result + size_t(row) * result_step, whole, outputs);
        }
    }

  private:
    static __m512 load_floats(const float * from) { return _mm512_loadu_ps(from); }

    template <int first, int second>
    void multiply_block(const Inputs8ByFactor * x, Batch<kTiles> & batch, int i) const {
        load_tile<0>(x->q, row_bytes_);
        multiply_pair<first, second>(batch, i, 0);
        if constexpr (kTiles == 4) {
            multiply_pair<first, second>(batch, i, 2);
        }
    }

    template <int first, int second>
    void multiply_pair(Batch<kTiles> & batch, int i, int tile) const {
        load_tile<1>(batch.weights[i][tile], kTileBytes);
        zero_tile<first>();
        add_products<first, 0, 1>();
        load_tile<2>(batch.weights[i][tile + 1], kTileBytes);
        zero_tile<second>();
        add_products<second, 0, 2>();
        store_tile<first>(batch.sums[i][tile], kTileBytes);
        store_tile<second>(batch.sums[i][tile + 1], kTileBytes);
    }

    void add_up(const uint8_t * prepared, int row, int64_t first, int count, const Batch<kTiles> & batch) {
        const auto * blocks = reinterpret_cast<const Inputs8ByFactor *>(prepared + size_t(row) * row_bytes_);
        __m512       value  = load_floats(value_[row]);
        for (int i = 0; i < count; i++) {
            const Inputs8ByFactor & x = blocks[Type::block(first + i)];
            const __m512i           factor[2] = {V::repeat32(x.factor), V::repeat32(x.factor + 1)};
#pragma GCC unroll 2
            for (int part = 0; part < kScales; part++) {
                const __m512i one = V::load(batch.sums[i][2 * part][row]), two = V::load(batch.sums[i][2 * part + 1][row]);
                const __m512i total = Type::kShort ? V::dot16(V::pairs(one, factor[0]), two, factor[1])
                                                   : V::plus(_mm512_mullo_epi32(one, factor[0]), _mm512_mullo_epi32(two, factor[1]));
                const float sum = kScales == 1 ? x.sum : x.half[part];
                value = V::add_product(V::to_float(total), load_floats(batch.scale[i][part]), value);
                value = V::add_product(load_floats(batch.minimum[i][part]), V::repeat(sum), value);
            }
        }
        store_floats(value_[row], value);
    }

    const uint8_t * panel_;
    int64_t         blocks_;
    size_t          row_bytes_;
    int             rows_;
    alignas(64) float value_[kTileRows][kPanel];
};

// Tiles of inputs (0), weights (1, 2) and sums (4 to 7) for this many rows.
inline TileConfig config_for(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile : {0, 1, 2, 4, 5, 6, 7}) {
        const bool inputs = tile == 0, weights = tile == 1 || tile == 2;
        config.row_bytes[tile] = inputs ? 4 * kLanes : kTileBytes;
        config.rows[tile]      = uint8_t(weights ? kLanes : rows);
    }
    return config;
}

template <class Type>
void multiply_tiles(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes, int64_t rows,
                    float * result, size_t result_step, int outputs) {
    if (rows <= kFewRows) {
        return Type::few().multiply(panel, inputs, prepared, row_bytes, rows, result, result_step, outputs);
    }
    // Groups of the same size; the last ones may overlap, and compute the same again.
    const int64_t    groups = (rows + kTileRows - 1) / kTileRows, some = (rows + groups - 1) / groups;
    const TileConfig ours   = config_for(int(some));
    TileConfig       before;  // ggml's own AMX kernels leave theirs and expect to find it again
    save_tiles(&before);
    configure_tiles(&ours);
    TileProduct<Type> product(panel, inputs / 32, row_bytes, int(some));
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = std::min(group * some, rows - some);
        product.run(prepared + size_t(row) * row_bytes, result + size_t(row) * result_step, result_step, outputs);
    }
    configure_tiles(&before);
}

}  // namespace

}  // namespace dspine
