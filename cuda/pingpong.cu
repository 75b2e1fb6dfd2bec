// Round trips between two ranks: put + signal of several sizes, and signals alone. A first pass stamps and checks every
// message as it arrives, so that a signal that overtakes its data is seen; the second is timed.
#include "common/gin.cuh"

namespace pingpong_program {

__global__ void put_and_signal(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, bool check,
                               uint64_t base, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank, warm = rounds / 10;
    const size_t last = bytes - 8;
    uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        if (i == warm) started = now_ns();
        for (int turn = 0; turn < 2; turn++) {
            if (turn == comm.rank) {
                if (check) {
                    store(local(window, 0), mix(comm.rank, i));
                    store(local(window, last), mix(comm.rank, i));
                }
                gin.put(world, peer, window, receive, window, 0, bytes, SignalInc{0});
            } else {
                if (!wait_signal(gin, 0, base + i + 1, out, i)) return;
                if (!check) continue;
                for (size_t at : {size_t{0}, last})
                    if (uint64_t found = load(local(window, receive + at)); found != mix(peer, i))
                        return report(out, 2, at, mix(peer, i), found, i);
            }
        }
    }
    out->nanoseconds = (now_ns() - started) / (rounds - warm);
    gin.flush(ncclCoopThread());
}

__global__ void signal_only(ncclDevComm comm, int rounds, uint64_t base, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank, warm = rounds / 10;
    uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        if (i == warm) started = now_ns();
        if (comm.rank == 0) gin.signal(world, peer, SignalInc{0});
        if (!wait_signal(gin, 0, base + i + 1, out, i)) return;
        if (comm.rank == 1) gin.signal(world, peer, SignalInc{0});
    }
    out->nanoseconds = (now_ns() - started) / (rounds - warm);
    gin.flush(ncclCoopThread());
}

PROGRAM(pingpong) {
    if (rank.count() != 2) throw Failure("takes two ranks");
    const size_t area = rank.options.quick ? 4 << 20 : 16 << 20;
    const int rounds = rank.options.quick ? 100 : 2000;
    World world(rank, 2 * area);
    uint64_t base = 0;
    for (size_t bytes : {size_t{8}, size_t{1} << 10, size_t{64} << 10, size_t{1} << 20, area}) {
        const int n = bytes > (1 << 20) ? rounds / 10 : rounds;
        for (bool check : {true, false}) {
            std::vector<uint64_t> data(bytes / 8);
            for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i, bytes);
            world.write(0, data);
            world.run("put + signal", [&] {
                put_and_signal<<<1, 1, 0, world.stream>>>(world.device, world.window, area, bytes, n, check, base, world.out);
            });
            base += n;
            if (check) continue;
            world.verify("put + signal", area, bytes / 8, [&](size_t i) { return mix(1 - rank.index, i, bytes); });
            rank.row("put + signal round trip", bytes, world.out->nanoseconds / 1e3, "us");
        }
    }
    // The first pass is not counted here, either: what came before was large, and the way of the queues with it.
    for (int pass = 0; pass < 2; pass++, base += rounds)
        world.run("signal only", [&] { signal_only<<<1, 1, 0, world.stream>>>(world.device, rounds, base, world.out); });
    rank.row("signal round trip", 0, world.out->nanoseconds / 1e3, "us");
    world.close();
}

}  // namespace pingpong_program
