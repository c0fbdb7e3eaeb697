// A copy for each file that includes it, since files of different families are compiled for different processors.
#pragma once

#include <cstddef>

namespace dspine {

namespace {

// Asks for the cache lines of `bytes` bytes. (Always inlined: GCC leaves calls out of a function that only fetches.)
[[gnu::always_inline]] inline void fetch(const void * from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(static_cast<const char *>(from) + i);
    }
}

}  // namespace

}  // namespace dspine
