// Signals: many senders adding to one, increments and additions, by index and by address, weak and strong, and resets
// over thousands of rounds. Sums must be exact.
#include "common/gin.cuh"

namespace signals_program {

enum { INC, ADD, STRONG, WEAK, PING, ACK, SIGNALS };

// Every rank signals every rank, itself included.
__global__ void sums(ncclDevComm comm, ncclWindow_t window, size_t va_inc, size_t va_add, int count, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    uint64_t total = 0;
    for (int i = 0; i < count; i++)
        for (int peer = 0; peer < comm.nRanks; peer++) {
            const uint64_t value = (uint64_t(i) << 33) + peer + 1;  // above 32 bits too
            gin.signal(world, peer, SignalInc{INC});
            gin.signal(world, peer, SignalAdd{ADD, value});
            gin.signal(world, peer, VASignalInc{window, va_inc});
            gin.signal(world, peer, VASignalAdd{window, va_add, value});
            if (peer == comm.rank) total += value;
        }
    const uint64_t incs = uint64_t(count) * comm.nRanks;
    total *= comm.nRanks;
    if (!wait_signal(gin, INC, incs, out) || !wait_signal(gin, ADD, total, out)) return;
    if (!wait_for([&] { return gin.readSignal(window, va_inc); }, 100, incs, out)) return;
    if (!wait_for([&] { return gin.readSignal(window, va_add); }, 101, total, out)) return;
    gin.flush(ncclCoopThread());
}

// After all ranks are done nothing may have been added twice.
__global__ void exact(ncclDevComm comm, ncclWindow_t window, size_t va_inc, size_t va_add, uint64_t incs, uint64_t total, Outcome* out) {
    ncclGin gin{comm, 0};
    const uint64_t found[] = {gin.readSignal(INC), gin.readSignal(ADD), gin.readSignal(window, va_inc), gin.readSignal(window, va_add)};
    for (int i = 0; i < 4; i++)
        if (uint64_t wanted = i % 2 ? total : incs; found[i] != wanted) return report(out, 2, i, wanted, found[i], 0);
}

// Puts without a signal, then one strong signal: when it shows, all of them do.
__global__ void strong(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int puts, int rounds, uint64_t before,
                       Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks, left = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    for (int i = 0; i < rounds; i++) {
        for (int p = 0; p < puts; p++) {
            store(local(window, p * bytes + bytes - 8), mix(comm.rank, i, p));
            gin.put(world, right, window, receive + p * bytes, window, p * bytes, bytes);
        }
        gin.signal(world, right, SignalInc{STRONG});
        if (!wait_signal(gin, STRONG, before + i + 1, out, i)) return;
        for (int p = 0; p < puts; p++)
            if (uint64_t found = load(local(window, receive + p * bytes + bytes - 8)); found != mix(left, i, p))
                return report(out, 2, p, mix(left, i, p), found, i);
        // Neither side writes again before the other has looked.
        gin.flush(ncclCoopThread());
        gin.signal(world, left, SignalInc{ACK});
        if (!wait_signal(gin, ACK, before + i + 1, out, i)) return;
    }
}

#if HAVE_WEAK_SIGNALS
// A weak signal vouches for its own put.
__global__ void weak(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int rounds, uint64_t acks, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks, left = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    for (int i = 0; i < rounds; i++) {
        store(local(window, bytes - 8), mix(comm.rank, i));
        gin.put(world, right, window, receive, window, 0, bytes, ncclGin_WeakSignalInc{WEAK});
        if (!wait_signal(gin, WEAK, i + 1, out, i)) return;
        if (uint64_t found = load(local(window, receive + bytes - 8)); found != mix(left, i))
            return report(out, 2, 0, mix(left, i), found, i);
        gin.flush(ncclCoopThread());
        gin.signal(world, left, ncclGin_WeakSignalInc{ACK});
        if (!wait_signal(gin, ACK, acks + i + 1, out, i)) return;
    }
}
#endif

// Each round starts from a signal that was set back to zero. The acknowledgement keeps the next increment away from the
// reset, as the API asks.
__global__ void resets(ncclDevComm comm, int rounds, uint64_t acks, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks, left = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        gin.signal(world, right, SignalInc{PING});
        if (!wait_signal(gin, PING, 1, out, i)) return;
        if (uint64_t found = gin.readSignal(PING); found != 1) return report(out, 2, PING, 1, found, i);
        gin.resetSignal(PING);
        gin.signal(world, left, SignalInc{ACK});
        if (!wait_signal(gin, ACK, acks + i + 1, out, i)) return;
    }
    out->nanoseconds = (now_ns() - started) / rounds;
    gin.flush(ncclCoopThread());
}

PROGRAM(signals) {
    const size_t va_inc = 0, va_add = 64, receive = 16 << 20;
    const int scale = rank.options.quick ? 1 : 10, n = rank.count();
    // Signals by address want a window whose writes stay in order.
    World world(rank, 2 * receive, {.signals = SIGNALS, .window_flags = NCCL_WIN_STRICT_ORDERING});
    world.fill(0, 2 * receive, 0);
    int count = 50 * scale;
    world.run("inc and add, by index and address",
              [&] { sums<<<1, 1, 0, world.stream>>>(world.device, world.window, va_inc, va_add, count, world.out); });
    uint64_t total = 0;
    for (int i = 0; i < count; i++) total += (uint64_t(i) << 33) + rank.index + 1;
    world.run("exact sums", [&] {
        exact<<<1, 1, 0, world.stream>>>(world.device, world.window, va_inc, va_add, uint64_t(count) * n, total * n, world.out);
    });
    rank.row("exact sums", 0, 4.0 * count * n, "signals");
    uint64_t acks = 0;
    for (size_t bytes : {size_t{8}, size_t{256} << 10}) {
        const int rounds = 20 * scale, puts = 16;
        world.run("strong signal after puts", [&] {
            strong<<<1, 1, 0, world.stream>>>(world.device, world.window, receive, bytes, puts, rounds, acks, world.out);
        });
        acks += rounds;
        rank.row("strong signal after 16 puts", bytes, rounds, "rounds");
    }
#if HAVE_WEAK_SIGNALS
    const int rounds = 50 * scale;
    world.run("weak signal", [&] {
        weak<<<1, 1, 0, world.stream>>>(world.device, world.window, receive, 64 << 10, rounds, acks, world.out);
    });
    acks += rounds;
    rank.row("put + weak signal", 64 << 10, rounds, "rounds");
#endif
    const int times = 500 * scale;
    world.run("reset", [&] { resets<<<1, 1, 0, world.stream>>>(world.device, times, acks, world.out); });
    rank.row("signal, reset, acknowledge", 0, world.out->nanoseconds / 1e3, "us");
    world.close();
}

}  // namespace signals_program
