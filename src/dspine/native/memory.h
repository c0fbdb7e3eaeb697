// Memory of packed weights.
#pragma once

#include <cstddef>

namespace dspine {

constexpr size_t kAlignment = 64;

// `size` bytes of zeros, or null.
void * take_memory(size_t size);

void give_back(void * memory, size_t size);

// About `size` bytes will be asked for soon: a thread begins to fetch them from the system. Without effect where
// there is no processor to spare.
void expect_memory(size_t size);

// What was expected and not taken goes back.
void expect_nothing();

}  // namespace dspine
