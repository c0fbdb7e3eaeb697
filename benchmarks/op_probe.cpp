// Notes when each thread of ggml's CPU backend begins an operation and when it waits for the others,
// without changing the library: loaded first (LD_PRELOAD), it stands before four functions that the
// library calls through its own symbol table, and passes every call on. `ops.py` compiles and reads it.
#include <dlfcn.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#define PROBE __attribute__((visibility("default")))

namespace {

enum Kind : int64_t { kGraph, kOperation, kWait, kResume, kEnd };

struct Event {
    int64_t     kind;
    int64_t     nanoseconds;
    const void * tensor;
};

std::mutex                         g_lock;
std::vector<std::vector<Event> *> g_threads;
bool                               g_on = false;

void note(Kind kind, const void * tensor) {
    if (!g_on) {
        return;
    }
    thread_local std::vector<Event> * mine = nullptr;
    if (mine == nullptr) {
        mine = new std::vector<Event>;
        mine->reserve(1 << 16);
        const std::lock_guard<std::mutex> held(g_lock);
        g_threads.push_back(mine);
    }
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    mine->push_back({kind, now.tv_sec * INT64_C(1000000000) + now.tv_nsec, tensor});
}

// The library's own function: it was opened for its user alone, so the usual "next" does not find it.
void * original(const char * name) {
    void * library = dlopen("libggml-cpu.so.0", RTLD_LAZY | RTLD_NOLOAD);
    void * found   = library == nullptr ? nullptr : dlsym(library, name);
    if (found == nullptr) {
        std::fprintf(stderr, "op_probe: libggml-cpu.so.0 has no %s\n", name);
        std::abort();
    }
    return found;
}

}  // namespace

extern "C" {

PROBE bool ggml_cpu_extra_compute_forward(void * params, void * tensor) {
    static const auto next = reinterpret_cast<bool (*)(void *, void *)>(original("ggml_cpu_extra_compute_forward"));
    note(kOperation, tensor);
    return next(params, tensor);
}

PROBE void ggml_compute_forward_rms_norm_mul_fused(const void * params, void * norm, void * product) {
    static const auto next = reinterpret_cast<void (*)(const void *, void *, void *)>(
        original("ggml_compute_forward_rms_norm_mul_fused"));
    note(kOperation, norm);
    next(params, norm, product);
}

PROBE void ggml_barrier(void * pool) {
    static const auto next = reinterpret_cast<void (*)(void *)>(original("ggml_barrier"));
    note(kWait, nullptr);
    next(pool);
    note(kResume, nullptr);
}

PROBE int ggml_graph_compute(void * graph, void * plan) {
    static const auto next = reinterpret_cast<int (*)(void *, void *)>(original("ggml_graph_compute"));
    note(kGraph, nullptr);
    const int status = next(graph, plan);
    note(kEnd, nullptr);
    return status;
}

// Forgets what was noted, and starts or stops noting.
PROBE void op_probe_switch(int on) {
    g_on = false;
    const std::lock_guard<std::mutex> held(g_lock);
    for (std::vector<Event> * events : g_threads) {
        events->clear();
    }
    g_on = on != 0;
}

PROBE int op_probe_threads() { return int(g_threads.size()); }

// The events of one thread: their number, and in `events` where they lie.
PROBE int64_t op_probe_events(int thread, const void ** events) {
    *events = g_threads[size_t(thread)]->data();
    return int64_t(g_threads[size_t(thread)]->size());
}

}  // extern "C"
