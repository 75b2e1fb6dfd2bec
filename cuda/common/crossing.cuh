// Puts and gets across the segment boundaries of a window: the cases, the kernel and the check against a copy on the CPU.
#pragma once

#include "gin.cuh"
#include "vmm.cuh"

#if HAVE_GET  // NCCL takes windows of several segments since then, too

namespace {

struct Piece {
    size_t from, to, bytes;  // offsets in the window, of the giver and of the taker
};

constexpr int MOST_PIECES = 16;

struct Pieces {
    Piece at[MOST_PIECES];
    int count;
};

// Every rank puts all pieces to its right neighbour, then gets them from there to another place and looks at their ends.
template <typename Kind>
__global__ void cross(ncclDevComm comm, ncclWindow_t window, Pieces pieces, size_t fetched, uint64_t base, Outcome* out) {
    ncclGin gin{comm, 0};
    const ncclTeam world = ncclTeamWorld(comm);
    const int right = (comm.rank + 1) % comm.nRanks;
    const uint64_t started = now_ns();
    for (int i = 0; i < pieces.count; i++) {
        const Piece p = pieces.at[i];
        gin.put(world, right, window, p.to, window, p.from, p.bytes, SignalInc{0}, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{},
                cuda::thread_scope_thread, cuda::thread_scope_device, ncclGinOptFlagsDefault, Kind{});
    }
    if (!wait_signal(gin, 0, base + pieces.count, out)) return;
    for (int i = 0; i < pieces.count; i++) {
        const Piece p = pieces.at[i];
        gin.get(world, right, window, p.from, window, fetched + p.to, p.bytes, ncclCoopThread{}, ncclGin_None{},
                ncclGinOptFlagsDefault, Kind{});
    }
    gin.flush(ncclCoopThread());
    out->nanoseconds = now_ns() - started;
}

// A window of `kinds` segments: the first third is given, the second is put to, the third is fetched to.
template <typename Kind>
void cross_boundaries(Rank& rank, const char* what, const std::vector<Where>& kinds) {
    Segments memory(kinds, 2 << 20);
    World world(rank, memory.bytes(), {.memory = memory.base(), .segment = memory.each});
    // In multiples of 4 KiB; with ten segments of 2 MiB a third begins in the middle of one, with six at a boundary.
    const size_t s = memory.each, edge = 4096, third = memory.bytes() / 3 / edge * edge;
    // What is put or fetched to does not overlap.
    const Pieces pieces{{
        {0, 0, 8},                                           // in a segment
        {edge, edge + 8, edge - 16},                         //
        {s - 8, 2 * edge, 16},                               // across a boundary at the giver's
        {s - edge - 24, 8 * edge, 2 * edge},                 //
        {24 * edge + 8, 30 * edge, edge},                    //
        {s - 40 * edge, 322 * edge, 80 * edge + 8},          // at both, with ten segments
        {s - 30 * edge, s - 50 * edge - 8, 100 * edge + 16}, // at both, with six segments
        {s / 2 + 8, 640 * edge, s / 2 + edge},               // large
    }, 8};
    const int left = (rank.index + rank.count() - 1) % rank.count(), right = (rank.index + 1) % rank.count();
    auto given = [](int by, size_t byte) { return mix(by, byte / 8, 77); };
    std::vector<uint64_t> wanted(2 * third / 8, 0xEEEEEEEEEEEEEEEEull), own(third / 8);
    for (size_t i = 0; i < own.size(); i++) own[i] = given(rank.index, i * 8);
    Pieces placed = pieces;
    for (int i = 0; i < pieces.count; i++) {
        const Piece p = pieces.at[i];
        if (p.from + p.bytes > third || p.to + p.bytes > third) throw Failure("a piece does not fit: the segments are too small");
        placed.at[i].to += third;
        for (size_t b = 0; b < p.bytes; b += 8) {
            wanted[(p.to + b) / 8] = given(left, p.from + b);
            wanted[(third + p.to + b) / 8] = given(right, p.from + b);
        }
    }
    double best = 1e18;
    const int rounds = rank.options.quick ? 3 : 20;
    for (int round = 0; round < rounds; round++) {
        world.write(0, own);
        world.write(third, std::vector<uint64_t>(2 * third / 8, 0xEEEEEEEEEEEEEEEEull));
        world.run(what, [&] {
            cross<Kind><<<1, 1, 0, world.stream>>>(world.device, world.window, placed, third, uint64_t(round) * pieces.count, world.out);
        });
        world.verify(what, third, wanted.size(), [&](size_t i) { return wanted[i]; });
        best = std::min(best, double(world.out->nanoseconds));
    }
    size_t bytes = 0;
    for (int i = 0; i < pieces.count; i++) bytes += pieces.at[i].bytes;
    rank.row(what, bytes, best / 1e3, "us");
    world.close();
    memory.free();
}

}  // namespace

#endif
