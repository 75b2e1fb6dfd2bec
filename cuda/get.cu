// get + flush from every rank, the own one included: once flush returns, the data are in place.
#include "common/gin.cuh"

namespace get_program {

#if HAVE_GET
__global__ void fetch(ncclDevComm comm, ncclWindow_t window, size_t area, size_t bytes, int round, Outcome* out) {
    ncclGin gin{comm, 0};
    const uint64_t started = now_ns();
    for (int peer = 0; peer < comm.nRanks; peer++)
        gin.get(ncclTeamWorld(comm), peer, window, 0, window, area + peer * bytes, bytes);
    gin.flush(ncclCoopThread());
    out->nanoseconds = now_ns() - started;
    // Seen by the kernel itself, at once.
    for (int peer = 0; peer < comm.nRanks; peer++)
        for (size_t at : {size_t{0}, bytes - 8})
            if (uint64_t found = load(local(window, area + peer * bytes + at)); found != mix(peer, at, round))
                return report(out, 2, peer, mix(peer, at, round), found, round);
}

PROGRAM(get) {
    const size_t area = 4 << 20;
    World world(rank, area * (1 + rank.count()));
    int round = 0;
    for (size_t bytes : {size_t{8}, size_t{4} << 10, size_t{1} << 20, area}) {
        const int rounds = rank.options.quick ? 5 : 50;
        double best = 1e18;
        for (int i = 0; i < rounds; i++, round++) {
            std::vector<uint64_t> data(bytes / 8);
            for (size_t k = 0; k < data.size(); k++) data[k] = mix(rank.index, k * 8, round);
            world.write(0, data);
            world.run("get + flush", [&] {
                fetch<<<1, 1, 0, world.stream>>>(world.device, world.window, area, bytes, round, world.out);
            });
            best = std::min(best, double(world.out->nanoseconds));
            world.verify("get + flush", area, bytes * rank.count() / 8,
                         [&](size_t k) { return mix(k / (bytes / 8), k % (bytes / 8) * 8, round); });
        }
        rank.row("get from every rank + flush", bytes, best / 1e3, "us");
    }
    world.close();
}
#else
PROGRAM(get) { throw Absent("this NCCL's device API has no get"); }
#endif

}  // namespace get_program
