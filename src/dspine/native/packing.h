// Rows of a weight matrix between the file's layout and the packed one.
#pragma once

#include "kernel.h"

namespace dspine {

// Write `size` bytes of the file's layout, from byte `offset` of the matrix on. Much is packed by several
// threads.
void pack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * source, size_t offset, size_t size,
                uint8_t * packed);

// Read them back.
void unpack_bytes(const Kernel & kernel, int64_t inputs, const uint8_t * packed, size_t offset, size_t size,
                  uint8_t * target);

}  // namespace dspine
