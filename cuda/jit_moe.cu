// Mixture of experts whose kernels are compiled at run time, as NCCL EP's and DeepEP's are: dispatch and combine are
// modules of PTX, and each is loaded only when the kernel before it runs on every rank. The driver lets the call wait
// for that kernel, and the kernel waits for the other ranks' tokens: they must come although the thread of the
// application stands in the driver.
#include "common/jit_moe.cuh"
#include "common/vmm.cuh"

namespace jit_moe_program {

using namespace moe_ll;

// Made by the Makefile from jit/.
const char DISPATCH[] =
#include "jit/moe_dispatch.inc"
    ;
const char COMBINE[] =
#include "jit/moe_combine.inc"
    ;

__global__ void sum_up(ncclWindow_t window, Plan plan, int round) { add_up(window, plan, round); }

// A kernel, loaded from PTX.
struct Loaded {
    CUmodule module{};
    CUfunction function{};
    double ms = 0;  // the load took

    Loaded(const char* text, const char* name) {
        const auto started = Clock::now();
        const CUresult result = DRIVER(cuModuleLoadData)(&module, text);
        if (result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) throw Absent("the driver is too old for this compiler's PTX");
        if (result == CUDA_ERROR_JIT_COMPILER_NOT_FOUND) throw Absent("there is no libnvidia-ptxjitcompiler");
        driver_check(result, "cuModuleLoadData");
        driver_check(DRIVER(cuModuleGetFunction)(&function, module, name), "cuModuleGetFunction");
        ms = ms_since(started);
    }

    void unload() { driver_check(DRIVER(cuModuleUnload)(module), "cuModuleUnload"); }
};

class Jit {
  public:
    Jit(Rank& rank, World& world, Plan plan) : rank_(rank), world_(world), plan_(plan) {
        CUDA(cudaHostAlloc(&talk_, sizeof *talk_, cudaHostAllocMapped | cudaHostAllocPortable));
        memset(talk_, 0, sizeof *talk_);
        cudaFuncAttributes loaded;
        CUDA(cudaFuncGetAttributes(&loaded, sum_up));
        // The driver keeps what it has compiled: later loads are those of a warm cache.
        Loaded(COMBINE, "jit_combine").unload();
    }

    void close() { CUDA(cudaFreeHost(talk_)); }

    // Launches the kernel; back when it runs on every rank.
    void launch(const Loaded& kernel, const char* what, int round) {
        rank_.stage(format("%s of round %d", what, round).c_str());
        // Ranks of one process may share a context: no call of another's may wait for this kernel before it can be let
        // go.
        rank_.barrier();
        JitArguments a{world_.device, world_.window, plan_, round, ++last_, uint32_t(20'000 + mix(last_, 3) % 200'000),
                       talk_,         world_.out};
        void* arguments[] = {&a};
        driver_check(DRIVER(cuLaunchKernel)(kernel.function, plan_.ranks, 1, 1, THREADS, 1, 1, 0, world_.stream,
                                            arguments, nullptr),
                     "cuLaunchKernel");
        if (!comes(talk_->runs, last_, 20)) throw Failure(format("%s of round %d does not begin", what, round));
        rank_.barrier();
    }

    // The running kernel waits for the other ranks from now on.
    void go() { let_go(talk_, last_); }

    // Loads the next kernel beside the running one.
    Loaded load(const char* text, const char* name, const char* running, int round) {
        rank_.stage(format("load %s beside %s of round %d", name, running, round).c_str());
        Loaded next{text, name};
        check(running, round);
        longest = std::max(longest, next.ms);
        return next;
    }

    void check(const char* what, int round) const {
        const Outcome& found = *world_.out;
        if (found.failed)
            throw Failure(format("%s of round %d, the next module being loaded: %s %u: wanted %llu, found %llu", what,
                                 round, found.failed == 1 ? "waited 8 s for signal" : "wrong data at", found.where,
                                 (unsigned long long)found.wanted, (unsigned long long)found.found));
    }

    double longest = 0;

  private:
    Rank& rank_;
    World& world_;
    const Plan plan_;
    Talk* talk_{};
    uint32_t last_ = 0;
};

PROGRAM(jit_moe) {
    const int rounds = rank.options.quick ? 12 : 100, n = rank.count();
    const Plan plan{n};
    World world(rank, (plan.sums(rounds) + 4095) / 4096 * 4096, {.signals = plan.signals(), .contexts = 4});
    world.fill(0, world.bytes, 0xEE);
    memset(world.out, 0, sizeof *world.out);
    Jit jit(rank, world, plan);
    Loaded dispatch{DISPATCH, "jit_dispatch"};
    const auto started = Clock::now();
    for (int round = 0; round < rounds; round++) {
        jit.launch(dispatch, "dispatch", round);
        jit.go();
        Loaded combine = jit.load(COMBINE, "jit_combine", "dispatch", round);
        jit.launch(combine, "combine", round);
        jit.go();
        dispatch.unload();  // one more call that waits for combine
        dispatch = jit.load(DISPATCH, "jit_dispatch", "combine", round);
        sum_up<<<8, THREADS, 0, world.stream>>>(world.window, plan, round);
        CUDA(cudaGetLastError());
        CUDA(cudaStreamSynchronize(world.stream));
        jit.check("combine", round);
        combine.unload();
        // Nobody loads or unloads while another rank's kernel waits for its own.
        rank.barrier();
    }
    const double ms = ms_since(started) / rounds;
    rank.stage("compare");
    for (int round = 0; round < rounds; round++) verify_sums(world, plan, round);
    rank.row("a round, modules loaded beside kernels", MESSAGE, ms, "ms");
    rank.row("longest load of a module", 0, jit.longest, "ms");
    dispatch.unload();
    jit.close();
    world.close();
}
LOADS_LAZILY(jit_moe)

}  // namespace jit_moe_program
