// The seam between what is common to all CPUs (registration, threads, memory) and the kernel
// families: a family offers one Kernel per weight type and an Attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

namespace dspine {

// Outputs that are packed together; the last panel of a matrix is filled up with zeros.
constexpr int kPanel = 16;

// How one family stores one weight type and multiplies by it.
//
// A packed matrix is a row of panels of 16 outputs; a panel is a row of units of `unit_inputs`
// inputs, each `unit_bytes` long. Results do not depend on how rows are grouped: every output of
// every row is summed over the inputs in one fixed order.
struct Kernel {
    int     type;
    int64_t unit_inputs;       // inputs of a row must be a multiple of this
    size_t  unit_bytes;        // packed bytes of 16 outputs x unit_inputs
    size_t  source_bytes;      // bytes of unit_inputs weights of one output in the file
    size_t  activation_bytes;  // of unit_inputs prepared inputs of one row, a multiple of 4

    // Consecutive units of one output: from the file's layout into lane `lane` of as many units, and back.
    void (*pack)(const uint8_t * source, int64_t units, int lane, uint8_t * unit);
    void (*unpack)(const uint8_t * unit, int64_t units, int lane, uint8_t * source);

    // Inputs of one row in the form that multiply takes.
    void (*prepare)(const float * input, int64_t inputs, uint8_t * prepared);

    // rows x one panel: result[row * result_step + output] for the first `outputs` of the panel.
    void (*multiply)(const uint8_t * panel, int64_t inputs, const uint8_t * prepared, size_t row_bytes,
                     int64_t rows, float * result, size_t result_step, int outputs);

    // `pack` for all lanes at once, whose rows are `row_bytes` apart in the file; may be left out.
    void (*pack_panel)(const uint8_t * source, size_t row_bytes, int64_t units, uint8_t * unit) = nullptr;
};

// One attention operation, cut into items that are independent of each other.
struct Attention {
    bool   (*takes)(const Tensor * op);
    size_t (*work_bytes)(const Tensor * op);  // per thread
    void   (*compute)(const Params * params, Tensor * op, uint8_t * work);
};

struct Family {
    const char *     key;
    bool             (*runs_here)();
    const Kernel *   kernels;
    int              count;
    const Attention * attention;
};

const Family & avx2_family();
const Family & avxvnni_family();
const Family & avx512_family();
const Family & amx_family();

// `pack` and `unpack` of a kernel, made of what they do to one unit.
template <void (*one)(const uint8_t *, int, uint8_t *), size_t source_bytes, size_t unit_bytes>
void pack_units(const uint8_t * source, int64_t units, int lane, uint8_t * unit) {
    for (; units > 0; units--, source += source_bytes, unit += unit_bytes) {
        one(source, lane, unit);
    }
}

template <void (*one)(const uint8_t *, int, uint8_t *), size_t source_bytes, size_t unit_bytes>
void unpack_units(const uint8_t * unit, int64_t units, int lane, uint8_t * source) {
    for (; units > 0; units--, source += source_bytes, unit += unit_bytes) {
        one(unit, lane, source);
    }
}

static inline size_t panel_bytes(const Kernel & kernel, int64_t inputs) {
    return size_t(inputs / kernel.unit_inputs) * kernel.unit_bytes;
}

static inline size_t packed_bytes(const Kernel & kernel, int64_t inputs, int64_t outputs) {
    return size_t((outputs + kPanel - 1) / kPanel) * panel_bytes(kernel, inputs);
}

}  // namespace dspine
