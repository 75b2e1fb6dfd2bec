// NCCL's own reduce-scatter, all-gather and all-reduce on symmetric windows. Between hosts NCCL has kernels for them that put
// and signal by GIN (ReduceScatter_RailA2A, and with multicast AllGather_RailRing); within a host they load and store. Nothing
// here asks for either: what NCCL chooses is what a program gets. All data are compared.
#include "common/collective.cuh"

namespace symmetric_program {

#if NCCL_VERSION_CODE < 22907

PROGRAM(symmetric) { throw Absent("NCCL before 2.29.7 takes no GIN from a plugin"); }

#else

// Element `i` of what rank `by` gives. Sums over 64 ranks are exact in any order.
__host__ __device__ inline float element(int by, size_t i) { return float(mix(by, i) % 4096); }

__global__ void fill(float* at, size_t count, int by) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        at[i] = element(by, i);
}

// Counts the elements that are not the sum over `n` ranks of their elements from `first` on, and keeps the first place.
__global__ void compare_sums(const float* at, size_t count, size_t first, int n, unsigned long long* bad) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        float sum = 0;
        for (int by = 0; by < n; by++) sum += element(by, first + i);
        if (at[i] == sum) continue;
        atomicAdd_system(&bad[0], 1ull);
        atomicMin_system(&bad[1], static_cast<unsigned long long>(i));
    }
}

void give_elements(CollectiveWindows& world, size_t count, int by) {
    fill<<<256, 256, 0, world.stream>>>(reinterpret_cast<float*>(world.send), count, by);
    CUDA(cudaGetLastError());
    world.clear(world.most);
}

void expect_sums(CollectiveWindows& world, const char* what, size_t count, size_t first, int n) {
    auto* bad = world.bad;
    bad[0] = 0, bad[1] = ~0ull;
    compare_sums<<<256, 256, 0, world.stream>>>(reinterpret_cast<float*>(world.receive), count, first, n, bad);
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(world.stream));
    if (bad[0]) throw Failure(format("%s: %llu of %zu sums wrong, the first at %llu", what, bad[0], count, bad[1]));
}

PROGRAM(symmetric) {
    const int n = rank.count(), me = rank.index;
    rank.stage("ncclCommInitRank");
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, n, rank.id(), me));
    std::vector<size_t> sizes = small_alltoall_sizes();
    if (!rank.options.quick) sizes.push_back(size_t{256} << 20);
    CollectiveWindows world(rank, comm, sizes.back());
    // The first rounds warm up.
    auto measured = [&](const char* what, size_t total, auto launch) {
        rank.stage(what);
        double us = 0;
        for (int times : {2, total > (16 << 20) ? 10 : small_alltoall_rounds(rank)})
            us = microseconds_of(rank, world.stream, times, launch);
        rank.row(what, total, us, "us");
    };
    for (size_t total : sizes) {
        const size_t words = total / n / 8, count = total / n / 4;
        auto scatter = [&] { NCCL(ncclReduceScatter(world.send, world.receive, count, ncclFloat, ncclSum, comm, world.stream)); };
        give_elements(world, count * n, me);
        measured("reduce-scatter on windows", total, scatter);
        expect_sums(world, "reduce-scatter", count, me * count, n);
        if (total == (1 << 20)) {
            world.clear(world.most);
            const double us = microseconds_of_graph(rank, world.stream, small_alltoall_rounds(rank), scatter);
            expect_sums(world, "a graph of reduce-scatter", count, me * count, n);
            rank.row("a graph of reduce-scatter on windows", total, us, "us");
        }
        give_elements(world, count, me);
        measured("all-reduce on windows", total / n, [&] {
            NCCL(ncclAllReduce(world.send, world.receive, count, ncclFloat, ncclSum, comm, world.stream));
        });
        expect_sums(world, "all-reduce", count, 0, n);
        give_all(rank, world.send, words, world.stream);
        world.clear(world.most);
        measured("all-gather on windows", total, [&] {
            NCCL(ncclAllGather(world.send, world.receive, words, ncclUint64, comm, world.stream));
        });
        // It brings from each rank the block that it gives rank 0.
        compare_blocks("all-gather", world.receive, words, n, 0, 0, world.bad, world.stream);
    }
    rank.stage("close");
    rank.barrier();
    world.close();
    NCCL(ncclCommDestroy(comm));
}

#endif

}  // namespace symmetric_program
