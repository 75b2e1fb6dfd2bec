// CUDA's hardware queues. How many of eight further streams stand while others are busy; and whether kernels of eight streams
// that wait for each other, as the ranks of an application do, still all begin beside further streams that get small kernels.
// Each case with ranks has a context of its own, so that no stream has had work before. CUDA_DEVICE_MAX_CONNECTIONS, which CUDA reads as
// the process starts, says how many queues there are. No NCCL, one rank, one GPU.
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>
#include <vector>

#include "common/clock.cuh"
#include "common/vmm.cuh"

namespace hardware_queues_program {

using std::chrono::microseconds, std::chrono::milliseconds;

__global__ void spin(const volatile unsigned* end) {
    while (!*end) {
    }
}
__global__ void nothing() {}
__global__ void mark(volatile unsigned* at) { *at = 1; }

// What takes a little while and waits for nothing.
__global__ void linger(uint64_t ns) {
    const uint64_t started = now_ns();
    while (now_ns() - started < ns) {
    }
}

constexpr int RANKS = 8, THREADS = 512, BLOCKS = 16, BATCHES = 50, BATCH = 20;
// So many doubles each thread keeps in registers, so that a multiprocessor holds one block, as with an application's kernels.
constexpr int KEPT = 48;

struct Progress {
    unsigned long long begun[RANKS], ended[RANKS];
    unsigned is_given_up;
};

// A rank's kernel: each block waits until `target` blocks of all ranks' kernels have begun.
__global__ void __launch_bounds__(THREADS, 1)
    wait_for_all(Progress* progress, unsigned long long* begun, unsigned long long target, int rank, double* kept) {
    double values[KEPT];
    for (int i = 0; i < KEPT; i++) values[i] = static_cast<volatile double*>(kept)[threadIdx.x + i];
    if (threadIdx.x == 0) {
        atomicAdd_system(&progress->begun[rank], 1ull);
        atomicAdd(begun, 1ull);
        while (*(volatile unsigned long long*)begun < target && !*(volatile unsigned*)&progress->is_given_up) {
        }
    }
    __syncthreads();
    double sum = 0;
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < KEPT; i++) values[i] = values[i] * values[(i + 1) % KEPT] + sum, sum += values[(i * 7) % KEPT];
    for (int i = 0; i < KEPT; i++)
        if (values[i] == 1.2345) kept[i] = sum;  // never; the values are zero
    if (threadIdx.x == 0) atomicAdd_system(&progress->ended[rank], 1ull);
}

// A context that is the current one as long as it lives.
class Context {
  public:
    explicit Context(int gpu) : made_(new_context(gpu)) {}
    ~Context() { DRIVER(cuCtxDestroy)(made_); }
    void enter() const { driver_check(DRIVER(cuCtxSetCurrent)(made_), "cuCtxSetCurrent"); }

  private:
    CUcontext made_;
};

using Streams = std::vector<cudaStream_t>;

Streams streams(int count, bool is_first = false) {
    int low, high;
    CUDA(cudaDeviceGetStreamPriorityRange(&low, &high));
    Streams all(count);
    for (auto& stream : all) CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, is_first ? high : low));
    return all;
}

// Of eight streams, how many stand while `busy` others have a kernel that spins and, if `is_followed`, one behind it.
int standing(unsigned* flags, int busy, bool is_followed, bool busy_is_first, bool other_is_first) {
    constexpr int OTHERS = 8;
    memset(flags, 0, 4096);
    const Streams spinning = streams(busy, busy_is_first), others = streams(OTHERS, other_is_first);
    for (auto stream : spinning) {
        spin<<<1, 1, 0, stream>>>(flags);
        if (is_followed) nothing<<<1, 1, 0, stream>>>();
    }
    for (int i = 0; i < OTHERS; i++) mark<<<1, 1, 0, others[i]>>>(flags + 1 + i);
    std::this_thread::sleep_for(milliseconds(20));
    int stand = 0;
    for (int i = 0; i < OTHERS; i++) stand += !static_cast<volatile unsigned*>(flags)[1 + i];
    *static_cast<volatile unsigned*>(flags) = 1;
    CUDA(cudaDeviceSynchronize());
    for (auto stream : spinning) CUDA(cudaStreamDestroy(stream));
    for (auto stream : others) CUDA(cudaStreamDestroy(stream));
    return stand;
}

void all_standing(Rank& rank) {
    struct Kind {
        const char* what;
        bool is_followed, busy_is_first, other_is_first;
    };
    for (const Kind& kind : {Kind{"one behind each", true, false, false}, Kind{"one behind each, in high streams", true, true, false},
                             Kind{"one behind each, others high", true, false, true}, Kind{"nothing behind", false, false, false}}) {
        rank.stage(kind.what);
        Context context(rank.gpu());
        unsigned* flags;
        CUDA(cudaHostAlloc(&flags, 4096, cudaHostAllocMapped));
        std::string line = format("busy streams, %s: how many of 8 others stand:", kind.what);
        for (int busy : {1, 4, 6, 7, 8, 16, 24, 30, 31, 32, 48, 64})
            line += format(" %d: %d;", busy, standing(flags, busy, kind.is_followed, kind.busy_is_first, kind.other_is_first));
        CUDA(cudaFreeHost(flags));
        rank.note(line);
    }
}

// Further streams of each rank. `made` get one kernel at the beginning; `used` of those get one after the other, as long as the
// ranks' kernels run, of `life_us` each.
struct Further {
    const char* what;
    int made, used, life_us;
    bool is_synchronized;  // cudaStreamSynchronize behind each kernel
    bool is_destroyed;     // those that are not used, after their one kernel
};

