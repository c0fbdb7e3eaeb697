#include "memory.h"

#include <sys/mman.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "threads.h"

namespace dspine {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
// What the same memory in small pages takes, generously.
constexpr double kSlowMilliseconds = 1.5;
constexpr int    kPopulateWrite    = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older ones fill later

size_t in_huge_pages(size_t size) { return (size + kHugePage - 1) / kHugePage * kHugePage; }

double own_milliseconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e3 * double(now.tv_sec) + 1e-6 * double(now.tv_nsec);
}

// One row at a time is bound by reading the weights once, address look-ups included: huge pages save
// about 5 %. But where a virtual machine gives free memory back to its host, a huge page that was not
// in use before takes four times as long as small pages, which are cut from memory that it kept. So the
// first slow one ends it; the system may still join the small pages later on.
void fill(char * memory, size_t size) {
    madvise(memory, size, MADV_HUGEPAGE);
    size_t at = 0;
    for (double spent = 0.0; at < size && spent < kSlowMilliseconds; at += kHugePage) {
        const double began = own_milliseconds();
        memory[at]         = 0;
        spent              = own_milliseconds() - began;
    }
    if (at < size) {
        madvise(memory + at, size - at, MADV_NOHUGEPAGE);
        const size_t pages = (size - at) / kHugePage, threads = threads_for(size - at);
        run_parts(threads, [&](size_t part) {
            const size_t from = pages * part / threads, to = pages * (part + 1) / threads;
            madvise(memory + at + from * kHugePage, (to - from) * kHugePage, kPopulateWrite);
        });
        madvise(memory + at, size - at, MADV_HUGEPAGE);
    }
}

}  // namespace

void * take_memory(size_t size) {
    if (size < kHugePage) {
        const size_t whole  = (size + kAlignment) / kAlignment * kAlignment;
        void *       memory = std::aligned_alloc(kAlignment, whole);
        if (memory != nullptr) {
            std::memset(memory, 0, whole);
        }
        return memory;
    }
    const size_t whole = in_huge_pages(size);
    void *       found = mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        return nullptr;
    }
    char *       first  = static_cast<char *>(found);
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
    if (before != 0) {
        munmap(first, before);
    }
    munmap(first + before + whole, kHugePage - before);
    fill(first + before, whole);
    return first + before;
}

void give_back(void * memory, size_t size) {
    if (size < kHugePage) {
        std::free(memory);
    } else {
        munmap(memory, in_huge_pages(size));
    }
}

}  // namespace dspine
