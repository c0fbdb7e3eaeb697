// Work on memory shared out among threads that live as long as the work.
#pragma once

#include <cstddef>
#include <functional>

namespace dspine {

// How many threads are worth starting for so many bytes.
size_t threads_for(size_t bytes);

// work(0) to work(parts - 1), each in a thread of its own where the system gives one.
void run_parts(size_t parts, const std::function<void(size_t)> & work);

}  // namespace dspine
