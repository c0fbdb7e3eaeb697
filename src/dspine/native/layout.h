// How groups of four inputs of one output lie in 32-bit lanes; common to the layouts of all types with
// fewer than 8 bits. Everything in these headers has a copy in each file that includes it: files of
// different families are compiled for different processors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "inputs.h"
#include "kernel.h"
#include "transpose.h"

namespace dspine {

namespace {

// in_order: lane g holds inputs 4 g to 4 g + 3. by_factor: of each 8 inputs, lane 2 k holds 0, 1, 4 and 5,
// lane 2 k + 1 holds 2, 3, 6 and 7, so that all of a lane have the same factor (`Inputs8`).
enum class Lanes { in_order, by_factor };

// A kernel whose weights and 8-bit inputs lie in these lanes, but for how it packs and multiplies.
template <Lanes lanes>
constexpr Kernel lanes_kernel(int type, int64_t unit_inputs, size_t unit_bytes, size_t source_bytes) {
    constexpr bool in_order = lanes == Lanes::in_order;
    Kernel         kernel{};
    kernel.type             = type;
    kernel.unit_inputs      = unit_inputs;
    kernel.unit_bytes       = unit_bytes;
    kernel.source_bytes     = source_bytes;
    kernel.activation_bytes = size_t(unit_inputs / 32) * (in_order ? sizeof(Inputs8) : sizeof(Inputs8ByFactor));
    kernel.prepare          = in_order ? prepare8 : prepare8_by_factor;
    return kernel;
}

// Bytes of `groups` x 4 inputs of one output, `step` bytes from a lane to the same one of the next group.
template <Lanes lanes>
inline void into_lanes(const uint8_t * bytes, int groups, uint8_t * lane, size_t step) {
    if (lanes == Lanes::in_order) {
        for (int group = 0; group < groups; group++) {
            std::memcpy(lane + step * size_t(group), bytes + 4 * group, 4);
        }
        return;
    }
    for (int group = 0; group < groups; group += 2, lane += 2 * step, bytes += 8) {
        std::memcpy(lane, bytes, 2);
        std::memcpy(lane + 2, bytes + 4, 2);
        std::memcpy(lane + step, bytes + 2, 2);
        std::memcpy(lane + step + 2, bytes + 6, 2);
    }
}

template <Lanes lanes>
inline void from_lanes(const uint8_t * lane, int groups, uint8_t * bytes, size_t step) {
    if (lanes == Lanes::in_order) {
        for (int group = 0; group < groups; group++) {
            std::memcpy(bytes + 4 * group, lane + step * size_t(group), 4);
        }
        return;
    }
    for (int group = 0; group < groups; group += 2, lane += 2 * step, bytes += 8) {
        std::memcpy(bytes, lane, 2);
        std::memcpy(bytes + 4, lane + 2, 2);
        std::memcpy(bytes + 2, lane + step, 2);
        std::memcpy(bytes + 6, lane + step + 2, 2);
    }
}

}  // namespace

}  // namespace dspine
