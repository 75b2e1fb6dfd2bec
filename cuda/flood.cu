// Floods of put + signal, every rank to its right neighbour at once, from one and from several contexts; then large puts
// for bandwidth. Every message goes to a place of its own, and all of them are compared.
#include "common/gin.cuh"

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

int main(int argc, char** argv) {
    run_ranks("flood", argc, argv, [](Rank& rank) {
        const size_t area = 256 << 20;
        const int most = 8;
        World world(rank, 2 * area, {.signals = 8, .contexts = most});
        if ((int)world.device.ginContextCount < most)
            throw Failure(format("asked for %d contexts, got %u", most, world.device.ginContextCount));
        const int left = (rank.index + rank.count() - 1) % rank.count();
        ncclGinSignal_t signal = 0;  // a fresh one each time
        auto one = [&](int contexts, size_t bytes, int slots, int count, bool rate) {
            const size_t words = contexts * slots * bytes / 8;
            std::vector<uint64_t> data(words);
            for (size_t i = 0; i < words; i++) data[i] = mix(rank.index, i, bytes + contexts);
            world.write(0, data);
            world.fill(area, words * 8, 0xEE);
            world.run("flood", [&] {
                flood<<<contexts, 1, 0, world.stream>>>(world.device, world.window, area, bytes, slots, count, signal, world.out);
            });
            signal++;
            world.verify("flood", area, words, [&](size_t i) { return mix(left, i, bytes + contexts); });
            const double ns = world.out->nanoseconds, n = double(contexts) * count;
            std::string name = format("put + signal, %d context%s", contexts, contexts == 1 ? "" : "s");
            if (rate) rank.row(name.c_str(), bytes, n * 1e3 / ns, "M/s");
            else rank.row(name.c_str(), bytes, n * bytes / ns, "GB/s");
        };
        const int scale = rank.options.quick ? 1 : 10;
        // At least as many messages as places.
        one(1, 8, 1024, 2048 * scale, true);
        one(most, 8, 1024, 1024 * scale, true);
        one(1, 64 << 10, 64, 500 * scale, true);
        one(1, 64 << 20, 4, 4 * scale, false);
        one(most, 16 << 20, 2, 2 * scale, false);
        world.close();
    });
}
