// What NCCL EP posts in its high-throughput mode between hosts: 32 warps, each with a context of its own, take chunks
// of 64 tokens by turns. Dispatch: a warp's threads put each token of the chunk and its 256 bytes of weights to each
// rank that wants them, closely packed, then one signal a chunk and rank. Combine: up to eight neighbouring tokens a
// put, by one thread. All that comes is compared.
#include "common/gin.cuh"

namespace flood_ht_program {

constexpr int CHUNK = 64, BLOCKS = 16, WARPS = 2, CHANNELS = BLOCKS * WARPS, BATCH = 8;
constexpr size_t TOKEN = 7168 * 2, WEIGHTS = 256, ENTRY = TOKEN + WEIGHTS;

// Most tokens go to most ranks.
__host__ __device__ inline bool wanted(int from, int to, int token) { return mix(from, to, token) % 8 != 0; }
// A word of what `from` sends of a token; weights come after the token.
__host__ __device__ inline uint64_t word_of(int from, int token, size_t word) { return mix(from + 77, token, word); }

struct Plan {
    int ranks, tokens;
    __host__ __device__ int chunks() const { return tokens / CHUNK; }
    // Tokens, one after another, then their weights; what came from a rank, each chunk with room for all its tokens.
    __host__ __device__ size_t token(int t) const { return t * TOKEN; }
    __host__ __device__ size_t weights(int t) const { return tokens * TOKEN + t * WEIGHTS; }
    __host__ __device__ size_t sent() const { return tokens * ENTRY; }
    __host__ __device__ size_t received(int from, int chunk) const {
        return sent() * (1 + from) + chunk * CHUNK * ENTRY;
    }
    size_t end() const { return sent() * (1 + ranks); }
    __host__ __device__ int tail(int from, int chunk) const { return from * chunks() + chunk; }
};

__global__ void fill_sent(ncclDevComm comm, ncclWindow_t window, Plan plan) {
    for (int t = blockIdx.x; t < plan.tokens; t += gridDim.x)
        for (size_t w = threadIdx.x; w < ENTRY / 8; w += blockDim.x)
            *local(window, w < TOKEN / 8 ? plan.token(t) + w * 8 : plan.weights(t) + w * 8 - TOKEN) =
                word_of(comm.rank, t, w);
}

// Which of the chunk's tokens rank `to` wants, a bit each.
__device__ inline uint64_t mask_of(int from, int to, int first) {
    const int lane = threadIdx.x % 32;
    return __ballot_sync(~0u, wanted(from, to, first + lane)) |
           uint64_t(__ballot_sync(~0u, wanted(from, to, first + 32 + lane))) << 32;
}

__device__ inline int context_of(const ncclDevComm& comm, int channel) {
    const int contexts = comm.ginContextCount;
    return contexts > 1 ? 1 + channel % (contexts - 1) : 0;
}

struct Channel {
    const ncclDevComm& comm;
    ncclWindow_t window;
    Plan plan;
    int number, lane;
    ncclGin gin;

    __device__ Channel(const ncclDevComm& comm, ncclWindow_t window, Plan plan)
        : comm(comm),
          window(window),
          plan(plan),
          number(blockIdx.x * WARPS + threadIdx.x / 32),
          lane(threadIdx.x % 32),
          gin{comm, context_of(comm, number)} {}

    __device__ void put(int to, size_t target, size_t source, size_t bytes, uint32_t flags) const {
        gin.put(ncclTeamWorld(comm), to, window, target, window, source, bytes, ncclGin_None{}, ncclGin_None{},
                ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_device, flags);
    }

    // Each thread the tokens of its place; closely packed.
    __device__ void put_each(int to, int chunk, uint64_t mask) const {
        for (int i = lane; i < CHUNK; i += 32) {
            if (!(mask >> i & 1)) continue;
            const int t = chunk * CHUNK + i, before = __popcll(mask & ((1ull << i) - 1));
            const size_t target = plan.received(comm.rank, chunk) + before * ENTRY;
            put(to, target, plan.token(t), TOKEN, ncclGinOptFlagsAggregateRequests);
            put(to, target + TOKEN, plan.weights(t), WEIGHTS, ncclGinOptFlagsAggregateRequests);
        }
    }

    // Runs of tokens, each to its own place.
    __device__ void put_runs(int to, int chunk, uint64_t mask) const {
        if (lane != 0) return;
        for (int i = 0; i < CHUNK;) {
            int n = 0;
            while (n < BATCH && i + n < CHUNK && mask >> (i + n) & 1) n++;
            if (n)
                put(to, plan.received(comm.rank, chunk) + i * TOKEN, plan.token(chunk * CHUNK + i), n * TOKEN,
                    ncclGinOptFlagsDefault);
            i += n ? n : 1;
        }
    }

