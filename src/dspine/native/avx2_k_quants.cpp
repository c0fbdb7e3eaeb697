// Q4_K, Q5_K and Q6_K: blocks of 256 inputs with a scale per 32 (Q6_K: per 16) inside.
//
// Unit of 16 outputs x 256 inputs: the 16-bit scales of the 16 outputs, their smaller scales (and
// minima) as bytes, then the quants in "sets" of 8 groups x 16 outputs x 4 bytes: the 32 low nibbles
// are one sub-block, the 32 high nibbles another, as in the file. Upper bits lie in sets too.
#include "avx2.h"
#include "avx2_tables.h"

namespace dspine {

namespace {

enum class Kind { q4_k, q5_k, q6_k };

constexpr size_t kSet = 512;  // 8 groups x 16 outputs x 4 bytes

template <Kind kind>
struct Layout {
    static constexpr bool   kSix      = kind == Kind::q6_k;
    static constexpr size_t kScale    = 0;
    static constexpr size_t kMinimum  = 32;                     // not q6_k
    static constexpr size_t kSmall    = kSix ? 32 : 64;         // smaller scales
    static constexpr size_t kSmallMin = kSmall + 8 * 16;        // not q6_k
    static constexpr size_t kSets     = kSmall + 16 * 16;
    static constexpr int    kUppers   = kSix ? 2 : kind == Kind::q5_k ? 1 : 0;  // sets of upper bits
    static constexpr size_t kUnit     = kSets + (4 + kUppers) * kSet;

    // Upper bits come before the nibbles they belong to, so that a unit is read from front to back:
    // upper 0, nibbles 0 to 3 (q5_k); upper 0, nibbles 0 and 1, upper 1, nibbles 2 and 3 (q6_k).
    static constexpr size_t nibbles(int set) {
        return kSets + kSet * size_t(set + (kSix ? 1 + set / 2 : kUppers));
    }
    static constexpr size_t upper(int set) { return kSets + kSet * size_t(3 * set); }

