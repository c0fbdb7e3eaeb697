// Q4_0, Q4_1 and Q5_0 with AMX.
#include "amx.h"
#include "amx_tables.h"
#include "avx512_tables.h"
#include "vnni_small.h"

namespace dspine {

namespace {

template <Small kind>
struct SmallTiles {
    using L    = SmallLayout<kind>;
    using V    = Vectors512;
    using Unit = VnniSmallUnit<V, kind>;
    static constexpr int  kTiles = 2;
    static constexpr bool kShort = kind != Small::q5_0;  // 15 * 127 * 16 < 2^15

    static const Kernel & few() {
        return kind == Small::q4_0 ? kAvx512Q4_0 : kind == Small::q4_1 ? kAvx512Q4_1 : kAvx512Q5_0;
    }

    static int64_t block(int64_t i) { return i; }

    template <int group>
    static void decode_group(const uint8_t * unit, uint8_t (&weights)[2][kLanes][kTileBytes]) {
        store_weights(weights[group % 2][group], Unit::template weights<group, false>(unit, 0));
        store_weights(weights[group % 2][group + 4], Unit::template weights<group, true>(unit, 0));
    }

    static void decode(const uint8_t * panel, int64_t first, int count, Weights<2> & weights, Scales<2> & scales) {
        const uint8_t * unit = panel + size_t(first) * L::kUnit;
        for (int i = 0; i < count; i++, unit += L::kUnit) {
            decode_group<0>(unit, weights.tile[i]);
            decode_group<1>(unit, weights.tile[i]);
            decode_group<2>(unit, weights.tile[i]);
            decode_group<3>(unit, weights.tile[i]);
            const __m512 scale = V::half_floats(unit + L::kScale);
            store_floats(scales.scale[i][0], scale);
            store_floats(scales.minimum[i][0], Unit::minimum_of(unit, 0, scale));
        }
    }
};

template <Small kind>
constexpr Kernel kernel(int type) {
    return small_kernel<kind, Lanes::by_factor>(type, multiply_tiles<SmallTiles<kind>>);
}

}  // namespace

const Kernel kAmxQ4_0 = kernel<Small::q4_0>(Q4_0);
const Kernel kAmxQ4_1 = kernel<Small::q4_1>(Q4_1);
const Kernel kAmxQ5_0 = kernel<Small::q5_0>(Q5_0);

}  // namespace dspine
