// Q4_0, Q4_1 and Q5_0: one decode of the nibbles serves 16 outputs of up to four rows.
//
// Unit of 16 outputs x 32 inputs: 16 scales (f16), Q4_1: 16 minima (f16), Q5_0: 64 bytes of fifth
// bits, then four times [outputs 0-7][outputs 8-15] of 32 bytes. Byte 4 * output + i of the g-th
// holds input 4 g + i in its low and input 16 + 4 g + i in its high nibble.
#include "avx2.h"
#include "avx2_tables.h"

namespace dspine {

namespace {

enum class Kind { q4_0, q4_1, q5_0 };

template <Kind kind>
struct Layout {
    static constexpr size_t kScale    = 0;
    static constexpr size_t kMinimum  = 32;  // q4_1 only
    static constexpr size_t kFifth    = 32;  // q5_0 only
    static constexpr size_t kNibbles  = kind == Kind::q4_0 ? 32 : kind == Kind::q4_1 ? 64 : 96;
    static constexpr size_t kUnit     = kNibbles + 256;
    static constexpr size_t kSourceNibbles = kind == Kind::q4_0 ? 2 : kind == Kind::q4_1 ? 4 : 6;
    static constexpr size_t kSource   = kSourceNibbles + 16;
};

size_t nibble_at(int group, int lane) { return size_t(group) * 64 + size_t(lane) * 4; }

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

template <Kind kind>
void pack(const uint8_t * source, int lane, uint8_t * unit) {
    using L = Layout<kind>;
    std::memcpy(unit + L::kScale + 2 * lane, source, 2);
    if (kind == Kind::q4_1) {
        std::memcpy(unit + L::kMinimum + 2 * lane, source + 2, 2);
    }
    if (kind == Kind::q5_0) {
        uint32_t bits;
        std::memcpy(&bits, source + 2, 4);
        bits = even_before_odd(even_before_odd(bits));
        std::memcpy(unit + L::kFifth + 4 * lane, &bits, 4);
    }
    for (int group = 0; group < 4; group++) {
        std::memcpy(unit + L::kNibbles + nibble_at(group, lane), source + L::kSourceNibbles + 4 * group, 4);
    }
}

template <Kind kind>
void unpack(const uint8_t * unit, int lane, uint8_t * source) {
    using L = Layout<kind>;
    std::memcpy(source, unit + L::kScale + 2 * lane, 2);
    if (kind == Kind::q4_1) {
        std::memcpy(source + 2, unit + L::kMinimum + 2 * lane, 2);
    }
    if (kind == Kind::q5_0) {
        uint32_t bits;
        std::memcpy(&bits, unit + L::kFifth + 4 * lane, 4);
        bits = even_and_odd_in_turn(even_and_odd_in_turn(bits));
        std::memcpy(source + 2, &bits, 4);
    }
    for (int group = 0; group < 4; group++) {
        std::memcpy(source + L::kSourceNibbles + 4 * group, unit + L::kNibbles + nibble_at(group, lane), 4);
    }
}

// Sixteen bits hold eight products of a 4-bit weight (15 * 127 * 2 * 8), but only four of a 5-bit one
// (31 * 127 * 2 * 4).
template <Kind kind>
struct Unit {
    using L      = Layout<kind>;
    using Inputs = Inputs8;
    static constexpr size_t kBytes  = L::kUnit;
    static constexpr int    kBlocks = 1;
    static constexpr int    kRows   = kind == Kind::q5_0 ? kFewerRows : kMostRows;

    static float scale(const Inputs8 * x) { return x->row; }

    // Four inputs of 8 outputs: the low or the high nibbles of a group.
    static __m256i weights(const uint8_t * unit, int group, int half, bool high) {
        const __m256i raw  = load(unit + L::kNibbles + 64 * group + 32 * half);
        const __m256i four = _mm256_and_si256(high ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(15));
        if (kind != Kind::q5_0) {
            return four;
        }
        const __m256i fifth = load(unit + L::kFifth + 32 * half);
        const __m256i moved = high ? _mm256_srli_epi16(fifth, group) : _mm256_slli_epi16(fifth, 4 - group);
        return _mm256_or_si256(four, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }

    template <int R>
    static void add(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
        constexpr int kFlush = kind == Kind::q5_0 ? 4 : 8;  // products that 16 bits hold
        __m256i       part[R][2], sum[R][2];
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
            const int     group = step / 2;
            const bool    high  = step % 2 == 1;
            const __m256i w[2]  = {weights(unit, group, 0, high), weights(unit, group, 1, high)};
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i a = repeat32(x[r]->q + 16 * high + 4 * group);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const __m256i product = _mm256_maddubs_epi16(w[h], a);
                    part[r][h] = step % kFlush == 0 ? product : plus16(part[r][h], product);
                }
            }
            if (step % kFlush != kFlush - 1) {
                continue;
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256i factor = repeat32(x[r]->factor);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const __m256i wide = _mm256_madd_epi16(part[r][h], factor);
                    sum[r][h] = step < kFlush ? wide : _mm256_add_epi32(sum[r][h], wide);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const __m256 scale   = load_half(unit + L::kScale + 16 * h);
            const __m256 minimum = kind == Kind::q4_1   ? load_half(unit + L::kMinimum + 16 * h)
                                   : kind == Kind::q4_0 ? _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f))
                                                        : _mm256_mul_ps(scale, _mm256_set1_ps(-16.0f));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                value[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, value[r][h]);
                value[r][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x[r]->sum), value[r][h]);
            }
        }
    }
};

template <Kind kind>
constexpr Kernel kernel(int type) {
    using L = Layout<kind>;
    return {type,
            32,
            L::kUnit,
            L::kSource,
            sizeof(Inputs8),
            pack_units<pack<kind>, L::kSource, L::kUnit>,
            unpack_units<unpack<kind>, L::kSource, L::kUnit>,
            prepare8,
            multiply<Unit<kind>, 32>};
}

}  // namespace

const Kernel kAvx2Q4_0 = kernel<Kind::q4_0>(Q4_0);
const Kernel kAvx2Q4_1 = kernel<Kind::q4_1>(Q4_1);
const Kernel kAvx2Q5_0 = kernel<Kind::q5_0>(Q5_0);

}  // namespace dspine
