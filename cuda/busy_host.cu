// Kernels of all ranks wait for each other through GIN while each rank's application is in a CUDA call that the driver
// lets wait for running kernels: loading modules, freeing memory, copying synchronously, and so on. Such a call may
// hold locks in the application's context for as long as the kernel runs, and the kernel runs until its peers' data
// have come: whoever moves data must need none of these locks. A round is one kernel on every rank and one application
// call, or two by two threads.
#include <condition_variable>
#include <memory>
#include <thread>

#include "common/app_calls.cuh"
#include "common/talk.cuh"

namespace busy_host_program {

constexpr int HOPS = 6, THREADS = 512;
constexpr size_t LARGEST = 4 << 20;
constexpr size_t SIZES[] = {8, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, LARGEST};
// Areas of the window.
constexpr size_t GIVEN = 0, OFFERED = LARGEST, RECEIVED = 2 * LARGEST, FETCHED = 3 * LARGEST, OUT = 4 * LARGEST,
                 IN = OUT + 4096, END = IN + 4096;
enum Signal { DATA, HOP, SUM, SIGNALS };

enum Step { HOST, COUNTER, PUT, RECEIPT, HOP_STEP, HOP_DATA, GET, FETCH, SUMS, EXACT, FLUSH };
const char* const STEPS[] = {"the host's word",      "the counter of a put", "the signal of a put", "what was put",
                             "a hop's signal",       "a hop's data",         "get and flush",       "what was fetched",
                             "the sum of additions", "exact signals",        "the last flush"};

__host__ __device__ inline uint64_t added(int from, int to, uint32_t number) {
    return mix(from, to, number) % 1000 + 1;
}

// One rank's kernel number `number`, by one block.
struct Pattern {
    const ncclDevComm& comm;
    ncclWindow_t window;
    size_t bytes;
    uint32_t number;
    uint64_t sum;  // what all have added to this rank's signal by the end of this kernel
    Talk* talk;
    Outcome* out;

    __device__ bool first() const { return threadIdx.x == 0; }

    // All threads: what `act`, done by the first, gave.
    template <typename Act>
    __device__ bool by_first(Step step, Act act) const {
        __shared__ bool good;
        __syncthreads();
        if (first()) {
            say(&talk->step, step);
            good = act();
        }
        __syncthreads();
        return good;
    }

    __device__ void fill(size_t area, uint64_t key) const {
        for (size_t w = threadIdx.x; w < bytes / 8; w += blockDim.x)
            store(local(window, area + w * 8), mix(key, number, w));
        __threadfence();
        __syncthreads();
    }

    __device__ bool compare(Step step, size_t area, uint64_t key) const {
        bool good = true;
        for (size_t w = threadIdx.x; w < bytes / 8 && good; w += blockDim.x)
            if (uint64_t found = load(local(window, area + w * 8)); found != mix(key, number, w)) {
                report(out, 2, step, mix(key, number, w), found, w);
                good = false;
            }
        return __syncthreads_and(good);
    }

    __device__ bool put_and_receive(const ncclGin& gin, int left, int right) const {
        if (!by_first(COUNTER, [&] {
                gin.put(ncclTeamWorld(comm), right, window, RECEIVED, window, GIVEN, bytes, SignalInc{DATA},
                        CounterInc{0});
                return wait_counter(gin, 0, number, out, number);
            }))
            return false;
        fill(GIVEN, ~uint64_t(comm.rank));  // the counter says that the source may be reused
        return by_first(PUT, [&] { return wait_signal(gin, DATA, number, out, number); }) &&
               compare(RECEIPT, RECEIVED, left);
    }

    // Hops that wait for one another: values, puts of 8 bytes and signals alone.
    __device__ bool hops(const ncclGin& gin, int left, int right) const {
        return by_first(HOP_STEP, [&] {
            const ncclTeam world = ncclTeamWorld(comm);
            for (int h = 0; h < HOPS; h++) {
                const uint64_t value = mix(comm.rank, number, h);
                if (h % 3 == 0) gin.putValue(world, right, window, IN + h * 8, value, SignalInc{HOP});
                if (h % 3 == 1) {
                    store(local(window, OUT + h * 8), value);
                    gin.put(world, right, window, IN + h * 8, window, OUT + h * 8, 8, SignalInc{HOP});
                }
                if (h % 3 == 2) gin.signal(world, right, SignalInc{HOP});
                if (!wait_for([&] { return gin.readSignal(HOP); }, HOP_STEP, uint64_t(number - 1) * HOPS + h + 1, out,
                              number))
                    return false;
                const uint64_t wanted = mix(left, number, h), found = load(local(window, IN + h * 8));
                if (h % 3 != 2 && found != wanted) return report(out, 2, HOP_DATA, wanted, found, h), false;
            }
            return true;
        });
    }

    __device__ bool fetch(const ncclGin& gin, int left) const {
#if HAVE_GET
        by_first(GET, [&] {
            gin.get(ncclTeamWorld(comm), left, window, OFFERED, window, FETCHED, bytes);
            gin.flush(ncclCoopThread());
            return true;
        });
        return compare(FETCH, FETCHED, left + 1000);
#else
        return true;
#endif
    }

