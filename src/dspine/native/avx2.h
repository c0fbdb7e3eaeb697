// Pieces shared by the AVX2 kernels. Include only in files compiled with -mavx2 -mfma -mf16c.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernel.h"

namespace dspine {

// Rows that share one pass over a panel. Six rows by two vectors of outputs fill the registers; formats
// that take more work to decode have room for four.
constexpr int kMostRows = 6, kFewerRows = 4;

// 32 inputs of one row as 8-bit integers of at most 127 in size. With e = 0 for the inputs whose
// index modulo 4 is 0 or 1 and e = 1 for the others, input = row * factor[e] * q: so each 16 inputs
// have a scale of their own, which the instruction that adds up neighbours multiplies in at no cost.
struct Inputs8 {
    float   row;        // scale of the whole row
    int16_t factor[2];  // 1 to kMostFactor
    float   sum;        // of factor * q, all 32
    float   half[2];    // of the first and the last 16
    int8_t  q[32];
};

// The largest that keeps the sums of 16 products with 6-bit weights within 32 bits
// (63 * 127 * 16 * 16384 < 2^31), and of 32 with 5-bit ones.
constexpr float kMostFactor = 16383.0f;

// 32 inputs of one row as 16-bit integers.
struct Inputs16 {
    float   scale;
    int16_t q[32];
};

void prepare8(const float * input, int64_t inputs, uint8_t * prepared);
void prepare16(const float * input, int64_t inputs, uint8_t * prepared);

inline __m256i load(const void * from) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

inline __m256i repeat32(const void * from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return _mm256_set1_epi32(value);
}

// Sum of a running total and a product. The compiler must not see a chain of additions: it would
// turn them into a tree, which holds every product at once and spills them all.
inline __m256i plus16(__m256i total, __m256i product) {
    total = _mm256_add_epi16(total, product);
    asm("" : "+x"(total));
    return total;
}

inline __m256i plus32(__m256i total, __m256i product) {
    total = _mm256_add_epi32(total, product);
    asm("" : "+x"(total));
    return total;
}

// Eight 16-bit floats.
inline __m256 load_half(const void * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(from)));
}

inline void store_panel(float * to, const __m256 (&value)[2], int outputs) {
    if (outputs == kPanel) {
        _mm256_storeu_ps(to, value[0]);
        _mm256_storeu_ps(to + 8, value[1]);
        return;
    }
    float whole[kPanel];
    _mm256_storeu_ps(whole, value[0]);
    _mm256_storeu_ps(whole + 8, value[1]);
    std::memcpy(to, whole, size_t(outputs) * sizeof(float));
}

// Rows times one panel. A `Unit` says how one unit is multiplied:
//
//   using Inputs                   what `prepare` makes of the inputs of a row
//   kBytes, kBlocks                bytes of a unit, and how many Inputs it takes
//   kRows                          rows that share one pass over a panel
//   add<R>(unit, x, value)         value[r][half] += unit * x[r]
//   scale(x)                       what a row's results are multiplied by at the end
template <class Unit>
struct PanelProduct {
    using Inputs = typename Unit::Inputs;

    const uint8_t * panel;
    int64_t         units;
    const uint8_t * prepared;
    size_t          row_bytes;
    float *         result;
    size_t          result_step;
    int             outputs;

    // All rows, in groups of nearly equal size. Every group adds up in the same order.
    void run(int64_t rows) const {
        int64_t groups = (rows + Unit::kRows - 1) / Unit::kRows;
        for (int64_t row = 0; groups > 0; groups--) {
            const int64_t count = (rows - row + groups - 1) / groups;
            const bool    ahead = groups == 1 && row > 0;
            some_rows<Unit::kRows>(count, row, ahead);
            row += count;
        }
    }

  private:
    template <int R>
    void some_rows(int64_t count, int64_t row, bool ahead) const {
        if constexpr (R > 1) {
            if (count < R) {
                return some_rows<R - 1>(count, row, ahead);
            }
        }
        group<R>(row, ahead);
    }

    template <int R>
    void group(int64_t row, bool ahead) const {
        const uint8_t * start[R];
        __m256          value[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            start[r]    = prepared + (row + r) * row_bytes;
            value[r][0] = value[r][1] = _mm256_setzero_ps();
        }
        size_t at = 0;  // bytes of each row that were used
        const size_t bytes = size_t(units) * Unit::kBytes;
        for (const uint8_t * unit = panel, * end = panel + bytes; unit < end; unit += Unit::kBytes) {
            if (ahead) {
                for (size_t i = 0; i < Unit::kBytes; i += 64) {
                    _mm_prefetch(reinterpret_cast<const char *>(unit + bytes + i), _MM_HINT_T0);
                }
            }
            // One register counts for all rows. The compiler must not see that R pointers move in
            // step: it would keep them in memory, as a vector.
            asm("" : "+r"(at));
            const Inputs * x[R];
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                x[r] = reinterpret_cast<const Inputs *>(start[r] + at);
            }
            Unit::template add<R>(unit, x, value);
            at += Unit::kBlocks * sizeof(Inputs);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const __m256 scale = _mm256_set1_ps(Unit::scale(reinterpret_cast<const Inputs *>(start[r])));
            value[r][0] = _mm256_mul_ps(value[r][0], scale);
            value[r][1] = _mm256_mul_ps(value[r][1], scale);
            store_panel(result + (row + r) * result_step, value[r], outputs);
        }
    }
};

template <class Unit, int inputs_of_unit>
void multiply(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes, int64_t rows,
              float * result, size_t result_step, int outputs) {
    PanelProduct<Unit>{panel, inputs / inputs_of_unit, prepared, row_bytes, result, result_step, outputs}.run(rows);
}

}  // namespace dspine
