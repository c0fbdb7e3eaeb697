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

// Exchanges the bits under `mask` with those `by` above them.
inline uint32_t exchange(uint32_t bits, int by, uint32_t mask) {
    const uint32_t differ = (bits ^ bits >> by) & mask;
    return bits ^ differ ^ differ << by;
}

// Bits 0, 2, 4 ... before 1, 3, 5 ..., and back. Done twice, the fifth bit of input 4 g + i, bit
// 4 g + i of the file, becomes bit 8 i + g: bit g of byte i.
inline uint32_t even_before_odd(uint32_t bits) {
    bits = exchange(bits, 1, 0x22222222);
    bits = exchange(bits, 2, 0x0C0C0C0C);
    bits = exchange(bits, 4, 0x00F000F0);
    return exchange(bits, 8, 0x0000FF00);
}

inline uint32_t even_and_odd_in_turn(uint32_t bits) {
    bits = exchange(bits, 8, 0x0000FF00);
    bits = exchange(bits, 4, 0x00F000F0);
    bits = exchange(bits, 2, 0x0C0C0C0C);
    return exchange(bits, 1, 0x22222222);
}

// Bits of inputs in the order of `lanes`, and back.
template <Lanes lanes>
inline uint32_t bits_in_lanes(uint32_t bits) {
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

constexpr size_t kEightWeights = 32;
constexpr size_t kEightUnit    = kEightWeights + 512;
constexpr size_t kEightSource  = 34;

inline void pack_eight(const uint8_t * source, int lane, uint8_t * unit) {
    std::memcpy(unit + 2 * lane, source, 2);
    for (int pair = 0; pair < 16; pair++) {
        std::memcpy(unit + kEightWeights + 32 * pair + 2 * lane, source + 2 + 2 * pair, 2);
    }
}

inline void unpack_eight(const uint8_t * unit, int lane, uint8_t * source) {
    std::memcpy(source, unit + 2 * lane, 2);
    for (int pair = 0; pair < 16; pair++) {
        std::memcpy(source + 2 + 2 * pair, unit + kEightWeights + 32 * pair + 2 * lane, 2);
    }
}

}  // namespace

}  // namespace dspine
