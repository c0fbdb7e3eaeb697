#include "packing.h"

#include <algorithm>
#include <cstring>

namespace dspine {

namespace {

// Calls visit(unit, lane, from, to, position): bytes [from, to) of the file's unit that lies in
// `lane` of packed `unit`, `position` bytes after `offset`.
template <class Visit>
void each_unit(const Kernel & kernel, int64_t inputs, size_t offset, size_t size, Visit visit) {
    const size_t units = size_t(inputs / kernel.unit_inputs);
    size_t       done  = 0;
    while (done < size) {
        const size_t at   = offset + done;
        const size_t unit = at / kernel.source_bytes;
        const size_t from = at % kernel.source_bytes;
        const size_t to   = std::min(kernel.source_bytes, from + size - done);
        const size_t row = unit / units, column = unit % units;
        visit(((row / kPanel) * units + column) * kernel.unit_bytes, int(row % kPanel), from, to, done);
        done += to - from;
    }
}

constexpr size_t kLargestUnit = 1024;

}  // namespace

void pack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t offset, size_t size,
                uint8_t * packed) {
    each_unit(kernel, inputs, offset, size, [&](size_t unit, int lane, size_t from, size_t to, size_t position) {
        if (to - from == kernel.source_bytes) {
            kernel.pack(source + position, lane, packed + unit);
            return;
        }
        uint8_t whole[kLargestUnit];
        kernel.unpack(packed + unit, lane, whole);
        std::memcpy(whole + from, source + position, to - from);
        kernel.pack(whole, lane, packed + unit);
    });
}

void unpack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * packed, size_t offset, size_t size,
                  uint8_t * target) {
    each_unit(kernel, inputs, offset, size, [&](size_t unit, int lane, size_t from, size_t to, size_t position) {
        uint8_t whole[kLargestUnit];
        kernel.unpack(packed + unit, lane, whole);
        std::memcpy(target + position, whole + from, to - from);
    });
}

}  // namespace dspine
