// Local completion: a counter lets the sender reuse its buffer. Four source slots are rewritten as soon as their counter
// moves; a counter that moves too early shows as a later message's data in an earlier one's place.
#include "common/gin.cuh"

namespace counters_program {

constexpr int SLOTS = 4;

__global__ void reuse(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int count, Outcome* out) {
    ncclGin gin{comm, 0};
    const int right = (comm.rank + 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = 0; i < count; i++) {
        const int slot = i % SLOTS;
        if (!wait_counter(gin, slot, i / SLOTS, out, i)) return;
        for (size_t at = 0; at < bytes; at += 8) store(local(window, slot * bytes + at), mix(comm.rank, i, at));
        gin.put(ncclTeamWorld(comm), right, window, receive + i * bytes, window, slot * bytes, bytes, SignalInc{0},
                CounterInc{ncclGinCounter_t(slot)});
    }
    for (int slot = 0; slot < SLOTS; slot++)
        if (!wait_counter(gin, slot, count / SLOTS, out, count)) return;
    if (!wait_signal(gin, 0, count, out)) return;
    for (int slot = 0; slot < SLOTS; slot++) {
        gin.resetCounter(slot);
        if (gin.readCounter(slot) != 0) return report(out, 2, slot, 0, gin.readCounter(slot), count);
    }
    out->nanoseconds = (now_ns() - started) / count;
}

PROGRAM(counters) {
    const size_t bytes = 1024, area = 4 << 20;
    const int count = rank.options.quick ? 400 : 4000, left = (rank.index + rank.count() - 1) % rank.count();
    World world(rank, 2 * area, {.signals = 1, .counters = SLOTS});
    world.fill(area, area, 0xEE);
    world.run("put + signal + counter", [&] {
        reuse<<<1, 1, 0, world.stream>>>(world.device, world.window, area, bytes, count, world.out);
    });
    world.verify("put + counter", area, count * bytes / 8,
                 [&](size_t i) { return mix(left, i / (bytes / 8), i % (bytes / 8) * 8); });
    rank.row("put + signal + counter", bytes, world.out->nanoseconds / 1e3, "us");
    world.close();
}

}  // namespace counters_program