    // The file's block.
    static constexpr size_t kSourceUpper   = kSix ? 128 : 16;
    static constexpr size_t kSourceNibbles = kSix ? 0 : kind == Kind::q5_k ? 48 : 16;
    static constexpr size_t kSourceSmall   = kSix ? 192 : 4;
    static constexpr size_t kSource        = kSix ? 210 : kSourceNibbles + 128;
};

// 32 bytes of one output to or from its lane of a set.
void into_set(const uint8_t * bytes, int lane, uint8_t * set) {
    for (int group = 0; group < 8; group++) {
        std::memcpy(set + 64 * group + 4 * lane, bytes + 4 * group, 4);
    }
}

void from_set(const uint8_t * set, int lane, uint8_t * bytes) {
    for (int group = 0; group < 8; group++) {
        std::memcpy(bytes + 4 * group, set + 64 * group + 4 * lane, 4);
    }
}

// Q4_K and Q5_K keep 8 scales and 8 minima of 6 bits in 12 bytes: the first four of each in the low
// 6 bits of bytes 0-3 and 4-7, the others' low 4 bits in bytes 8-11 and their upper 2 bits on top of
// bytes 0-3 and 4-7.
void split_small(const uint8_t * packed, int i, uint8_t & scale, uint8_t & minimum) {
    if (i < 4) {
        scale   = packed[i] & 63;
        minimum = packed[i + 4] & 63;
    } else {
        scale   = uint8_t((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
        minimum = uint8_t(packed[i + 4] >> 4 | (packed[i] >> 6) << 4);
    }
}

void join_small(const uint8_t (&scale)[8], const uint8_t (&minimum)[8], uint8_t * packed) {
    for (int i = 0; i < 4; i++) {
        packed[i]     = uint8_t(scale[i] | (scale[i + 4] >> 4) << 6);
        packed[i + 4] = uint8_t(minimum[i] | (minimum[i + 4] >> 4) << 6);
        packed[i + 8] = uint8_t((scale[i + 4] & 15) | (minimum[i + 4] & 15) << 4);
    }
}

template <Kind kind>
void pack(const uint8_t * source, int lane, uint8_t * unit) {
    using L = Layout<kind>;
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
        into_set(source + L::kSourceNibbles + 32 * set, lane, unit + L::nibbles(set));
    }
    for (int set = 0; set < L::kUppers; set++) {
        into_set(source + L::kSourceUpper + 32 * set, lane, unit + L::upper(set));
    }
}

template <Kind kind>
void unpack(const uint8_t * unit, int lane, uint8_t * source) {
    using L = Layout<kind>;
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
        from_set(unit + L::nibbles(set), lane, source + L::kSourceNibbles + 32 * set);
    }
    for (int set = 0; set < L::kUppers; set++) {
        from_set(unit + L::upper(set), lane, source + L::kSourceUpper + 32 * set);
    }
}

// The sub-block of 32 inputs whose nibbles are the low or the high ones of a set.
//
// q4_k, q5_k: set i holds sub-blocks 2 i and 2 i + 1; the fifth bit of sub-block b is bit b.
// q6_k: each half of 128 inputs has two sets; low nibbles are sub-blocks 0 and 1 of the half, high
// ones 2 and 3; bits 2 b and 2 b + 1 belong to sub-block b of the half.
template <Kind kind, int set, bool high>
struct SubBlock {
    static constexpr bool   kSix     = kind == Kind::q6_k;
    static constexpr int    kInHalf  = set % 2 + 2 * high;  // q6_k
    static constexpr int    kIndex   = kSix ? 4 * (set / 2) + kInHalf : 2 * set + high;
    static constexpr size_t kNibbles = Layout<kind>::nibbles(set);
    static constexpr size_t kUpper   = Layout<kind>::upper(kSix ? set / 2 : 0);
    static constexpr int    kUp      = 4 - (kSix ? 2 * kInHalf : kIndex);  // moves the upper bits above the nibble
};

template <Kind kind, int set, bool high>
inline __m256i weights(const uint8_t * unit, int group, int half) {
    using S            = SubBlock<kind, set, high>;
    const size_t  at   = size_t(64 * group + 32 * half);
    const __m256i raw  = load(unit + S::kNibbles + at);
    const __m256i four = _mm256_and_si256(high ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(15));
    if (kind == Kind::q4_k) {
        return four;
    }
    const __m256i mask  = _mm256_set1_epi8(kind == Kind::q6_k ? 0x30 : 0x10);
    __m256i       upper = load(unit + S::kUpper + at);
    if (S::kUp > 0) {
        upper = _mm256_slli_epi16(upper, S::kUp);
    } else if (S::kUp < 0) {
        upper = _mm256_srli_epi16(upper, -S::kUp);
    }
    return _mm256_or_si256(four, _mm256_and_si256(upper, mask));
}

// Sixteen bits hold 8 products of 4-bit weights, 4 of 5-bit ones, 2 of 6-bit ones.
template <Kind kind>
constexpr int kFlush = kind == Kind::q4_k ? 8 : kind == Kind::q5_k ? 4 : 2;
// Groups of 4 inputs that share a scale.
template <Kind kind>
constexpr int kScaled = kind == Kind::q6_k ? 4 : 8;

// Not inlined: one function for all of a unit takes minutes to compile, and the values would be kept
// in memory all the same.
template <Kind kind, int set, bool high, int R>
__attribute__((noinline)) void add_sub_block(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
    using L             = Layout<kind>;
    constexpr int index = SubBlock<kind, set, high>::kIndex;
    __m256i       part[R][2], sum[R][2];
#pragma GCC unroll 8
    for (int group = 0; group < 8; group++) {
        const __m256i w[2] = {weights<kind, set, high>(unit, group, 0), weights<kind, set, high>(unit, group, 1)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i a = repeat32(x[r][index].q + 4 * group);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m256i product = _mm256_maddubs_epi16(w[h], a);
                part[r][h] = group % kFlush<kind> == 0 ? product : plus16(part[r][h], product);
                if (group % kFlush<kind> == kFlush<kind> - 1) {
                    const __m256i wide = _mm256_madd_epi16(part[r][h], repeat32(x[r][index].factor));
                    const bool    first = group % kScaled<kind> < kFlush<kind>;
                    sum[r][h]           = first ? wide : plus32(sum[r][h], wide);
                }
            }
        }
        if (group % kScaled<kind> != kScaled<kind> - 1) {
            continue;
        }
        const int scaled = L::kSix ? 2 * index + group / 4 : index;
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const auto * small  = reinterpret_cast<const __m128i *>(unit + L::kSmall + 16 * scaled + 8 * h);
            const auto   eight  = _mm_loadl_epi64(small);
            const __m256 factor = _mm256_cvtepi32_ps(L::kSix ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
            const __m256 scale  = _mm256_mul_ps(load_half(unit + L::kScale + 16 * h), factor);
            __m256       minimum;
            if (L::kSix) {
                minimum = _mm256_mul_ps(scale, _mm256_set1_ps(-32.0f));
            } else {
                const auto * least = reinterpret_cast<const __m128i *>(unit + L::kSmallMin + 16 * scaled + 8 * h);
                const __m256 size  = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(least)));
                minimum = _mm256_mul_ps(_mm256_xor_ps(load_half(unit + L::kMinimum + 16 * h), _mm256_set1_ps(-0.0f)), size);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const Inputs8 & in    = x[r][index];
                const float     total = L::kSix ? in.half[group / 4] : in.sum;
                value[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][h]), scale, value[r][h]);
                value[r][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(total), value[r][h]);
            }
        }
    }
}

template <Kind kind>
struct Unit {
    using Inputs = Inputs8;
    static constexpr size_t kBytes  = Layout<kind>::kUnit;
    static constexpr int    kBlocks = 8;
    static constexpr int    kRows   = kFewerRows;

    static float scale(const Inputs8 * x) { return x->row; }

    template <int R>
    static void add(const uint8_t * unit, const Inputs8 * const (&x)[R], __m256 (&value)[R][2]) {
        add_sub_block<kind, 0, false, R>(unit, x, value);
        add_sub_block<kind, 0, true, R>(unit, x, value);
        add_sub_block<kind, 1, false, R>(unit, x, value);
        add_sub_block<kind, 1, true, R>(unit, x, value);
        add_sub_block<kind, 2, false, R>(unit, x, value);
        add_sub_block<kind, 2, true, R>(unit, x, value);
        add_sub_block<kind, 3, false, R>(unit, x, value);
        add_sub_block<kind, 3, true, R>(unit, x, value);
    }
};

template <Kind kind>
constexpr Kernel kernel(int type) {
    using L = Layout<kind>;
    return {type,
            256,
            L::kUnit,
            L::kSource,
            8 * sizeof(Inputs8),
            pack_units<pack<kind>, L::kSource, L::kUnit>,
            unpack_units<unpack<kind>, L::kSource, L::kUnit>,
            prepare8,
            multiply<Unit<kind>, 256>};
}

}  // namespace

const Kernel kAvx2Q4_K = kernel<Kind::q4_k>(Q4_K);
const Kernel kAvx2Q5_K = kernel<Kind::q5_k>(Q5_K);
const Kernel kAvx2Q6_K = kernel<Kind::q6_k>(Q6_K);

}  // namespace dspine
