// Q4_0, Q4_1, Q5_0 and Q8_0 with the instructions that multiply, add up four (two) neighbours and add to a
// 32-bit sum in one. `V` is the family's vectors. Every sum is the one that the AVX2 kernels compute, to
// the bit: the integers are exact in any order, and the operations in fp32 are the same.
#pragma once

#include "inputs.h"
#include "kernel.h"
#include "layout_small.h"
#include "panel.h"

namespace dspine {

namespace {

template <class V, Small kind>
struct VnniSmallUnit {
    using L       = SmallLayout<kind>;
    using Vectors = V;
    using Inputs  = Inputs8ByFactor;
    using Int     = typename V::Int;
    using Float   = typename V::Float;
    static constexpr size_t kBytes  = L::kUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = kind == Small::q5_0 ? V::kFewerRows : V::kMostRows;

    // Sums of four products that 16 bits hold: 15 * 127 * 4 * 4 and 31 * 127 * 4 * 2 are below 2^15. So a
    // sum can be multiplied by its factor as the lower half of a pair.
    static constexpr int kFlush = kind == Small::q5_0 ? 2 : 4;

    static float scale(const Inputs * x) { return x->row; }

    template <int group, bool high>
    static Int weights(const uint8_t * unit, int part) {
        const Int raw  = V::load(unit + L::kNibbles + 64 * group + 32 * part);
        const Int four = V::both(high ? V::template right<4>(raw) : raw, V::bytes(15));
        if constexpr (kind == Small::q5_0) {
            const Int fifth = V::load(unit + L::kFifth + 32 * part);
            const Int moved = high ? V::template right<group>(fifth) : V::template left<4 - group>(fifth);
            return V::either_part(four, moved, V::bytes(16));
        }
        return four;
    }

    // Adds the two products of a group: of its low and its high nibbles.
    template <int group, int R>
    static void add_group(const uint8_t * unit, int part, const Inputs * const (&x)[R], Int (&sum)[R], Int (&total)[R]) {
        const Int low = weights<group, false>(unit, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            sum[r] = V::dot8(group < 2 || kFlush == 2 ? V::nothing() : sum[r], low, x[r]->q + 4 * group);
        }
        const Int high = weights<group, true>(unit, part);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            sum[r] = V::dot8(sum[r], high, x[r]->q + 4 * group + 16);
        }
        if (group < 2 && kFlush == 4) {
            return;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            total[r] = V::dot16(group == kFirst ? V::nothing() : total[r], sum[r], x[r]->factor + group % 2);
        }
    }
    static constexpr int kFirst = kFlush == 2 ? 0 : 2;  // group after which totals begin

    // What an input of 1 adds for a weight of 0.
    static Float minimum_of(const uint8_t * unit, int part, Float scale) {
        return kind == Small::q4_1   ? V::half_floats(unit + L::kMinimum + 16 * part)
               : kind == Small::q4_0 ? V::times(scale, V::repeat(-8.0f))
                                     : V::times(scale, V::repeat(-16.0f));
    }

    template <int R>
    static void add(const uint8_t * unit, const Inputs * const (&x)[R], Float (&value)[R][V::kParts]) {
#pragma GCC unroll 2
        for (int part = 0; part < V::kParts; part++) {
            if (V::kParts > 1) {
                // The inputs are read anew for the second part: kept from the first, they would fill all registers.
                asm("" ::: "memory");
            }
            Int sum[R], total[R];
            add_group<0, R>(unit, part, x, sum, total);
            add_group<2, R>(unit, part, x, sum, total);
            add_group<1, R>(unit, part, x, sum, total);
            add_group<3, R>(unit, part, x, sum, total);
            const Float scale   = V::half_floats(unit + L::kScale + 16 * part);
            const Float minimum = minimum_of(unit, part, scale);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                value[r][part] = V::add_product(V::to_float(total[r]), scale, value[r][part]);
                value[r][part] = V::add_product(minimum, V::repeat(x[r]->sum), value[r][part]);
            }
        }
    }
};

template <class V, Small kind>
constexpr Kernel vnni_small_kernel(int type) {
    return small_kernel<kind, Lanes::by_factor>(type, multiply<VnniSmallUnit<V, kind>, 32>);
}

template <class V>
struct VnniEightUnit {
    using Vectors = V;
    using Inputs  = Inputs16;
    using Int     = typename V::Int;
    using Float   = typename V::Float;
    static constexpr size_t kBytes  = kEightUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = V::kMostRows;

    static float scale(const Inputs *) { return 1.0f; }

    template <int R>
    static void add(const uint8_t * unit, const Inputs * const (&x)[R], Float (&value)[R][V::kParts]) {
        // Each sum waits for the one before: few rows keep several.
        constexpr int kSums = R * V::kParts == 1 ? 4 : R * V::kParts <= 4 ? 2 : 1;
        Int           sum[R][V::kParts][kSums];
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++) {
#pragma GCC unroll 2
            for (int part = 0; part < V::kParts; part++) {
                const Int w = V::widen_bytes(unit + kEightWeights + 32 * pair + 16 * part);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    Int & to = sum[r][part][pair % kSums];
                    to       = V::dot16(pair < kSums ? V::nothing() : to, w, x[r]->q + 2 * pair);
                }
            }
        }
#pragma GCC unroll 2
        for (int part = 0; part < V::kParts; part++) {
            const Float scale = V::half_floats(unit + 16 * part);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                Int whole = sum[r][part][0];
#pragma GCC unroll 4
                for (int i = 1; i < kSums; i++) {
                    whole = V::plus(whole, sum[r][part][i]);
                }
                const Float both = V::times(scale, V::repeat(x[r]->scale));
                value[r][part]   = V::add_product(V::to_float(whole), both, value[r][part]);
            }
        }
    }
};

template <class V>
constexpr Kernel vnni_eight_kernel() {
    return eight_kernel(multiply<VnniEightUnit<V>, 32>);
}

}  // namespace

}  // namespace dspine
