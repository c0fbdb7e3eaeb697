#include "threads.h"

#include <sched.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace dspine {

namespace {

// A thread is worth its start from so many bytes on; more than so many wait for the memory only.
constexpr size_t kBytesOfThread = size_t(1) << 18;
constexpr size_t kMostThreads   = 8;

size_t processors() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? size_t(CPU_COUNT(&set)) : 1;
}

}  // namespace

size_t threads_for(size_t bytes) {
    const size_t useful = std::min(kMostThreads, bytes / kBytesOfThread);
    return useful <= 1 ? 1 : std::max<size_t>(1, std::min(useful, processors()));
}

void run_parts(size_t parts, const std::function<void(size_t)> & work) {
    std::vector<std::thread> others;
    others.reserve(parts);
    for (size_t part = 1; part < parts; part++) {
        try {
            others.emplace_back(work, part);
        } catch (const std::system_error &) {  // no more threads for this process
            work(part);
        }
    }
    work(0);
    for (std::thread & other : others) {
        other.join();
    }
}

}  // namespace dspine
