// Many contexts from many blocks and threads at once: every thread puts pieces of odd sizes to every rank, through the
// context of its block, with signals of its block; all places are compared, gaps included.
#include "common/gin.cuh"

namespace contexts_program {

constexpr int BLOCKS = 32, THREADS = 4, PIECES = 8;
constexpr size_t PLACE = 4096;  // room for one piece

// A piece's length: 8 to PLACE - 8 bytes, a multiple of 8.
__host__ __device__ inline size_t piece_bytes(int from, int to, int index) { return (mix(from, to, index) % (PLACE / 8 - 1) + 1) * 8; }

__global__ void scatter(ncclDevComm comm, ncclWindow_t window, size_t receive, Outcome* out) {
    const int block = blockIdx.x;
    ncclGin gin{comm, block % int(comm.ginContextCount)};
    const int pieces = BLOCKS * THREADS * PIECES;
    const uint64_t started = now_ns();
    for (int p = 0; p < PIECES; p++)
        for (int peer = 0; peer < comm.nRanks; peer++) {
            const int index = (block * THREADS + threadIdx.x) * PIECES + p;
            const size_t at = size_t(index) * PLACE;
            gin.put(ncclTeamWorld(comm), peer, window, receive + comm.rank * pieces * PLACE + at, window, at,
                    piece_bytes(comm.rank, peer, index), SignalInc{ncclGinSignal_t(block)});
        }
    if (threadIdx.x == 0 && !wait_signal(gin, block, uint64_t(THREADS) * PIECES * comm.nRanks, out)) return;
    gin.flush(ncclCoopThread());
    atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), now_ns() - started);
}

PROGRAM(contexts) {
    const int pieces = BLOCKS * THREADS * PIECES;
    const size_t area = pieces * PLACE;
    World world(rank, area * (1 + rank.count()), {.signals = BLOCKS, .contexts = 16});
    std::vector<uint64_t> data(area / 8);
    for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i);
    world.write(0, data);
    world.fill(area, area * rank.count(), 0xEE);
    world.run("scatter", [&] { scatter<<<BLOCKS, THREADS, 0, world.stream>>>(world.device, world.window, area, world.out); });
    for (int from = 0; from < rank.count(); from++)
        world.verify("scatter", area * (1 + from), area / 8, [&](size_t i) {
            const size_t index = i * 8 / PLACE, at = i * 8 % PLACE;
            return at < piece_bytes(from, rank.index, index) ? mix(from, i) : 0xEEEEEEEEEEEEEEEEull;
        });
    std::string name = format("%d blocks x %d, %u contexts", BLOCKS, THREADS, world.device.ginContextCount);
    rank.row(name.c_str(), 0, pieces * rank.count() * 1e3 / world.out->nanoseconds, "M/s");
    world.close();
}

}  // namespace contexts_program
