// All-to-all with GIN only: every rank puts a block to every rank, the own one included, spread over blocks of threads
// and contexts.
#include "common/alltoall.cuh"

namespace alltoall_program {

PROGRAM(alltoall) {
    const size_t area = rank.options.quick ? 32 << 20 : 256 << 20;
    const int blocks = 4, n = rank.count();
    World world(rank, 2 * area, {.signals = blocks, .contexts = blocks});
    uint64_t base = 0;
    for (size_t total : {size_t{64} << 10, size_t{1} << 20, size_t{16} << 20, area}) {
        const size_t bytes = total / n / 8 * 8;
        const int rounds = rank.options.quick ? 4 : 20;
        std::vector<uint64_t> data(bytes * n / 8);
        for (size_t i = 0; i < data.size(); i++) data[i] = mix(rank.index, i, bytes);
        world.write(0, data);
        world.fill(area, bytes * n, 0xEE);
        world.run("all-to-all", [&] {
            gin_all_to_all<<<blocks, 1, 0, world.stream>>>(world.device, world.window, area, bytes, rounds, base, world.out);
        });
        base += uint64_t(rounds) * n;
        world.verify("all-to-all", area, bytes * n / 8, [&](size_t i) {
            const size_t words = bytes / 8, from = i / words;
            return mix(from, rank.index * words + i % words, bytes);
        });
        rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / world.out->nanoseconds, "GB/s");
    }
    world.close();
}

}  // namespace alltoall_program
