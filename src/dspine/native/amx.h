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

// Four blocks of weights, taken apart into tiles.
template <int kTiles>
struct Weights {
    alignas(64) uint8_t tile[kSlices][kTiles][kLanes][kTileBytes];  // lanes of the other tiles stay zero
};

// And what their sums are multiplied by.
template <int kTiles>
struct Scales {
    alignas(64) float scale[kSlices][kTiles / 2][kPanel], minimum[kSlices][kTiles / 2][kPanel];
};

// Products of four blocks with up to 16 rows.
template <int kTiles>
struct Sums {
    alignas(64) int32_t of[kSlices][kTiles][kTileRows][kPanel];
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
//   decode(panel, first, count, weights, scales)   `count` blocks from the `first` on
//   few                          the kernel for few rows
template <class Type>
class TileProduct {
  public:
    using V = Vectors512;
    static constexpr int kTiles = Type::kTiles, kScales = kTiles / 2;

    TileProduct(const uint8_t * panel, int64_t blocks, size_t row_bytes, int rows)
        : panel_(panel), blocks_(blocks), row_bytes_(row_bytes), rows_(rows) {}

    // Of `rows` rows from `prepared` on. While four blocks are multiplied, the next four are taken apart and the
    // sums of the four before are added up: memory is never read right after it was written, and sums are stored
    // only when there was time to compute them.
    void run(const uint8_t * prepared, float * result, size_t result_step, int outputs) {
        static thread_local Weights<kTiles> weights[2];
        Sums<kTiles>                        sums[2];
        Scales<kTiles>                      scales[3];
        for (int row = 0; row < rows_; row++) {
            store_floats(value_[row], V::zero());
        }
        decode(0, weights[0], scales[0]);
        const int64_t batches = (blocks_ + kSlices - 1) / kSlices;
        for (int64_t batch = 0; batch <= batches; batch++) {
            const int64_t first = batch * kSlices;
            decode(first + kSlices, weights[(batch + 1) % 2], scales[(batch + 1) % 3]);
            for (int i = 0; i < kSlices; i++) {
                const bool any = first + i < blocks_;
                if (any) {
                    const auto * x = reinterpret_cast<const Inputs8ByFactor *>(prepared) + Type::block(first + i);
                    multiply_block(x, weights[batch % 2].tile[i]);
                }
                if (batch > 0 && kShared * i < rows_) {
                    add_rows<kShared>(prepared, kShared * i, first - kSlices, scales[(batch + 2) % 3], sums[(batch + 1) % 2]);
                }
                if (any) {
                    store_sums(sums[batch % 2].of[i]);
                }
            }
        }
        for (int row = 0; row < rows_; row++) {
            const auto * x        = reinterpret_cast<const Inputs8ByFactor *>(prepared + size_t(row) * row_bytes_);
            const __m512 whole[1] = {V::times(load_floats(value_[row]), V::repeat(x->row))};
            V::store(result + size_t(row) * result_step, whole, outputs);
        }
    }

  private:
    static constexpr int kShared = kTileRows / kSlices;  // rows that are added up at a time

    static __m512 load_floats(const float * from) { return _mm512_loadu_ps(from); }

    void decode(int64_t first, Weights<kTiles> & weights, Scales<kTiles> & scales) const {
        if (first < blocks_) {
            Type::decode(panel_, first, int(std::min<int64_t>(kSlices, blocks_ - first)), weights, scales);
        }
    }

    void multiply_block(const Inputs8ByFactor * x, const uint8_t (&weights)[kTiles][kLanes][kTileBytes]) const {
        load_tile<0>(x->q, row_bytes_);
        multiply_tile<1, 4>(weights[0]);
        multiply_tile<2, 5>(weights[1]);
        if constexpr (kTiles == 4) {
            multiply_tile<1, 6>(weights[2]);
            multiply_tile<2, 7>(weights[3]);
        }
    }

    template <int tile, int sum>
    static void multiply_tile(const uint8_t (&weights)[kLanes][kTileBytes]) {
        load_tile<tile>(weights, kTileBytes);
        zero_tile<sum>();
        add_products<sum, 0, tile>();
    }

    static void store_sums(int32_t (&sums)[kTiles][kTileRows][kPanel]) {
        store_tile<4>(sums[0], kTileBytes);
        store_tile<5>(sums[1], kTileBytes);
        if constexpr (kTiles == 4) {
            store_tile<6>(sums[2], kTileBytes);
            store_tile<7>(sums[3], kTileBytes);
        }
    }

    // Adds up the sums of at most R rows from `row` on.
    template <int R>
    void add_rows(const uint8_t * prepared, int row, int64_t first, const Scales<kTiles> & scales, const Sums<kTiles> & sums) {
        if constexpr (R > 1) {
            if (rows_ - row < R) {
                return add_rows<R - 1>(prepared, row, first, scales, sums);
            }
        }
        const Inputs8ByFactor * blocks[R];
        __m512                  value[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            blocks[r] = reinterpret_cast<const Inputs8ByFactor *>(prepared + size_t(row + r) * row_bytes_);
            value[r]  = load_floats(value_[row + r]);
        }
        const int count = int(std::min<int64_t>(kSlices, blocks_ - first));
        for (int i = 0; i < count; i++) {
            const int64_t block = Type::block(first + i);
#pragma GCC unroll 2
            for (int part = 0; part < kScales; part++) {
                const __m512 scale = load_floats(scales.scale[i][part]), minimum = load_floats(scales.minimum[i][part]);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    const Inputs8ByFactor & x = blocks[r][block];
                    const __m512i one = V::load(sums.of[i][2 * part][row + r]), two = V::load(sums.of[i][2 * part + 1][row + r]);
                    const __m512i factor[2] = {V::repeat32(x.factor), V::repeat32(x.factor + 1)};
                    const __m512i total     = Type::kShort ? V::dot16(V::pairs(one, factor[0]), two, factor[1])
                                                           : V::plus(_mm512_mullo_epi32(one, factor[0]), _mm512_mullo_epi32(two, factor[1]));
                    const float sum = kScales == 1 ? x.sum : x.half[part];
                    value[r] = V::add_product(V::to_float(total), scale, value[r]);
                    value[r] = V::add_product(minimum, V::repeat(sum), value[r]);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            store_floats(value_[row + r], value[r]);
        }
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
