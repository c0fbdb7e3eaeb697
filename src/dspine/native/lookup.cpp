#include "lookup.h"

#include <algorithm>
#include <limits>

namespace dspine {

namespace {

constexpr size_t kPieceBytes = 1024;  // at least the largest unit of a file

}  // namespace

bool Lookup::work_size(int, const Tensor *, size_t & size) {
    size = 0;
    return true;
}

bool Lookup::compute(Params * params, Tensor * op) {
    const Tensor * table = op->src[0];
    const Tensor * index = op->src[1];
    const Tensor * whole = table->view_src == nullptr ? table : table->view_src;
    const int64_t  origin = table->view_src == nullptr ? 0 : int64_t(table->view_offs / whole->nb[1]);
    const int64_t  inputs = table->ne[0];
    for (int64_t i = params->ith; i < index->ne[0]; i += params->nth) {
        const int32_t row = *reinterpret_cast<const int32_t *>(static_cast<const char *>(index->data) + size_t(i) * index->nb[0]);
        float *       to  = reinterpret_cast<float *>(static_cast<char *>(op->data) + size_t(i) * op->nb[1]);
        if (row < 0 || row >= table->ne[1]) {  // ggml would end the process
            std::fill_n(to, inputs, std::numeric_limits<float>::quiet_NaN());
            continue;
        }
        read_row(static_cast<const uint8_t *>(whole->data), origin + row, inputs, to);
    }
    return true;
}

void Lookup::read_row(const uint8_t * packed, int64_t row, int64_t inputs, float * to) const {
    const int64_t   units = inputs / kernel_.unit_inputs, most = int64_t(kPieceBytes / kernel_.source_bytes);
    const uint8_t * panel = packed + size_t(row / kPanel) * panel_bytes(kernel_, inputs);
    for (int64_t unit = 0; unit < units; unit += most) {
        const int64_t some = std::min(most, units - unit);
        alignas(8) uint8_t file[kPieceBytes];
        kernel_.unpack(panel + size_t(unit) * kernel_.unit_bytes, some, int(row % kPanel), file);
        to_floats_(file, to + unit * kernel_.unit_inputs, some * kernel_.unit_inputs);
    }
}

}  // namespace dspine
