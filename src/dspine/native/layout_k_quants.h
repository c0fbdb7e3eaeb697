// Units of Q4_K, Q5_K and Q6_K: blocks of 256 inputs with a scale per 32 (Q6_K: per 16) inside.
//
// Unit of 16 outputs x 256 inputs: the 16-bit scales of the 16 outputs, their smaller scales (and
// minima) as bytes, then the quants in "sets" of 8 groups x 16 outputs x 4 bytes: the 32 low nibbles
// are one sub-block, the 32 high nibbles another, as in the file. Upper bits lie in sets too.
#pragma once

#include "layout.h"

namespace dspine {

namespace {

enum class KQuant { q4_k, q5_k, q6_k };

constexpr size_t kSet = 512;  // 8 groups x 16 outputs x 4 bytes

template <KQuant kind>
struct KLayout {
    static constexpr bool   kSix      = kind == KQuant::q6_k;
    static constexpr size_t kScale    = 0;
    static constexpr size_t kMinimum  = 32;                     // not q6_k
    static constexpr size_t kSmall    = kSix ? 32 : 64;         // smaller scales
    static constexpr size_t kSmallMin = kSmall + 8 * 16;        // not q6_k
    static constexpr size_t kSets     = kSmall + 16 * 16;
    static constexpr int    kUppers   = kSix ? 2 : kind == KQuant::q5_k ? 1 : 0;  // sets of upper bits
    static constexpr size_t kUnit     = kSets + (4 + kUppers) * kSet;

    // Upper bits come before the nibbles they belong to, so that a unit is read from front to back:
    // upper 0, nibbles 0 to 3 (q5_k); upper 0, nibbles 0 and 1, upper 1, nibbles 2 and 3 (q6_k).
    static constexpr size_t nibbles(int set) {
        return kSets + kSet * size_t(set + (kSix ? 1 + set / 2 : kUppers));
    }
    static constexpr size_t upper(int set) { return kSets + kSet * size_t(3 * set); }

