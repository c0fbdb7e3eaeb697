// The best path through a block's transition table.
#include <cmath>
#include <cstdint>

#include "api.h"

extern "C" {

// Follows the best candidate of each of `slots` slots with `k` candidates, given the one before: the lowest index
// among equals. `ids` (slots, k), `first` (k) the scores of the first slot, `table` (slots - 1, k, k) of the
// others: [candidate before][candidate]. Writes tokens, and for each its softmax probability in its row;
// returns 0 where scores are no numbers, else 1.
DSPINE_API int dspine_chain_walk(const int32_t * ids, const float * first, const float * table, int slots, int k,
                                 int32_t * tokens, double * scores) {
    const float * row = first;
    for (int slot = 0; slot < slots; slot++) {
        int column = 0;
        for (int j = 1; j < k; j++) {
            column = row[j] > row[column] ? j : column;
        }
        double total = 0.0;
        for (int j = 0; j < k; j++) {
            total += std::exp(double(row[j]) - double(row[column]));
        }
        if (!(total >= 1.0)) {
            return 0;
        }
        tokens[slot] = ids[slot * k + column];
        scores[slot] = 1.0 / total;
        row          = table + (int64_t(slot) * k + column) * k;
    }
    return 1;
}

}  // extern "C"
