// Units of Q4_0, Q4_1, Q5_0 and Q8_0: 16 outputs x 32 inputs.
//
// Four and five bits: 16 scales (f16), Q4_1: 16 minima (f16), Q5_0: 64 bytes of fifth bits, then four
// times [outputs 0-7][outputs 8-15] of 32 bytes. With lanes in order, byte 4 * output + i of the g-th
// holds input 4 g + i in its low and input 16 + 4 g + i in its high nibble.
//
// Q8_0: 16 scales (f16), then for each pair of inputs 16 bytes of outputs 0-7 and 16 bytes of outputs
// 8-15; byte 2 * output + i is input 2 * pair + i.
#pragma once

#include "layout.h"

namespace dspine {

namespace {

enum class Small { q4_0, q4_1, q5_0 };

template <Small kind>
struct SmallLayout {
    static constexpr size_t kScale    = 0;
    static constexpr size_t kMinimum  = 32;  // q4_1 only
    static constexpr size_t kFifth    = 32;  // q5_0 only
    static constexpr size_t kNibbles  = kind == Small::q4_0 ? 32 : kind == Small::q4_1 ? 64 : 96;
    static constexpr size_t kUnit     = kNibbles + 256;
    static constexpr size_t kSourceNibbles = kind == Small::q4_0 ? 2 : kind == Small::q4_1 ? 4 : 6;
    static constexpr size_t kSource   = kSourceNibbles + 16;
};

// Bits of one output, or of eight.
typedef uint32_t Bits8 __attribute__((vector_size(32)));

// Exchanges the bits under `mask` with those `by` above them.
template <class Bits>
inline Bits exchange(Bits bits, int by, uint32_t mask) {
    const Bits differ = (bits ^ bits >> by) & mask;
    return bits ^ differ ^ differ << by;
}

// Bits 0, 2, 4 ... before 1, 3, 5 ..., and back. Done twice, the fifth bit of input 4 g + i, bit
// 4 g + i of the file, becomes bit 8 i + g: bit g of byte i.
template <class Bits>
inline Bits even_before_odd(Bits bits) {
    bits = exchange(bits, 1, 0x22222222);
    bits = exchange(bits, 2, 0x0C0C0C0C);
    bits = exchange(bits, 4, 0x00F000F0);
    return exchange(bits, 8, 0x0000FF00);
}

template <class Bits>
inline Bits even_and_odd_in_turn(Bits bits) {
    bits = exchange(bits, 8, 0x0000FF00);
    bits = exchange(bits, 4, 0x00F000F0);
    bits = exchange(bits, 2, 0x0C0C0C0C);
    return exchange(bits, 1, 0x22222222);
}

// Bits of inputs in the order of `lanes`, and back.
template <Lanes lanes, class Bits>
inline Bits bits_in_lanes(Bits bits) {
    return lanes == Lanes::in_order ? bits : exchange(bits, 2, 0x0C0C0C0C);
}

template <Small kind, Lanes lanes>
void pack_small(const uint8_t * source, int lane, uint8_t * unit) {
    using L = SmallLayout<kind>;
    std::memcpy(unit + L::kScale + 2 * lane, source, 2);
    if (kind == Small::q4_1) {
        std::memcpy(unit + L::kMinimum + 2 * lane, source + 2, 2);
    }
    if (kind == Small::q5_0) {
        uint32_t bits;
        std::memcpy(&bits, source + 2, 4);
        bits = even_before_odd(even_before_odd(bits_in_lanes<lanes>(bits)));
        std::memcpy(unit + L::kFifth + 4 * lane, &bits, 4);
    }
    into_lanes<lanes>(source + L::kSourceNibbles, 4, unit + L::kNibbles + 4 * lane, 64);
}

// A unit of 16 rows, whose first bytes are `step` apart.
template <Small kind, Lanes lanes>
void pack_small_panel(const uint8_t * rows, size_t step, uint8_t * unit) {
    using L = SmallLayout<kind>;
    pair_of_rows(rows, step, unit + L::kScale);
    if (kind == Small::q4_1) {
        pair_of_rows(rows + 2, step, unit + L::kMinimum);
    }
    if (kind == Small::q5_0) {
        Bits8 bits[2];
        for (size_t row = 0; row < kPanel; row++) {
            std::memcpy(reinterpret_cast<uint8_t *>(bits) + 4 * row, rows + row * step + 2, 4);
        }
        for (Bits8 & eight : bits) {
            eight = even_before_odd(even_before_odd(bits_in_lanes<lanes>(eight)));
        }
        std::memcpy(unit + L::kFifth, bits, sizeof bits);
    }
    words_side_by_side<lanes == Lanes::by_factor>(rows + L::kSourceNibbles, step, unit + L::kNibbles);
}

template <Small kind, Lanes lanes>
void unpack_small(const uint8_t * unit, int lane, uint8_t * source) {
    using L = SmallLayout<kind>;
    std::memcpy(source, unit + L::kScale + 2 * lane, 2);
    if (kind == Small::q4_1) {
        std::memcpy(source + 2, unit + L::kMinimum + 2 * lane, 2);
    }
    if (kind == Small::q5_0) {
        uint32_t bits;
        std::memcpy(&bits, unit + L::kFifth + 4 * lane, 4);
        bits = bits_in_lanes<lanes>(even_and_odd_in_turn(even_and_odd_in_turn(bits)));
        std::memcpy(source + 2, &bits, 4);
    }
    from_lanes<lanes>(unit + L::kNibbles + 4 * lane, 4, source + L::kSourceNibbles, 64);
}

template <Small kind, Lanes lanes>
constexpr Kernel small_kernel(int type, decltype(Kernel::multiply) multiply) {
    using L           = SmallLayout<kind>;
    Kernel kernel     = lanes_kernel<lanes>(type, 32, L::kUnit, L::kSource);
    kernel.pack       = pack_units<pack_small<kind, lanes>, L::kSource, L::kUnit>;
    kernel.unpack     = unpack_units<unpack_small<kind, lanes>, L::kSource, L::kUnit>;
    kernel.pack_panel = pack_whole_units<pack_small_panel<kind, lanes>, L::kSource, L::kUnit>;
    kernel.multiply   = multiply;
    return kernel;
}

constexpr size_t kEightWeights = 32;
constexpr size_t kEightUnit    = kEightWeights + 512;
constexpr size_t kEightSource  = 34;

inline void pack_eight(const uint8_t * source, int lane, uint8_t * unit) {
    std::memcpy(unit + 2 * lane, source, 2);
    for (int pair = 0; pair < 16; pair++) {
        std::memcpy(unit + kEightWeights + 32 * pair + 2 * lane, source + 2 + 2 * pair, 2);
    }
}

inline void pack_eight_panel(const uint8_t * rows, size_t step, uint8_t * unit) {
    pair_of_rows(rows, step, unit);
    pairs_side_by_side(rows + 2, step, unit + kEightWeights);
    pairs_side_by_side(rows + 18, step, unit + kEightWeights + 256);
}

inline void unpack_eight(const uint8_t * unit, int lane, uint8_t * source) {
    std::memcpy(source, unit + 2 * lane, 2);
    for (int pair = 0; pair < 16; pair++) {
        std::memcpy(source + 2 + 2 * pair, unit + kEightWeights + 32 * pair + 2 * lane, 2);
    }
}

constexpr Kernel eight_kernel(decltype(Kernel::multiply) multiply) {
    return {Q8_0,
            32,
            kEightUnit,
            kEightSource,
            sizeof(Inputs16),
            pack_units<pack_eight, kEightSource, kEightUnit>,
            unpack_units<unpack_eight, kEightSource, kEightUnit>,
            prepare16,
            multiply,
            pack_whole_units<pack_eight_panel, kEightSource, kEightUnit>};
}

}  // namespace

}  // namespace dspine
