// Q4_K, Q5_K and Q6_K with the instructions of `vnni_small.h`, to the bits of the AVX2 kernels.
#pragma once

#include "inputs.h"
#include "kernel.h"
#include "layout_k_quants.h"
#include "panel.h"

namespace dspine {

namespace {

template <class V, KQuant kind>
struct VnniKUnit {
    using L       = KLayout<kind>;
    using Vectors = V;
    using Inputs  = Inputs8ByFactor;
    using Int     = typename V::Int;
    using Float   = typename V::Float;
    static constexpr size_t kBytes  = L::kUnit;
    static constexpr int    kBlocks = 8;
    static constexpr bool   kFetches = true;
    static constexpr int    kRows   = kind == KQuant::q5_k ? V::kFewerRows : V::kMostRows;
    // Sums of four products that 16 bits hold: 4 of 4-bit weights, 2 of 5-bit ones, 1 of 6-bit ones.
    static constexpr int kFlush = kind == KQuant::q4_k ? 4 : kind == KQuant::q5_k ? 2 : 1;
    // Groups of four inputs that share a scale; half of them have either factor.
    static constexpr int kScaled = L::kSix ? 4 : 8;

    // Sub-blocks whose bits stand in the same places are multiplied by the same code, in turns.
    static constexpr int    kTurns      = kind == KQuant::q4_k ? 4 : kind == KQuant::q5_k ? 1 : 2;
    static constexpr int    kTurnBlocks = 8 / kTurns;
    static constexpr size_t kTurnBytes  = kTurns == 1 ? 0 : L::nibbles(4 / kTurns) - L::nibbles(0);

    static float scale(const Inputs * x) { return x->row; }

    template <int set, bool high>
    static Int weights(const uint8_t * quants, size_t at) {
        using S        = SubBlock<kind, set, high>;
        const Int raw  = V::load(quants + S::kNibbles + at);
        const Int four = V::both(high ? V::template right<4>(raw) : raw, V::bytes(15));
        if constexpr (kind == KQuant::q4_k) {
            return four;
        }
        Int upper = V::load(quants + S::kUpper + at);
        if constexpr (S::kUp > 0) {
            upper = V::template left<S::kUp>(upper);
        } else if constexpr (S::kUp < 0) {
            upper = V::template right<-S::kUp>(upper);
        }
        return V::either_part(four, upper, V::bytes(L::kSix ? 0x30 : 0x10));
    }

    // Exact sums of the groups from `first` on that share a scale, times the factors of the inputs.
    template <int set, bool high, int R>
    static void sums(const uint8_t * quants, int part, int first, const Inputs * const (&x)[R], Int (&total)[R]) {
        Int sum[R];
#pragma GCC unroll 8
        for (int step = 0; step < kScaled; step++) {
            const int factor = step / (kScaled / 2), i = step % (kScaled / 2), group = first + 2 * i + factor;
            const Int w      = weights<set, high>(quants, size_t(64 * group + 32 * part));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                sum[r] = V::dot8(i % kFlush == 0 ? V::nothing() : sum[r], w, x[r]->q + 4 * group);
                if (i % kFlush == kFlush - 1) {
                    total[r] = V::dot16(step < kFlush ? V::nothing() : total[r], sum[r], x[r]->factor + factor);
                }
            }
        }
    }

    // Scale number `scaled` of a unit.
    static Float scale_of(const uint8_t * unit, int scaled, int part) {
        const uint8_t * small  = unit + L::kSmall + 16 * scaled + 8 * part;
        const Float     factor = V::to_float(L::kSix ? V::signed_bytes(small) : V::unsigned_bytes(small));
        return V::times(V::half_floats(unit + L::kScale + 16 * part), factor);
    }

    // What an input of 1 adds for a weight of 0.
    static Float minimum_of(const uint8_t * unit, int scaled, int part, Float scale) {
        if constexpr (L::kSix) {
            return V::times(scale, V::repeat(-32.0f));
        } else {
            const Float size = V::to_float(V::unsigned_bytes(unit + L::kSmallMin + 16 * scaled + 8 * part));
            return V::times(V::negative(V::half_floats(unit + L::kMinimum + 16 * part)), size);
        }
    }

    template <int set, bool high, int R>
    __attribute__((always_inline)) static void add_sub_block(const uint8_t * unit, int turn, const Inputs * const (&blocks)[R],
                                                        Float (&value)[R][V::kParts]) {
        const int       index  = SubBlock<kind, set, high>::kIndex + kTurnBlocks * turn;
        const uint8_t * quants = unit + kTurnBytes * size_t(turn);
        constexpr int   lines  = int((kBytes / 8 + 63) / 64);
        fetch<V, lines>(unit + 64 * lines * (2 * size_t(set) + high + kTurnBlocks * size_t(turn)));
        const Inputs * x[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            x[r] = blocks[r] + index;
        }
#pragma GCC unroll 2
        for (int first = 0; first < 8; first += kScaled) {
            const int scaled = L::kSix ? 2 * index + first / 4 : index;
#pragma GCC unroll 2
            for (int part = 0; part < V::kParts; part++) {
                if (V::kParts > 1) {
                    // The inputs are read anew for the second part: kept from the first, they would fill all registers.
                    asm("" ::: "memory");
                }
                Int total[R];
                sums<set, high, R>(quants, part, first, x, total);
                const Float scale   = scale_of(unit, scaled, part);
                const Float minimum = minimum_of(unit, scaled, part, scale);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const float sum = L::kSix ? x[r]->half[first / 4] : x[r]->sum;
                    value[r][part]  = V::add_product(V::to_float(total[r]), scale, value[r][part]);
                    value[r][part]  = V::add_product(minimum, V::repeat(sum), value[r][part]);
                }
            }
        }
    }

    template <int set, int R>
    static void add_set(const uint8_t * unit, int turn, const Inputs * const (&x)[R], Float (&value)[R][V::kParts]) {
        if constexpr (set < 4 / kTurns) {
            add_sub_block<set, false, R>(unit, turn, x, value);
            add_sub_block<set, true, R>(unit, turn, x, value);
        }
    }

    // In the order of the AVX2 kernels: sets one after the other.
    template <int R>
    static void add(const uint8_t * unit, const Inputs * const (&x)[R], Float (&value)[R][V::kParts]) {
        for (int turn = 0; turn < kTurns; turn++) {
            add_set<0, R>(unit, turn, x, value);
            add_set<1, R>(unit, turn, x, value);
            add_set<2, R>(unit, turn, x, value);
            add_set<3, R>(unit, turn, x, value);
        }
    }
};

template <class V, KQuant kind>
constexpr Kernel vnni_k_kernel(int type) {
    return k_kernel<kind, Lanes::by_factor>(type, multiply<VnniKUnit<V, kind>, 256>);
}

}  // namespace

}  // namespace dspine
