// Times a product of a family without plugging it in: families are compared on the machine they run on.
#include "trial.h"

#include <algorithm>

#include "api.h"
#include "families.h"
#include "packing.h"

namespace dspine {

namespace {

// One matrix with arbitrary weights and rows of arbitrary inputs, the same for every family.
class Trial {
  public:
    Trial(const Kernel & kernel, int64_t inputs, int64_t outputs, int64_t rows)
        : kernel_(kernel), inputs_(inputs), outputs_(outputs), rows_(rows),
          step_((size_t(inputs / kernel.unit_inputs) * kernel.activation_bytes + kTrialAlign - 1) / kTrialAlign * kTrialAlign),
          values_(size_t(rows * inputs)) {
        uint32_t             state = 1;
        std::vector<uint8_t> file(size_t(outputs * (inputs / kernel.unit_inputs)) * kernel.source_bytes);
        for (uint8_t & byte : file) {
            byte = uint8_t(32 + next(state) % 32);  // scales are then 16-bit floats of ordinary size
        }
        for (float & value : values_) {
            value = float(next(state) % 2001) / 1000.0f - 1.0f;
        }
        packed_   = aligned(packed_bytes_, packed_bytes(kernel, inputs, outputs));
        prepared_ = aligned(prepared_bytes_, step_ * size_t(rows));
        pack_bytes(kernel, inputs, file.data(), 0, file.size(), packed_);
    }

    double run(float * result) {
        const double began = seconds_now();
        for (int64_t row = 0; row < rows_; row++) {
            kernel_.prepare(values_.data() + row * inputs_, inputs_, prepared_ + size_t(row) * step_);
        }
        const size_t stride = panel_bytes(kernel_, inputs_);
        for (int64_t output = 0; output < outputs_; output += kPanel) {
            kernel_.multiply(packed_ + size_t(output / kPanel) * stride, inputs_, prepared_, step_, rows_, result + output,
                             size_t(outputs_), int(std::min<int64_t>(kPanel, outputs_ - output)));
        }
        return seconds_now() - began;
    }

  private:
    const Kernel &       kernel_;
    int64_t              inputs_, outputs_, rows_;
    size_t               step_;
    std::vector<float>   values_;
    std::vector<uint8_t> packed_bytes_, prepared_bytes_;
    uint8_t *            packed_;
    uint8_t *            prepared_;
};

}  // namespace

}  // namespace dspine

// Seconds of one thread that a product takes, the best of `repeats`, and the product (rows x outputs). Below 0:
// this machine or the family has no such kernel, or the matrix does not fit it.
extern "C" DSPINE_API double dspine_kernels_trial(const char * family, int type, int64_t inputs,
                                                                              int64_t outputs, int64_t rows, int repeats,
                                                                              float * result) {
    using namespace dspine;
    const Family * found = family_called(family);
    for (int i = 0; found != nullptr && i < found->count; i++) {
        const Kernel & kernel = found->kernels[i];
        if (kernel.type != type || inputs % kernel.unit_inputs != 0) {
            continue;
        }
        Trial  trial(kernel, inputs, outputs, rows);
        double best = trial.run(result);
        for (int repeat = 1; repeat < repeats; repeat++) {
            best = std::min(best, trial.run(result));
        }
        return best;
    }
    return -1.0;
}
