// A table in the host memory of all ranks, of which kernels fetch entries by get + flush, as DeepEP's engrams are fetched:
// 12,288 entries of 256 bytes from anywhere, one context for each multiprocessor, by kernels that fill the GPU, then nothing for
// some milliseconds. Every entry is compared.
#include <thread>

#include "common/gin.cuh"
#include "common/vmm.cuh"

namespace engram_program {

#if HAVE_GET
constexpr int ENTRIES = 12288, THREADS = 1024, WARPS = THREADS / 32;
constexpr size_t ENTRY = 256;  // bytes

#if NCCL_VERSION_CODE >= 23007
constexpr auto TOGETHER = ncclGinOptFlagsAggregateRequests;
#else
constexpr auto TOGETHER = ncclGinOptFlagsDefault;
#endif

// Which entry comes to a place: of which rank, and its number there.
__host__ __device__ inline uint64_t wanted(int rank, int place, int round) { return mix(rank, place, round) >> 16; }

// The first thread of each warp asks for some, `each` are a rank's, which lie behind the place where they come to.
__global__ void __launch_bounds__(THREADS, 1) fetch(ncclDevComm comm, ncclWindow_t window, size_t table, uint64_t each, int round) {
    ncclGin gin{comm, int(blockIdx.x % comm.ginContextCount)};
    if (threadIdx.x % 32) return;
    for (int i = blockIdx.x * WARPS + threadIdx.x / 32; i < ENTRIES; i += gridDim.x * WARPS) {
        const uint64_t entry = wanted(comm.rank, i, round) % (each * comm.nRanks);
        gin.get(ncclTeamWorld(comm), int(entry / each), window, table + entry % each * ENTRY, window, i * ENTRY, ENTRY,
                ncclCoopThread{}, ncclGin_None{}, TOGETHER, ncclGin_SegmentMixed{});
    }
}

// They are all there once this kernel ends.
__global__ void __launch_bounds__(THREADS, 1) await(ncclDevComm comm) {
    if (threadIdx.x || blockIdx.x >= comm.ginContextCount) return;
    ncclGin gin{comm, int(blockIdx.x)};
    gin.flush(ncclCoopThread());
}

PROGRAM(engram) {
    int processors = 0;
    CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, rank.gpu()));
    Segments memory({Where::GPU, Where::HOST}, 32 << 20);
    World world(rank, memory.bytes(), {.contexts = processors, .memory = memory.base(), .segment = memory.each, .queue_depth = 1024});
    const size_t table = memory.each, words = ENTRY / 8;
    const uint64_t each = memory.each / ENTRY;
    std::vector<uint64_t> own(memory.each / 8);
    for (size_t i = 0; i < own.size(); i++) own[i] = mix(rank.index, i);
    world.write(table, own);
    cudaEvent_t began, ended;
    CUDA(cudaEventCreate(&began));
    CUDA(cudaEventCreate(&ended));
    std::vector<double> times;
    const int rounds = rank.options.quick ? 6 : 40;
    for (int round = 0; round < rounds; round++) {
        world.fill(0, ENTRIES * ENTRY, 0xEE);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        world.run("get + flush", [&] {
            CUDA(cudaEventRecord(began, world.stream));
            fetch<<<processors, THREADS, 0, world.stream>>>(world.device, world.window, table, each, round);
            await<<<processors, THREADS, 0, world.stream>>>(world.device);
            CUDA(cudaEventRecord(ended, world.stream));
        });
        float ms = 0;
        CUDA(cudaEventElapsedTime(&ms, began, ended));
        times.push_back(ms * 1e3);
        world.verify("get + flush", 0, ENTRIES * words, [&](size_t i) {
            const uint64_t entry = wanted(rank.index, i / words, round) % (each * rank.count());
            return mix(entry / each, entry % each * words + i % words);
        });
    }
    std::sort(times.begin(), times.end());
    rank.row("12,288 entries from host memory, best", ENTRY, times.front(), "us");
    rank.row("12,288 entries from host memory, median", ENTRY, times[times.size() / 2], "us");
    rank.row("12,288 entries from host memory, worst", ENTRY, times.back(), "us");
    CUDA(cudaEventDestroy(began));
    CUDA(cudaEventDestroy(ended));
    world.close();
    memory.free();
}
#else
PROGRAM(engram) { throw Absent("this NCCL's device API has no get"); }
#endif

}  // namespace engram_program
