#include "packing.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace dspine {

namespace {

constexpr size_t kLargestUnit = 1024;

// Units of a panel that pass before the next 16 x as many: they stay in the first cache while all
// lanes of them are written.
constexpr size_t kBlockBytes = 16384;

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

void pack_piece(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t offset, size_t size,
                uint8_t * packed) {
    each_unit(kernel, inputs, offset, size, [&](size_t unit, int lane, size_t from, size_t to, size_t position) {
        if (to - from == kernel.source_bytes) {
            kernel.pack(source + position, 1, lane, packed + unit);
            return;
        }
        uint8_t whole[kLargestUnit];
        kernel.unpack(packed + unit, 1, lane, whole);
        std::memcpy(whole + from, source + position, to - from);
        kernel.pack(whole, 1, lane, packed + unit);
    });
}

// Whole rows [first, end) of the matrix.
void pack_rows(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t first, size_t end, uint8_t * packed) {
    const size_t units = size_t(inputs / kernel.unit_inputs), row_bytes = units * kernel.source_bytes;
    const size_t block = std::max<size_t>(1, kBlockBytes / kernel.unit_bytes);
    for (size_t row = first; row < end;) {
        const size_t panel = row / kPanel, next = std::min(end, (panel + 1) * kPanel);
        if (next - row == kPanel && kernel.pack_panel != nullptr) {
            kernel.pack_panel(source + (row - first) * row_bytes, row_bytes, int64_t(units), packed + panel * panel_bytes(kernel, inputs));
            row = next;
            continue;
        }
        for (size_t unit = 0; unit < units; unit += block) {
            uint8_t *     to   = packed + (panel * units + unit) * kernel.unit_bytes;
            const int64_t some = int64_t(std::min(block, units - unit));
            for (size_t lane = row; lane < next; lane++) {
                kernel.pack(source + (lane - first) * row_bytes + unit * kernel.source_bytes, some, int(lane % kPanel), to);
            }
        }
        row = next;
    }
}

// The same by several threads, each with panels of its own.
void pack_rows_together(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t first, size_t end,
                        uint8_t * packed) {
    const size_t row_bytes = size_t(inputs / kernel.unit_inputs) * kernel.source_bytes;
    const size_t panels    = (end + kPanel - 1) / kPanel - first / kPanel;
    const size_t threads   = std::min(panels, threads_for((end - first) * row_bytes));
    const auto   border    = [&](size_t part) {
        return std::clamp((first / kPanel + panels * part / threads) * kPanel, first, end);
    };
    run_parts(threads, [&](size_t part) {
        pack_rows(kernel, inputs, source + (border(part) - first) * row_bytes, border(part), border(part + 1), packed);
    });
}

}  // namespace

void pack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t offset, size_t size,
                uint8_t * packed) {
    const size_t row_bytes = size_t(inputs / kernel.unit_inputs) * kernel.source_bytes;
    const size_t first = (offset + row_bytes - 1) / row_bytes, end = (offset + size) / row_bytes;
    if (first >= end) {
        pack_piece(kernel, inputs, source, offset, size, packed);
        return;
    }
    const size_t before = first * row_bytes - offset, after = end * row_bytes - offset;
    pack_piece(kernel, inputs, source, offset, before, packed);
    pack_rows_together(kernel, inputs, source + before, first, end, packed);
    pack_piece(kernel, inputs, source + after, end * row_bytes, size - after, packed);
}

void unpack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * packed, size_t offset, size_t size,
                  uint8_t * target) {
    each_unit(kernel, inputs, offset, size, [&](size_t unit, int lane, size_t from, size_t to, size_t position) {
        if (to - from == kernel.source_bytes) {
            kernel.unpack(packed + unit, 1, lane, target + position);
            return;
        }
        uint8_t whole[kLargestUnit];
        kernel.unpack(packed + unit, 1, lane, whole);
        std::memcpy(target + position, whole + from, to - from);
    });
}

}  // namespace dspine
