// What the tile instructions of the AMX kernels do, in plain C++, from Intel's Software Developer's Manual,
// volume 2. What the processor refuses ends the process.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "emulated_vnni.h"

#define DSPINE_TILE_INSTRUCTIONS

namespace emulated {

struct Tiles {
    uint8_t config[64];
    uint8_t data[8][16][64];

    bool     on() const { return config[0] == 1; }
    unsigned row_bytes(int tile) const { return config[16 + 2 * tile] | unsigned(config[17 + 2 * tile]) << 8; }
    unsigned rows(int tile) const { return config[48 + tile]; }
};

static thread_local Tiles tiles;

static inline void demand(bool legal) {
    if (!legal) {
        std::abort();
    }
}

// LDTILECFG: palette 0 turns the tiles off, palette 1 has eight of at most 16 rows of 64 bytes.
DSPINE_EMULATED_CALL void configure(const void * from) {
    Tiles next{};
    std::memcpy(next.config, from, sizeof next.config);
    demand(next.config[0] <= 1);
    if (next.config[0] == 1) {
        for (int i = 2; i < 16; i++) {
            demand(next.config[i] == 0);
        }
        for (int tile = 0; tile < 8; tile++) {
            demand(next.row_bytes(tile) <= 64 && next.rows(tile) <= 16);
            demand((next.row_bytes(tile) == 0) == (next.rows(tile) == 0));
        }
        for (int tile = 8; tile < 16; tile++) {
            demand(next.row_bytes(tile) == 0 && next.rows(tile) == 0);
        }
    } else {
        std::memset(next.config, 0, sizeof next.config);
    }
    tiles = next;
}

static inline void demand_tile(int tile) { demand(tiles.on() && tile < 8 && tiles.rows(tile) > 0); }

// TILELOADD: the rest of the rows and bytes becomes 0.
DSPINE_EMULATED_CALL void load_tile(int tile, const void * from, size_t step) {
    demand_tile(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    for (unsigned row = 0; row < tiles.rows(tile); row++) {
        std::memcpy(tiles.data[tile][row], static_cast<const char *>(from) + row * step, tiles.row_bytes(tile));
    }
}

DSPINE_EMULATED_CALL void store_tile(int tile, void * to, size_t step) {
    demand_tile(tile);
    for (unsigned row = 0; row < tiles.rows(tile); row++) {
        std::memcpy(static_cast<char *>(to) + row * step, tiles.data[tile][row], tiles.row_bytes(tile));
    }
}

DSPINE_EMULATED_CALL void zero_tile(int tile) {
    demand_tile(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

// TDPBSSD, and TDPBUSD, whose `a` is unsigned.
template <class A>
DSPINE_EMULATED_CALL void add_products(int sum, int a, int b) {
    demand_tile(sum), demand_tile(a), demand_tile(b);
    demand(sum != a && sum != b && a != b);
    demand(tiles.row_bytes(sum) % 4 == 0 && tiles.row_bytes(a) % 4 == 0 && tiles.row_bytes(b) % 4 == 0);
    demand(tiles.rows(sum) == tiles.rows(a) && tiles.row_bytes(sum) == tiles.row_bytes(b) &&
           tiles.row_bytes(a) / 4 == tiles.rows(b));
    for (unsigned m = 0; m < tiles.rows(sum); m++) {
        for (unsigned n = 0; n < tiles.row_bytes(sum) / 4; n++) {
            uint32_t total;
            std::memcpy(&total, tiles.data[sum][m] + 4 * n, 4);
            for (unsigned k = 0; k < tiles.rows(b); k++) {
                for (unsigned i = 0; i < 4; i++) {
                    total += uint32_t(int32_t(A(tiles.data[a][m][4 * k + i])) * int32_t(int8_t(tiles.data[b][k][4 * n + i])));
                }
            }
            std::memcpy(tiles.data[sum][m] + 4 * n, &total, 4);
        }
        std::memset(tiles.data[sum][m] + tiles.row_bytes(sum), 0, 64 - tiles.row_bytes(sum));
    }
}

}  // namespace emulated

namespace dspine {

namespace {

[[maybe_unused]] inline void save_tiles(void * to) { std::memcpy(to, emulated::tiles.config, 64); }
[[maybe_unused]] inline void configure_tiles(const void * from) { emulated::configure(from); }

template <int tile>
inline void zero_tile() {
    emulated::zero_tile(tile);
}
template <int tile>
inline void load_tile(const void * from, size_t step) {
    emulated::load_tile(tile, from, step);
}
template <int tile>
inline void store_tile(void * to, size_t step) {
    emulated::store_tile(tile, to, step);
}
template <int sum, int a, int b>
inline void add_products() {
    emulated::add_products<int8_t>(sum, a, b);
}
template <int sum, int a, int b>
inline void add_unsigned_products() {
    emulated::add_products<uint8_t>(sum, a, b);
}

}  // namespace

}  // namespace dspine
