// Two GIN backends of one communicator at work at once: the plugin's own queues and NCCL's proxy over the RMA table. A device
// communicator of each, kernels of both beside each other on one window, then one made again beside the other's traffic.
#include "common/gin.cuh"

#if NCCL_VERSION_CODE < 23102

PROGRAM(two_backends) { throw Absent("NCCL before 2.31.2 has one GIN backend a communicator"); }

#else

namespace two_backends_program {

constexpr int ROUNDS = 400, THREADS = 128;
constexpr size_t BYTES = 24 << 10;  // of a put

// Each round every rank puts a block to every rank, the own one included, and reads what came. A second signal says that it
// has read: the next round overwrites it. `area`: what is to be sent, then a place for each rank. `before`: rounds that this
// device communicator has had; a signal of a peer that is ahead may be there already.
__global__ void exchange(ncclDevComm comm, ncclWindow_t window, size_t area, uint64_t seed, uint64_t before, int rounds,
                         Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int n = comm.nRanks, words = BYTES / 8;
    const uint64_t due = before * n;
    const uint64_t started = now_ns();
    __shared__ bool failed;
    if (threadIdx.x == 0) failed = false;
    for (int round = 1; round <= rounds; round++) {
        uint64_t* mine = local(window, area);
        for (int i = threadIdx.x; i < words; i += THREADS) store(mine + i, mix(seed + comm.rank, round, i));
        __syncthreads();
        if (threadIdx.x < n)
            gin.put(world, threadIdx.x, window, area + BYTES * (1 + comm.rank), window, area, BYTES, SignalInc{ncclGinSignal_t(0)});
        if (threadIdx.x == 0) {
            if (!wait_signal(gin, 0, due + uint64_t(round) * n, out, round)) failed = true;
            __threadfence_system();
        }
        __syncthreads();
        if (failed) return;
        for (int i = threadIdx.x; i < n * words; i += THREADS) {
            const uint64_t wanted = mix(seed + i / words, round, i % words), found = load(local(window, area + BYTES) + i);
            if (wanted != found) report(out, 2, i, wanted, found, round);
        }
        __syncthreads();
        if (threadIdx.x < n) gin.signal(world, threadIdx.x, SignalInc{ncclGinSignal_t(1)});
        // What was sent may be overwritten, and what came at the peers.
        gin.flush(ncclCoopCta());
        if (threadIdx.x == 0 && !wait_signal(gin, 1, due + uint64_t(round) * n, out, round)) failed = true;
        __syncthreads();
        if (failed) return;
    }
    if (threadIdx.x == 0) out->nanoseconds = now_ns() - started;
}

struct Backend {
    ncclDevComm device;
    uint64_t rounds = 0;
};

Backend device_communicator(ncclComm_t comm, ncclGinType_t type) {
    ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    requirements.ginSignalCount = 2;
    requirements.ginContextCount = 1;
    requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
    requirements.ginType = type;
    ncclDevComm device{};
    NCCL(ncclDevCommCreate(comm, &requirements, &device));
    return {device};
}

PROGRAM(two_backends) {
    const size_t area = BYTES * (1 + rank.count());
    World world(rank, 2 * area, {.signals = 2, .contexts = 1});
    if (world.device.ginNetDeviceTypes[0] == NCCL_GIN_TYPE_PROXY && getenv("OXYGIN_ENGINE") &&
        !strcmp(getenv("OXYGIN_ENGINE"), "nccl"))
        throw Absent("NCCL's proxy is the only backend here");
    rank.stage("ncclDevCommCreate of NCCL's proxy");
    Backend proxy = device_communicator(world.comm, NCCL_GIN_TYPE_PROXY);
    Backend own = device_communicator(world.comm, NCCL_GIN_TYPE_GDAKI), first{world.device};
    rank.note(format("what the structures say: %d beside %d, by itself %d", int(own.device.ginNetDeviceTypes[0]),
                     int(proxy.device.ginNetDeviceTypes[0]), int(world.device.ginNetDeviceTypes[0])));

    // `own` gives kernels queues of the proxy's form.
    const char* engine = getenv("OXYGIN_ENGINE");
    const ncclGinType_t wanted = engine && !strcmp(engine, "own") ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_GDAKI;
    if (proxy.device.ginNetDeviceTypes[0] != NCCL_GIN_TYPE_PROXY || own.device.ginNetDeviceTypes[0] != wanted)
        throw Failure(format("the plugin's queues are of type %d, not %d, beside type %d of NCCL's proxy",
                             int(own.device.ginNetDeviceTypes[0]), int(wanted), int(proxy.device.ginNetDeviceTypes[0])));

    Outcome* others;
    cudaStream_t beside;
    CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc(&others, sizeof(Outcome), cudaHostAllocMapped | cudaHostAllocPortable));
    auto both = [&](const char* what, Backend& plugin, int rounds) {
        memset(others, 0, sizeof(Outcome));
        world.run(what, [&] {
            exchange<<<1, THREADS, 0, beside>>>(proxy.device, world.window, area, 1000, proxy.rounds, rounds, others);
            exchange<<<1, THREADS, 0, world.stream>>>(plugin.device, world.window, 0, 2000, plugin.rounds, rounds, world.out);
        });
        proxy.rounds += rounds;
        plugin.rounds += rounds;
        const std::string by_proxy = format("%s, NCCL's proxy", what);
        rank.stage(by_proxy.c_str());
        CUDA(cudaStreamSynchronize(beside));
        check(by_proxy.c_str(), *others);
        rank.row(format("%s, the plugin's queues", what).c_str(), BYTES, world.out->nanoseconds / 1e3 / rounds, "us");
        rank.row(by_proxy.c_str(), BYTES, others->nanoseconds / 1e3 / rounds, "us");
        rank.barrier();
    };
    const int rounds = rank.options.quick ? ROUNDS / 4 : ROUNDS;
    both("side by side", own, rounds);
    both("once more", first, rounds);
    NCCL(ncclDevCommDestroy(world.comm, &own.device));
    both("behind the end of one", first, rounds);
    NCCL(ncclDevCommDestroy(world.comm, &proxy.device));
    proxy = device_communicator(world.comm, NCCL_GIN_TYPE_PROXY);
    both("made again", first, rounds);
    NCCL(ncclDevCommDestroy(world.comm, &proxy.device));
    CUDA(cudaFreeHost(others));
    CUDA(cudaStreamDestroy(beside));
    world.close();
}

}  // namespace two_backends_program

#endif
