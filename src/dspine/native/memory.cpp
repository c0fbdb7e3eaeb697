#include "memory.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "threads.h"

namespace dspine {

namespace {

constexpr size_t kHugePage      = size_t(2) << 20;
constexpr size_t kChunk         = 32;  // pages between two looks at the clock
constexpr double kPatience      = 300.0, kQuickPage = 0.5;  // milliseconds
constexpr int    kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older ones fill later

size_t in_huge_pages(size_t size) { return (size + kHugePage - 1) / kHugePage * kHugePage; }

double milliseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * double(now.tv_sec) + 1e-6 * double(now.tv_nsec);
}

void populate(char * memory, size_t pages) {
    const size_t parts = threads_for(pages * kHugePage);
    run_parts(parts, [&](size_t part) {
        const size_t from = pages * part / parts, to = pages * (part + 1) / parts;
        madvise(memory + from * kHugePage, (to - from) * kHugePage, kPopulateWrite);
    });
}

// One row at a time is bound by reading the weights once, address look-ups included: huge pages save
// about 5 % of every step. But where a virtual machine gives free memory back to its host, a huge page
// that was not in use before takes twenty times as long as one that was. So what that costs is limited,
// and the rest comes in small pages, which the system may join later on.
void fill(char * memory, size_t size) {
    madvise(memory, size, MADV_HUGEPAGE);
    const size_t pages = size / kHugePage;
    const double began = milliseconds_now();
    size_t       done  = 0;
    while (done < pages && milliseconds_now() - began < kPatience + kQuickPage * double(done)) {
        const size_t next = std::min(done + kChunk, pages);
        populate(memory + done * kHugePage, next - done);
        done = next;
    }
    if (done < pages) {
        madvise(memory + done * kHugePage, (pages - done) * kHugePage, MADV_NOHUGEPAGE);
        populate(memory + done * kHugePage, pages - done);
        madvise(memory + done * kHugePage, (pages - done) * kHugePage, MADV_HUGEPAGE);
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
