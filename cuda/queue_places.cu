// What a post costs by where its queue lies: pinned host memory, the same write-combined, GPU memory, and managed memory on
// either side; and what it takes to bring managed memory to the GPU and back, while it is written and while the application is
// in calls that wait for its kernels. No NCCL, one rank, one GPU.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "common/ranks.cuh"

namespace queue_places_program {

using Word = unsigned long long;

constexpr int SLOTS = 64, SLOT_WORDS = 16;  // of 128 bytes
constexpr size_t BYTES = 1 << 20;

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

__device__ Word load(const Word* at) {
    Word value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ void store(Word* at, Word value) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory"); }

__device__ void fill(Word* slot, Word value) {
    for (int word = 0; word < SLOT_WORDS; word += 2)
        asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(slot + word), "l"(value), "l"(value) : "memory");
}

__device__ bool is_full(const Word* slot, Word value) {
    bool all = true;
    for (int word = 0; word < SLOT_WORDS; word += 2) {
        Word a, b;
        asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(slot + word) : "memory");
        all &= a == value && b == value;
    }
    return all;
}

// Clocks of what block 0 does, as a post of device code: a fence of the system and 128 bytes; and until block 1, which looks for
// them all the time, has answered in GPU memory. Gives up after four seconds.
__global__ void post_and_look(Word* queue, Word* answer, int count, Word* clocks) {
    if (threadIdx.x) return;
    const long long started = clock64();
    const auto is_late = [&] { return clock64() - started > 8'000'000'000ll; };
    Word posting = 0, all = 0;
    for (int i = 1; i <= count; i++) {
        Word* slot = queue + (i % SLOTS) * SLOT_WORDS;
        if (blockIdx.x == 0) {
            const long long before = clock64();
            __threadfence_system();
            fill(slot, i);
            const long long posted = clock64();
            while (load(answer) != Word(i))
                if (is_late()) return;
            posting += posted - before, all += clock64() - before;
        } else {
            while (!is_full(slot, i))
                if (is_late()) return;
            store(answer, i);
        }
    }
    if (blockIdx.x == 0) clocks[0] = posting, clocks[1] = all;
}

// Posts every few microseconds until it is told to end.
__global__ void post_on(Word* queue, const Word* end) {
    const long long started = clock64();
    for (int i = 1; !load(end) && clock64() - started < 8'000'000'000ll; i++) {
        fill(queue + (i % SLOTS) * SLOT_WORDS, i);
        __threadfence_system();
        __nanosleep(2000);
    }
}

cudaError_t bring(void* at, size_t bytes, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    return cudaMemPrefetchAsync(at, bytes, cudaMemLocation{cudaMemLocationTypeDevice, 0}, 0, stream);
#else
    return cudaMemPrefetchAsync(at, bytes, 0, stream);
#endif
}

cudaError_t map_for_gpu(void* at, size_t bytes) {
#if CUDART_VERSION >= 13000
    return cudaMemAdvise(at, bytes, cudaMemAdviseSetAccessedBy, cudaMemLocation{cudaMemLocationTypeDevice, 0});
#else
    return cudaMemAdvise(at, bytes, cudaMemAdviseSetAccessedBy, 0);
#endif
}

struct Places {
    Rank& rank;
    int rounds;
    Word *host, *combined, *gpu, *managed;
    Word *answer, *clocks, *end;
    double clocks_a_us;
    cudaStream_t stream, kernels;

    explicit Places(Rank& rank) : rank(rank), rounds(rank.options.quick ? 1000 : 4000) {
        if (rank.count() != 1) throw Failure("takes one rank");
        int concurrent = 0, khz = 0;
        CUDA(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
        if (!concurrent) throw Absent("the CPU cannot use managed memory beside kernels here");
        CUDA(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
        clocks_a_us = khz / 1e3;
        CUDA(cudaHostAlloc(&host, BYTES, cudaHostAllocMapped));
        CUDA(cudaHostAlloc(&combined, BYTES, cudaHostAllocMapped | cudaHostAllocWriteCombined));
        CUDA(cudaMalloc(&gpu, BYTES));
        CUDA(cudaMallocManaged(&managed, BYTES));
        CUDA(map_for_gpu(managed, BYTES));
        CUDA(cudaMalloc(&answer, 4096));
        CUDA(cudaHostAlloc(&clocks, 4096, cudaHostAllocMapped));
        CUDA(cudaHostAlloc(&end, 4096, cudaHostAllocMapped));
        for (cudaStream_t* s : {&stream, &kernels}) CUDA(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    }

    void bring_all() {
        CUDA(bring(managed, BYTES, stream));
        CUDA(cudaStreamSynchronize(stream));
    }

    void posts(const char* where, Word* queue) {
        rank.stage(where);
        CUDA(cudaMemset(answer, 0, 8));
        clocks[0] = clocks[1] = 0;
        post_and_look<<<2, 32, 0, kernels>>>(queue, answer, rounds, clocks);
        CUDA(cudaStreamSynchronize(kernels));
        if (!clocks[1]) throw Failure(format("%s: a post was not seen", where));
        rank.row(format("%s: post of 128 bytes behind a fence", where).c_str(), 0, clocks[0] / clocks_a_us / rounds, "us");
        rank.row(format("%s: the same until it was seen and answered", where).c_str(), 0, clocks[1] / clocks_a_us / rounds, "us");
    }

    void all_places() {
        CUDA(cudaMemset(gpu, 0, BYTES));
        for (Word* queue : {host, combined, managed}) memset(queue, 0, BYTES);
        posts("pinned memory", host);
        posts("write-combined memory", combined);
        posts("GPU memory", gpu);
        posts("managed memory in the host", managed);
        memset(managed, 0, BYTES);
        bring_all();
        posts("managed memory on the GPU", managed);
    }

    // What the CPU waits for to have the queue brought, until it is there, and for its own first look after that.
    void to_and_fro(const char* what) {
        std::vector<double> calls, there, first, next;
        for (int i = 0; i < 60; i++) {
            const double before = now_us();
            CUDA(bring(managed, BYTES, stream));
            const double called = now_us();
            CUDA(cudaStreamSynchronize(stream));
            const double done = now_us();
            (void)*static_cast<volatile Word*>(managed);
            const double looked = now_us();
            (void)*static_cast<volatile Word*>(managed + 4096 / sizeof(Word));
            calls.push_back(called - before), there.push_back(done - before), first.push_back(looked - done), next.push_back(now_us() - looked);
        }
        rank.row(format("%s: call that brings managed memory", what).c_str(), BYTES, median(calls), "us");
        rank.row(format("%s: until it is on the GPU", what).c_str(), BYTES, median(there), "us");
        rank.row(format("%s: the CPU's first look", what).c_str(), 0, median(first), "us");
        rank.row(format("%s: its look at the next page", what).c_str(), 0, median(next), "us");
    }

    // The CPU's look while a kernel runs and another thread is in a call that waits for it.
    void beside(const char* what, void (*call)()) {
        rank.stage(what);
        bring_all();
        *static_cast<volatile Word*>(end) = 0;
        post_on<<<1, 1, 0, kernels>>>(gpu, end);
        std::atomic<bool> returned{false};
        std::thread other([&] { cudaSetDevice(0), call(), returned = true; });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        const double before = now_us();
        (void)*static_cast<volatile Word*>(managed);
        const double took = now_us() - before;
        const bool waited = !returned;
        *static_cast<volatile Word*>(end) = 1;
        other.join();
        CUDA(cudaStreamSynchronize(kernels));
        if (took > 1e4) throw Failure(format("beside %s the CPU's look took %.0f us", what, took));
        rank.row(format("beside %s%s: the CPU's first look", what, waited ? ", which waits" : "").c_str(), 0, took, "us");
    }
};

PROGRAM(queue_places) {
    Places places(rank);
    places.all_places();
    places.to_and_fro("idle");
    *static_cast<volatile Word*>(places.end) = 0;
    post_on<<<1, 1, 0, places.kernels>>>(places.managed, places.end);
    places.to_and_fro("posts every 2 us");
    *static_cast<volatile Word*>(places.end) = 1;
    CUDA(cudaStreamSynchronize(places.kernels));
    places.beside("cudaDeviceSynchronize", [] { cudaDeviceSynchronize(); });
    places.beside("cudaMalloc and cudaFree", [] {
        void* memory = nullptr;
        if (cudaMalloc(&memory, 256 << 20) == cudaSuccess) cudaFree(memory);
    });
    places.beside("cudaHostAlloc", [] {
        void* memory = nullptr;
        if (cudaHostAlloc(&memory, 16 << 20, 0) == cudaSuccess) cudaFreeHost(memory);
    });
}

}  // namespace queue_places_program
