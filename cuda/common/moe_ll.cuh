// Mixture of experts, the low-latency form: where things lie, and what a block does for one other rank. Dispatch: each
// token is put straight to the rank of each of its experts, then one signal an expert carries the count. Combine: the
// expert's rank puts its answers straight to the token's places and signals once. Buffers and signals are doubled, so
// that one round may begin while another rank still reads the last. moe_ll.cu does both in one kernel, jit_moe.cu in
// two.
#pragma once

#include "gin.cuh"

namespace moe_ll {

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
    return (mix(rank, round, token) % experts + choice * (1 + mix(token, rank, round) % ((experts - 1) / TOP))) %
           experts;
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
    // How many messages came, for each expert and rank.
    __host__ __device__ size_t counts(int set) const { return 2 * set_bytes() + set * size_t(EXPERTS) * ranks * 8; }
    __host__ __device__ size_t sums(int round) const { return counts(2) + size_t(round) * TOKENS * WORDS * 8; }
    // Signals: the count of an expert's tokens from a rank, then one for a rank's answers.
    __host__ __device__ int dispatched(int set, int expert, int from) const {
        return (set * (EXPERTS + 1) + expert) * ranks + from;
    }
    __host__ __device__ int answered(int set, int from) const { return (set * (EXPERTS + 1) + EXPERTS) * ranks + from; }
    int signals() const { return 2 * (EXPERTS + 1) * ranks; }
};

// What a block does in one round for the rank `peer`, with all its threads.
struct Pair {
    const ncclDevComm& comm;
    ncclWindow_t window;
    Plan plan;
    int peer, round;
    Outcome* out;
    int me, set;
    // What goes to a rank travels on that rank's context, and its signals arrive there.
    ncclGin to, from;

    __device__ Pair(const ncclDevComm& comm, ncclWindow_t window, Plan plan, int peer, int round, Outcome* out)
        : comm(comm),
          window(window),
          plan(plan),
          peer(peer),
          round(round),
          out(out),
          me(comm.rank),
          set(round % 2),
          to{comm, peer % int(comm.ginContextCount)},
          from{comm, me % int(comm.ginContextCount)} {}

    __device__ void send_tokens() const {
        const ncclTeam world = ncclTeamWorld(comm);
        for (int e = 0; e < EXPERTS; e++) {
            const size_t first = (size_t(e) * plan.ranks + peer) * TOKENS,
                         theirs = (size_t(e) * plan.ranks + me) * TOKENS;
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
                        to.put(world, peer, window, plan.incoming(set) + (theirs + sent) * MESSAGE, window, at,
                               MESSAGE);
                    sent++;
                }
            // One more than the count, so that none is a signal too.
            if (threadIdx.x == 0)
                to.signal(world, peer, SignalAdd{ncclGinSignal_t(plan.dispatched(set, e, me)), uint64_t(sent + 1)});
        }
    }

    // Waits for the peer's tokens and notes their counts; false if they do not come.
    __device__ bool receive_tokens() const {
        __shared__ bool good;
        if (threadIdx.x == 0) {
            good = true;
            for (int e = 0; e < EXPERTS && good; e++) {
                const ncclGinSignal_t signal = plan.dispatched(set, e, peer);
                good = wait_signal(from, signal, 1, out, round);
                store(count(e), good ? from.readSignal(signal) - 1 : 0);
                from.resetSignal(signal);
            }
            __threadfence();
        }
        __syncthreads();
        return good;
    }

    // The answers to the tokens that have been received.
    __device__ void send_answers() const {
        const ncclTeam world = ncclTeamWorld(comm);
        for (int e = 0; e < EXPERTS; e++) {
            const size_t first = (size_t(e) * plan.ranks + peer) * TOKENS;
            const uint64_t messages = load(count(e));
            for (uint64_t i = 0; i < messages; i++) {
                const uint64_t* message = local(window, plan.incoming(set) + (first + i) * MESSAGE);
                const size_t at = plan.replies(set) + (first + i) * MESSAGE;
                const uint64_t place = load(message);
                if (place >= TOKENS * TOP) return report(out, 2, e, TOKENS * TOP, place, round);
                for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
                    local(window, at)[w] = answer(me * EXPERTS + e, load(message + 1 + w));
                __threadfence();
                __syncthreads();
                if (threadIdx.x == 0)
                    to.put(world, peer, window, plan.combined(set) + place * WORDS * 8, window, at, WORDS * 8);
            }
        }
        if (threadIdx.x == 0) to.signal(world, peer, SignalInc{ncclGinSignal_t(plan.answered(set, me))});
    }

    // Waits for the peer's answers.
    __device__ void receive_answers() const {
        if (threadIdx.x != 0 || !wait_signal(from, plan.answered(set, peer), 1, out, round)) return;
        from.resetSignal(plan.answered(set, peer));
        to.flush(ncclCoopThread());
    }

  private:
    __device__ uint64_t* count(int expert) const {
        return local(window, plan.counts(set)) + expert * plan.ranks + peer;
    }
};

// A token's sum, by as many blocks as there are.
__device__ inline void add_up(ncclWindow_t window, Plan plan, int round) {
    const uint64_t* answers = local(window, plan.combined(round % 2));
    uint64_t* sums = local(window, plan.sums(round));
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < TOKENS * WORDS; i += gridDim.x * blockDim.x) {
        uint64_t sum = 0;
        for (int k = 0; k < TOP; k++)
            sum += load(answers + (size_t(i / WORDS) * TOP + k) * WORDS + i % WORDS) * (k + 1);
        sums[i] = sum;
    }
}

// Compares the sums of a round with the CPU's.
inline void verify_sums(World& world, Plan plan, int round) {
    const int me = world.rank.index, experts = EXPERTS * plan.ranks;
    world.verify("combine", plan.sums(round), size_t(TOKENS) * WORDS, [&](size_t i) {
        uint64_t sum = 0;
        const int t = i / WORDS;
        for (int k = 0; k < TOP; k++)
            sum += answer(chosen(me, round, t, k, experts), token_word(me, round, t, i % WORDS)) * (k + 1);
        return sum;
    });
}

}  // namespace moe_ll
