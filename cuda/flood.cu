// Floods of put + signal, every rank to its right neighbour at once, from one and from several contexts, by one thread a
// context and by 32, and of puts and of signals alone; then large puts for bandwidth, at last from rank 0 alone. Every message goes to a
// place of its own, and all of them are compared.
#include "common/gin.cuh"

namespace flood_program {

enum class Message {
    PUT,       // put + signal
    RELEASED,  // the same; the kernel says that all it wrote is visible to the system, and NCCL leaves out its fence
    SIGNAL,    // no data
    BARE,      // put alone; a signal comes behind the last
};

// A block posts through one context, its threads by turns.
template <Message Kind>
__global__ void flood(ncclDevComm comm, ncclWindow_t window, size_t receive, size_t bytes, int slots, int count,
                      ncclGinSignal_t signal, Outcome* out) {
    const int context = blockIdx.x;
    ncclGin gin{comm, context};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const size_t at = (size_t(context) * slots + i % slots) * bytes;
        if constexpr (Kind == Message::SIGNAL) {
            gin.signal(world, right, SignalInc{signal});
        } else if constexpr (Kind == Message::BARE) {
            gin.put(world, right, window, receive + at, window, at, bytes);
        } else {
            gin.put(world, right, window, receive + at, window, at, bytes, SignalInc{signal}, ncclGin_None{}, ncclCoopThread{},
                    ncclGin_None{}, Kind == Message::RELEASED ? cuda::thread_scope_system : cuda::thread_scope_thread);
        }
    }
    // The flush waits for what has been posted before it.
    __syncthreads();
    if (threadIdx.x != 0) return;
    const uint64_t wanted = Kind == Message::BARE ? 1 : count;
    if (Kind == Message::BARE) gin.signal(world, right, SignalInc{signal});
    if (!wait_signal(gin, signal, wanted, out)) return;
    if (uint64_t found = gin.readSignal(signal); found != wanted) return report(out, 2, signal, wanted, found, 0);
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
    constexpr int asked = 8;
    World world(rank, 2 * area, {.signals = 16, .contexts = asked});
    // Between hosts NCCL 2.29.7 gives four.
    const int most = std::min<int>(asked, world.device.ginContextCount);
    if (most < 2) throw Failure(format("asked for %d contexts, got %d", asked, most));
    const int left = (rank.index + rank.count() - 1) % rank.count();
    ncclGinSignal_t signal = 0;  // a fresh one each time
    using Kernel = void (*)(ncclDevComm, ncclWindow_t, size_t, size_t, int, int, ncclGinSignal_t, Outcome*);
    auto one = [&](const char* what, Kernel kernel, int contexts, int threads, size_t bytes, int slots, int count, const char* unit,
                   const char* manner = "") {
        const std::string name = format("%s, %d context%s%s", what, contexts, contexts == 1 ? "" : "s", manner);
        if (name.find(rank.options.only) == std::string::npos) return;
        const bool alone = kernel == one_way;
        const size_t words = contexts * slots * bytes / 8;
        std::vector<uint64_t> data(words);
        for (size_t i = 0; i < words; i++) data[i] = mix(rank.index, i, bytes + contexts);
        if (words) {
            world.write(0, data);
            world.fill(area, words * 8, 0xEE);
        }
        world.run(name.c_str(), [&] {
            kernel<<<contexts, threads, 0, world.stream>>>(world.device, world.window, area, bytes, slots, count, signal, world.out);
        });
        signal++;
        if (!alone || rank.index == 1)
            world.verify(name.c_str(), area, words, [&](size_t i) { return mix(left, i, bytes + contexts); });
        const double ns = world.out->nanoseconds, n = double(contexts) * count;
        rank.row(name.c_str(), bytes, strcmp(unit, "M/s") == 0 ? n * 1e3 / ns : n * bytes / ns, unit);
    };
    const bool quick = rank.options.quick;
    const int scale = quick ? 1 : 10;
    const size_t large = quick ? 8 << 20 : 64 << 20;
    const char *both = "put + signal", *rate = "M/s", *width = "GB/s";
    // At least as many messages as places.
    one(both, flood<Message::PUT>, 1, 1, 8, 1024, 2048 * scale, rate);
    one(both, flood<Message::PUT>, most, 1, 8, 1024, 1024 * scale, rate);
    one(both, flood<Message::PUT>, 1, 32, 8, 1024, 2048 * scale, rate, ", 32 threads");
    one(both, flood<Message::RELEASED>, 1, 1, 8, 1024, 2048 * scale, rate, ", no fence");
    one("put", flood<Message::BARE>, 1, 1, 8, 1024, 2048 * scale, rate);
    one("put", flood<Message::BARE>, most, 1, 8, 1024, 1024 * scale, rate);
    one("signal", flood<Message::SIGNAL>, 1, 1, 0, 0, 2048 * scale, rate);
    one("signal", flood<Message::SIGNAL>, most, 1, 0, 0, 1024 * scale, rate);
    one(both, flood<Message::PUT>, 1, 1, 64 << 10, 64, 500 * scale, rate);
    // As large as a token.
    one(both, flood<Message::PUT>, most, 32, 7 << 10, 64, 500 * scale, rate, ", 32 threads");
    one(both, flood<Message::PUT>, 1, 1, large, 4, 4 * scale, width);
    one(both, flood<Message::PUT>, most, 1, large / 4, 2, 2 * scale, width);
    one(both, one_way, 1, 1, large, 4, 4 * scale, width, ", one way");
    world.close();
}

}  // namespace flood_program
