// Hybrid all-to-all: stores to the peers whose memory this GPU maps (the LSA team), GIN puts to the others.
#include "common/gin.cuh"

namespace hybrid_program {

constexpr int BLOCKS = 4, THREADS = 256;

__global__ void all_to_all(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, uint64_t base, Outcome* out) {
    const int block = blockIdx.x;
    // The block that serves a peer, and with it the context, follows from the peer: its signals arrive in one place.
    ncclGin gin{comm, block % int(comm.ginContextCount)};
    const ncclTeam world = ncclTeamWorld(comm), lsa = ncclTeamLsa(comm);
    const int first = comm.rank - lsa.rank, remote = comm.nRanks - lsa.nRanks;
    const size_t words = bytes / 8, place = receive + comm.rank * bytes;
    const uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        if (threadIdx.x == 0)
            for (int k = block; k < comm.nRanks; k += gridDim.x)
                if (k < first || k >= first + lsa.nRanks)
                    gin.put(world, k, window, place, window, k * bytes, bytes, SignalInc{ncclGinSignal_t(block)});
        for (int k = 0; k < lsa.nRanks; k++) {
            auto* to = static_cast<uint64_t*>(ncclGetLsaPointer(window, place, k));
            const uint64_t* from = local(window, (first + k) * bytes);
            for (size_t w = block * blockDim.x + threadIdx.x; w < words; w += size_t(gridDim.x) * blockDim.x) to[w] = from[w];
        }
        if (threadIdx.x == 0 && block == comm.rank % int(gridDim.x) && remote &&
            !wait_signal(gin, block, base + uint64_t(i + 1) * remote, out, i))
            return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        gin.flush(ncclCoopThread());
        atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), (now_ns() - started) / rounds);
    }
}

PROGRAM(hybrid) {
    const size_t area = rank.options.quick ? 16 << 20 : 64 << 20;
    const int n = rank.count();
    World world(rank, 2 * area, {.signals = BLOCKS, .contexts = BLOCKS});
    const int remote = n - ncclTeamLsa(world.comm).nRanks;
    uint64_t base = 0;
    for (size_t total : {size_t{64} << 10, size_t{4} << 20, area}) {
        const size_t bytes = total / n / 8 * 8;
        const int rounds = rank.options.quick ? 4 : 20;
        std::vector<uint64_t> data(bytes * n / 8);
        for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i, bytes);
        world.write(0, data);
        world.fill(area, bytes * n, 0xEE);
        // `run` begins and ends with a barrier of all ranks: the stores of the others are in place after it.
        world.run("hybrid all-to-all", [&] {
            all_to_all<<<BLOCKS, THREADS, 0, world.stream>>>(world.device, world.window, area, bytes, rounds, base, world.out);
        });
        base += uint64_t(rounds) * remote;
        world.verify("hybrid all-to-all", area, bytes * n / 8, [&](size_t i) {
            const size_t words = bytes / 8, from = i / words;
            return mix(from, rank.index * words + i % words, bytes);
        });
        std::string name = format("all-to-all, %d of %d by GIN", remote, n);
        rank.row(name.c_str(), bytes * n, double(bytes) * n / world.out->nanoseconds, "GB/s");
    }
    world.close();
}

}  // namespace hybrid_program
