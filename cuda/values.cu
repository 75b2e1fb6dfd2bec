// putValue of 1, 2, 4 and 8 bytes to every rank, the own one included; the bytes around each value stay as they were.
#include "common/gin.cuh"

namespace values_program {

constexpr int VALUES = 64;

template <typename T>
__global__ void values(ncclDevComm comm, ncclWindow_t window, size_t offset, ncclGinSignal_t signal, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const uint64_t started = now_ns();
    for (int i = 0; i < VALUES; i++)
        for (int peer = 0; peer < comm.nRanks; peer++)
            // Every second place is left alone.
            gin.putValue(world, peer, window, offset + (comm.rank * VALUES + i) * 2 * sizeof(T), T(mix(comm.rank, i, peer)),
                         SignalInc{signal});
    if (!wait_signal(gin, signal, uint64_t(VALUES) * comm.nRanks, out)) return;
    gin.flush(ncclCoopThread());
    out->nanoseconds = now_ns() - started;
}

template <typename T>
void one(Rank& rank, World& world, size_t offset, ncclGinSignal_t signal) {
    const size_t bytes = size_t(rank.count()) * VALUES * 2 * sizeof(T);
    std::vector<T> wanted(bytes / sizeof(T));
    memset(wanted.data(), 0xEE, bytes);
    for (int from = 0; from < rank.count(); from++)
        for (int i = 0; i < VALUES; i++) wanted[(from * VALUES + i) * 2] = T(mix(from, i, rank.index));
    world.fill(offset, bytes, 0xEE);
    world.run("putValue", [&] { values<T><<<1, 1, 0, world.stream>>>(world.device, world.window, offset, signal, world.out); });
    world.verify("putValue", offset, bytes / 8, [&](size_t i) {
        uint64_t word;
        memcpy(&word, reinterpret_cast<char*>(wanted.data()) + i * 8, 8);
        return word;
    });
    rank.row("putValue + signal", sizeof(T), VALUES * rank.count() * 1e3 / world.out->nanoseconds, "M/s");
}

PROGRAM(values) {
    World world(rank, 4 << 20);
    one<uint8_t>(rank, world, 0, 0);
    one<uint16_t>(rank, world, 1 << 20, 1);
    one<uint32_t>(rank, world, 2 << 20, 2);
    one<uint64_t>(rank, world, 3 << 20, 3);
    world.close();
}

}  // namespace values_program
