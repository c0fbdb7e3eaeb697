// Q4_K, Q5_K and Q6_K with AMX.
#include "amx.h"
#include "amx_tables.h"
#include "avx512_tables.h"
#include "vnni_k_quants.h"

namespace dspine {

namespace {

template <KQuant kind>
struct KTiles {
    using L    = KLayout<kind>;
    using V    = Vectors512;
    using Unit = VnniKUnit<V, kind>;
    static constexpr int  kTiles = L::kSix ? 4 : 2;
    static constexpr bool kShort = kind == KQuant::q4_k;  // 15 * 127 * 16 < 2^15

    static const Kernel & few() {
        return kind == KQuant::q4_k ? kAvx512Q4_K : kind == KQuant::q5_k ? kAvx512Q5_K : kAvx512Q6_K;
    }

    // Results are added up set after set, and in Q6_K a set holds every other block of four.
    static int64_t block(int64_t i) { return L::kSix ? i / 4 * 4 + i % 2 * 2 + i / 2 % 2 : i; }

    template <int set, bool high>
    static void decode_block(const uint8_t * unit, Weights<kTiles> & weights, Scales<kTiles> & scales) {
        constexpr int i = 2 * (set % 2) + high, index = SubBlock<kind, set, high>::kIndex;
#pragma GCC unroll 8
        for (int lane = 0; lane < kLanes; lane++) {
            const int tile = lane % 2 + (L::kSix ? lane / 4 * 2 : 0);
            store_weights(weights.tile[i][tile][lane], Unit::template weights<set, high>(unit, size_t(64 * lane)));
        }
        for (int part = 0; part < kTiles / 2; part++) {
            const int    scaled = L::kSix ? 2 * index + part : index;
            const __m512 scale  = Unit::scale_of(unit, scaled, 0);
            store_floats(scales.scale[i][part], scale);
            store_floats(scales.minimum[i][part], Unit::minimum_of(unit, scaled, 0, scale));
        }
    }

    template <int set>
    static void decode_sets(const uint8_t * unit, Weights<kTiles> & weights, Scales<kTiles> & scales) {
        decode_block<set, false>(unit, weights, scales);
        decode_block<set, true>(unit, weights, scales);
        decode_block<set + 1, false>(unit, weights, scales);
        decode_block<set + 1, true>(unit, weights, scales);
    }

    // Half a unit.
    static void decode(const uint8_t * panel, int64_t first, int, Weights<kTiles> & weights, Scales<kTiles> & scales) {
        const uint8_t * unit = panel + size_t(first / 8) * L::kUnit;
        first % 8 == 0 ? decode_sets<0>(unit, weights, scales) : decode_sets<2>(unit, weights, scales);
    }
};

template <KQuant kind>
constexpr Kernel kernel(int type) {
    return k_kernel<kind, Lanes::by_factor>(type, multiply_tiles<KTiles<kind>>);
}

}  // namespace

const Kernel kAmxQ4_K = kernel<KQuant::q4_k>(Q4_K);
const Kernel kAmxQ5_K = kernel<KQuant::q5_k>(Q5_K);
const Kernel kAmxQ6_K = kernel<KQuant::q6_k>(Q6_K);

}  // namespace dspine
