// All-to-all with GIN only: every rank puts a block to every rank, the own one included, spread over blocks of threads
// and contexts. Then the shape of nccl-tests' device implementation 3: one kernel an iteration, in each of its blocks a
// GIN barrier in front and behind, one put + signal to each rank between them; small sizes too. --gin-barrier runs only
// that, with --blocks blocks.
#include "common/alltoall.cuh"

namespace alltoall_program {

constexpr int THREADS = 512;  // of a block between barriers
constexpr int PLAIN_BLOCKS = 4;
const char* const PARTS[] = {"first barrier", "puts and signals", "flush", "second barrier"};
constexpr int LONGEST = std::size(PARTS);

// All on context 0. A thread puts to one rank, so the first block puts all where there are no more than 512.
// `parts`: ns that the first block spends in each of PARTS, added up; at LONGEST its longest round's, which tells
// one that was held up from many that were slow.
__global__ void between_barriers(ncclDevComm comm, ncclWindow_t window, ncclGinBarrierHandle_t handle, size_t receive,
                                 size_t bytes, unsigned long long* parts, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const bool measures = blockIdx.x == 0 && threadIdx.x == 0;
    const uint64_t begin = now_ns();
    uint64_t last = begin;
    auto part_ends = [&](int part) {
        if (!measures) return;
        const uint64_t now = now_ns();
        parts[part] += now - last;
        last = now;
    };
    const uint64_t before = gin.readSignal(blockIdx.x);
    ncclGinBarrierSession<ncclCoopCta> barrier{ncclCoopCta(), gin, world, handle, blockIdx.x};
    barrier.sync(ncclCoopCta(), cuda::memory_order_acquire, ncclGinFenceLevel::Relaxed);
    part_ends(0);
    const int threads = gridDim.x * blockDim.x;
    for (int peer = blockIdx.x * blockDim.x + threadIdx.x; peer < comm.nRanks; peer += threads)
        gin.put(world, peer, window, receive + comm.rank * bytes, window, peer * bytes, bytes,
                SignalInc{ncclGinSignal_t(blockIdx.x)});
    // What comes to a rank comes by the block of the thread that serves it.
    if (blockIdx.x == comm.rank % threads / blockDim.x && threadIdx.x == 0)
        wait_signal(gin, blockIdx.x, before + comm.nRanks, out);
    __syncthreads();
    part_ends(1);
    gin.flush(ncclCoopCta());
    part_ends(2);
    barrier.sync(ncclCoopCta(), cuda::memory_order_release, ncclGinFenceLevel::Relaxed);
    part_ends(3);
    if (measures && last - begin > parts[LONGEST]) parts[LONGEST] = last - begin;
}

void with_barriers(Rank& rank, World& world, size_t area) {
    const int n = rank.count(), blocks = rank.options.blocks;
    unsigned long long *bad, *parts, ns[LONGEST + 1];
    CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
    CUDA(cudaMalloc(&parts, sizeof ns));
    char* memory = static_cast<char*>(world.memory);
    for (size_t total : small_alltoall_sizes()) {
        const size_t bytes = total / n / 16 * 16, words = bytes / 8;
        give_all(rank, memory, words, world.stream);
        world.fill(area, bytes * n, 0xEE);
        double us = 0;
        for (int times : {5, small_alltoall_rounds(rank)}) {
            rank.stage(format("all-to-all between barriers, %zu bytes", total).c_str());
            CUDA(cudaMemset(parts, 0, sizeof ns));
            us = microseconds_of(rank, world.stream, times, [&] {
                between_barriers<<<blocks, THREADS, 0, world.stream>>>(world.device, world.window, world.barrier, area,
                                                                       bytes, parts, world.out);
            });
            if (world.out->failed)
                throw Failure(format("all-to-all between barriers, %zu bytes: waited 8 s for a signal", total));
        }
        compare_all(rank, "all-to-all between barriers", memory + area, words, bad, world.stream);
        rank.row(format("all-to-all between barriers, %d blocks", blocks).c_str(), total, us, "us");
        CUDA(cudaMemcpy(ns, parts, sizeof ns, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < std::size(PARTS); i++)
            rank.row(format("of which %s", PARTS[i]).c_str(), total, ns[i] / 1e3 / small_alltoall_rounds(rank), "us");
        rank.row("the longest of them", total, ns[LONGEST] / 1e3, "us");
    }
    CUDA(cudaFree(parts));
    CUDA(cudaFreeHost(bad));
}

void plain(Rank& rank, World& world, size_t area) {
    const int n = rank.count();
    uint64_t base = 0;
    for (size_t total : {size_t{64} << 10, size_t{1} << 20, size_t{16} << 20, area}) {
        const size_t bytes = total / n / 8 * 8;
        const int rounds = rank.options.quick ? 4 : 20;
        std::vector<uint64_t> data(bytes * n / 8);
        for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i, bytes);
        world.write(0, data);
        world.fill(area, bytes * n, 0xEE);
        world.run("all-to-all", [&] {
            gin_all_to_all<<<PLAIN_BLOCKS, 1, 0, world.stream>>>(world.device, world.window, area, bytes, rounds, base,
                                                                 world.out);
        });
        base += uint64_t(rounds) * n;
        world.verify("all-to-all", area, bytes * n / 8, [&](size_t i) {
            const size_t words = bytes / 8, from = i / words;
            return mix(from, rank.index * words + i % words, bytes);
        });
        rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / world.out->nanoseconds, "GB/s");
    }
}

PROGRAM(alltoall) {
    const size_t area = rank.options.gin_barrier ? 16 << 20 : rank.options.quick ? 32 << 20 : 256 << 20;
    const int blocks = rank.options.blocks;
    World world(rank, 2 * area,
                {.signals = std::max(blocks, PLAIN_BLOCKS), .contexts = PLAIN_BLOCKS, .barriers = blocks});
    if (!rank.options.gin_barrier) plain(rank, world, area);
    with_barriers(rank, world, area);
    world.close();
}

}  // namespace alltoall_program
