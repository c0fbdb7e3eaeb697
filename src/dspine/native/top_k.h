// TOP_K: indices of the largest values of each row. ggml sorts all indices of a row for it; here one pass finds
// a bound that few values reach, and a second one these values.
#pragma once

#include "kernel.h"

namespace dspine {

constexpr int kMostChosen = 64;

// Indices of the `k` largest of `count` values, the best first and of equal ones the lowest index first. What is
// no number comes after all numbers. 1 <= k <= kMostChosen, k <= count < 2^31. Needs AVX2, as all families do.
void avx2_choose_largest(const float * values, int64_t count, int k, int32_t * chosen);

class TopK : public Operation {
  public:
    // As far as types and shapes decide it; operands must also lie in memory of the CPU.
    static bool takes(const Tensor * op);

    bool work_size(int threads, const Tensor * op, size_t & size) override;
    bool compute(Params * params, Tensor * op) override;
};

}  // namespace dspine
