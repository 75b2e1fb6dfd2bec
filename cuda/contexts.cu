// Many contexts from many blocks and threads at once: every thread puts pieces of odd sizes to every rank, through a context
// and with a signal of its own; all places are compared, gaps included.
#include "common/gin.cuh"

namespace contexts_program {

constexpr int BLOCKS = 32, THREADS = 4, PIECES = 8;
constexpr size_t PLACE = 4096;  // room for one piece

// A piece's length: 8 to PLACE - 8 bytes, a multiple of 8.
__host__ __device__ inline size_t piece_bytes(int from, int to, int index) { return (mix(from, to, index) % (PLACE / 8 - 1) + 1) * 8; }

// Thread t of all uses context t modulo their number, and a signal of its own there.
__global__ void scatter(ncclDevComm comm, ncclWindow_t window, size_t receive, int each, Outcome* out) {
    const int thread = blockIdx.x * THREADS + threadIdx.x, pieces = BLOCKS * THREADS * each;
    ncclGin gin{comm, thread % int(comm.ginContextCount)};
    const uint64_t started = now_ns();
    for (int p = 0; p < each; p++)
        for (int peer = 0; peer < comm.nRanks; peer++) {
            const int index = thread * each + p;
            const size_t at = size_t(index) * PLACE;
            gin.put(ncclTeamWorld(comm), peer, window, receive + comm.rank * pieces * PLACE + at, window, at,
                    piece_bytes(comm.rank, peer, index), SignalInc{ncclGinSignal_t(thread)});
        }
    if (!wait_signal(gin, thread, uint64_t(each) * comm.nRanks, out)) return;
    gin.flush(ncclCoopThread());
    atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), now_ns() - started);
}

void scatter_through(Rank& rank, int contexts, int each) {
    const int pieces = BLOCKS * THREADS * each;
    const size_t area = pieces * PLACE;
    World world(rank, area * (1 + rank.count()), {.signals = BLOCKS * THREADS, .contexts = contexts});
    std::vector<uint64_t> data(area / 8);
    for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i);
    world.write(0, data);
    world.fill(area, area * rank.count(), 0xEE);
    world.run("scatter", [&] { scatter<<<BLOCKS, THREADS, 0, world.stream>>>(world.device, world.window, area, each, world.out); });
    for (int from = 0; from < rank.count(); from++)
        world.verify("scatter", area * (1 + from), area / 8, [&](size_t i) {
            const size_t index = i * 8 / PLACE, at = i * 8 % PLACE;
            return at < piece_bytes(from, rank.index, index) ? mix(from, i) : 0xEEEEEEEEEEEEEEEEull;
        });
    std::string name = format("%d blocks x %d, %u contexts", BLOCKS, THREADS, world.device.ginContextCount);
    rank.row(name.c_str(), 0, pieces * rank.count() * 1e3 / world.out->nanoseconds, "M/s");
    world.close();
}

PROGRAM(contexts) {
    scatter_through(rank, 16, PIECES);
    // As many as DeepEP asks for, and more than there are warps.
    for (int contexts : {17, 65, 129}) scatter_through(rank, contexts, 2);
}

}  // namespace contexts_program
