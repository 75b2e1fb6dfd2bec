// Mixture of experts, the high-throughput form. A token goes once to each node that has one of its experts: from its sender
// into a circular buffer of a forwarder there, and from the forwarder to the ranks that want it. Answers come back the same
// way; the forwarder adds up those of its node. Every buffer has a tail signal (what was written) and a head signal (what may
// be overwritten), and is far smaller than the stream. Received tokens and final sums are compared with the CPU's.
//
// With four ranks or more a "node" is two neighbouring ranks, otherwise one: there the forwarder forwards to itself.
#include "common/gin.cuh"

namespace moe_ht_program {

constexpr int TOKENS = 256, TOP = 3, EXPERTS = 4;  // tokens a rank, experts a token, experts a rank
constexpr int WORDS = 448, SLOTS = 8, THREADS = 128;
constexpr int HEADER = 3;  // source rank, token, which ranks of the node want it (0: the end)
constexpr size_t MESSAGE = (HEADER + WORDS) * 8, RING = SLOTS * MESSAGE;

__host__ __device__ inline uint64_t token_word(int rank, int token, int word) { return mix(rank + 77, token, word); }
__host__ __device__ inline int chosen(int rank, int token, int choice, int experts) {
    return (mix(rank, token, 5) % experts + choice * (1 + mix(token, rank, 6) % ((experts - 1) / TOP))) % experts;
}
__host__ __device__ inline bool wanted(int from, int token, int by, int experts) {
    for (int k = 0; k < TOP; k++)
        if (chosen(from, token, k, experts) / EXPERTS == by) return true;
    return false;
}
// What a rank's experts make of a token's word.
__host__ __device__ inline uint64_t answer(int from, int token, int by, int experts, uint64_t word) {
    uint64_t sum = 0;
    for (int k = 0; k < TOP; k++)
        if (int e = chosen(from, token, k, experts); e / EXPERTS == by) sum += (word * (2 * e + 1) + e) * (k + 1);
    return sum;
}

struct Plan {
    int ranks, local, nodes;  // local: ranks a node
    __host__ __device__ explicit Plan(int n) : ranks(n), local(n >= 4 && n % 2 == 0 ? 2 : 1), nodes(n / local) {}
    __host__ __device__ int experts() const { return EXPERTS * ranks; }
    // Rings in the window. Sources: what a sender, a returner, a forwarder has written but not yet got back.
    __host__ __device__ size_t ring(int index) const { return index * RING; }
    __host__ __device__ size_t sending(int node) const { return ring(node); }
    __host__ __device__ size_t forwarding(int from) const { return ring(nodes + from); }
    __host__ __device__ size_t receiving(int via, int from) const { return ring(2 * nodes + via * nodes + from); }
    __host__ __device__ size_t returning(int via, int from) const { return ring(2 * nodes + ranks + via * nodes + from); }
    __host__ __device__ size_t merging(int from, int by) const { return ring(2 * nodes + 2 * ranks + from * local + by); }
    __host__ __device__ size_t merged(int from) const { return ring(2 * nodes + 3 * ranks + from); }
    __host__ __device__ size_t arriving(int node) const { return ring(3 * nodes + 3 * ranks + node); }
    // Results and the order of things, for the way back.
    __host__ __device__ size_t tokens() const { return ring(4 * nodes + 3 * ranks); }
    __host__ __device__ size_t token(int from, int t) const { return tokens() + (size_t(from) * TOKENS + t) * WORDS * 8; }
    __host__ __device__ size_t sums() const { return token(ranks, 0); }
    __host__ __device__ size_t forwarded(int from) const { return sums() + (TOKENS * WORDS + from * 2 * (TOKENS + 1)) * 8; }
    __host__ __device__ size_t received(int via, int from) const { return forwarded(nodes + via * nodes + from); }
    __host__ __device__ size_t end() const { return received(local, 0); }
    // Signals.
    __host__ __device__ int forward_tail(int from) const { return from; }
    __host__ __device__ int send_head(int node) const { return nodes + node; }
    __host__ __device__ int receive_tail(int via, int from) const { return 2 * nodes + via * nodes + from; }
    __host__ __device__ int forward_head(int from, int by) const { return 2 * nodes + ranks + from * local + by; }
    __host__ __device__ int merge_tail(int from, int by) const { return 2 * nodes + 2 * ranks + from * local + by; }
    __host__ __device__ int return_head(int via, int from) const { return 2 * nodes + 3 * ranks + via * nodes + from; }
    __host__ __device__ int arrive_tail(int node) const { return 2 * nodes + 4 * ranks + node; }
    __host__ __device__ int merged_head(int from) const { return 3 * nodes + 4 * ranks + from; }
    int signals() const { return 4 * nodes + 4 * ranks; }
};

// One block in one role. What goes to a rank travels on that rank's context, and its signals arrive there.
struct Role {
    const ncclDevComm& comm;
    ncclWindow_t window;
    Plan plan;
    Outcome* out;
    int contexts, node, place;  // this rank's node, and its place there

