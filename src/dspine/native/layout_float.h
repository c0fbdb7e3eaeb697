// Units of F16 and BF16: 16 outputs x 1 input, 16 values of 2 bytes.
#pragma once

#include <cstring>

#include "kernel.h"
#include "transpose.h"

namespace dspine {

namespace {

constexpr size_t kFloatUnit = 32, kFloatSource = 2;

inline void pack_float(const uint8_t * source, int lane, uint8_t * unit) { std::memcpy(unit + 2 * lane, source, 2); }

inline void unpack_float(const uint8_t * unit, int lane, uint8_t * source) { std::memcpy(source, unit + 2 * lane, 2); }

inline void pack_float_panel(const uint8_t * rows, size_t step, int64_t units, uint8_t * unit) {
    for (; units >= 8; units -= 8, rows += 8 * kFloatSource, unit += 8 * kFloatUnit) {
        pairs_side_by_side(rows, step, unit);
    }
    for (; units > 0; units--, rows += kFloatSource, unit += kFloatUnit) {
        pair_of_rows(rows, step, unit);
    }
}

inline void prepare_floats(const float * input, int64_t inputs, uint8_t * prepared) {
    std::memcpy(prepared, input, size_t(inputs) * sizeof(float));
}

constexpr Kernel float_kernel(int type, decltype(Kernel::multiply) multiply) {
    return {type,
            1,
            kFloatUnit,
            kFloatSource,
            sizeof(float),
            pack_units<pack_float, kFloatSource, kFloatUnit>,
            unpack_units<unpack_float, kFloatSource, kFloatUnit>,
            prepare_floats,
            multiply,
            pack_float_panel};
}

}  // namespace

}  // namespace dspine
