// MUL_MAT with packed weights: prepares the inputs, cuts the outputs among the threads.
#pragma once

#include "kernel.h"

namespace dspine {

using Barrier = void (*)(void * pool);

class Product : public Operation {
  public:
    Product(const Kernel & kernel, Barrier barrier) : kernel_(kernel), barrier_(barrier) {}

    const Kernel & kernel() const { return kernel_; }

    bool work_size(int threads, const Tensor * op, size_t & size) override;
    bool compute(Params * params, Tensor * op) override;

  private:
    size_t row_bytes(const Tensor * op) const;

    const Kernel & kernel_;
    Barrier        barrier_;
};

}  // namespace dspine