    __device__ Role(const ncclDevComm& comm, ncclWindow_t window, Plan plan, Outcome* out)
        : comm(comm), window(window), plan(plan), out(out), contexts(comm.ginContextCount), node(comm.rank / plan.local),
          place(comm.rank % plan.local) {}

    // All threads: waits until this rank's signal reaches `least`; false if it never does.
    __device__ bool wait(int signal, uint64_t least) const {
        __shared__ bool came;
        __syncthreads();
        if (threadIdx.x == 0) {
            ncclGin gin{comm, comm.rank % contexts};
            came = wait_signal(gin, signal, least, out, least);
        }
        __syncthreads();
        return came;
    }

    // All threads: room for message number `count` in a ring whose head signal this rank has.
    __device__ bool room(int head, uint64_t count) const { return count < SLOTS || wait(head, count - SLOTS + 1); }

    __device__ void put(int to, size_t target, size_t source, int tail) const {
        __threadfence();
        __syncthreads();
        if (threadIdx.x != 0) return;
        ncclGin gin{comm, to % contexts};
        gin.put(ncclTeamWorld(comm), to, window, target, window, source, MESSAGE, SignalInc{ncclGinSignal_t(tail)});
    }

    // Tells `to` that one more slot may be overwritten; after `flush` if a put reads from it.
    __device__ void release(int to, int head, bool flush) const {
        __syncthreads();
        if (threadIdx.x != 0) return;
        if (flush)
            for (int d = 0; d < plan.local; d++) ncclGin{comm, (node * plan.local + d) % contexts}.flush(ncclCoopThread());
        ncclGin gin{comm, to % contexts};
        gin.signal(ncclTeamWorld(comm), to, SignalInc{ncclGinSignal_t(head)});
    }

