// The GIN barrier over all ranks, thousands of times. Before each, every rank puts its round number to every other; after
// it, all of them have arrived.
#include "common/gin.cuh"

namespace barrier_program {

__global__ void rounds_of(ncclDevComm comm, ncclWindow_t window, ncclGinBarrierHandle_t handle, int rounds, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    // A warp: up to 2.30.4 each thread signals one peer and waits for the same one before the next, so that fewer threads
    // than peers wait for each other in a ring.
    ncclGinBarrierSession<ncclCoopWarp> barrier{ncclCoopWarp(), gin, world, handle, 0};
    const uint64_t started = now_ns();
    for (int i = 0; i < rounds; i++) {
        // Two sets of places: a rank may be one barrier ahead.
        const size_t set = i % 2 * 4096;
        for (int peer = threadIdx.x; peer < comm.nRanks; peer += 32)
            gin.putValue(world, peer, window, set + comm.rank * 8, uint64_t(i + 1));
#if HAVE_WEAK_SIGNALS
        barrier.sync(ncclCoopWarp(), cuda::memory_order_acq_rel, ncclGinFenceLevel::Put);
#else
        barrier.sync(ncclCoopWarp(), cuda::memory_order_acq_rel, ncclGinFenceLevel::Relaxed);
#endif
        for (int peer = threadIdx.x; peer < comm.nRanks; peer += 32)
            // The own rank takes no part in the exchange of signals.
            if (peer != comm.rank)
                if (uint64_t found = load(local(window, set + peer * 8)); found != uint64_t(i + 1))
                    return report(out, 2, peer, i + 1, found, i);
    }
    if (threadIdx.x != 0) return;
    out->nanoseconds = (now_ns() - started) / rounds;
    gin.flush(ncclCoopThread());
}

PROGRAM(barrier) {
    World world(rank, 1 << 20, {.barriers = 1});
    world.fill(0, 8192, 0);
    const int rounds = rank.options.quick ? 200 : 3000;
    world.run("barrier", [&] {
        rounds_of<<<1, 32, 0, world.stream>>>(world.device, world.window, world.barrier, rounds, world.out);
    });
    rank.row("values to all + barrier", 8, world.out->nanoseconds / 1e3, "us");
    world.close();
}

}  // namespace barrier_program
