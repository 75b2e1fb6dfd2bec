// What a running kernel and its host say to each other, in mapped host memory: the kernel tells that it runs and waits
// for a word before it goes on, so that a test can have the host in a CUDA call while the kernel is at work.
#pragma once

#include <chrono>
#include <functional>

#include "gin.cuh"

// Numbers, which only grow: one for each kernel.
struct Talk {
    uint32_t runs;   // by the kernel: this one has begun
    uint32_t go;     // by the host: this one may go on
    uint32_t step;   // by the kernel: what it is at
    uint32_t ended;  // by the kernel: this one is through
};

__device__ inline void say(uint32_t* word, uint32_t value) {
    __threadfence_system();
    *static_cast<volatile uint32_t*>(word) = value;
}

// One thread of kernel `number`: tells that it runs, waits for the host, then holds for `hold_ns`, in which the host's
// call comes to where it waits.
__device__ inline bool wait_for_host(Talk* talk, uint32_t number, uint32_t hold_ns, uint32_t where, Outcome* out) {
    say(&talk->runs, number);
    if (!wait_for([&] { return uint64_t(*static_cast<volatile uint32_t*>(&talk->go)); }, where, number, out, number))
        return false;
    for (const uint64_t started = now_ns(); now_ns() - started < hold_ns;) {
    }
    return true;
}

using Clock = std::chrono::steady_clock;

inline double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Looks at a word that a kernel writes until it is `number`, for at most `seconds`.
inline bool comes(const uint32_t& word, uint32_t number, double seconds) {
    const auto started = Clock::now();
    while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) < number) {
        if (ms_since(started) > seconds * 1e3) return false;
        usleep(20);
    }
    return true;
}

inline void let_go(Talk* talk, uint32_t number) { __atomic_store_n(&talk->go, number, __ATOMIC_RELEASE); }
