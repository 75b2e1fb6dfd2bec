// NCCL's own all-gather and all-to-all without kernels, NCCL_CTA_POLICY_ZERO, on registered windows: copy engines within a
// host, and between hosts puts of NCCL's RMA proxy, which calls the plugin (2.30.7 and later). Enqueued on a stream and out of a
// captured graph. All data are compared.
#include "common/alltoall.cuh"

namespace zero_cta_program {

#if NCCL_VERSION_CODE < 23007

PROGRAM(zero_cta) { throw Absent("NCCL before 2.30.7 has no such collectives between hosts"); }

#else

// Counts the words that are not what an all-gather brings: block k is what rank k gave.
__global__ void compare_gathered(const uint64_t* at, size_t words, int n, unsigned long long* bad) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words * n; i += size_t(gridDim.x) * blockDim.x)
        if (at[i] != mix(i / words, i % words, words)) {
            atomicAdd_system(&bad[0], 1ull);
            atomicMin_system(&bad[1], static_cast<unsigned long long>(i));
        }
}

PROGRAM(zero_cta) {
    const bool quick = rank.options.quick;
    const int n = rank.count();
    rank.stage("ncclCommInitRankConfig");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    ncclComm_t comm;
    NCCL(ncclCommInitRankConfig(&comm, n, rank.id(), rank.index, &config));

    std::vector<size_t> sizes = small_alltoall_sizes();
    for (size_t large : alltoall_sizes(rank))
        if (large <= size_t{128} << 20) sizes.push_back(large);
    const size_t most = sizes.back();
    char *send, *receive;
    ncclWindow_t from, to;
    unsigned long long* bad;
    cudaStream_t stream;
    rank.stage("ncclCommWindowRegister");
    NCCL(ncclMemAlloc(reinterpret_cast<void**>(&send), most));
    NCCL(ncclMemAlloc(reinterpret_cast<void**>(&receive), most));
    NCCL(ncclCommWindowRegister(comm, send, most, &from, NCCL_WIN_COLL_SYMMETRIC));
    NCCL(ncclCommWindowRegister(comm, receive, most, &to, NCCL_WIN_COLL_SYMMETRIC));
    CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    auto all_to_all = [&](size_t words) { NCCL(ncclAlltoAll(send, receive, words, ncclUint64, comm, stream)); };
    auto all_gather = [&](size_t words) { NCCL(ncclAllGather(send, receive, words, ncclUint64, comm, stream)); };
    auto prepare = [&](size_t words) {
        give_all(rank, send, words, stream);
        CUDA(cudaMemsetAsync(receive, 0xEE, words * 8 * n, stream));
        CUDA(cudaStreamSynchronize(stream));
    };
    auto check = [&](const char* what, size_t words, bool gathered) {
        if (!gathered) return compare_all(rank, what, receive, words, bad, stream);
        bad[0] = 0, bad[1] = ~0ull;
        compare_gathered<<<256, 256, 0, stream>>>(reinterpret_cast<uint64_t*>(receive), words, n, bad);
        CUDA(cudaGetLastError());
        CUDA(cudaStreamSynchronize(stream));
        if (bad[0]) throw Failure(format("%s: %llu of %zu words wrong, the first at %llu", what, bad[0], words * n, bad[1]));
    };
    for (bool gathered : {true, false}) {
        const char* what = gathered ? "all-gather" : "all-to-all";
        for (size_t total : sizes) {
            const size_t words = total / n / 8;
            const int rounds = total > (1 << 20) ? (quick ? 2 : 10) : small_alltoall_rounds(rank);
            prepare(words);
            rank.stage(what);
            double us = 0;
            // The first rounds warm up.
            for (int times : {2, rounds})
                us = microseconds_of(rank, stream, times, [&] { gathered ? all_gather(words) : all_to_all(words); });
            check(what, words, gathered);
            rank.row(format("%s without kernels", what).c_str(), words * 8 * n, us, "us");
        }
        const size_t words = (1 << 20) / n / 8;
        prepare(words);
        rank.stage("capture");
        cudaGraph_t graph;
        cudaGraphExec_t instance;
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        gathered ? all_gather(words) : all_to_all(words);
        CUDA(cudaStreamEndCapture(stream, &graph));
        CUDA(cudaGraphInstantiate(&instance, graph, 0));
        rank.barrier();
        rank.stage("graph");
        const double us = microseconds_of(rank, stream, small_alltoall_rounds(rank), [&] { CUDA(cudaGraphLaunch(instance, stream)); });
        check("graph", words, gathered);
        rank.row(format("a graph of %s without kernels", what).c_str(), words * 8 * n, us, "us");
        CUDA(cudaGraphExecDestroy(instance));
        CUDA(cudaGraphDestroy(graph));
    }
    rank.stage("close");
    rank.barrier();
    NCCL(ncclCommWindowDeregister(comm, from));
    NCCL(ncclCommWindowDeregister(comm, to));
    NCCL(ncclMemFree(send));
    NCCL(ncclMemFree(receive));
    CUDA(cudaFreeHost(bad));
    CUDA(cudaStreamDestroy(stream));
    NCCL(ncclCommDestroy(comm));
}

#endif

}  // namespace zero_cta_program
