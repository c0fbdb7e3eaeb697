// The tile instructions of the AMX family. Not the compiler's intrinsics: those of GCC 12 do not say which
// memory they read, and stores before them are lost.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dspine {

namespace {

struct alignas(64) TileConfig {
    uint8_t  palette;
    uint8_t  start_row;
    uint8_t  reserved[14];
    uint16_t row_bytes[16];
    uint8_t  rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// A test brings functions of the same names that do the same in plain C++.
#ifndef DSPINE_TILE_INSTRUCTIONS

inline void save_tiles(TileConfig * to) { asm volatile("sttilecfg %0" : "=m"(*to)); }

inline void configure_tiles(const TileConfig * from) { asm volatile("ldtilecfg %0" ::"m"(*from) : "memory"); }

template <int tile>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// Rows lie `step` bytes apart.
template <int tile>
inline void load_tile(const void * from, size_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(step), "i"(tile) : "memory");
}

template <int tile>
inline void store_tile(void * to, size_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(step), "i"(tile) : "memory");
}

// sum[m][n] += four products of signed bytes, for each four of row m of a and row k of b at n.
template <int sum, int a, int b>
inline void add_products() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

// The same with unsigned bytes of a.
template <int sum, int a, int b>
inline void add_unsigned_products() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
}

#endif

}  // namespace

}  // namespace dspine
