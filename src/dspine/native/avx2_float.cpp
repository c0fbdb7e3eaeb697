// F16 and BF16: weights widened to fp32, one fused multiply-add per input.
//
// Unit of 16 outputs x 1 input: 16 values of 2 bytes.
#include "avx2.h"
#include "avx2_tables.h"

namespace dspine {

namespace {

void pack(const uint8_t * source, int lane, uint8_t * unit) { std::memcpy(unit + 2 * lane, source, 2); }

void unpack(const uint8_t * unit, int lane, uint8_t * source) { std::memcpy(source, unit + 2 * lane, 2); }

void prepare(const float * input, int64_t inputs, uint8_t * prepared) {
    std::memcpy(prepared, input, size_t(inputs) * sizeof(float));
}

template <bool brain>
inline __m256 widen(const uint8_t * from) {
    if (!brain) {
        return load_half(from);
    }
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

template <bool brain>
struct Unit {
    using Inputs = float;
    static constexpr size_t kBytes  = 32;
    static constexpr int    kBlocks = 1;
    static constexpr int    kRows   = kFewerRows;

    static float scale(const float *) { return 1.0f; }

    template <int R>
    static void add(const uint8_t * unit, const float * const (&x)[R], __m256 (&value)[R][2]) {
        const __m256 w[2] = {widen<brain>(unit), widen<brain>(unit + 16)};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256 a = _mm256_set1_ps(*x[r]);
            value[r][0]    = _mm256_fmadd_ps(w[0], a, value[r][0]);
            value[r][1]    = _mm256_fmadd_ps(w[1], a, value[r][1]);
        }
    }
};

}  // namespace

const Kernel kAvx2F16  = {F16, 1, 32, 2, sizeof(float), pack_units<pack, 2, 32>, unpack_units<unpack, 2, 32>, prepare,
                         multiply<Unit<false>, 1>};
const Kernel kAvx2BF16 = {BF16, 1, 32, 2, sizeof(float), pack_units<pack, 2, 32>, unpack_units<unpack, 2, 32>, prepare,
                         multiply<Unit<true>, 1>};

}  // namespace dspine
