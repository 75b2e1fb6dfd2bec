// The GPU's clock. It stands apart from ranks.cuh, which the CPU's compiler reads too.
#pragma once

#include <cstdint>

__device__ inline uint64_t now_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
