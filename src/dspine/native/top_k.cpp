#include "top_k.h"

#include <limits>

#include "api.h"

namespace dspine {

bool TopK::takes(const Tensor * op) {
    const Tensor * values = op->src[0];
    for (int i = 1; i < kDims; i++) {
        if (op->ne[i] != values->ne[i]) {
            return false;
        }
    }
    return values->type == F32 && values->nb[0] == sizeof(float) && op->type == I32 && op->nb[0] == sizeof(int32_t) &&
           op->ne[0] >= 1 && op->ne[0] <= kMostChosen && op->ne[0] <= values->ne[0] &&
           values->ne[0] <= std::numeric_limits<int32_t>::max();
}

bool TopK::work_size(int, const Tensor *, size_t & size) {
    size = 0;
    return true;
}

bool TopK::compute(Params * params, Tensor * op) {
    const Tensor * values = op->src[0];
    const int64_t  rows   = row_count(op);
    for (int64_t row = params->ith; row < rows; row += params->nth) {
        avx2_choose_largest(static_cast<const float *>(row_of(values, row)), values->ne[0], int(op->ne[0]),
                            static_cast<int32_t *>(row_of(op, row)));
    }
    return true;
}

}  // namespace dspine

extern "C" {

// What the operation does to one row, for tests: here the array ends where the row does.
DSPINE_API void dspine_top_k(const float * values, int64_t count, int k, int32_t * chosen) {
    dspine::avx2_choose_largest(values, count, k, chosen);
}

}  // extern "C"
