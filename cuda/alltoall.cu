// All-to-all with GIN only: every rank puts a block to every rank, the own one included, spread over blocks of threads
// and contexts.
#include "common/gin.cuh"

__global__ void all_to_all(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, uint64_t base, Outcome* out) {
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

int main(int argc, char** argv) {
    run_ranks("alltoall", argc, argv, [](Rank& rank) {
        const size_t area = 256 << 20;
        const int blocks = 4, n = rank.count();
        World world(rank, 2 * area, {.signals = blocks, .contexts = blocks});
        uint64_t base = 0;
        for (size_t total : {size_t{64} << 10, size_t{1} << 20, size_t{32} << 20, area}) {
            const size_t bytes = total / n / 8 * 8;
            const int rounds = rank.options.quick ? 4 : 20;
            std::vector<uint64_t> data(bytes * n / 8);
            for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i, bytes);
            world.write(0, data);
            world.fill(area, bytes * n, 0xEE);
            world.run("all-to-all", [&] {
                all_to_all<<<blocks, 1, 0, world.stream>>>(world.device, world.window, area, bytes, rounds, base, world.out);
            });
            base += uint64_t(rounds) * n;
            world.verify("all-to-all", area, bytes * n / 8, [&](size_t i) {
                const size_t words = bytes / 8, from = i / words;
                return mix(from, rank.index * words + i % words, bytes);
            });
            rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / world.out->nanoseconds, "GB/s");
        }
        world.close();
    });
}
