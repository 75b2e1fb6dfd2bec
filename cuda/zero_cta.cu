// NCCL's own all-gather and all-to-all without kernels, NCCL_CTA_POLICY_ZERO, on registered windows: copy engines within a
// host, and between hosts puts of NCCL's RMA proxy, which calls the plugin (2.30.7 and later). Enqueued on a stream and out of a
// captured graph. All data are compared.
#include "common/collective.cuh"

namespace zero_cta_program {

#if NCCL_VERSION_CODE < 23007

PROGRAM(zero_cta) { throw Absent("NCCL before 2.30.7 has no such collectives between hosts"); }

#else

PROGRAM(zero_cta) {
    const bool quick = rank.options.quick;
    const int n = rank.count();
    rank.stage("ncclCommInitRankConfig");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    ncclComm_t comm;
    NCCL(ncclCommInitRankConfig(&comm, n, rank.id(), rank.index, &config));

    std::vector<size_t> sizes = small_alltoall_sizes();
    for (size_t large : alltoall_sizes(rank))
        if (large <= size_t{128} << 20) sizes.push_back(large);
    CollectiveWindows world(rank, comm, sizes.back());
    char *const send = world.send, *const receive = world.receive;
    unsigned long long* const bad = world.bad;
    const cudaStream_t stream = world.stream;

    auto all_to_all = [&](size_t words) { NCCL(ncclAlltoAll(send, receive, words, ncclUint64, comm, stream)); };
    auto all_gather = [&](size_t words) { NCCL(ncclAllGather(send, receive, words, ncclUint64, comm, stream)); };
    auto prepare = [&](size_t words) {
        give_all(rank, send, words, stream);
        world.clear(words * 8 * n);
    };
    auto check = [&](const char* what, size_t words, bool gathered) {
        // An all-gather brings from each rank the block that it gives rank 0.
        compare_blocks(what, receive, words, n, 0, gathered ? 0 : rank.index, bad, stream);
    };
    for (bool gathered : {true, false}) {
        const char* what = gathered ? "all-gather" : "all-to-all";
        for (size_t total : sizes) {
            const size_t words = total / n / 8;
            const int rounds = total > (1 << 20) ? (quick ? 2 : 10) : small_alltoall_rounds(rank);
            prepare(words);
            rank.stage(what);
            double us = 0;
            // The first rounds warm up.
            for (int times : {2, rounds})
                us = microseconds_of(rank, stream, times, [&] { gathered ? all_gather(words) : all_to_all(words); });
            check(what, words, gathered);
            rank.row(format("%s without kernels", what).c_str(), words * 8 * n, us, "us");
        }
        const size_t words = (1 << 20) / n / 8;
        prepare(words);
        const double us = microseconds_of_graph(rank, stream, small_alltoall_rounds(rank),
                                                [&] { gathered ? all_gather(words) : all_to_all(words); });
        check("graph", words, gathered);
        rank.row(format("a graph of %s without kernels", what).c_str(), words * 8 * n, us, "us");
    }
    rank.stage("close");
    rank.barrier();
    world.close();
    NCCL(ncclCommDestroy(comm));
}

#endif

}  // namespace zero_cta_program
