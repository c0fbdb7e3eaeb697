// GET_ROWS from packed weights: rows of a matrix in fp32, so that a model that multiplies by its token
// embedding needs no second copy to look rows up in.
#pragma once

#include "kernel.h"

namespace dspine {

// Weights of the file's layout to fp32, ggml's own function.
using ToFloats = void (*)(const void * from, float * to, int64_t count);

class Lookup : public Operation {
  public:
    Lookup(const Kernel & kernel, ToFloats to_floats) : kernel_(kernel), to_floats_(to_floats) {}

    bool work_size(int threads, const Tensor * op, size_t & size) override;
    bool compute(Params * params, Tensor * op) override;

  private:
    void read_row(const uint8_t * packed, int64_t row, int64_t inputs, float * to) const;

    const Kernel & kernel_;
    ToFloats       to_floats_;
};

}  // namespace dspine