class Crowd {
  public:
    Crowd(int gpu, const Further& further) : context_(gpu), further_(further), everyone_(RANKS) {
        CUDA(cudaHostAlloc(&progress_, sizeof *progress_, cudaHostAllocMapped));
        CUDA(cudaMalloc(&begun_, 8));
        CUDA(cudaMalloc(&kept_, 1 << 20));
        CUDA(cudaMemset(kept_, 0, 1 << 20));
        prepare();
    }
    ~Crowd() { cudaFreeHost(progress_); }

    // How many batches all went through: BATCHES, or fewer once nothing has ended for a second.
    int batches() {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < RANKS; rank++) threads.emplace_back([this, rank] { launch_batches(rank); });
        for (int rank = 0; rank < RANKS && further_.used; rank++) threads.emplace_back([this, rank] { keep_busy(rank); });
        unsigned long long last = 0;
        for (int quiet = 0; batch_ < BATCHES && quiet < 200; quiet++) {
            std::this_thread::sleep_for(milliseconds(5));
            unsigned long long ended = 0;
            for (auto& each : progress_->ended) ended += *static_cast<volatile unsigned long long*>(&each);
            if (ended != last) last = ended, quiet = 0;
        }
        const int went = batch_;
        *static_cast<volatile unsigned*>(&progress_->is_given_up) = 1;
        is_over_ = true;
        for (auto& thread : threads) thread.join();
        return went;
    }

    long launches() const { return launches_; }

  private:
    Context context_;
    const Further& further_;
    Progress* progress_{};
    unsigned long long* begun_{};
    double* kept_{};
    Streams ranks_;
    std::vector<Streams> others_;  // of each rank
    std::atomic<int> batch_{0};
    std::atomic<long> launches_{0};
    std::atomic<bool> is_over_{false};
    std::barrier<> everyone_;

    // Streams that get their first work here: the further ones, then the ranks'.
    void prepare() {
        for (int rank = 0; rank < RANKS; rank++) others_.push_back(streams(further_.made, true));
        ranks_ = streams(RANKS);
        for (auto& its : others_)
            for (auto stream : its) linger<<<1, 32, 0, stream>>>(100);
        CUDA(cudaDeviceSynchronize());
        if (further_.is_destroyed)
            for (auto& its : others_)
                for (int i = further_.used; i < further_.made; i++) CUDA(cudaStreamDestroy(its[i]));
        for (auto stream : ranks_) {
            wait_for_all<<<1, THREADS, 0, stream>>>(progress_, begun_, 0, 0, kept_);
            CUDA(cudaDeviceSynchronize());
        }
        memset(progress_, 0, sizeof *progress_);
        CUDA(cudaMemset(begun_, 0, 8));
        CUDA(cudaDeviceSynchronize());
    }

    void launch_batches(int rank) {
        context_.enter();
        unsigned long long kernels = 0;
        for (int batch = 0; batch < BATCHES; batch++) {
            everyone_.arrive_and_wait();
            for (int i = 0; i < BATCH; i++)
                wait_for_all<<<BLOCKS, THREADS, 0, ranks_[rank]>>>(progress_, begun_, ++kernels * BLOCKS * RANKS, rank, kept_);
            cudaStreamSynchronize(ranks_[rank]);
            everyone_.arrive_and_wait();
            if (rank == 0 && !is_over_) batch_++;
        }
    }

    void keep_busy(int rank) {
        context_.enter();
        for (size_t turn = 0; !is_over_; turn++) {
            const auto stream = others_[rank][turn % further_.used];
            if (cudaStreamQuery(stream) == cudaSuccess) {
                linger<<<1, 32, 0, stream>>>(further_.life_us * 1000ull);
                launches_++;
                if (further_.is_synchronized) cudaStreamSynchronize(stream);
            }
            std::this_thread::sleep_for(microseconds(150));
        }
    }
};

void all_crowds(Rank& rank) {
    const Further all[] = {
        {"none", 0, 0, 0, false, false},
        {"2, all used", 2, 2, 500, false, false},
        {"4, all used", 4, 4, 500, false, false},
        {"4, all used for 20 us at a time", 4, 4, 20, false, false},
        {"4, all used, each kernel waited for by cudaStreamSynchronize", 4, 4, 500, true, false},
        {"4, one used", 4, 1, 500, false, false},
        {"4, none used", 4, 0, 0, false, false},
        {"8, one used", 8, 1, 500, false, false},
        {"8, one used, the others destroyed", 8, 1, 500, false, true},
        {"8, all used", 8, 8, 500, false, false},
    };
    for (const Further& further : all) {
        if (rank.options.only.size() && !strstr(further.what, rank.options.only.c_str())) continue;
        std::string line = format("8 ranks' streams, further ones of each: %s: of %d batches went", further.what, BATCHES);
        long launches = 0;
        for (int round = 0; round < (rank.options.quick ? 1 : 3); round++) {
            rank.stage(further.what);
            Crowd crowd(rank.gpu(), further);
            line += format(" %d", crowd.batches());
            launches += crowd.launches();
        }
        rank.note(line + format(" (%ld further kernels)", launches));
    }
}

PROGRAM(hardware_queues) {
    const char* queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    rank.note(format("hardware queues: %s", queues ? queues : "8, CUDA's default"));
    all_standing(rank);
    all_crowds(rank);
}

}  // namespace hardware_queues_program
