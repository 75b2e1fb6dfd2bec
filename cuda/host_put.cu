// NCCL's one-sided calls of the host, ncclPutSignal, ncclSignal and ncclWaitSignal: enqueued on a stream, by themselves, in
// groups and out of a captured graph. Between hosts NCCL carries them out by the RMA table: its proxy calls the plugin when the
// stream has come to them. All data are compared.
#include "common/alltoall.cuh"

namespace host_put_program {

#if NCCL_VERSION_CODE < 22907

PROGRAM(host_put) { throw Absent("ncclPutSignal of NCCL 2.29.7 and later"); }

#else

// A communicator with one window, half of it to send from and half to receive in.
class Windowed {
  public:
    Windowed(Rank& rank, size_t half) : half(half), rank_(rank) {
        rank.stage("ncclCommInitRank");
        NCCL(ncclCommInitRank(&comm, rank.count(), rank.id(), rank.index));
#if NCCL_VERSION_CODE < 23003
        // It takes no table for it from a plugin: between hosts only its own does it, on InfiniBand.
        ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
        NCCL(ncclCommQueryProperties(comm, &properties));
        if (!properties.hostRmaSupport) {
            NCCL(ncclCommDestroy(comm));
            throw Absent("this NCCL has its host's puts between hosts from InfiniBand only");
        }
#endif
        rank.stage("ncclCommWindowRegister");
        NCCL(ncclMemAlloc(reinterpret_cast<void**>(&memory), 2 * half));
        NCCL(ncclCommWindowRegister(comm, memory, 2 * half, &window, NCCL_WIN_COLL_SYMMETRIC));
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaHostAlloc(&bad, 2 * sizeof *bad, cudaHostAllocMapped | cudaHostAllocPortable));
        rank.barrier();
    }

    // `from` and `to` count from the start of the two halves.
    void put(size_t from, size_t bytes, int peer, size_t to) {
        NCCL(ncclPutSignal(memory + from, bytes, ncclInt8, peer, window, half + to, 0, 0, 0, comm, stream));
    }

    void signal(int peer) { NCCL(ncclSignal(peer, 0, 0, 0, comm, stream)); }

    void wait(int peer, int signals) {
        ncclWaitSignalDesc_t one{signals, peer, 0, 0};
        NCCL(ncclWaitSignal(1, &one, comm, stream));
    }

    // One signal of each rank. (An array: nvcc 13.0 fails at a vector of this type, a struct without a name.)
    void wait_for_all() {
        ncclWaitSignalDesc_t all[MAX_RANKS];
        for (int peer = 0; peer < rank_.count(); peer++) all[peer] = {1, peer, 0, 0};
        NCCL(ncclWaitSignal(rank_.count(), all, comm, stream));
    }

    // What was received is what rank `from` gave: one block of `bytes`.
    void compare_with(const char* what, int from, size_t bytes) {
        compare_blocks(what, memory + half, bytes / 8, 1, from, 0, bad, stream);
    }

    void close() {
        rank_.stage("close");
        rank_.barrier();
        NCCL(ncclCommWindowDeregister(comm, window));
        NCCL(ncclMemFree(memory));
        CUDA(cudaFreeHost(bad));
        CUDA(cudaStreamDestroy(stream));
        NCCL(ncclCommDestroy(comm));
    }

    const size_t half;
    ncclComm_t comm{};
    ncclWindow_t window{};
    char* memory{};
    cudaStream_t stream{};
    unsigned long long* bad{};

  private:
    Rank& rank_;
};

// One block of `bytes` as rank `by` gives it.
void give_block(Windowed& world, Rank& rank, size_t bytes) {
    give<<<256, 256, 0, world.stream>>>(reinterpret_cast<uint64_t*>(world.memory), bytes / 8, 1, rank.index);
    CUDA(cudaGetLastError());
    CUDA(cudaMemsetAsync(world.memory + world.half, 0xEE, bytes, world.stream));
    CUDA(cudaStreamSynchronize(world.stream));
}

PROGRAM(host_put) {
    const bool quick = rank.options.quick;
    const int n = rank.count(), right = (rank.index + 1) % n, left = (rank.index + n - 1) % n;
    // The last size is more than NCCL gives a plugin in one piece.
    std::vector<size_t> sizes = {8, 1 << 10, 64 << 10, 1 << 20, 16 << 20};
    if (!quick) sizes.push_back((size_t{1} << 30) + (64 << 20));
    Windowed world(rank, sizes.back());
    auto rounds_of = [&](size_t bytes) { return bytes > (1 << 20) ? (quick ? 5 : 20) : quick ? 50 : 1000; };

    // Everybody puts to the right and waits for the left; the next round begins when that has come.
    for (size_t bytes : sizes) {
        const int rounds = bytes > (size_t{64} << 20) ? 2 : rounds_of(bytes);
        give_block(world, rank, bytes);
        rank.stage("puts around a ring");
        const double us = microseconds_of(rank, world.stream, rounds, [&] {
            world.put(0, bytes, right, 0);
            world.wait(left, 1);
        });
        world.compare_with("puts around a ring", left, bytes);
        rank.row("ncclPutSignal, ncclWaitSignal, a ring", bytes, us, "us");
    }

    // Many under way before anybody waits.
    {
        const size_t bytes = 4 << 10;
        const int pieces = quick ? 64 : 512;
        give_block(world, rank, bytes * pieces);
        rank.stage("many puts");
        const double us = microseconds_of(rank, world.stream, quick ? 2 : 20, [&] {
            for (int i = 0; i < pieces; i++) world.put(i * bytes, bytes, right, i * bytes);
            world.wait(left, pieces);
        });
        world.compare_with("many puts", left, bytes * pieces);
        rank.row("the same, many under way, one", bytes, us / pieces, "us");
    }

    rank.stage("signals");
    const double us = microseconds_of(rank, world.stream, rounds_of(8), [&] {
        world.signal(right);
        world.wait(left, 1);
    });
    rank.row("ncclSignal, ncclWaitSignal, a ring", 0, us, "us");

    // To all in a group, one wait for all: between ranks of one host NCCL copies by itself, between hosts by the plugin.
    for (size_t total : small_alltoall_sizes()) {
        const size_t words = total / n / 8, bytes = words * 8;
        give_all(rank, world.memory, words, world.stream);
        CUDA(cudaMemsetAsync(world.memory + world.half, 0xEE, bytes * n, world.stream));
        CUDA(cudaStreamSynchronize(world.stream));
        rank.stage("all-to-all");
        const double us = microseconds_of(rank, world.stream, small_alltoall_rounds(rank), [&] {
            NCCL(ncclGroupStart());
            for (int peer = 0; peer < n; peer++) world.put(peer * bytes, bytes, peer, rank.index * bytes);
            NCCL(ncclGroupEnd());
            world.wait_for_all();
        });
        compare_all(rank, "all-to-all", world.memory + world.half, words, world.bad, world.stream);
        rank.row("all-to-all of puts in a group", total, us, "us");
    }

    // A graph of puts and waits, launched again and again.
    for (size_t bytes : {size_t{8}, size_t{1} << 20}) {
        give_block(world, rank, bytes);
        const double us = microseconds_of_graph(rank, world.stream, rounds_of(bytes), [&] {
            world.put(0, bytes, right, 0);
            world.wait(left, 1);
        });
        world.compare_with("graph", left, bytes);
        rank.row("a graph of ncclPutSignal, ncclWaitSignal", bytes, us, "us");
    }
    world.close();
}

#endif

}  // namespace host_put_program
