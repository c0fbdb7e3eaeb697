#include "memory.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "threads.h"

namespace dspine {

namespace {

constexpr size_t  kHugePage = size_t(2) << 20, kSmallPage = 4096;
constexpr int     kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older ones fill later
constexpr int64_t kPatience = 100'000, kQuickPage = 500;  // microseconds

size_t in_huge_pages(size_t size) { return (size + kHugePage - 1) / kHugePage; }

int64_t microseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1'000'000 + now.tv_nsec / 1000;
}

// Addresses that begin at a huge page and are not backed by memory yet, or null.
char * take_addresses(size_t pages) {
    const size_t whole = pages * kHugePage;
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
    return first + before;
}

// Fetches memory for addresses, by any number of threads.
//
// One row at a time is bound by reading the weights once, address look-ups included: huge pages save
// about 5 % of every step. But where a virtual machine gives free memory back to its host, a huge page
// that was not in use before takes twenty times as long as one that was. So what that costs is limited,
// and the rest comes in small pages, which the system may join later on.
class Filling {
  public:
    Filling(char * memory, size_t pages) : memory_(memory), pages_(pages) {
        madvise(memory, pages * kHugePage, MADV_HUGEPAGE);
    }

    char * memory() const { return memory_; }

    size_t pages() const { return pages_; }

    // Only so many pages are wanted, and no other thread is at work.
    void cut(size_t pages) {
        munmap(memory_ + pages * kHugePage, (pages_ - pages) * kHugePage);
        pages_ = pages;
    }

    // Until all pages are fetched or `stop`, beside other work of this process.
    void run(const std::atomic<bool> & stop) {
        // The system call for it would keep other threads from their allocations.
        fetch(stop, [](char * page) {
            for (size_t i = 0; i < kHugePage; i += kSmallPage) {
                static_cast<volatile char *>(page)[i] = 0;
            }
        });
    }

    // All pages, while other work waits.
    void finish() {
        if (next_ < pages_) {
            const std::atomic<bool> never{false};
            run_parts(threads_for((pages_ - next_) * kHugePage), [&](size_t) {
                fetch(never, [](char * page) { madvise(page, kHugePage, kPopulateWrite); });
            });
        }
        if (small_) {
            madvise(memory_, pages_ * kHugePage, MADV_HUGEPAGE);
        }
    }

  private:
    template <class Fetch>
    void fetch(const std::atomic<bool> & stop, Fetch one) {
        while (!stop) {
            const size_t page = next_++;
            if (page >= pages_) {
                return;
            }
            const int64_t began = microseconds_now();
            one(memory_ + page * kHugePage);
            const int64_t lost = microseconds_now() - began - kQuickPage;
            if (lost > 0 && !small_ && (lost_ += lost) > kPatience && !small_.exchange(true)) {
                madvise(memory_, pages_ * kHugePage, MADV_NOHUGEPAGE);
            }
        }
    }

    char *               memory_;
    size_t               pages_;
    std::atomic<size_t>  next_{0};
    std::atomic<int64_t> lost_{0};
    std::atomic<bool>    small_{false};
};

// What is fetched before it is asked for.
class Expected {
  public:
    explicit Expected(std::unique_ptr<Filling> filling)
        : filling_(std::move(filling)), thread_([this] { filling_->run(stop_); }) {}

    ~Expected() {
        stop();
        if (filling_ != nullptr) {
            munmap(filling_->memory(), filling_->pages() * kHugePage);
        }
    }

    // The filling as it is now, if it is for at least so many pages.
    std::unique_ptr<Filling> take(size_t pages) {
        stop();
        if (filling_->pages() < pages) {
            return nullptr;
        }
        filling_->cut(pages);
        return std::move(filling_);
    }

  private:
    void stop() {
        stop_ = true;
        if (thread_.joinable()) {
            thread_.join();
        }
    }

    std::unique_ptr<Filling> filling_;
    std::atomic<bool>        stop_{false};
    std::thread              thread_;
};

std::mutex                g_lock;
std::unique_ptr<Expected> g_expected;

std::unique_ptr<Filling> begun_filling(size_t pages) {
    const std::lock_guard<std::mutex> guard(g_lock);
    std::unique_ptr<Filling>          found = g_expected == nullptr ? nullptr : g_expected->take(pages);
    g_expected                              = nullptr;
    return found;
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
    const size_t             pages   = in_huge_pages(size);
    std::unique_ptr<Filling> filling = begun_filling(pages);
    if (filling == nullptr) {
        char * memory = take_addresses(pages);
        if (memory == nullptr) {
            return nullptr;
        }
        filling = std::make_unique<Filling>(memory, pages);
    }
    filling->finish();
    return filling->memory();
}

void give_back(void * memory, size_t size) {
    if (size < kHugePage) {
        std::free(memory);
    } else {
        munmap(memory, in_huge_pages(size) * kHugePage);
    }
}

void expect_memory(size_t size) {
    const size_t pages = in_huge_pages(size);
    if (threads_for(size) < 2) {
        return;
    }
    const std::lock_guard<std::mutex> guard(g_lock);
    g_expected    = nullptr;
    char * memory = take_addresses(pages);
    if (memory == nullptr) {
        return;
    }
    try {
        g_expected = std::make_unique<Expected>(std::make_unique<Filling>(memory, pages));
    } catch (const std::system_error &) {  // no more threads for this process
        munmap(memory, pages * kHugePage);
    }
}

void expect_nothing() {
    const std::lock_guard<std::mutex> guard(g_lock);
    g_expected = nullptr;
}

}  // namespace dspine
