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
struct Panel {
    const uint8_t * panel;
    int64_t         inputs;
    const uint8_t * prepared;
    size_t          row_bytes;
    float *         result;
    size_t          result_step;
    int             outputs;

    template <int R>
    void run(int64_t row) const {
        const float * x[R];
        __m256        value[R][2];
        for (int r = 0; r < R; r++) {
            x[r]        = reinterpret_cast<const float *>(prepared + (row + r) * row_bytes);
            value[r][0] = value[r][1] = _mm256_setzero_ps();
        }
        for (int64_t i = 0; i < inputs; i++) {
            const __m256 w[2] = {widen<brain>(panel + 32 * i), widen<brain>(panel + 32 * i + 16)};
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const __m256 a = _mm256_set1_ps(x[r][i]);
                value[r][0]    = _mm256_fmadd_ps(w[0], a, value[r][0]);
                value[r][1]    = _mm256_fmadd_ps(w[1], a, value[r][1]);
            }
        }
        for (int r = 0; r < R; r++) {
            store_panel(result + (row + r) * result_step, value[r], outputs);
        }
    }
};

template <bool brain>
void multiply(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes, int64_t rows,
              float * result, size_t result_step, int outputs) {
    in_row_groups(rows, Panel<brain>{panel, inputs, prepared, row_bytes, result, result_step, outputs});
}

}  // namespace

const Kernel kAvx2F16  = {F16, 1, 32, 2, sizeof(float), pack, unpack, prepare, multiply<false>};
const Kernel kAvx2BF16 = {BF16, 1, 32, 2, sizeof(float), pack, unpack, prepare, multiply<true>};

}  // namespace dspine
