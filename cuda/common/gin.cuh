// A communicator with one window and one device communicator, and device-side helpers. Compiles against the public
// headers of NCCL 2.29.7 and later.
#pragma once

#include <algorithm>

#include <nccl_device.h>

#include "clock.cuh"
#include "ranks.cuh"

#if NCCL_VERSION_CODE < 22907
#error "these programs need the device API of NCCL 2.29.7 or later"
#endif

#define HAVE_GET (NCCL_VERSION_CODE >= 23003)
#define HAVE_WEAK_SIGNALS (NCCL_VERSION_CODE >= 23007)

// Up to 2.30.4 every signal is strong and the names say nothing about it.
#if HAVE_WEAK_SIGNALS
using SignalInc = ncclGin_StrongSignalInc;
using SignalAdd = ncclGin_StrongSignalAdd;
using VASignalInc = ncclGin_StrongVASignalInc;
using VASignalAdd = ncclGin_StrongVASignalAdd;
using CounterInc = ncclGin_WeakCounterInc;
#else
using SignalInc = ncclGin_SignalInc;
using SignalAdd = ncclGin_SignalAdd;
using VASignalInc = ncclGin_VASignalInc;
using VASignalAdd = ncclGin_VASignalAdd;
using CounterInc = ncclGin_CounterInc;
#endif

// What a kernel tells the host, in mapped host memory.
struct Outcome {
    uint64_t nanoseconds;
    uint32_t failed;  // 1 a signal or counter did not come, 2 wrong data
    uint32_t where;   // signal, counter or slot
    uint64_t wanted, found;
    uint64_t round;
};

constexpr uint64_t WAIT_LIMIT_NS = 8'000'000'000;

__device__ inline void report(Outcome* out, uint32_t kind, uint32_t where, uint64_t wanted, uint64_t found, uint64_t round) {
    if (atomicCAS_system(&out->failed, 0u, kind) != 0) return;
    out->where = where;
    out->wanted = wanted;
    out->found = found;
    out->round = round;
    __threadfence_system();
}

// Polls `read` until it gives at least `least`; false, and a report, after the limit.
template <typename Read>
__device__ inline bool wait_for(Read read, uint32_t where, uint64_t least, Outcome* out, uint64_t round = 0) {
    uint64_t found = read();
    for (uint32_t polls = 1, started = 0; found < least; found = read(), polls++) {
        if (polls % 4096 != 0) continue;
        // Seconds are enough here, and fit.
        uint32_t tenths = static_cast<uint32_t>(now_ns() / 100'000'000);
        if (started == 0) started = tenths;
        if (tenths - started > WAIT_LIMIT_NS / 100'000'000) {
            report(out, 1, where, least, found, round);
            return false;
        }
    }
    return true;
}

__device__ inline bool wait_signal(const ncclGin& gin, ncclGinSignal_t signal, uint64_t least, Outcome* out, uint64_t round = 0) {
    return wait_for([&] { return gin.readSignal(signal); }, signal, least, out, round);
}

__device__ inline bool wait_counter(const ncclGin& gin, ncclGinCounter_t counter, uint64_t least, Outcome* out, uint64_t round = 0) {
    return wait_for([&] { return gin.readCounter(counter); }, counter, least, out, round);
}

__device__ inline uint64_t* local(ncclWindow_t window, size_t offset) {
    return static_cast<uint64_t*>(ncclGetLocalPointer(window, offset));
}

__device__ inline uint64_t load(const uint64_t* at) { return *static_cast<const volatile uint64_t*>(at); }
__device__ inline void store(uint64_t* at, uint64_t value) { *static_cast<volatile uint64_t*>(at) = value; }

