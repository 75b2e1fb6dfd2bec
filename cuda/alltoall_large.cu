// All-to-all with GIN only, 32 MiB to 1 GiB a rank: the figures to hold beside those of nccl_alltoall.
#include "common/alltoall.cuh"

namespace alltoall_large_program {

PROGRAM(alltoall_large) {
    const std::vector<size_t> sizes = alltoall_sizes(rank);
    const size_t area = sizes.back();
    const int blocks = 4, n = rank.count();
    World world(rank, 2 * area, {.signals = blocks, .contexts = blocks});
    unsigned long long* bad;
    CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
    char* memory = static_cast<char*>(world.memory);
    uint64_t base = 0;
    for (size_t total : sizes) {
        const size_t words = total / n / 8, bytes = words * 8;
        const int rounds = alltoall_rounds(rank, total);
        give_all(rank, memory, words, world.stream);
        world.fill(area, bytes * n, 0xEE);
        // The first round warms up; the second time counts.
        for (int times : {1, rounds}) {
            world.run("all-to-all", [&] {
                gin_all_to_all<<<blocks, 1, 0, world.stream>>>(world.device, world.window, area, bytes, times, base, world.out);
            });
            base += uint64_t(times) * n;
        }
        compare_all(rank, "all-to-all", memory + area, words, bad, world.stream);
        rank.row("all-to-all, a rank's bytes", bytes * n, double(bytes) * n / world.out->nanoseconds, "GB/s");
        rank.barrier();
    }
    CUDA(cudaFreeHost(bad));
    world.close();
}

}  // namespace alltoall_large_program