    __device__ void signal(int to, int chunk) const {
        __syncwarp();
        gin.signal(ncclTeamWorld(comm), to, SignalAdd{ncclGinSignal_t(plan.tail(comm.rank, chunk)), 1}, ncclCoopWarp{},
                   ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_thread);
    }
};

// The signals of a chunk arrive on the channel's context, which the receiving rank's channel of that chunk has too.
__global__ void __launch_bounds__(WARPS * 32)
    send_all(ncclDevComm comm, ncclWindow_t window, Plan plan, bool combine, uint64_t round, Outcome* out) {
    const Channel channel{comm, window, plan};
    const uint64_t started = now_ns();
    for (int chunk = channel.number; chunk < plan.chunks(); chunk += CHANNELS)
        for (int step = 1; step < comm.nRanks; step++) {
            const int to = (comm.rank + step) % comm.nRanks;
            const uint64_t mask = mask_of(comm.rank, to, chunk * CHUNK);
            if (combine)
                channel.put_runs(to, chunk, mask);
            else
                channel.put_each(to, chunk, mask);
            channel.signal(to, chunk);
        }
    channel.gin.flush(ncclCoopWarp{});
    if (channel.lane != 0) return;
    for (int chunk = channel.number; chunk < plan.chunks(); chunk += CHANNELS)
        for (int step = 1; step < comm.nRanks; step++)
            if (!wait_signal(channel.gin, plan.tail((comm.rank + step) % comm.nRanks, chunk), round, out, round))
                return;
    atomicMax_system(reinterpret_cast<unsigned long long*>(&out->nanoseconds), now_ns() - started);
}

// A block a chunk and rank.
__global__ void compare(ncclDevComm comm, ncclWindow_t window, Plan plan, bool combine, Outcome* out) {
    const int chunk = blockIdx.x, from = (comm.rank + 1 + blockIdx.y) % comm.nRanks;
    int place = 0;
    for (int i = 0; i < CHUNK; i++) {
        const int t = chunk * CHUNK + i;
        if (!wanted(from, comm.rank, t)) continue;
        const size_t at = plan.received(from, chunk) + (combine ? i * TOKEN : place * ENTRY);
        for (size_t w = threadIdx.x; w < (combine ? TOKEN : ENTRY) / 8; w += blockDim.x)
            if (uint64_t found = load(local(window, at + w * 8)); found != word_of(from, t, w))
                return report(out, 2, t, word_of(from, t, w), found, from);
        place++;
    }
}

PROGRAM(flood_ht) {
    const int tokens = rank.options.quick ? 1024 : 4096, n = rank.count(), me = rank.index;
    const Plan plan{n, tokens};
    World world(rank, (plan.end() + 4095) / 4096 * 4096,
                {.signals = n * plan.chunks(), .contexts = 1 + CHANNELS, .queue_depth = 3 * CHUNK + 1});
    // Entries that are not rung yet fill a queue that several warps have, and each waits for room before it rings: with
    // GDAKI's device code a warp must have a queue of its own. NCCL 2.29.7 gives four between hosts.
    const char* engine = getenv("OXYGIN_ENGINE");
    if (engine && !strncmp(engine, "gdaki", 5) && world.device.ginContextCount <= CHANNELS) {
        const std::string given = format("NCCL gives %u contexts, and GDAKI's needs one a warp (NCCL_GIN_NCONTEXTS=%d)",
                                         world.device.ginContextCount, 1 + CHANNELS);
        world.close();
        throw Absent(given);
    }
    const std::string contexts = format("%u contexts", world.device.ginContextCount);
    fill_sent<<<256, 256, 0, world.stream>>>(world.device, world.window, plan);
    CUDA(cudaGetLastError());
    double posted[2] = {};  // operations of this rank: dispatch, combine
    double bytes[2] = {};
    for (int to = 0; to < n; to++)
        for (int t = 0, run = 0; to != me && t < tokens; t++) {
            const bool is = wanted(me, to, t);
            if (is) posted[0] += 2, bytes[0] += ENTRY, bytes[1] += TOKEN;
            if (t % CHUNK == 0) posted[0]++, posted[1]++, run = 0;
            if (is && run % BATCH == 0) posted[1]++;
            run = is ? run + 1 : 0;
        }
    uint64_t round = 0;
    for (bool combine : {false, true}) {
        const char* what = combine ? "combine" : "dispatch";
        world.fill(plan.sent(), plan.end() - plan.sent(), 0xEE);
        double best = 1e18;
        for (int i = 0; i < (rank.options.quick ? 3 : 10); i++) {
            round++;
            world.run(what, [&] {
                send_all<<<BLOCKS, WARPS * 32, 0, world.stream>>>(world.device, world.window, plan, combine, round,
                                                                  world.out);
            });
            best = std::min(best, double(world.out->nanoseconds));
        }
        world.run(format("compare after %s", what).c_str(), [&] {
            compare<<<dim3(plan.chunks(), std::max(1, n - 1)), 256, 0, world.stream>>>(world.device, world.window, plan,
                                                                                       combine, world.out);
        });
        const std::string name = format("%s of %d tokens, %s", what, tokens, contexts.c_str());
        rank.row(name.c_str(), combine ? BATCH * TOKEN : TOKEN, best / 1e6, "ms");
        rank.row((name + ", a rank").c_str(), combine ? BATCH * TOKEN : TOKEN, posted[combine] * 1e3 / best, "M/s");
        rank.row((name + ", a rank").c_str(), combine ? BATCH * TOKEN : TOKEN, bytes[combine] / best, "GB/s");
    }
    world.close();
}

}  // namespace flood_ht_program
