// What is read after every decode, in one call each: right after a decode every further piece of code
// that runs comes from memory, so a call costs more than the work it does.
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "api.h"
#include "avx2.h"

namespace {

constexpr int64_t kBlock = 1024;  // values whose largest is kept, so that one block alone is searched

// The largest of some values; `odd` collects lanes that are no numbers.
float largest(const float * x, int64_t count, __m256 & odd) {
    const __m256 least = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
    __m256       a = least, b = least;
    int64_t      i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m256 p = _mm256_loadu_ps(x + i), q = _mm256_loadu_ps(x + i + 8);
        a   = _mm256_max_ps(a, p);
        b   = _mm256_max_ps(b, q);
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(p, q, _CMP_UNORD_Q));
    }
    float found = dspine::largest(_mm256_max_ps(a, b));
    for (; i < count; i++) {
        odd   = _mm256_or_ps(odd, _mm256_cmp_ps(_mm256_set1_ps(x[i]), least, _CMP_UNORD_Q));
        found = x[i] > found ? x[i] : found;
    }
    return found;
}

// Index of the largest value, the lowest one among equals; -1 where a value is no number.
int64_t index_of_largest(const float * x, int64_t count) {
    __m256  odd  = _mm256_setzero_ps();
    float   best = -std::numeric_limits<float>::infinity();
    int64_t from = 0;
    for (int64_t first = 0; first < count; first += kBlock) {
        const float found = largest(x + first, count - first < kBlock ? count - first : kBlock, odd);
        if (found > best) {
            best = found;
            from = first;
        }
    }
    if (_mm256_movemask_ps(odd) != 0) {
        return -1;
    }
    while (x[from] != best) {
        from++;
    }
    return from;
}

}  // namespace

extern "C" {

// Puts the most likely token after row `first` of the last decode, and after the rows behind it, into
// `tokens`, as long as each is the draft that was decoded there; `tokens` holds the `drafts` drafts at first
// and has room for one token more. How many it put there; -1 where a row has no logits or some that
// are no numbers. `logits_of` is the library's function that gives a row's logits.
DSPINE_API int dspine_results_follow(void * context, void * logits_of, int first, int drafts, int64_t vocabulary,
                                     int32_t * tokens) {
    const auto row_of = reinterpret_cast<const float * (*)(void *, int32_t)>(logits_of);
    for (int row = 0; row <= drafts; row++) {
        const float * logits = row_of(context, first + row);
        const int64_t best   = logits == nullptr ? -1 : index_of_largest(logits, vocabulary);
        if (best < 0) {
            return -1;
        }
        const bool right = row < drafts && tokens[row] == best;
        tokens[row]      = int32_t(best);
        if (!right) {
            return row + 1;
        }
    }
    return drafts + 1;
}

// Copies rows first ... first + count - 1 of each tapped layer, `row_bytes` each, to `out`: row after row, each
// with its layers in turn. The number of the first layer without a buffer, `layers` where all have one.
// `rows_of` is the library's function that gives a layer's rows.
DSPINE_API int dspine_results_copy_taps(void * context, void * rows_of, const uint32_t * layer_ids, int layers,
                                        int64_t row_bytes, int first, int count, char * out) {
    const auto layer_rows = reinterpret_cast<const char * (*)(void *, uint32_t)>(rows_of);
    for (int layer = 0; layer < layers; layer++) {
        const char * rows = layer_rows(context, layer_ids[layer]);
        if (rows == nullptr) {
            return layer;
        }
        for (int row = 0; row < count; row++) {
            std::memcpy(out + (int64_t(row) * layers + layer) * row_bytes, rows + (first + row) * row_bytes,
                        size_t(row_bytes));
        }
    }
    return layers;
}

}  // extern "C"
