// What trials of products and of attention share: the clock, arbitrary numbers and aligned memory.
#pragma once

#include <time.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dspine {

constexpr size_t kTrialAlign = 64;

// Of this thread, so that other work on the machine disturbs little.
static inline double seconds_now() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

static inline uint32_t next(uint32_t & state) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static inline uint8_t * aligned(std::vector<uint8_t> & bytes, size_t size) {
    bytes.assign(size + kTrialAlign, 0);
    const uintptr_t start = reinterpret_cast<uintptr_t>(bytes.data());
    return reinterpret_cast<uint8_t *>((start + kTrialAlign - 1) / kTrialAlign * kTrialAlign);
}

}  // namespace dspine
