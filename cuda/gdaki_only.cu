// Kernels that are compiled for NCCL's GDAKI backend alone, as DeepEP V2.5 compiles its own: they read whatever context they
// are given as one of GDAKI's. Puts around the ring with a signal and a counter, values, and gets with a flush behind them.
// The compiler's pass for the host does without: there NCCL's headers have no GDAKI, and need some backend.
#ifdef __CUDA_ARCH__
#define NCCL_GIN_PROXY_ENABLE 0
#define NCCL_GIN_GPI_ENABLE 0
#endif
#include "common/gin.cuh"

namespace gdaki_only_program {

constexpr int SLOTS = 16;

__global__ void around(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks, left = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        const size_t slot = i % SLOTS * bytes;
        // The source may be written again when the put before it in this slot was counted.
        if (i >= SLOTS && !wait_counter(gin, 0, i - SLOTS + 1, out, i)) return;
        for (size_t at = 0; at < bytes; at += 8) store(local(window, slot + at), mix(comm.rank, i, at));
        __threadfence_system();
        gin.put(world, right, window, receive + slot, window, slot, bytes, SignalInc{0}, CounterInc{0});
        if (!wait_signal(gin, 0, i + 1, out, i)) return;
        for (size_t at = 0; at < bytes; at += 8)
            if (uint64_t found = load(local(window, receive + slot + at)); found != mix(left, i, at))
                return report(out, 2, at, mix(left, i, at), found, i);
        // The left one's next put into this slot comes after this.
        gin.signal(world, left, SignalInc{1});
        if (!wait_signal(gin, 1, i + 1, out, i)) return;
    }
    gin.flush(ncclCoopThread());
    out->nanoseconds = (now_ns() - started) / rounds;
}

__global__ void values_to_all(ncclDevComm comm, ncclWindow_t window, size_t area, Outcome* out) {
    ncclGin gin{comm, 1};
    const ncclTeam world = ncclTeamWorld(comm);
    const uint64_t started = now_ns();
    for (int peer = 0; peer < comm.nRanks; peer++)
        gin.putValue(world, peer, window, area + 8 * comm.rank, mix(comm.rank, peer), SignalInc{2});
    if (!wait_signal(gin, 2, comm.nRanks, out)) return;
    for (int peer = 0; peer < comm.nRanks; peer++)
        if (uint64_t found = load(local(window, area + 8 * peer)); found != mix(peer, comm.rank))
            return report(out, 2, peer, mix(peer, comm.rank), found, 0);
    out->nanoseconds = now_ns() - started;
}

#if HAVE_GET
__global__ void fetch_from_all(ncclDevComm comm, ncclWindow_t window, size_t area, size_t bytes, Outcome* out) {
    ncclGin gin{comm, 0};
    for (int peer = 0; peer < comm.nRanks; peer++)
        gin.get(ncclTeamWorld(comm), peer, window, 0, window, area + peer * bytes, bytes);
    gin.flush(ncclCoopThread());
    for (int peer = 0; peer < comm.nRanks; peer++)
        for (size_t at : {size_t{0}, bytes - 8})
            if (uint64_t found = load(local(window, area + peer * bytes + at)); found != mix(peer, at, 7))
                return report(out, 2, peer, mix(peer, at, 7), found, 0);
}
#endif

// Signals and counters begin at 0 in each.
void one_size(Rank& rank, size_t bytes) {
    const size_t area = 4 << 20;
    const int rounds = rank.options.quick ? 100 : 2000;
    World world(rank, area * (2 + rank.count()), {.signals = 3, .counters = 1});
    world.run("around", [&] { around<<<1, 1, 0, world.stream>>>(world.device, world.window, area, bytes, rounds, world.out); });
    rank.row("around the ring, checked", bytes, world.out->nanoseconds / 1e3, "us");
    world.run("values", [&] { values_to_all<<<1, 1, 0, world.stream>>>(world.device, world.window, area, world.out); });
#if HAVE_GET
    std::vector<uint64_t> data(bytes / 8);
    for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i * 8, 7);
    world.write(0, data);
    world.run("gets", [&] {
        fetch_from_all<<<1, 1, 0, world.stream>>>(world.device, world.window, 2 * area, bytes, world.out);
    });
#endif
    world.close();
}

PROGRAM(gdaki_only) {
    const char* engine = getenv("OXYGIN_ENGINE");
    if (!engine || strncmp(engine, "gdaki", 5)) throw Absent("OXYGIN_ENGINE is none of GDAKI's: these kernels would fault");
    for (size_t bytes : {size_t{8}, size_t{4} << 10}) one_size(rank, bytes);
}

}  // namespace gdaki_only_program
