// What programs of NCCL's own collectives on symmetric windows have: a window to send from, one to receive in, and a stream.
#pragma once

#include "alltoall.cuh"

namespace {

// Collective to make and to close.
struct CollectiveWindows {
    const size_t most;  // bytes of each window
    char *send{}, *receive{};
    unsigned long long* bad{};  // two words in mapped host memory, for comparisons
    cudaStream_t stream{};

    CollectiveWindows(Rank& rank, ncclComm_t comm, size_t most) : most(most), comm_(comm) {
        rank.stage("ncclCommWindowRegister");
        NCCL(ncclMemAlloc(reinterpret_cast<void**>(&send), most));
        NCCL(ncclMemAlloc(reinterpret_cast<void**>(&receive), most));
        NCCL(ncclCommWindowRegister(comm, send, most, &from_, NCCL_WIN_COLL_SYMMETRIC));
        NCCL(ncclCommWindowRegister(comm, receive, most, &to_, NCCL_WIN_COLL_SYMMETRIC));
        CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }

    // Spoils the first bytes of what is received.
    void clear(size_t bytes) {
        CUDA(cudaMemsetAsync(receive, 0xEE, bytes, stream));
        CUDA(cudaStreamSynchronize(stream));
    }

    void close() {
        NCCL(ncclCommWindowDeregister(comm_, from_));
        NCCL(ncclCommWindowDeregister(comm_, to_));
        NCCL(ncclMemFree(send));
        NCCL(ncclMemFree(receive));
        CUDA(cudaFreeHost(bad));
        CUDA(cudaStreamDestroy(stream));
    }

  private:
    ncclComm_t comm_;
    ncclWindow_t from_{}, to_{};
};

}  // namespace
