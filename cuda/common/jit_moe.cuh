// What the kernels of jit_moe.cu, which are modules of their own, share with it.
#pragma once

#include "moe_ll.cuh"
#include "talk.cuh"

namespace moe_ll {

struct JitArguments {
    ncclDevComm comm;
    ncclWindow_t window;
    Plan plan;
    int round;
    uint32_t number;  // of the kernel, for Talk
    uint32_t hold_ns;
    Talk* talk;
    Outcome* out;

    // All threads: what the first one saw.
    __device__ bool host_lets_go() const {
        __shared__ bool goes;
        if (threadIdx.x == 0) goes = wait_for_host(talk, number, hold_ns, 0, out);
        __syncthreads();
        return goes;
    }
};

}  // namespace moe_ll