    __device__ bool sums(const ncclGin& gin) const {
        return by_first(SUMS, [&] {
            for (int peer = 0; peer < comm.nRanks; peer++)
                gin.signal(ncclTeamWorld(comm), peer, SignalAdd{SUM, added(comm.rank, peer, number)});
            if (!wait_for([&] { return gin.readSignal(SUM); }, SUMS, sum, out, number)) return false;
            const uint64_t wanted[] = {number, uint64_t(number) * HOPS, sum};
            for (int s = 0; s < SIGNALS; s++)
                if (uint64_t found = gin.readSignal(s); found != wanted[s])
                    return report(out, 2, EXACT, wanted[s], found, s), false;
            return true;
        });
    }

    __device__ void run(uint32_t hold_ns) const {
        const int right = (comm.rank + 1) % comm.nRanks, left = (comm.rank + comm.nRanks - 1) % comm.nRanks;
        ncclGin gin{comm, 0};
        fill(GIVEN, comm.rank);
        fill(OFFERED, comm.rank + 1000);
        if (!by_first(HOST, [&] { return wait_for_host(talk, number, hold_ns, HOST, out); })) return;
        if (!put_and_receive(gin, left, right) || !hops(gin, left, right) || !fetch(gin, left) || !sums(gin)) return;
        by_first(FLUSH, [&] { return gin.flush(ncclCoopThread()), true; });
    }
};

__global__ void __launch_bounds__(THREADS) pattern(ncclDevComm comm, ncclWindow_t window, size_t bytes, uint32_t number,
                                                   uint64_t sum, uint32_t hold_ns, Talk* talk, Outcome* out) {
    Pattern{comm, window, bytes, number, sum, talk, out}.run(hold_ns);
    __syncthreads();
    if (threadIdx.x == 0) say(&talk->ended, number);
}

// A thread of the application. What it is given to do may stand for ever: then it is left behind.
class Caller {
  public:
    explicit Caller(int gpu) : state_(std::make_shared<State>()) {
        std::thread([state = state_, gpu] { state->loop(gpu); }).detach();
    }
    ~Caller() { give(nullptr, true); }

    void give(std::function<void()> task, bool quit = false) {
        std::lock_guard held(state_->mutex);
        state_->task = std::move(task);
        state_->quit = quit;
        state_->busy = !quit;
        state_->changed.notify_all();
    }

    // False: it is still at work. Throws what the task threw.
    bool wait(double seconds) {
        std::unique_lock held(state_->mutex);
        if (!state_->changed.wait_for(held, std::chrono::duration<double>(seconds), [&] { return !state_->busy; }))
            return false;
        if (!state_->error.empty()) throw Failure(state_->error);
        return true;
    }

  private:
    struct State {
        std::mutex mutex;
        std::condition_variable changed;
        std::function<void()> task;
        std::string error;
        bool busy = false, quit = false;

        void loop(int gpu) {
            cudaSetDevice(gpu);
            std::unique_lock held(mutex);
            while (true) {
                changed.wait(held, [&] { return busy || quit; });
                if (quit) return;
                held.unlock();
                std::string why;
                try {
                    task();
                } catch (const std::exception& reason) {
                    why = reason.what();
                }
                held.lock();
                error = why;
                busy = false;
                changed.notify_all();
            }
        }
    };
    std::shared_ptr<State> state_;
};

// A rank's kernels and callers.
class Bench {
  public:
    Bench(Rank& rank, World& world) : rank_(rank), world_(world) {
        // What works on the legacy stream waits for streams of this kind.
        CUDA(cudaStreamCreate(&stream_));
        CUDA(cudaHostAlloc(&talk_, sizeof *talk_, cudaHostAllocMapped | cudaHostAllocPortable));
        memset(talk_, 0, sizeof *talk_);
        memset(world.out, 0, sizeof *world.out);
        // Loaded now: later, loading would wait for other ranks' kernels that wait for this one.
        cudaFuncAttributes loaded;
        CUDA(cudaFuncGetAttributes(&loaded, pattern));
        for (int c = 0; c < 2; c++) callers_.push_back(std::make_unique<Caller>(rank.gpu()));
    }

    void close() {
        callers_.clear();
        CUDA(cudaFreeHost(talk_));
        CUDA(cudaStreamDestroy(stream_));
    }