    // The file's block.
    static constexpr size_t kSourceUpper   = kSix ? 128 : 16;
    static constexpr size_t kSourceNibbles = kSix ? 0 : kind == KQuant::q5_k ? 48 : 16;
    static constexpr size_t kSourceSmall   = kSix ? 192 : 4;
    static constexpr size_t kSource        = kSix ? 210 : kSourceNibbles + 128;
};

// Q4_K and Q5_K keep 8 scales and 8 minima of 6 bits in 12 bytes: the first four of each in the low
// 6 bits of bytes 0-3 and 4-7, the others' low 4 bits in bytes 8-11 and their upper 2 bits on top of
// bytes 0-3 and 4-7.
inline void split_small(const uint8_t * packed, int i, uint8_t & scale, uint8_t & minimum) {
    if (i < 4) {
        scale   = packed[i] & 63;
        minimum = packed[i + 4] & 63;
    } else {
        scale   = uint8_t((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
        minimum = uint8_t(packed[i + 4] >> 4 | (packed[i] >> 6) << 4);
    }
}

inline void join_small(const uint8_t (&scale)[8], const uint8_t (&minimum)[8], uint8_t * packed) {
    for (int i = 0; i < 4; i++) {
        packed[i]     = uint8_t(scale[i] | (scale[i + 4] >> 4) << 6);
        packed[i + 4] = uint8_t(minimum[i] | (minimum[i + 4] >> 4) << 6);
        packed[i + 8] = uint8_t((scale[i + 4] & 15) | (minimum[i + 4] & 15) << 4);
    }
}

template <KQuant kind, Lanes lanes>
void pack_k(const uint8_t * source, int lane, uint8_t * unit) {
    using L = KLayout<kind>;
    if (L::kSix) {
        std::memcpy(unit + L::kScale + 2 * lane, source + 208, 2);
        for (int i = 0; i < 16; i++) {
            unit[L::kSmall + 16 * i + lane] = source[L::kSourceSmall + i];
        }
    } else {
        std::memcpy(unit + L::kScale + 2 * lane, source, 2);
        std::memcpy(unit + L::kMinimum + 2 * lane, source + 2, 2);
        for (int i = 0; i < 8; i++) {
            split_small(source + L::kSourceSmall, i, unit[L::kSmall + 16 * i + lane], unit[L::kSmallMin + 16 * i + lane]);
        }
    }
    for (int set = 0; set < 4; set++) {
        into_lanes<lanes>(source + L::kSourceNibbles + 32 * set, 8, unit + L::nibbles(set) + 4 * lane, 64);
    }
    for (int set = 0; set < L::kUppers; set++) {
        into_lanes<lanes>(source + L::kSourceUpper + 32 * set, 8, unit + L::upper(set) + 4 * lane, 64);
    }
}

// The same for the 12 bytes at once: scales, then minima.
inline __m128i split_all_small(const uint8_t * packed) {
    uint32_t word[3];
    std::memcpy(word, packed, sizeof word);
    const uint32_t upper = 0x03030303, six = 0x3F3F3F3F, four = 0x0F0F0F0F;
    return _mm_setr_epi32(int(word[0] & six), int((word[2] & four) | (word[0] >> 6 & upper) << 4), int(word[1] & six),
                          int((word[2] >> 4 & four) | (word[1] >> 6 & upper) << 4));
}

// A unit of 16 rows, whose first bytes are `step` apart.
template <KQuant kind, Lanes lanes>
void pack_k_panel(const uint8_t * rows, size_t step, uint8_t * unit) {
    using L = KLayout<kind>;
    constexpr bool by_factor = lanes == Lanes::by_factor;
    __m128i        small[kPanel];
    for (size_t row = 0; row < kPanel; row++) {
        const uint8_t * from = rows + row * step + L::kSourceSmall;
        small[row] = L::kSix ? _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)) : split_all_small(from);
    }
    bytes_side_by_side(small, unit + L::kSmall);
    pair_of_rows(rows + (L::kSix ? 208 : 0), step, unit + L::kScale);
    if (!L::kSix) {
        pair_of_rows(rows + 2, step, unit + L::kMinimum);
    }
    for (int set = 0; set < 4; set++) {
        const uint8_t * from = rows + L::kSourceNibbles + 32 * set;
        words_side_by_side<by_factor>(from, step, unit + L::nibbles(set));
        words_side_by_side<by_factor>(from + 16, step, unit + L::nibbles(set) + 256);
    }
    for (int set = 0; set < L::kUppers; set++) {
        const uint8_t * from = rows + L::kSourceUpper + 32 * set;
        words_side_by_side<by_factor>(from, step, unit + L::upper(set));
        words_side_by_side<by_factor>(from + 16, step, unit + L::upper(set) + 256);
    }
}

template <KQuant kind, Lanes lanes>
void unpack_k(const uint8_t * unit, int lane, uint8_t * source) {
    using L = KLayout<kind>;
    if (L::kSix) {
        std::memcpy(source + 208, unit + L::kScale + 2 * lane, 2);
        for (int i = 0; i < 16; i++) {
            source[L::kSourceSmall + i] = unit[L::kSmall + 16 * i + lane];
        }
    } else {
        std::memcpy(source, unit + L::kScale + 2 * lane, 2);
        std::memcpy(source + 2, unit + L::kMinimum + 2 * lane, 2);
        uint8_t scale[8], minimum[8];
        for (int i = 0; i < 8; i++) {
            scale[i]   = unit[L::kSmall + 16 * i + lane];
            minimum[i] = unit[L::kSmallMin + 16 * i + lane];
        }
        join_small(scale, minimum, source + L::kSourceSmall);
    }
    for (int set = 0; set < 4; set++) {
        from_lanes<lanes>(unit + L::nibbles(set) + 4 * lane, 8, source + L::kSourceNibbles + 32 * set, 64);
    }
    for (int set = 0; set < L::kUppers; set++) {
        from_lanes<lanes>(unit + L::upper(set) + 4 * lane, 8, source + L::kSourceUpper + 32 * set, 64);
    }
}

template <KQuant kind, Lanes lanes>
constexpr Kernel k_kernel(int type, decltype(Kernel::multiply) multiply) {
    using L           = KLayout<kind>;
    Kernel kernel     = lanes_kernel<lanes>(type, 256, L::kUnit, L::kSource);
    kernel.pack       = pack_units<pack_k<kind, lanes>, L::kSource, L::kUnit>;
    kernel.unpack     = unpack_units<unpack_k<kind, lanes>, L::kSource, L::kUnit>;
    kernel.pack_panel = pack_whole_units<pack_k_panel<kind, lanes>, L::kSource, L::kUnit>;
    kernel.multiply   = multiply;
    return kernel;
}

// The sub-block of 32 inputs whose nibbles are the low or the high ones of a set.
//
// q4_k, q5_k: set i holds sub-blocks 2 i and 2 i + 1; the fifth bit of sub-block b is bit b.
// q6_k: each half of 128 inputs has two sets; low nibbles are sub-blocks 0 and 1 of the half, high
// ones 2 and 3; bits 2 b and 2 b + 1 belong to sub-block b of the half.
template <KQuant kind, int set, bool high>
struct SubBlock {
    static constexpr bool   kSix     = kind == KQuant::q6_k;
    static constexpr int    kInHalf  = set % 2 + 2 * high;  // q6_k
    static constexpr int    kIndex   = kSix ? 4 * (set / 2) + kInHalf : 2 * set + high;
    static constexpr size_t kNibbles = KLayout<kind>::nibbles(set);
    static constexpr size_t kUpper   = KLayout<kind>::upper(kSix ? set / 2 : 0);
    static constexpr int    kUp      = 4 - (kSix ? 2 * kInHalf : kIndex);  // moves the upper bits above the nibble
};

}  // namespace

}  // namespace dspine