// 64 bits that depend on everything given: what test data consist of.
__host__ __device__ inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c = 0) {
    uint64_t x = a * 0x9E3779B97F4A7C15ull + b * 0xBF58476D1CE4E5B9ull + c * 0x94D049BB133111EBull + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline void check(const char* what, const Outcome& out) {
    if (out.failed)
        throw Failure(format("%s: %s %u: wanted %llu, found %llu, in round %llu", what,
                             out.failed == 1 ? "waited 8 s for signal, counter or place" : "wrong data at", out.where,
                             (unsigned long long)out.wanted, (unsigned long long)out.found, (unsigned long long)out.round));
}

struct Needs {
    int signals = 8;
    int counters = 0;
    int contexts = 4;
    int barriers = 0;     // world GIN barriers, in World::barrier
    int window_flags = 0;  // beside NCCL_WIN_COLL_SYMMETRIC
    void* memory = nullptr;  // the caller's, as large as the window; otherwise ncclMemAlloc's
    size_t segment = 0;      // bytes of each physical allocation in `memory`, if there are several
    int queue_depth = 0;     // of NCCL's queues, where this NCCL lets it be chosen; 0: NCCL's own
};

// One rank's communicator, window, device communicator and stream. Collective to make and to close.
class World {
  public:
    World(Rank& rank, size_t bytes, Needs needs = {}) : rank(rank), bytes(bytes), segment_(needs.segment ? needs.segment : bytes) {
        rank.stage("ncclCommInitRank");
        NCCL(ncclCommInitRank(&comm, rank.count(), rank.id(), rank.index));
        ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
        NCCL(ncclCommQueryProperties(comm, &properties));
        if (!properties.deviceApiSupport) throw Failure("NCCL gives this communicator no device API");
        // A plugin that gives device code queues of its own reports the type of one that needs no proxy of NCCL's.
        const char* engine = getenv("OXYGIN_ENGINE");
        const bool own = engine && (!strcmp(engine, "own") || !strncmp(engine, "gdaki", 5));
        const int wanted = own ? NCCL_GIN_TYPE_GDAKI : NCCL_GIN_TYPE_PROXY;
        if (properties.ginType != wanted && (engine || properties.ginType != NCCL_GIN_TYPE_GDAKI))
            throw Failure(format("NCCL offers GIN type %d, not %d: no GIN or RMA plugin in use", (int)properties.ginType, wanted));

        rank.stage("ncclCommWindowRegister");
        memory = needs.memory;
        if (!memory) NCCL(ncclMemAlloc(&allocated_, bytes));
        if (!memory) memory = allocated_;
        NCCL(ncclCommWindowRegister(comm, memory, bytes, &window, NCCL_WIN_COLL_SYMMETRIC | needs.window_flags));

        rank.stage("ncclDevCommCreate");
        ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
        // A barrier's signals lie behind the program's own. Not by ncclGinBarrierCreateRequirement: up to 2.30.7 NCCL drops the
        // signals of such a requirement and leaves the handle at 0: barriers and puts would count in the same signals.
        requirements.ginSignalCount = needs.signals + needs.barriers * rank.count();
        barrier.signal0 = needs.signals;
        requirements.ginCounterCount = needs.counters;
        requirements.ginContextCount = needs.contexts;
        requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
        // The proxy of older ones refuses any other.
        if (NCCL_VERSION_CODE >= 23007) requirements.ginQueueDepth = needs.queue_depth;
        NCCL(ncclDevCommCreate(comm, &requirements, &device));

        rank.stage("allocate");
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaHostAlloc(&out, sizeof(Outcome), cudaHostAllocMapped | cudaHostAllocPortable));
        memset(out, 0, sizeof(Outcome));
        // Allocations may wait for running kernels: nobody launches before all are done.
        rank.barrier();
    }

    // Runs a kernel to its end on every rank at once: `launch` enqueues it on `stream`.
    template <typename Launch>
    void run(const char* what, Launch launch) {
        rank.stage(what);
        memset(out, 0, sizeof(Outcome));
        rank.barrier();
        launch();
        CUDA(cudaGetLastError());
        CUDA(cudaStreamSynchronize(stream));
        check(what, *out);
        rank.barrier();
    }

    // Copies on this rank's stream, in order with its kernels; no other rank's kernel may be running.
    std::vector<uint64_t> read(size_t offset, size_t words) {
        std::vector<uint64_t> data(words);
        by_segment(offset, words * 8, [&](char* at, size_t done, size_t length) {
            CUDA(cudaMemcpyAsync(reinterpret_cast<char*>(data.data()) + done, at, length, cudaMemcpyDefault, stream));
        });
        return data;
    }

    void write(size_t offset, const std::vector<uint64_t>& data) {
        by_segment(offset, data.size() * 8, [&](char* at, size_t done, size_t length) {
            CUDA(cudaMemcpyAsync(at, reinterpret_cast<const char*>(data.data()) + done, length, cudaMemcpyDefault, stream));
        });
    }

    void fill(size_t offset, size_t length, int byte) {
        by_segment(offset, length, [&](char* at, size_t, size_t length) { CUDA(cudaMemsetAsync(at, byte, length, stream)); });
    }

    // Compares a stretch of the window with what `expected(word)` gives.
    template <typename Expected>
    void verify(const char* what, size_t offset, size_t words, Expected expected) {
        auto data = read(offset, words);
        size_t bad = 0, first = 0;
        for (size_t i = 0; i < words; i++)
            if (data[i] != expected(i) && bad++ == 0) first = i;
        if (bad)
            throw Failure(format("%s: %zu of %zu words wrong, the first at %zu: wanted %016llx, found %016llx", what, bad, words,
                                 first, (unsigned long long)expected(first), (unsigned long long)data[first]));
    }

    void close() {
        rank.stage("close");
        rank.barrier();
        NCCL(ncclDevCommDestroy(comm, &device));
        NCCL(ncclCommWindowDeregister(comm, window));
        if (allocated_) NCCL(ncclMemFree(allocated_));
        CUDA(cudaFreeHost(out));
        CUDA(cudaStreamDestroy(stream));
        NCCL(ncclCommDestroy(comm));
    }

    Rank& rank;
    const size_t bytes;
    ncclComm_t comm{};
    void* memory{};
    ncclWindow_t window{};
    ncclDevComm device{};
    ncclGinBarrierHandle_t barrier{};
    cudaStream_t stream{};
    Outcome* out{};

  private:
    // Calls `piece(address, bytes before it, length)` for each part of a stretch that lies in one segment, then waits for the
    // stream: the driver crashes at one copy over GPU memory and host memory.
    template <typename Piece>
    void by_segment(size_t offset, size_t length, Piece piece) {
        for (size_t done = 0; done < length;) {
            const size_t at = offset + done, n = std::min(length - done, segment_ - at % segment_);
            piece(static_cast<char*>(memory) + at, done, n);
            done += n;
        }
        CUDA(cudaStreamSynchronize(stream));
    }

    const size_t segment_;
    void* allocated_{};
};