    // One kernel, and a thread in each of `calls` while it runs; the milliseconds that it took.
    double round(const std::vector<AppCall*>& calls, int round) {
        const uint32_t number = ++last_;
        const size_t bytes = SIZES[number % (sizeof SIZES / sizeof *SIZES)];
        std::string names;
        for (const AppCall* call : calls) names += (names.empty() ? "" : " + ") + call->name;
        rank_.stage(names.c_str());
        for (int from = 0; from < rank_.count(); from++) sum_ += added(from, rank_.index, number);
        for (AppCall* call : calls) call->prepare(round);
        rank_.barrier();
        pattern<<<1, THREADS, 0, stream_>>>(world_.device, world_.window, bytes, number, sum_, hold(number), talk_,
                                            world_.out);
        CUDA(cudaGetLastError());
        const std::string what = format("%s, round %d, %zu bytes", names.c_str(), round, bytes);
        if (!comes(talk_->runs, number, 20)) throw Failure(what + ": the kernel does not begin");
        // From here on every kernel runs, and a call may wait for them.
        rank_.barrier();
        const auto started = Clock::now();
        auto entered = std::make_shared<std::atomic<size_t>>(0);
        for (size_t c = 0; c < calls.size(); c++)
            callers_[c]->give([=, talk = talk_, call = calls[c], all = calls.size()] {
                if (++*entered == all) let_go(talk, number);
                while (call->call(round) && __atomic_load_n(&talk->ended, __ATOMIC_ACQUIRE) < number) {
                }
            });
        if (!comes(talk_->ended, number, 20))
            throw Failure(format("%s: the kernel has not ended for 20 s, at %s", what.c_str(), STEPS[talk_->step]));
        const double took = ms_since(started);
        for (size_t c = 0; c < calls.size(); c++)
            if (!callers_[c]->wait(20))
                throw Failure(format("%s: %s has not returned for 20 s", what.c_str(), calls[c]->name.c_str()));
        // Another rank of this process may still capture in global mode, which forbids the next call.
        rank_.barrier();
        CUDA(cudaStreamSynchronize(stream_));
        check(what);
        rank_.barrier();
        for (AppCall* call : calls) call->clean();
        return took;
    }

  private:
    // 20 to 400 µs.
    static uint32_t hold(uint32_t number) { return 20'000 + mix(number, 9) % 380'000; }

    void check(const std::string& what) const {
        const Outcome& found = *world_.out;
        if (found.failed)
            throw Failure(format("%s: %s %s: wanted %llu, found %llu, in %llu", what.c_str(),
                                 found.failed == 1 ? "waited 8 s for" : "wrong:", STEPS[found.where],
                                 (unsigned long long)found.wanted, (unsigned long long)found.found,
                                 (unsigned long long)found.round));
    }

    Rank& rank_;
    World& world_;
    cudaStream_t stream_{};
    Talk* talk_{};
    std::vector<std::unique_ptr<Caller>> callers_;
    uint32_t last_ = 0;
    uint64_t sum_ = 0;
};

// Rounds with the calls that `chosen(round)` gives, as many as are asked for and the time allows; a line of the table.
template <typename Chosen>
void rounds_of(Rank& rank, Bench& bench, const std::string& name, int most, double ms, Chosen chosen) {
    const auto started = Clock::now();
    double longest = 0;
    int done = 0;
    while (rank.agree(done < most && ms_since(started) < ms)) {
        longest = std::max(longest, bench.round(chosen(done), done));
        done++;
    }
    rank.row(format("%s, %d rounds", name.c_str(), done).c_str(), LARGEST, longest, "ms");
}

PROGRAM(busy_host) {
    World world(rank, END, {.signals = SIGNALS, .counters = 1});
    rank.stage("prepare");
    // Ranks of one process that share a GPU share its context.
    const int sharing = rank.options.processes ? 1 : (rank.count() + rank.options.gpus - 1) / rank.options.gpus;
    // Kept where the program fails: a call may still be under way.
    auto* calls =
        new std::vector<AppCall>(app_calls(rank.options.processes ? 0 : rank.index / rank.options.gpus, sharing));
    Bench bench(rank, world);
    const int most = rank.options.quick ? 20 : 300;
    // Two thirds of the time that the watch allows.
    const double ms = std::min(rank.options.quick ? 250.0 : 2500.0, rank.options.seconds * 667.0 / (calls->size() + 2));
    int chosen = 0;
    auto asked = [&](const std::string& name) {
        const bool is = name.find(rank.options.only) != name.npos;
        chosen += is;
        return is;
    };
    auto one = [&](AppCall& call) {
        if (!asked(call.name)) return;
        rounds_of(rank, bench, call.name, std::min(most, call.most_rounds), ms,
                  [&](int) { return std::vector{&call}; });
    };
    std::vector<AppCall*> any;
    for (AppCall& call : *calls) {
        if (!call.alone) one(call);
        if (!call.alone && call.most_rounds == INT_MAX) any.push_back(&call);
    }
    // Each rank in calls of its own, one after another.
    const size_t n = any.size();
    if (const char* name = "all by turns, two threads"; asked(name))
        rounds_of(rank, bench, name, most, 2 * ms, [&](int round) {
            const size_t one = (round + 3 * rank.index) % n, another = (one + 1 + round / n % (n - 1)) % n;
            return std::vector{any[one], any[another]};
        });
    for (AppCall& call : *calls)
        if (call.alone) one(call);
    if (!chosen) throw Failure(format("no call has '%s' in its name", rank.options.only.c_str()));
    rank.stage("end");
    bench.close();
    delete calls;
    world.close();
}
LOADS_LAZILY(busy_host)

}  // namespace busy_host_program
