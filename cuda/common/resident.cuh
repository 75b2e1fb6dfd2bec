// A kernel that stays on the GPU and does what the CPU writes into mapped host memory: what an engine of that kind could reach.
#pragma once

#include <cstdint>
#include <cstring>

#include <cuda_runtime.h>

#include "clock.cuh"

namespace {

// What the CPU asks of a resident kernel: three addresses, each in two words of 8 bytes, the most that a load is promised
// to see whole. So each word has the number of the command at its top.
struct alignas(64) Command {
    uint64_t part[4][2];

    // `bytes`: 8, 0 for the signal alone, or STOP. `number`: its low 16 bits are not those of the command before.
    void post(const void* from, const void* to, const void* signal, uint32_t bytes, uint64_t number) {
        const void* addresses[] = {from, to, signal, nullptr};
        for (int p = 0; p < 4; p++) {
            const uint64_t address = uint64_t(addresses[p]);
            __atomic_store_n(&part[p][0], number << 48 | address << 16 >> 16, __ATOMIC_RELAXED);
            __atomic_store_n(&part[p][1], number << 48 | uint64_t(bytes) << 16 | address >> 48, __ATOMIC_RELEASE);
        }
    }
};

constexpr uint32_t STOP = ~0u;
constexpr uint64_t IDLE_LIMIT_NS = 200'000'000;

// One warp that carries out the commands 1, 2, 3, ... until it is told to stop, or for 200 ms is told nothing.
__global__ void resident(const Command* command) {
    const int lane = threadIdx.x;
    for (uint64_t number = 1;; number++) {
        uint64_t low, high;
        const uint64_t started = now_ns();
        while (true) {
            asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
                         : "=l"(low), "=l"(high)
                         : "l"(command->part[lane % 4])
                         : "memory");
            if (__all_sync(~0u, (low ^ number << 48) >> 48 == 0 && (high ^ number << 48) >> 48 == 0)) break;
            if (__any_sync(~0u, now_ns() - started > IDLE_LIMIT_NS)) return;
        }
        const uint64_t address = high << 48 | low << 16 >> 16;
        const auto from = reinterpret_cast<const volatile unsigned long long*>(__shfl_sync(~0u, address, 0));
        const auto to = reinterpret_cast<volatile unsigned long long*>(__shfl_sync(~0u, address, 1));
        const auto signal = reinterpret_cast<unsigned long long*>(__shfl_sync(~0u, address, 2));
        const uint32_t bytes = high >> 16;
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
