#include "product.h"

#include <algorithm>

#include "fetch.h"

namespace dspine {

namespace {

// Up to here every thread prepares all rows for itself: cheaper than waiting for the others.
constexpr int64_t kOwnRows = 2;
// Rows that pass through a panel before the next panel is read; keeps their inputs in the L2 cache.
constexpr int64_t kRowBlock = 256;
constexpr size_t  kAlign    = 64;
// Weights that a thread fetches before it prepares inputs.
constexpr size_t kFirstBytes = 8192;

// Outputs [first, first + count) of one panel that is not used from its start.
void multiply_part(const Kernel & kernel, const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t step,
                   int64_t rows, int first, int count, float * result, size_t result_step) {
    constexpr int64_t kRows = 32;
    float             whole[kRows * kPanel];
    for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t some = std::min(kRows, rows - row);
        kernel.multiply(panel, inputs, prepared + row * step, step, some, whole, kPanel, kPanel);
        for (int64_t r = 0; r < some; r++) {
            std::copy_n(whole + r * kPanel + first, count, result + (row + r) * result_step);
        }
    }
}

}  // namespace

size_t Product::row_bytes(const Tensor * op) const {
    const size_t units = size_t(op->src[0]->ne[0] / kernel_.unit_inputs);
    return (units * kernel_.activation_bytes + kAlign - 1) / kAlign * kAlign;
}

bool Product::work_size(int threads, const Tensor * op, size_t & size) {
    const int64_t rows = row_count(op->src[1]);
    size = row_bytes(op) * size_t(rows <= kOwnRows ? rows * threads : rows) + kAlign;
    return true;
}

bool Product::compute(Params * params, Tensor * op) {
    const Tensor * weight = op->src[0];
    const Tensor * x      = op->src[1];
    const int64_t  inputs = weight->ne[0], outputs = weight->ne[1], rows = row_count(x);
    const size_t   step   = row_bytes(op);

    // A view of some rows of a packed matrix begins at one of its outputs.
    const Tensor *  whole  = weight->view_src == nullptr ? weight : weight->view_src;
    const int64_t   origin = weight->view_src == nullptr ? 0 : int64_t(weight->view_offs / whole->nb[1]);
    const int64_t   begin  = origin / kPanel, panels = (origin + outputs + kPanel - 1) / kPanel - begin;
    const int64_t   first  = begin + panels * params->ith / params->nth;
    const int64_t   last   = begin + panels * (params->ith + 1) / params->nth;
    const size_t    stride = panel_bytes(kernel_, inputs);
    const uint8_t * packed = static_cast<const uint8_t *>(whole->data);
    // The first ones come from memory meanwhile; `multiply` fetches the others.
    fetch(packed + size_t(first) * stride, std::min(kFirstBytes, size_t(last - first) * stride));

    const uintptr_t start    = reinterpret_cast<uintptr_t>(params->wdata);
    uint8_t *       prepared = reinterpret_cast<uint8_t *>((start + kAlign - 1) / kAlign * kAlign);
    if (rows <= kOwnRows) {
        prepared += step * size_t(rows) * size_t(params->ith);
        for (int64_t row = 0; row < rows; row++) {
            kernel_.prepare(static_cast<const float *>(row_of(x, row)), inputs, prepared + row * step);
        }
    } else {
        for (int64_t row = params->ith; row < rows; row += params->nth) {
            kernel_.prepare(static_cast<const float *>(row_of(x, row)), inputs, prepared + row * step);
        }
        barrier_(params->pool);
    }

    float *         result = static_cast<float *>(op->data);
    for (int64_t row = 0; row < rows; row += kRowBlock) {
        const int64_t   count  = std::min(kRowBlock, rows - row);
        const uint8_t * inputs_of_rows = prepared + row * step;
        for (int64_t panel = first; panel < last; panel++) {
            const int64_t   output = panel * kPanel - origin;  // of the panel's first lane
            const int       skip = int(std::max<int64_t>(0, -output));
            const int       end  = int(std::min<int64_t>(kPanel, outputs - output));
            const uint8_t * weights = packed + size_t(panel) * stride;
            float *         to      = result + row * outputs + output + skip;
            if (skip == 0) {
                kernel_.multiply(weights, inputs, inputs_of_rows, step, count, to, size_t(outputs), end);
            } else {
                multiply_part(kernel_, weights, inputs, inputs_of_rows, step, count, skip, end - skip, to, size_t(outputs));
            }
        }
    }
    return true;
}

}  // namespace dspine
