// CUDA calls of an application that the driver lets wait for running kernels, or that take locks which others then wait
// for.
#pragma once

#include <atomic>
#include <climits>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "vmm.cuh"

// One kind of call. `prepare` and `clean` run while no kernel does, `call` while kernels wait for each other: again and
// again until it gives false or they have ended.
struct AppCall {
    std::string name;
    std::function<void(int round)> prepare;
    std::function<bool(int round)> call;
    std::function<void()> clean;
    int most_rounds = INT_MAX;
    bool alone = false;  // forbids calls of other threads
};

namespace {

template <int K>
__global__ void lazily_loaded(uint64_t* word) {
    if (word) *word += uint64_t(K);
}

constexpr int LAZY_KERNELS = 256;
using LazyKernel = void (*)(uint64_t*);

template <int... K>
std::vector<LazyKernel> lazy_kernels(std::integer_sequence<int, K...>) {
    return {lazily_loaded<K>...};
}

// PTX that no module had before.
inline std::string fresh_ptx(std::string* name) {
    static std::atomic<int> last;
    *name = format("fresh_%d_%d", int(getpid()), ++last);
    return format(
        ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s(.param .u64 p) {\n"
        ".reg .u64 a, b;\nld.param.u64 a, [p];\nld.global.u64 b, [a];\nadd.u64 b, b, %d;\nst.global.u64 [a], "
        "b;\nret;\n}\n",
        name->c_str(), last.load());
}

// Pieces that the calls of a round use up, or leave behind.
template <typename Piece>
using Pieces = std::shared_ptr<std::vector<Piece>>;

template <typename Piece>
Piece take(const Pieces<Piece>& pieces) {
    Piece last = pieces->back();
    pieces->pop_back();
    return last;
}

template <typename Piece>
AppCall frees(const char* name, int count, std::function<Piece()> make, std::function<void(Piece)> free) {
    auto pieces = std::make_shared<std::vector<Piece>>();
    return {.name = name,
            .prepare =
                [=](int) {
                    while (int(pieces->size()) < count) pieces->push_back(make());
                },
            .call = [=](int) { return free(take(pieces)), !pieces->empty(); },
            .clean =
                [=] {
                    while (!pieces->empty()) free(take(pieces));
                }};
}

template <typename Piece>
AppCall makes(const char* name, size_t most, std::function<Piece()> make, std::function<void(Piece)> free) {
    auto pieces = std::make_shared<std::vector<Piece>>();
    return {.name = name,
            .prepare = [](int) {},
            .call = [=](int) { return pieces->push_back(make()), pieces->size() < most; },
            .clean =
                [=] {
                    while (!pieces->empty()) free(take(pieces));
                }};
}

inline AppCall does(const char* name, std::function<bool(int)> call) {
    return {.name = name, .prepare = [](int) {}, .call = call, .clean = [] {}};
}

// What a call works with: a stream beside the kernels', and memory.
struct AppThings {
    static constexpr size_t PAGEABLE = 1 << 20;
    cudaStream_t other{};
    uint64_t* word{};  // on the GPU
    char* block{};     // PAGEABLE bytes on the GPU
    std::vector<char> page = std::vector<char>(PAGEABLE, 1);

    AppThings() {
        CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CUDA(cudaMalloc(&word, 8));
        CUDA(cudaMalloc(&block, PAGEABLE));
        CUDA(cudaMemsetAsync(word, 0, 8, other));
        settle();
    }
    ~AppThings() {
        cudaFree(word);
        cudaFree(block);
        cudaStreamDestroy(other);
    }
    AppThings(const AppThings&) = delete;
    void settle() { CUDA(cudaStreamSynchronize(other)); }
};
using Things = std::shared_ptr<AppThings>;

inline CUmodule fresh_module() {
    std::string name;
    const std::string text = fresh_ptx(&name);
    CUmodule module;
    driver_check(DRIVER(cuModuleLoadData)(&module, text.c_str()), "cuModuleLoadData");
    return module;
}

inline void unload_module(CUmodule module) { driver_check(DRIVER(cuModuleUnload)(module), "cuModuleUnload"); }

// The module is loaded at the kernel's first launch.
inline AppCall library_launches() {
    const auto things = std::make_shared<AppThings>();
    const auto load = DRIVER(cuLibraryLoadData);
    const auto unload = DRIVER(cuLibraryUnload);
    const auto kernel_of = DRIVER(cuLibraryGetKernel);
    const auto launch = DRIVER(cuLaunchKernel);
    AppCall made = makes<CUlibrary>(
        "cuLibraryLoadData + launch", 32,
        [=] {
            std::string name;
            const std::string text = fresh_ptx(&name);
            CUlibrary library;
            CUkernel kernel;
            driver_check(load(&library, text.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
            driver_check(kernel_of(&kernel, library, name.c_str()), "cuLibraryGetKernel");
            void* arguments[] = {&things->word};
            driver_check(
                launch(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, things->other, arguments, nullptr),
                "cuLaunchKernel");
            return library;
        },
        [=](CUlibrary library) { driver_check(unload(library), "cuLibraryUnload"); });
    made.clean = [=, clean = made.clean] {
        things->settle();
        clean();
    };
    return made;
}

// Each kernel is launched for the first time once in a context; `sharing` ranks, of which this is number `place`, share
// one.
inline AppCall lazy_launches(int place, int sharing) {
    const auto things = std::make_shared<AppThings>();
    const auto kernels = lazy_kernels(std::make_integer_sequence<int, LAZY_KERNELS>{});
    AppCall made = does("first launch of a lazily loaded kernel", [=](int round) {
        kernels[(round * sharing + place) % LAZY_KERNELS]<<<1, 1, 0, things->other>>>(things->word);
        CUDA(cudaGetLastError());
        return false;
    });
    made.clean = [=] { things->settle(); };
    made.most_rounds = LAZY_KERNELS / sharing;
    return made;
}

// Held by the one rank of this process that captures, or waits for the device: in whatever mode a stream is captured,
// nobody may wait for all streams of its context, which ranks on one GPU share.
inline std::mutex& captures() {
    static std::mutex one;
    return one;
}

// A copy and a kernel, captured, made executable and launched.
inline AppCall graphs(const char* name, cudaStreamCaptureMode mode) {
    const auto things = std::make_shared<AppThings>();
    // Loaded before, so that no capture has to.
    lazily_loaded<-1><<<1, 1, 0, things->other>>>(things->word);
    things->settle();
    AppCall made = makes<cudaGraphExec_t>(
        name, 32,
        [=] {
            // Ranks that are threads of one process take turns.
            std::unique_lock<std::mutex> turn(captures());
            cudaGraph_t graph;
            cudaGraphExec_t ready;
            CUDA(cudaStreamBeginCapture(things->other, mode));
            CUDA(cudaMemcpyAsync(things->block, things->block + 4096, 4096, cudaMemcpyDeviceToDevice, things->other));
            lazily_loaded<-1><<<1, 1, 0, things->other>>>(things->word);
            CUDA(cudaStreamEndCapture(things->other, &graph));
            if (mode != cudaStreamCaptureModeGlobal) turn.unlock();
            CUDA(cudaGraphInstantiate(&ready, graph, 0));
            CUDA(cudaGraphDestroy(graph));
            CUDA(cudaGraphLaunch(ready, things->other));
            return ready;
        },
        [=](cudaGraphExec_t graph) {
            std::unique_lock<std::mutex> turn(captures(), std::defer_lock);
            if (mode == cudaStreamCaptureModeGlobal) turn.lock();
            CUDA(cudaGraphExecDestroy(graph));
        });
    made.clean = [=, clean = made.clean] {
        things->settle();
        clean();
    };
    // A capture in this mode forbids other threads what it holds for unsafe: the calls of other ranks too.
    made.alone = mode == cudaStreamCaptureModeGlobal;
    return made;
}

inline AppCall copies() {
    const auto things = std::make_shared<AppThings>();
    return does("cudaMemcpy, pageable, legacy stream", [=](int round) {
        const size_t bytes = round % 3 == 0 ? AppThings::PAGEABLE : round % 3 == 1 ? 100'000 : 8;
        if (round % 2)
            CUDA(cudaMemcpy(things->block, things->page.data(), bytes, cudaMemcpyHostToDevice));
        else
            CUDA(cudaMemcpy(things->page.data(), things->block, bytes, cudaMemcpyDeviceToHost));
        return true;
    });
}

template <typename Make>
void* made_by(Make make) {
    void* memory = nullptr;
    CUDA(make(&memory));
    return memory;
}

inline std::vector<AppCall> memory_calls() {
    const auto device = [] { return made_by([](void** m) { return cudaMalloc(m, 4 << 20); }); };
    const auto free_device = [](void* m) { CUDA(cudaFree(m)); };
    const auto pinned = [] {
        return made_by([](void** m) { return cudaHostAlloc(m, 1 << 20, cudaHostAllocDefault); });
    };
    const auto free_pinned = [](void* m) { CUDA(cudaFreeHost(m)); };
    return {
        makes<void*>("cudaMalloc", 16, device, free_device),
        frees<void*>("cudaFree", 4, device, free_device),
        makes<void*>("cudaHostAlloc", 16, pinned, free_pinned),
        frees<void*>("cudaFreeHost", 4, pinned, free_pinned),
        does("cuMemCreate to cuMemAddressFree",
             [](int) {
                 Segments({Where::GPU}, 2 << 20).free();
                 return true;
             }),
    };
}

inline AppCall asynchronous_allocations() {
    const auto things = std::make_shared<AppThings>();
    return does("cudaMallocAsync, cudaFreeAsync", [=](int) {
        void* memory;
        CUDA(cudaMallocAsync(&memory, 1 << 20, things->other));
        CUDA(cudaFreeAsync(memory, things->other));
        return true;
    });
}

// `sharing` ranks share a context.
inline std::vector<AppCall> context_calls(int sharing) {
    std::vector<AppCall> all = {
        does("cudaDeviceSynchronize",
             [](int) {
                 std::unique_lock<std::mutex> turn(captures());
                 CUDA(cudaDeviceSynchronize());
                 return true;
             }),
        does("cudaStreamCreate, cudaStreamDestroy",
             [](int) {
                 cudaStream_t stream;
                 CUDA(cudaStreamCreate(&stream));
                 CUDA(cudaStreamDestroy(stream));
                 return true;
             }),
    };
    // A launch after it may wait for all kernels of the context, or return when its own has ended. Where ranks share one,
    // such a launch and the kernels of the others, which wait for that rank, would wait for each other without GIN.
    if (sharing == 1)
        all.push_back(does("cuCtxSetLimit, stack size", [set = DRIVER(cuCtxSetLimit)](int round) {
            driver_check(set(CU_LIMIT_STACK_SIZE, round % 2 ? 2048 : 1024), "cuCtxSetLimit");
            return true;
        }));
    return all;
}

// All of them.
inline std::vector<AppCall> app_calls(int place, int sharing) {
    std::vector<AppCall> all = {
        does("nothing", [](int) { return usleep(50), true; }),
        makes<CUmodule>("cuModuleLoadData", 64, fresh_module, unload_module),
        frees<CUmodule>("cuModuleUnload", 2, fresh_module, unload_module),
        lazy_launches(place, sharing),
        library_launches(),
    };
    for (auto& more : {memory_calls(), context_calls(sharing)}) all.insert(all.end(), more.begin(), more.end());
    all.insert(all.end(), {
                              asynchronous_allocations(),
                              copies(),
                              graphs("graph, captured for this thread", cudaStreamCaptureModeThreadLocal),
                              graphs("graph, captured in global mode", cudaStreamCaptureModeGlobal),
                          });
    return all;
}

}  // namespace
