// NCCL's own all-to-all of the same sizes as alltoall_large, and of alltoall's small ones, over whatever transport the
// environment leaves it.
#include "common/alltoall.cuh"

namespace nccl_alltoall_program {

PROGRAM(nccl_alltoall) {
    rank.stage("ncclCommInitRank");
    const int n = rank.count();
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, n, rank.id(), rank.index));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const std::vector<size_t> sizes = alltoall_sizes(rank);
    char *send, *receive;
    unsigned long long* bad;
    CUDA(cudaMalloc(&send, sizes.back()));
    CUDA(cudaMalloc(&receive, sizes.back()));
    CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
    auto one = [&](size_t total, int rounds, bool small) {
        const size_t words = total / n / 8, bytes = words * 8;
        rank.stage("prepare");
        give_all(rank, send, words, stream);
        CUDA(cudaMemsetAsync(receive, 0xEE, bytes * n, stream));
        CUDA(cudaStreamSynchronize(stream));
        double us = 0;
        rank.stage("all-to-all");
        for (int times : {small ? 5 : 1, rounds})
            us = microseconds_of(rank, stream, times,
                                 [&] { NCCL(ncclAlltoAll(send, receive, words, ncclUint64, comm, stream)); });
        compare_all(rank, "all-to-all", receive, words, bad, stream);
        if (small)
            rank.row("all-to-all, an iteration", total, us, "us");
        else
            rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / us / 1e3, "GB/s");
    };
    for (size_t total : small_alltoall_sizes()) one(total, small_alltoall_rounds(rank), true);
    for (size_t total : sizes) one(total, alltoall_rounds(rank, total), false);
    rank.stage("close");
    rank.barrier();
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(send));
    CUDA(cudaFree(receive));
    CUDA(cudaFreeHost(bad));
    CUDA(cudaStreamDestroy(stream));
}

}  // namespace nccl_alltoall_program
