// Round trips of put + signal while the kernel that waits for them fills the GPU: nothing else finds a place there, and
// must not be needed.
#include "common/gin.cuh"

namespace crowded_program {

// Block 0 plays; all others hold their places until it is done.
__global__ void __launch_bounds__(1024, 2) play(ncclDevComm comm, ncclWindow_t window, size_t receive, int rounds, uint64_t base, uint32_t* done, Outcome* out) {
    extern __shared__ uint64_t place[];
    if (threadIdx.x == 0) place[0] = 0;
    if (blockIdx.x != 0) {
        if (threadIdx.x == 0)
            wait_for([&] { return uint64_t(*static_cast<volatile uint32_t*>(done)); }, blockIdx.x, 1, out);
        __syncthreads();
        return;
    }
    if (threadIdx.x == 0) {
        ncclGin gin{comm, 0};
        const ncclTeam world = ncclTeamWorld(comm);
        const int peer = 1 - comm.rank;
        const uint64_t started = now_ns();
        for (int i = 0; i < rounds; i++) {
            if (comm.rank == 0) gin.put(world, peer, window, receive, window, 0, 8, SignalInc{0});
            if (!wait_signal(gin, 0, base + i + 1, out, i)) break;
            if (comm.rank == 1) gin.put(world, peer, window, receive, window, 0, 8, SignalInc{0});
        }
        out->nanoseconds = (now_ns() - started) / rounds;
        gin.flush(ncclCoopThread());
        __threadfence();
        *static_cast<volatile uint32_t*>(done) = 1;
    }
    __syncthreads();
}

PROGRAM(crowded) {
    if (rank.count() != 2) throw Failure("takes two ranks");
    World world(rank, 1 << 20);
    int processors = 0, shared = 0, each = 0;
    CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, rank.gpu()));
    CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, rank.gpu()));
    // All the threads of a processor, and nearly all its shared memory: two blocks of half of each.
    const int threads = 1024, bytes = shared / 2 - 2048;
    CUDA(cudaFuncSetAttribute(play, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, play, threads, bytes));
    if (each != 2) throw Failure(format("%d blocks fit on a processor, not 2: there is a place left", each));
    uint32_t* done;
    CUDA(cudaMalloc(&done, 4));
    const int rounds = rank.options.quick ? 500 : 5000;
    for (int time = 0; time < 2; time++) {
        CUDA(cudaMemsetAsync(done, 0, 4, world.stream));
        CUDA(cudaStreamSynchronize(world.stream));
        world.run("crowded", [&] {
            play<<<processors * each, threads, bytes, world.stream>>>(world.device, world.window, 1 << 19, rounds, uint64_t(time) * rounds,
                                                                    done, world.out);
        });
    }
    rank.row("put + signal round trip, GPU full", 8, world.out->nanoseconds / 1e3, "us");
    CUDA(cudaFree(done));
    world.close();
}

}  // namespace crowded_program
