// Memory of packed weights.
#pragma once

#include <cstddef>

namespace dspine {

constexpr size_t kAlignment = 64;

// `size` bytes of zeros, or null.
void * take_memory(size_t size);

void give_back(void * memory, size_t size);

}  // namespace dspine
