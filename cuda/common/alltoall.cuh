// Data of all-to-alls, made and checked on the GPU: at 1 GiB the CPU would take longer than the transfers.
#pragma once

#include <chrono>

#include "gin.cuh"

namespace {

// What rank `by` gives: `n` blocks of `words`, the one for rank k at k.
__global__ void give(uint64_t* at, size_t words, int n, int by) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words * n; i += size_t(gridDim.x) * blockDim.x)
        at[i] = mix(by, i, words);
}

// `n` blocks of `words`, from ranks `first` and following: counts the words that are not what each gives rank `me`, and keeps the
// first place.
__global__ void compare(const uint64_t* at, size_t words, int n, int first, int me, unsigned long long* bad) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words * n; i += size_t(gridDim.x) * blockDim.x)
        if (at[i] != mix(first + i / words, me * words + i % words, words)) {
            atomicAdd_system(&bad[0], 1ull);
            atomicMin_system(&bad[1], static_cast<unsigned long long>(i));
        }
}

inline void give_all(Rank& rank, void* at, size_t words, cudaStream_t stream) {
    give<<<256, 256, 0, stream>>>(static_cast<uint64_t*>(at), words, rank.count(), rank.index);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
}

// `bad`: two words in mapped host memory.
inline void compare_blocks(const char* what, const void* at, size_t words, int n, int first, int me, unsigned long long* bad,
                           cudaStream_t stream) {
    bad[0] = 0, bad[1] = ~0ull;
    compare<<<256, 256, 0, stream>>>(static_cast<const uint64_t*>(at), words, n, first, me, bad);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(stream));
    if (bad[0]) throw Failure(format("%s: %llu of %zu words wrong, the first at %llu", what, bad[0], words * n, bad[1]));
}

// What an all-to-all brings.
inline void compare_all(Rank& rank, const char* what, const void* at, size_t words, unsigned long long* bad, cudaStream_t stream) {
    compare_blocks(what, at, words, rank.count(), 0, rank.index, bad, stream);
}

// Microseconds of one of `times` rounds that `launch()` enqueues on the stream, one after another.
template <typename Launch>
double microseconds_of(Rank& rank, cudaStream_t stream, int times, Launch launch) {
    rank.barrier();
    const auto started = std::chrono::steady_clock::now();
    for (int i = 0; i < times; i++) launch();
    CUDA(cudaStreamSynchronize(stream));
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - started).count() / times;
    rank.barrier();
    return us;
}

// The same of a graph of what `enqueue()` enqueues, launched so many times.
template <typename Enqueue>
double microseconds_of_graph(Rank& rank, cudaStream_t stream, int times, Enqueue enqueue) {
    rank.stage("capture");
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&instance, graph, 0));
    rank.barrier();
    rank.stage("graph");
    const double us = microseconds_of(rank, stream, times, [&] { CUDA(cudaGraphLaunch(instance, stream)); });
    CUDA(cudaGraphExecDestroy(instance));
    CUDA(cudaGraphDestroy(graph));
    return us;
}

inline std::vector<size_t> alltoall_sizes(const Rank& rank) {
    if (rank.options.quick) return {size_t{32} << 20};
    return {size_t{32} << 20, size_t{128} << 20, size_t{1} << 30};
}

inline int alltoall_rounds(const Rank& rank, size_t bytes) { return rank.options.quick ? 2 : bytes > (256u << 20) ? 3 : 10; }

// Those where the time of each operation counts, not the bandwidth.
inline std::vector<size_t> small_alltoall_sizes() {
    return {size_t{1} << 10, size_t{16} << 10, size_t{256} << 10, size_t{1} << 20, size_t{16} << 20};
}

inline int small_alltoall_rounds(const Rank& rank) { return rank.options.quick ? 20 : 200; }

// The kernel of the GIN all-to-all, in alltoall.cu and alltoall_large.cu. One thread a block.
__global__ void gin_all_to_all(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, uint64_t base,
                               Outcome* out) {
    // The block that serves a peer, and with it the context, follows from the peer: its signals arrive in one place.
    const int contexts = comm.ginContextCount, block = blockIdx.x;
    ncclGin gin{comm, block % contexts};
    const uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        for (int k = block; k < comm.nRanks; k += gridDim.x)
            gin.put(ncclTeamWorld(comm), k, window, receive + comm.rank * bytes, window, k * bytes, bytes,
                    SignalInc{ncclGinSignal_t(block)});
        if (block == comm.rank % int(gridDim.x) &&
            !wait_signal(gin, block, base + uint64_t(i + 1) * comm.nRanks, out, i))
            return;
    }
    gin.flush(ncclCoopThread());
    atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), (now_ns() - started) / rounds);
}

}  // namespace
