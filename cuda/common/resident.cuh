// A kernel that stays on the GPU and does what the CPU writes into mapped host memory: what an engine of that kind could reach.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_runtime.h>

namespace {

// What the CPU asks of a resident kernel: four parts of 16 bytes, each with the number of the command at its end, so that one
// load of a part sees a whole one.
struct alignas(64) Command {
    uint32_t part[4][4];

    // `bytes`: 8, 0 for the signal alone, or STOP.
    void post(const void* from, const void* to, const void* signal, uint32_t bytes, uint32_t number) {
        const void* addresses[] = {from, to, signal};
        for (int p = 0; p < 3; p++) {
            memcpy(part[p], &addresses[p], 8);
            part[p][2] = bytes;
        }
        for (auto& p : part) __atomic_store_n(&p[3], number, __ATOMIC_RELEASE);
    }
};

constexpr uint32_t STOP = ~0u;
constexpr uint64_t IDLE_LIMIT_NS = 200'000'000;

// One warp that carries out the commands 1, 2, 3, ... until it is told to stop, or for 200 ms is told nothing.
__global__ void resident(const Command* command) {
    const int lane = threadIdx.x;
    auto now = [] {
        uint64_t ns;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
        return ns;
    };
    for (uint32_t number = 1;; number++) {
        uint32_t low, high, bytes, stamp;
        const uint64_t started = now();
        while (true) {
            asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(low), "=r"(high), "=r"(bytes), "=r"(stamp)
                         : "l"(command->part[lane % 4])
                         : "memory");
            if (__all_sync(~0u, stamp == number)) break;
            if (__any_sync(~0u, now() - started > IDLE_LIMIT_NS)) return;
        }
        const uint64_t address = uint64_t(high) << 32 | low;
        const auto from = reinterpret_cast<const volatile unsigned long long*>(__shfl_sync(~0u, address, 0));
        const auto to = reinterpret_cast<volatile unsigned long long*>(__shfl_sync(~0u, address, 1));
        const auto signal = reinterpret_cast<unsigned long long*>(__shfl_sync(~0u, address, 2));
        bytes = __shfl_sync(~0u, bytes, 0);
        if (bytes == STOP) return;
        if (lane == 0) {
            if (bytes) {
                *to = *from;
                __threadfence_system();
            }
            atomicAdd_system(signal, 1ull);
        }
        __syncwarp();
    }
}

}  // namespace