    __device__ uint64_t* at(size_t offset) const { return local(window, offset); }
    __device__ void header(uint64_t* message, uint64_t a, uint64_t b, uint64_t c) const {
        if (threadIdx.x == 0) message[0] = a, message[1] = b, message[2] = c;
    }
    // Remembers an entry of a list of pairs; a second word of 0 ends it.
    __device__ void note(size_t list, int index, uint64_t a, uint64_t b) const {
        if (threadIdx.x == 0) at(list)[2 * index] = a, at(list)[2 * index + 1] = b;
    }
};

__device__ void send(Role r, int node) {
    const int me = r.comm.rank, to = node * r.plan.local + r.place;
    uint64_t sent = 0;
    for (int t = 0; t <= TOKENS; t++) {
        uint64_t mask = 0;
        for (int l = 0; t < TOKENS && l < r.plan.local; l++)
            if (wanted(me, t, node * r.plan.local + l, r.plan.experts())) mask |= 1ull << l;
        if (t < TOKENS && mask == 0) continue;
        if (!r.room(r.plan.send_head(node), sent)) return;
        const size_t slot = sent % SLOTS * MESSAGE;
        uint64_t* message = r.at(r.plan.sending(node) + slot);
        r.header(message, me, t, mask);
        for (int w = threadIdx.x; w < WORDS; w += blockDim.x) message[HEADER + w] = token_word(me, t, w);
        r.put(to, r.plan.forwarding(r.node) + slot, r.plan.sending(node) + slot, r.plan.forward_tail(r.node));
        sent++;
    }
}

__device__ void forward(Role r, int from) {
    const int source = from * r.plan.local + r.place;
    uint64_t sent[2] = {};
    for (uint64_t i = 0;; i++) {
        if (!r.wait(r.plan.forward_tail(from), i + 1)) return;
        const size_t slot = r.plan.forwarding(from) + i % SLOTS * MESSAGE;
        const uint64_t token = load(r.at(slot) + 1), mask = load(r.at(slot) + 2);
        r.note(r.plan.forwarded(from), i, token, mask);
        for (int l = 0; l < r.plan.local; l++) {
            if (mask != 0 && !(mask >> l & 1)) continue;
            if (!r.room(r.plan.forward_head(from, l), sent[l])) return;
            r.put(r.node * r.plan.local + l, r.plan.receiving(r.place, from) + sent[l] % SLOTS * MESSAGE, slot,
                  r.plan.receive_tail(r.place, from));
            sent[l]++;
        }
        r.release(source, r.plan.send_head(r.node), true);
        if (mask == 0) return;
    }
}

__device__ void receive(Role r, int via, int from) {
    for (uint64_t i = 0;; i++) {
        if (!r.wait(r.plan.receive_tail(via, from), i + 1)) return;
        const uint64_t* message = r.at(r.plan.receiving(via, from) + i % SLOTS * MESSAGE);
        const uint64_t source = load(message), token = load(message + 1), mask = load(message + 2);
        r.note(r.plan.received(via, from), i, token, mask);
        if (mask != 0) {
            if (source != uint64_t(from * r.plan.local + via) || token >= TOKENS) return report(r.out, 2, via, from, source, i);
            for (int w = threadIdx.x; w < WORDS; w += blockDim.x) r.at(r.plan.token(source, token))[w] = load(message + HEADER + w);
        }
        r.release(r.node * r.plan.local + via, r.plan.forward_head(from, r.place), false);
        if (mask == 0) return;
    }
}

__global__ void dispatch(ncclDevComm comm, ncclWindow_t window, Plan plan, Outcome* out) {
    Role role{comm, window, plan, out};
    int block = blockIdx.x;
    if (block < plan.nodes) return send(role, block);
    block -= plan.nodes;
    if (block < plan.nodes) return forward(role, block);
    block -= plan.nodes;
    receive(role, block / plan.nodes, block % plan.nodes);
}

// The way back, in the order in which tokens came.
__device__ void give_back(Role r, int via, int from) {
    const uint64_t* list = r.at(r.plan.received(via, from));
    const int source = from * r.plan.local + via, me = r.comm.rank;
    for (uint64_t i = 0; list[2 * i + 1] != 0; i++) {
        const int t = list[2 * i];
        if (!r.room(r.plan.return_head(via, from), i)) return;
        const size_t slot = i % SLOTS * MESSAGE;
        uint64_t* message = r.at(r.plan.returning(via, from) + slot);
        r.header(message, me, t, 1);
        for (int w = threadIdx.x; w < WORDS; w += blockDim.x)
            message[HEADER + w] = answer(source, t, me, r.plan.experts(), r.at(r.plan.token(source, t))[w]);
        r.put(r.node * r.plan.local + via, r.plan.merging(from, r.place) + slot, r.plan.returning(via, from) + slot,
              r.plan.merge_tail(from, r.place));
    }
}

__device__ void merge(Role r, int from) {
    const uint64_t* list = r.at(r.plan.forwarded(from));
    const int source = from * r.plan.local + r.place;
    uint64_t taken[2] = {};
    for (uint64_t i = 0; list[2 * i + 1] != 0; i++) {
        const uint64_t t = list[2 * i], mask = list[2 * i + 1];
        if (!r.room(r.plan.merged_head(from), i)) return;
        const size_t slot = i % SLOTS * MESSAGE;
        uint64_t* sum = r.at(r.plan.merged(from) + slot);
        r.header(sum, r.comm.rank, t, 1);
        for (int w = threadIdx.x; w < WORDS; w += blockDim.x) sum[HEADER + w] = 0;
        for (int l = 0; l < r.plan.local; l++) {
            if (!(mask >> l & 1)) continue;
            if (!r.wait(r.plan.merge_tail(from, l), taken[l] + 1)) return;
            const uint64_t* part = r.at(r.plan.merging(from, l) + taken[l] % SLOTS * MESSAGE);
            if (uint64_t found = load(part + 1); found != t) return report(r.out, 2, l, t, found, i);
            for (int w = threadIdx.x; w < WORDS; w += blockDim.x) sum[HEADER + w] += load(part + HEADER + w);
            r.release(r.node * r.plan.local + l, r.plan.return_head(r.place, from), false);
            taken[l]++;
        }
        r.put(source, r.plan.arriving(r.node) + slot, r.plan.merged(from) + slot, r.plan.arrive_tail(r.node));
    }
}

__device__ void arrive(Role r, int node) {
    const int me = r.comm.rank, forwarder = node * r.plan.local + r.place;
    uint64_t i = 0;
    for (int t = 0; t < TOKENS; t++) {
        bool expected = false;
        for (int l = 0; l < r.plan.local; l++) expected |= wanted(me, t, node * r.plan.local + l, r.plan.experts());
        if (!expected) continue;
        if (!r.wait(r.plan.arrive_tail(node), i + 1)) return;
        const uint64_t* message = r.at(r.plan.arriving(node) + i % SLOTS * MESSAGE);
        if (uint64_t found = load(message + 1); found != uint64_t(t)) return report(r.out, 2, node, t, found, i);
        auto* sums = reinterpret_cast<unsigned long long*>(r.at(r.plan.sums()) + size_t(t) * WORDS);
        for (int w = threadIdx.x; w < WORDS; w += blockDim.x) atomicAdd(sums + w, (unsigned long long)load(message + HEADER + w));
        r.release(forwarder, r.plan.merged_head(r.node), false);
        i++;
    }
}

__global__ void combine(ncclDevComm comm, ncclWindow_t window, Plan plan, Outcome* out) {
    Role role{comm, window, plan, out};
    int block = blockIdx.x;
    if (block < plan.nodes) return merge(role, block);
    block -= plan.nodes;
    if (block < plan.nodes) return arrive(role, block);
    block -= plan.nodes;
    give_back(role, block / plan.nodes, block % plan.nodes);
}

PROGRAM(moe_ht) {
    const Plan plan{rank.count()};
    World world(rank, (plan.end() + 4095) / 4096 * 4096, {.signals = plan.signals(), .contexts = 4});
    world.fill(0, world.bytes, 0xEE);
    world.fill(plan.sums(), size_t(TOKENS) * WORDS * 8, 0);
    const int blocks = 2 * plan.nodes + plan.ranks, me = rank.index;
    world.run("dispatch", [&] { dispatch<<<blocks, THREADS, 0, world.stream>>>(world.device, world.window, plan, world.out); });
    for (int from = 0; from < plan.ranks; from++)
        world.verify("dispatch", plan.token(from, 0), size_t(TOKENS) * WORDS, [&](size_t i) {
            const int t = i / WORDS;
            return wanted(from, t, me, plan.experts()) ? token_word(from, t, i % WORDS) : 0xEEEEEEEEEEEEEEEEull;
        });
    rank.row("dispatch by forwarders", MESSAGE, TOKENS, "tokens");
    world.run("combine", [&] { combine<<<blocks, THREADS, 0, world.stream>>>(world.device, world.window, plan, world.out); });
    world.verify("combine", plan.sums(), size_t(TOKENS) * WORDS, [&](size_t i) {
        const int t = i / WORDS;
        uint64_t sum = 0;
        for (int by = 0; by < plan.ranks; by++) sum += answer(me, t, by, plan.experts(), token_word(me, t, i % WORDS));
        return sum;
    });
    rank.row("combine by forwarders", MESSAGE, TOKENS, "tokens");
    world.close();
}

}  // namespace moe_ht_program
