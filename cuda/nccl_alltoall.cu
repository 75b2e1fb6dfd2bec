// NCCL's own all-to-all of the same sizes as alltoall_large, over whatever transport the environment leaves it.
#include <chrono>

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
    for (size_t total : sizes) {
        const size_t words = total / n / 8, bytes = words * 8;
        const int rounds = alltoall_rounds(rank, total);
        rank.stage("prepare");
        give_all(rank, send, words, stream);
        CUDA(cudaMemsetAsync(receive, 0xEE, bytes * n, stream));
        CUDA(cudaStreamSynchronize(stream));
        double ns = 0;
        for (int times : {1, rounds}) {
            rank.stage("all-to-all");
            rank.barrier();
            const auto started = std::chrono::steady_clock::now();
            for (int i = 0; i < times; i++) NCCL(ncclAlltoAll(send, receive, words, ncclUint64, comm, stream));
            CUDA(cudaStreamSynchronize(stream));
            ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - started).count() / times;
            rank.barrier();
        }
        compare_all(rank, "all-to-all", receive, words, bad, stream);
        rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / ns, "GB/s");
    }
    rank.stage("close");
    rank.barrier();
    NCCL(ncclCommDestroy(comm));
    CUDA(cudaFree(send));
    CUDA(cudaFree(receive));
    CUDA(cudaFreeHost(bad));
    CUDA(cudaStreamDestroy(stream));
}

}  // namespace nccl_alltoall_program
