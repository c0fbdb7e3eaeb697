// Q8_0 with AMX: inputs of 16 bits are a signed upper and an unsigned lower byte, and each is multiplied by
// the same tile of weights. 256 * upper + lower is the exact sum of the other families.
#include <algorithm>

#include "amx_tables.h"
#include "amx_tiles.h"
#include "avx512.h"
#include "avx512_tables.h"
#include "layout_small.h"

namespace dspine {

namespace {

constexpr int kTileRows  = 16;
constexpr int kTileBytes = 64;
constexpr int kSlices    = 4;  // units that are multiplied before their sums are added up
constexpr int kLanes     = 8;  // of four inputs, in a unit
constexpr int kFewRows   = 3;  // up to here one product per row and unit costs less

// The inputs of a row are all `Inputs16` of it, for few rows, and then these.
struct Bytes16 {
    int8_t  upper[32];
    uint8_t lower[32];
};

// Sums of up to 16 rows, upper and lower.
struct Sums {
    alignas(64) int32_t of[kSlices][2][kTileRows][kPanel];
};

void prepare_bytes(const float * input, int64_t inputs, uint8_t * prepared) {
    prepare16(input, inputs, prepared);
    const auto * block = reinterpret_cast<const Inputs16 *>(prepared);
    auto *       bytes = reinterpret_cast<Bytes16 *>(prepared + size_t(inputs / 32) * sizeof(Inputs16));
    for (int64_t i = 0; i < inputs / 32; i++) {
        for (int j = 0; j < 32; j++) {
            bytes[i].upper[j] = int8_t(block[i].q[j] >> 8);
            bytes[i].lower[j] = uint8_t(block[i].q[j] & 255);
        }
    }
}

class Product8 {
  public:
    using V = Vectors512;

    Product8(const uint8_t * panel, int64_t units, size_t row_bytes, int rows)
        : panel_(panel), units_(units), row_bytes_(row_bytes), rows_(rows) {}

    // Of `rows` rows from `prepared` on.
    void run(const uint8_t * prepared, float * result, size_t result_step, int outputs) {
        const auto * bytes = reinterpret_cast<const Bytes16 *>(prepared + size_t(units_) * sizeof(Inputs16));
        Sums         sums[2];
        for (int row = 0; row < rows_; row++) {
            keep(row, V::zero());
        }
        for (int64_t first = 0; first < units_ + kSlices; first += kSlices) {
            Sums &        now = sums[first / kSlices % 2], & last = sums[(first / kSlices + 1) % 2];
            const int64_t before = first - kSlices;
            for (int i = 0; i < kSlices; i++) {
                if (first + i < units_) {
                    multiply_unit(bytes + first + i, panel_ + size_t(first + i) * kEightUnit, now.of[i]);
                }
                for (int row = rows_ * i / kSlices; before >= 0 && row < rows_ * (i + 1) / kSlices; row++) {
                    add_up(prepared, row, before, int(std::min<int64_t>(kSlices, units_ - before)), last);
                }
            }
        }
        for (int row = 0; row < rows_; row++) {
            const __m512 whole[1] = {kept(row)};
            V::store(result + size_t(row) * result_step, whole, outputs);
        }
    }

  private:
    void   keep(int row, __m512 x) { _mm512_storeu_ps(value_[row], x); }
    __m512 kept(int row) const { return _mm512_loadu_ps(value_[row]); }

    void multiply_unit(const Bytes16 * x, const uint8_t * unit, int32_t (&sums)[2][kTileRows][kPanel]) {
        for (int lane = 0; lane < kLanes; lane++) {
            _mm512_storeu_si512(weights_[lane], V::halves_in_turn(unit + kEightWeights + kTileBytes * lane));
        }
        load_tile<2>(weights_, kTileBytes);
        load_tile<0>(x->upper, row_bytes_);
        zero_tile<4>();
        add_products<4, 0, 2>();
        load_tile<1>(x->lower, row_bytes_);
        zero_tile<5>();
        add_unsigned_products<5, 1, 2>();
        store_tile<4>(sums[0], kTileBytes);
        store_tile<5>(sums[1], kTileBytes);
    }

    void add_up(const uint8_t * prepared, int row, int64_t first, int count, const Sums & sums) {
        const auto * x     = reinterpret_cast<const Inputs16 *>(prepared + size_t(row) * row_bytes_) + first;
        __m512       value = kept(row);
        for (int i = 0; i < count; i++) {
            const __m512i whole = V::plus(V::times256(V::load(sums.of[i][0][row])), V::load(sums.of[i][1][row]));
            const __m512  scale = V::half_floats(panel_ + size_t(first + i) * kEightUnit);
            value = V::add_product(V::to_float(whole), V::times(scale, V::repeat(x[i].scale)), value);
        }
        keep(row, value);
    }

    const uint8_t * panel_;
    int64_t         units_;
    size_t          row_bytes_;
    int             rows_;
    alignas(64) uint8_t weights_[kLanes][kTileBytes];
    alignas(64) float value_[kTileRows][kPanel];
};

// Tiles of inputs (0, 1), weights (2) and sums (4, 5) for this many rows.
TileConfig config_for(int rows) {
    TileConfig config{};
    config.palette = 1;
    for (int tile : {0, 1, 2, 4, 5}) {
        config.row_bytes[tile] = tile < 2 ? 4 * kLanes : kTileBytes;
        config.rows[tile]      = uint8_t(tile == 2 ? kLanes : rows);
    }
    return config;
}

void multiply8(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes, int64_t rows,
               float * result, size_t result_step, int outputs) {
    if (rows <= kFewRows) {
        return kAvx512Q8_0.multiply(panel, inputs, prepared, row_bytes, rows, result, result_step, outputs);
    }
    // Groups of the same size; the last ones may overlap, and compute the same again.
    const int64_t    groups = (rows + kTileRows - 1) / kTileRows, some = (rows + groups - 1) / groups;
    const TileConfig ours   = config_for(int(some));
    TileConfig       before;  // ggml's own AMX kernels leave theirs and expect to find it again
    save_tiles(&before);
    configure_tiles(&ours);
    Product8 product(panel, inputs / 32, row_bytes, int(some));
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = std::min(group * some, rows - some);
        product.run(prepared + size_t(row) * row_bytes, result + size_t(row) * result_step, result_step, outputs);
    }
    configure_tiles(&before);
}

constexpr Kernel kernel() {
    Kernel kernel           = eight_kernel(multiply8);
    kernel.prepare          = prepare_bytes;
    kernel.activation_bytes = sizeof(Inputs16) + sizeof(Bytes16);
    return kernel;
}

}  // namespace

const Kernel kAmxQ8_0 = kernel();

}  // namespace dspine
