// Plain collectives and point-to-point with the plugin set: no GIN here, they must work as without it.
#include "common/ranks.cuh"

namespace collectives_program {

PROGRAM(collectives) {
    rank.stage("ncclCommInitRank");
    const int n = rank.count(), me = rank.index;
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, n, rank.id(), me));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const size_t count = 1 << 20;
    int *send, *receive;
    CUDA(cudaMalloc(&send, count * sizeof(int)));
    CUDA(cudaMalloc(&receive, count * n * sizeof(int)));
    std::vector<int> data(count), result(count * n);
    for (size_t i = 0; i < count; i++) data[i] = int(i % 1000) * (me + 1);
    CUDA(cudaMemcpyAsync(send, data.data(), count * sizeof(int), cudaMemcpyHostToDevice, stream));
    CUDA(cudaStreamSynchronize(stream));
    rank.barrier();

    auto fetch = [&](const char* what, size_t words, auto expected) {
        CUDA(cudaMemcpyAsync(result.data(), receive, words * sizeof(int), cudaMemcpyDeviceToHost, stream));
        CUDA(cudaStreamSynchronize(stream));
        for (size_t i = 0; i < words; i++)
            if (result[i] != expected(i)) throw Failure(format("%s: word %zu is %d, not %d", what, i, result[i], int(expected(i))));
        rank.row(what, words * sizeof(int), 1, "checked");
        rank.barrier();
    };
    rank.stage("all-reduce");
    NCCL(ncclAllReduce(send, receive, count, ncclInt, ncclSum, comm, stream));
    fetch("all-reduce", count, [&](size_t i) { return int(i % 1000) * n * (n + 1) / 2; });
    rank.stage("all-gather");
    NCCL(ncclAllGather(send, receive, count, ncclInt, comm, stream));
    fetch("all-gather", count * n, [&](size_t i) { return int(i % count % 1000) * int(i / count + 1); });
    rank.stage("send and receive");
    NCCL(ncclGroupStart());
    NCCL(ncclSend(send, count, ncclInt, (me + 1) % n, comm, stream));
    NCCL(ncclRecv(receive, count, ncclInt, (me + n - 1) % n, comm, stream));
    NCCL(ncclGroupEnd());
    fetch("send and receive", count, [&](size_t i) { return int(i % 1000) * ((me + n - 1) % n + 1); });
    rank.stage("close");
    NCCL(ncclCommDestroy(comm));
}

}  // namespace collectives_program
