// F16 and BF16 with AVX-512: weights widened to fp32, one fused multiply-add per input, as with AVX2.
#include "avx512.h"
#include "avx512_tables.h"
#include "layout_float.h"
#include "panel.h"

namespace dspine {

namespace {

template <bool brain>
struct Unit {
    using Vectors = Vectors512;
    using Inputs  = float;
    static constexpr size_t kBytes  = kFloatUnit;
    static constexpr int    kBlocks = 1;
    static constexpr bool   kFetches = false;
    static constexpr int    kRows   = Vectors512::kMostRows;

    static float scale(const float *) { return 1.0f; }

    template <int R>
    static void add(const uint8_t * unit, const float * const (&x)[R], __m512 (&value)[R][1]) {
        const __m512 w = brain ? Vectors512::brain_floats(unit) : Vectors512::half_floats(unit);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            value[r][0] = Vectors512::add_product(w, Vectors512::repeat(*x[r]), value[r][0]);
        }
    }
};

}  // namespace

const Kernel kAvx512F16  = float_kernel(F16, multiply<Unit<false>, 1>);
const Kernel kAvx512BF16 = float_kernel(BF16, multiply<Unit<true>, 1>);

}  // namespace dspine
