// Mixture of experts, the low-latency form. Dispatch: each token is put straight to the rank of each of its experts, then
// one signal an expert carries the count. Combine: the expert's rank puts its answers straight to the token's places and
// signals once. Buffers and signals are doubled, so that one round may begin while another rank still reads the last.
// Routing is random, rounds follow one another without the host, and every sum is compared with one made on the CPU.
#include "common/gin.cuh"

namespace moe_ll_program {

constexpr int TOKENS = 64, TOP = 3, EXPERTS = 4;  // tokens a rank and round, experts a token, experts a rank
constexpr int WORDS = 896;                        // 7 KiB a token
constexpr int THREADS = 256;
constexpr size_t MESSAGE = (1 + WORDS) * 8;  // place in the combine buffer, then the token

__host__ __device__ inline uint64_t token_word(int rank, int round, int token, int word) {
    return mix(rank * 1000 + round, token, word);
}
// What an expert makes of a word.
__host__ __device__ inline uint64_t answer(int expert, uint64_t word) { return word * (2 * expert + 1) + expert; }
// Different experts for each of a token's choices.
__host__ __device__ inline int chosen(int rank, int round, int token, int choice, int experts) {
    return (mix(rank, round, token) % experts + choice * (1 + mix(token, rank, round) % ((experts - 1) / TOP))) % experts;
}

// Where things lie in the window, for each of the two sets.
struct Plan {
    int ranks;
    __host__ __device__ size_t messages() const { return size_t(EXPERTS) * ranks * TOKENS; }
    // Messages that go out, and answers that go out; messages that come in; answers that come in.
    __host__ __device__ size_t outgoing(int set) const { return set * set_bytes(); }
    __host__ __device__ size_t incoming(int set) const { return outgoing(set) + messages() * MESSAGE; }
    __host__ __device__ size_t replies(int set) const { return incoming(set) + messages() * MESSAGE; }
    __host__ __device__ size_t combined(int set) const { return replies(set) + messages() * MESSAGE; }
    __host__ __device__ size_t set_bytes() const { return 3 * messages() * MESSAGE + TOKENS * TOP * WORDS * 8; }
    __host__ __device__ size_t sums(int round) const { return 2 * set_bytes() + size_t(round) * TOKENS * WORDS * 8; }
    // Signals: the count of an expert's tokens from a rank, then one for a rank's answers.
    __host__ __device__ int dispatched(int set, int expert, int from) const { return (set * (EXPERTS + 1) + expert) * ranks + from; }
    __host__ __device__ int answered(int set, int from) const { return (set * (EXPERTS + 1) + EXPERTS) * ranks + from; }
    int signals() const { return 2 * (EXPERTS + 1) * ranks; }
};

// A block for each other rank: sends it tokens, answers its tokens, takes its answers.
__global__ void round_of(ncclDevComm comm, ncclWindow_t window, Plan plan, int round, Outcome* out) {
    const int peer = blockIdx.x, me = comm.rank, set = round % 2, contexts = comm.ginContextCount;
    const ncclTeam world = ncclTeamWorld(comm);
    // What goes to a rank travels on that rank's context, and its signals arrive there.
    ncclGin to{comm, peer % contexts}, from{comm, me % contexts};
    __shared__ uint64_t count;

    for (int e = 0; e < EXPERTS; e++) {
        const size_t first = (size_t(e) * plan.ranks + peer) * TOKENS, theirs = (size_t(e) * plan.ranks + me) * TOKENS;
        int sent = 0;
        for (int t = 0; t < TOKENS; t++)
            for (int k = 0; k < TOP; k++) {
                if (chosen(me, round, t, k, EXPERTS * plan.ranks) != peer * EXPERTS + e) continue;
                const size_t at = plan.outgoing(set) + (first + sent) * MESSAGE;
                uint64_t* message = local(window, at);
                if (threadIdx.x == 0) message[0] = t * TOP + k;
                for (int w = threadIdx.x; w < WORDS; w += blockDim.x) message[1 + w] = token_word(me, round, t, w);
                __threadfence();
                __syncthreads();
                if (threadIdx.x == 0)
                    to.put(world, peer, window, plan.incoming(set) + (theirs + sent) * MESSAGE, window, at, MESSAGE);
                sent++;
            }
        // One more than the count, so that none is a signal too.
        if (threadIdx.x == 0) to.signal(world, peer, SignalAdd{ncclGinSignal_t(plan.dispatched(set, e, me)), uint64_t(sent + 1)});
    }

    for (int e = 0; e < EXPERTS; e++) {
        const ncclGinSignal_t signal = plan.dispatched(set, e, peer);
        if (threadIdx.x == 0) {
            count = 0;
            if (wait_signal(from, signal, 1, out, round)) count = from.readSignal(signal);
            from.resetSignal(signal);
        }
        __syncthreads();
        const uint64_t messages = count;
        if (messages == 0) return;
        __syncthreads();
        const size_t first = (size_t(e) * plan.ranks + peer) * TOKENS;
        for (uint64_t i = 0; i + 1 < messages; i++) {
            const uint64_t* message = local(window, plan.incoming(set) + (first + i) * MESSAGE);
            const size_t at = plan.replies(set) + (first + i) * MESSAGE;
            const uint64_t place = load(message);
            if (place >= TOKENS * TOP) return report(out, 2, e, TOKENS * TOP, place, round);
            for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
                local(window, at)[w] = answer(me * EXPERTS + e, load(message + 1 + w));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) to.put(world, peer, window, plan.combined(set) + place * WORDS * 8, window, at, WORDS * 8);
        }
    }
    if (threadIdx.x != 0) return;
    to.signal(world, peer, SignalInc{ncclGinSignal_t(plan.answered(set, me))});
    if (!wait_signal(from, plan.answered(set, peer), 1, out, round)) return;
    from.resetSignal(plan.answered(set, peer));
    to.flush(ncclCoopThread());
}

__global__ void combine(ncclWindow_t window, Plan plan, int round) {
    const uint64_t* answers = local(window, plan.combined(round % 2));
    uint64_t* sums = local(window, plan.sums(round));
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < TOKENS * WORDS; i += gridDim.x * blockDim.x) {
        uint64_t sum = 0;
        for (int k = 0; k < TOP; k++) sum += load(answers + (size_t(i / WORDS) * TOP + k) * WORDS + i % WORDS) * (k + 1);
        sums[i] = sum;
    }
}

PROGRAM(moe_ll) {
    const int rounds = rank.options.quick ? 6 : 30, n = rank.count(), experts = EXPERTS * n;
    const Plan plan{n};
    World world(rank, (plan.sums(rounds) + 4095) / 4096 * 4096, {.signals = plan.signals(), .contexts = 4});
    world.fill(0, world.bytes, 0xEE);
    world.run("dispatch and combine", [&] {
        for (int round = 0; round < rounds; round++) {
            round_of<<<n, THREADS, 0, world.stream>>>(world.device, world.window, plan, round, world.out);
            combine<<<8, THREADS, 0, world.stream>>>(world.window, plan, round);
        }
    });
    for (int round = 0; round < rounds; round++)
        world.verify("combine", plan.sums(round), size_t(TOKENS) * WORDS, [&](size_t i) {
            uint64_t sum = 0;
            const int t = i / WORDS;
            for (int k = 0; k < TOP; k++)
                sum += answer(chosen(rank.index, round, t, k, experts), token_word(rank.index, round, t, i % WORDS)) * (k + 1);
            return sum;
        });
    rank.row("low-latency rounds", MESSAGE, rounds, "rounds");
    world.close();
}

}  // namespace moe_ll_program
