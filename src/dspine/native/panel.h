// Rows times one panel, for every family whose panel of 16 outputs lies in one or two registers. A copy for
// each file that includes it, since files of different families are compiled for different processors.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace dspine {

namespace {

// Fetches `lines` cache lines behind `weights`, which need not exist: the family's kFetchFar behind them into the
// L2 cache (0: not that), kFetchAhead into the L1 cache. The processor's own prefetching leaves a product of few
// rows waiting for a quarter of its time. (Always inlined: GCC leaves calls out of a function that only fetches.)
template <class Vectors, int lines>
[[gnu::always_inline]] inline void fetch(const uint8_t * weights) {
    const char * from = reinterpret_cast<const char *>(weights);
#pragma GCC unroll 8
    for (int i = 0; i < lines; i++) {
        if (Vectors::kFetchFar != 0) {
            _mm_prefetch(from + Vectors::kFetchFar + 64 * i, _MM_HINT_T1);
        }
        _mm_prefetch(from + Vectors::kFetchAhead + 64 * i, _MM_HINT_T0);
    }
}

// Rows times one panel. A `Unit` says how one unit is multiplied:
//
//   using Vectors                  the family's vectors of 32-bit lanes (below)
//   using Inputs                   what `prepare` makes of the inputs of a row
//   kBytes, kBlocks                bytes of a unit, and how many Inputs it takes
//   kRows                          rows that share one pass over a panel
//   kFetches                       whether add calls `fetch` itself, for any row
//   add<R>(unit, x, value)         value[r][part] += unit * x[r]
//   scale(x)                       what a row's results are multiplied by at the end
//
// `Vectors` has the type Float of kLanes numbers, of which kParts make a panel, kFetchAhead, kFetchFar
// (above), and zero(), repeat(number), times(a, b) and store(to, value, outputs) for the first outputs of a panel.
template <class Unit>
struct PanelProduct {
    using Inputs  = typename Unit::Inputs;
    using Vectors = typename Unit::Vectors;
    using Float   = typename Vectors::Float;

    static constexpr int kParts = Vectors::kParts;

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
            some_rows<Unit::kRows>(count, row);
            row += count;
        }
    }

  private:
    template <int R>
    void some_rows(int64_t count, int64_t row) const {
        if constexpr (R > 1) {
            if (count < R) {
                return some_rows<R - 1>(count, row);
            }
        }
        group<R>(row);
    }

    template <int R>
    void group(int64_t row) const {
        const uint8_t * start[R];
        Float           value[R][kParts];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            start[r] = prepared + (row + r) * row_bytes;
#pragma GCC unroll 2
            for (int p = 0; p < kParts; p++) {
                value[r][p] = Vectors::zero();
            }
        }
        const size_t    bytes = size_t(units) * Unit::kBytes;
        const Inputs *  x[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            x[r] = reinterpret_cast<const Inputs *>(start[r]);
        }
        for (const uint8_t * unit = panel, * end = panel + bytes; unit < end; unit += Unit::kBytes) {
            if (!Unit::kFetches && row == 0) {
                fetch<Vectors, int((Unit::kBytes + 63) / 64)>(unit);
            }
            Unit::template add<R>(unit, x, value);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                x[r] += Unit::kBlocks;
                // The compiler must not see that R pointers move in step: it would keep them in memory, as a vector.
                asm("" : "+r"(x[r]));
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Float scale = Vectors::repeat(Unit::scale(reinterpret_cast<const Inputs *>(start[r])));
#pragma GCC unroll 2
            for (int p = 0; p < kParts; p++) {
                value[r][p] = Vectors::times(value[r][p], scale);
            }
            Vectors::store(result + (row + r) * result_step, value[r], outputs);
        }
    }
};

template <class Unit, int inputs_of_unit>
void multiply(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes, int64_t rows,
              float * result, size_t result_step, int outputs) {
    PanelProduct<Unit>{panel, inputs / inputs_of_unit, prepared, row_bytes, result, result_step, outputs}.run(rows);
}

}  // namespace

}  // namespace dspine
