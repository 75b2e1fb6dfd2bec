// Floods of put + signal, every rank to its right neighbour at once, from one and from several contexts; then large puts
// for bandwidth, at last from rank 0 alone. Every message goes to a place of its own, and all of them are compared.
#include "common/gin.cuh"

namespace flood_program {

__global__ void flood(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int slots, int count,
                      ncclGinSignal_t signal, Outcome* out) {
    const int context = blockIdx.x;
    ncclGin gin{comm, context};
    const int right = (comm.rank + 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = 0; i < count; i++) {
        const size_t at = (size_t(context) * slots + i % slots) * bytes;
        gin.put(ncclTeamWorld(comm), right, window, receive + at, window, at, bytes, SignalInc{signal});
    }
    if (!wait_signal(gin, signal, count, out)) return;
    gin.flush(ncclCoopThread());
    atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), now_ns() - started);
}

// Rank 0 puts, rank 1 answers once all have come, and that ends the time.
__global__ void one_way(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int slots, int count,
                        ncclGinSignal_t signal, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const uint64_t started = now_ns();
    if (comm.rank == 0) {
        for (int i = 0; i < count; i++) {
            const size_t at = i % slots * bytes;
            gin.put(world, 1, window, receive + at, window, at, bytes, SignalInc{signal});
        }
        if (!wait_signal(gin, signal, 1, out)) return;
    } else if (comm.rank == 1) {
        if (!wait_signal(gin, signal, count, out)) return;
        gin.signal(world, 0, SignalInc{signal});
    }
    gin.flush(ncclCoopThread());
    out->nanoseconds = now_ns() - started;
}

PROGRAM(flood) {
    const size_t area = 256 << 20;
    const int most = 8;
    World world(rank, 2 * area, {.signals = 8, .contexts = most});
    if ((int)world.device.ginContextCount < most)
        throw Failure(format("asked for %d contexts, got %u", most, world.device.ginContextCount));
    const int left = (rank.index + rank.count() - 1) % rank.count();
    ncclGinSignal_t signal = 0;  // a fresh one each time
    auto one = [&](int contexts, size_t bytes, int slots, int count, bool rate, bool alone = false) {
        const size_t words = contexts * slots * bytes / 8;
        std::vector<uint64_t> data(words);
        for (size_t i = 0; i < words; i++) data[i] = mix(rank.index, i, bytes + contexts);
        world.write(0, data);
        world.fill(area, words * 8, 0xEE);
        world.run("flood", [&] {
            if (alone)
                one_way<<<1, 1, 0, world.stream>>>(world.device, world.window, area, bytes, slots, count, signal, world.out);
            else
                flood<<<contexts, 1, 0, world.stream>>>(world.device, world.window, area, bytes, slots, count, signal, world.out);
        });
        signal++;
        if (!alone || rank.index == 1)
            world.verify("flood", area, words, [&](size_t i) { return mix(left, i, bytes + contexts); });
        const double ns = world.out->nanoseconds, n = double(contexts) * count;
        std::string name = format("put + signal, %d context%s%s", contexts, contexts == 1 ? "" : "s", alone ? ", one way" : "");
        if (rate) rank.row(name.c_str(), bytes, n * 1e3 / ns, "M/s");
        else rank.row(name.c_str(), bytes, n * bytes / ns, "GB/s");
    };
    const bool quick = rank.options.quick;
    const int scale = quick ? 1 : 10;
    const size_t large = quick ? 8 << 20 : 64 << 20;
    // At least as many messages as places.
    one(1, 8, 1024, 2048 * scale, true);
    one(most, 8, 1024, 1024 * scale, true);
    one(1, 64 << 10, 64, 500 * scale, true);
    one(1, large, 4, 4 * scale, false);
    one(most, large / 4, 2, 2 * scale, false);
    one(1, large, 4, 4 * scale, false, true);
    world.close();
}

}  // namespace flood_program
