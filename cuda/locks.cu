// Which calls of the CUDA driver wait for which: while a kernel runs and a thread of the application is in a call, what can
// another thread of the process still do, and what another process? Movers do one thing each, all the time; printed is the longest
// gap between two times that each has done it, in ms. No NCCL, one rank.
#include <sys/mman.h>
#include <sys/wait.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "common/vmm.cuh"

namespace locks_program {

using Clock = std::chrono::steady_clock;

double now_ms() { return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count(); }

__global__ void spin(volatile int* flag) {
    while (!*flag) {
    }
}
__global__ void tiny(int* word) { *word += 1; }
// One that nothing launches before its time comes: CUDA loads it then.
__global__ void lazy(int* word) { *word += 2; }

// The kernel runs so long, and so much longer than the rest takes.
constexpr int SPIN_MS = 400;

// What is repeated by a thread: one turn, in whatever context it likes. Turns are apart, so that movers do not keep each other busy.
struct Mover {
    std::string name;
    std::function<void(CUstream)> turn;
    CUcontext context;
    std::atomic<double> last{0}, gap{0};
    std::atomic<bool> has_failed{false};

    Mover(std::string name, CUcontext context, std::function<void(CUstream)> turn)
        : name(std::move(name)), turn(std::move(turn)), context(context) {}

    void begin() { last = 0, gap = 0; }

    void beat() {
        const double now = now_ms(), before = last;
        if (before != 0 && now - before > gap) gap = now - before;
        last = now;
    }
};

struct Context {
    CUcontext own{}, application{};

    explicit Context(int gpu) {
        driver_check(DRIVER(cuCtxGetCurrent)(&application), "cuCtxGetCurrent");
        own = new_context(gpu);
    }
};

class Locks {
  public:
    explicit Locks(Rank& rank) : rank_(rank), segment_({Where::GPU}, 2 << 20) {
        CUDA(cudaMalloc(&plain_, 1 << 20));
        CUDA(cudaMalloc(&word_, 4));
        CUDA(cudaHostAlloc(&flag_, 4096, cudaHostAllocMapped));
        CUDA(cudaHostAlloc(&pinned_, 4096, cudaHostAllocPortable));
        // What is lazily loaded but not looked at is loaded now.
        flag_[1] = 1;
        tiny<<<1, 1>>>(word_);
        spin<<<1, 1>>>(flag_ + 1);
        CUDA(cudaDeviceSynchronize());
        context_.reset(new Context(rank.gpu()));
        driver_check(DRIVER(cuMemHostAlloc)(&host_, 4096, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
        driver_check(DRIVER(cuMemAlloc)(&mine_, 1 << 20), "cuMemAlloc");
        CUcontext was;
        driver_check(DRIVER(cuCtxPopCurrent)(&was), "cuCtxPopCurrent");
        opened_here();
        movers();
    }

    void measure() {
        for (auto& mover : movers_) threads_.emplace_back([this, &mover] { run(*mover); });
        std::string head;
        for (auto& mover : movers_) head += " " + mover->name + " |";
        rank_.note("gaps, ms, while a kernel runs for 400 ms: | the application is in | its call |" + head);
        for (auto& [name, call] : calls()) one(name, call);
        quit_ = true;
        for (auto& thread : threads_) thread.join();
    }

  private:
    Rank& rank_;
    Segments segment_;
    std::unique_ptr<Context> context_;
    char* plain_{};
    int *word_{}, *flag_{};
    void *pinned_{}, *host_{};
    CUdeviceptr mine_{};
    std::vector<std::unique_ptr<Mover>> movers_;
    std::vector<std::thread> threads_;
    std::atomic<bool> works_{false}, quit_{false};

    // Whether a process can open memory of its own cudaMalloc by IPC in another context, so that copies would not touch the first.
    void opened_here() {
        cudaIpcMemHandle_t handle;
        CUDA(cudaIpcGetMemHandle(&handle, plain_));
        CUcontext was;
        driver_check(DRIVER(cuCtxPushCurrent)(context_->own), "cuCtxPushCurrent");
        CUdeviceptr at = 0;
        CUipcMemHandle same;
        memcpy(&same, &handle, sizeof same);
        const CUresult result = DRIVER(cuIpcOpenMemHandle)(&at, same, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        driver_check(DRIVER(cuCtxPopCurrent)(&was), "cuCtxPopCurrent");
        rank_.note(format("cuIpcOpenMemHandle of this process's own cudaMalloc memory in another context: %d, at %s address", int(result),
                          result ? "no" : at == CUdeviceptr(plain_) ? "the same" : "another"));
    }

    void run(Mover& mover) {
        CUstream stream;
        driver_check(DRIVER(cuCtxSetCurrent)(mover.context), "cuCtxSetCurrent");
        driver_check(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        while (!quit_) {
            if (works_) try {
                    mover.turn(stream);
                    mover.beat();
                } catch (const std::exception& error) {
                    if (!mover.has_failed.exchange(true)) fprintf(stderr, "%s: %s\n", mover.name.c_str(), error.what());
                }
            usleep(200);
        }
    }

    void add(const char* name, bool own, std::function<void(CUstream)> turn) {
        movers_.emplace_back(new Mover(name, own ? context_->own : context_->application, std::move(turn)));
    }

    static void finish(CUstream stream) {
        while (DRIVER(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY) {
        }
    }

    // A copy of two rows from pinned memory, by a copy engine.
    static void bring(CUstream stream, CUdeviceptr to, void* from) {
        CUDA_MEMCPY2D c{};
        c.srcMemoryType = CU_MEMORYTYPE_HOST, c.srcHost = from, c.srcPitch = 32;
        c.dstMemoryType = CU_MEMORYTYPE_DEVICE, c.dstDevice = to, c.dstPitch = 32;
        c.WidthInBytes = 32, c.Height = 2;
        driver_check(DRIVER(cuMemcpy2DAsync)(&c, stream), "cuMemcpy2DAsync");
        finish(stream);
    }

    void movers() {
        const CUdeviceptr window = CUdeviceptr(segment_.base());
        add("copy to own memory", true, [this](CUstream s) { bring(s, mine_, host_); });
        add("copy to cudaMalloc memory", true, [this](CUstream s) { bring(s, CUdeviceptr(plain_), host_); });
        add("copy to cuMemCreate memory", true, [this, window](CUstream s) { bring(s, window, host_); });
        add("copy from memory pinned by the application", true, [this, window](CUstream s) { bring(s, window + 8192, pinned_); });
        add("store", true, [window](CUstream s) {
            driver_check(DRIVER(cuStreamWriteValue64)(s, window + 4096, 7, 0), "cuStreamWriteValue64");
            finish(s);
        });
        add("cuPointerGetAttribute", true, [this](CUstream) {
            CUcontext context;
            driver_check(DRIVER(cuPointerGetAttribute)(&context, CU_POINTER_ATTRIBUTE_CONTEXT, CUdeviceptr(plain_)), "cuPointerGetAttribute");
        });
        add("export, import, map, unmap", true, [this, window](CUstream) { share(window); });
        add("cuMemHostAlloc and free", true, [](CUstream) {
            void* host;
            driver_check(DRIVER(cuMemHostAlloc)(&host, 4096, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
            driver_check(DRIVER(cuMemFreeHost)(host), "cuMemFreeHost");
        });
        add("create and destroy a stream", true, [](CUstream) {
            CUstream stream;
            driver_check(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
            driver_check(DRIVER(cuStreamDestroy)(stream), "cuStreamDestroy");
        });
        add("query in the application's", false, [](CUstream s) { DRIVER(cuStreamQuery)(s); });
        add("push of the application's", true, [this](CUstream) {
            CUcontext was;
            driver_check(DRIVER(cuCtxPushCurrent)(context_->application), "cuCtxPushCurrent");
            driver_check(DRIVER(cuCtxPopCurrent)(&was), "cuCtxPopCurrent");
        });
        add("launch in the application's", false, [this](CUstream s) {
            tiny<<<1, 1, 0, s>>>(word_);
            finish(s);
        });
    }

    void share(CUdeviceptr window) {
        CUmemGenericAllocationHandle handle, imported;
        int fd = -1;
        CUdeviceptr at = 0;
        const size_t bytes = segment_.bytes();
        driver_check(DRIVER(cuMemRetainAllocationHandle)(&handle, reinterpret_cast<void*>(window)), "cuMemRetainAllocationHandle");
        driver_check(DRIVER(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExport");
        driver_check(DRIVER(cuMemImportFromShareableHandle)(&imported, reinterpret_cast<void*>(size_t(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                     "cuMemImport");
        close(fd);
        driver_check(DRIVER(cuMemAddressReserve)(&at, bytes, 0, 0, 0), "cuMemAddressReserve");
        driver_check(DRIVER(cuMemMap)(at, bytes, 0, imported, 0), "cuMemMap");
        CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, rank_.gpu()}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        driver_check(DRIVER(cuMemSetAccess)(at, bytes, &access, 1), "cuMemSetAccess");
        driver_check(DRIVER(cuMemUnmap)(at, bytes), "cuMemUnmap");
        driver_check(DRIVER(cuMemAddressFree)(at, bytes), "cuMemAddressFree");
        driver_check(DRIVER(cuMemRelease)(imported), "cuMemRelease");
        driver_check(DRIVER(cuMemRelease)(handle), "cuMemRelease");
    }

    std::vector<std::pair<std::string, std::function<void()>>> calls() {
        auto keep = std::make_shared<void*>(nullptr);
        auto pageable = std::make_shared<std::vector<char>>(64 << 20, 1);
        char* big;
        CUDA(cudaMalloc(&big, 64 << 20));
        cudaStream_t other;
        CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        auto modules = std::make_shared<int>(0);
        auto ptx = [modules] {
            return format(".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry k%d(){ ret; }\n", ++*modules);
        };
        return {
            {"nothing", [] { usleep(1000); }},
            {"cuModuleLoadData", [ptx] {
                 CUmodule module;
                 driver_check(DRIVER(cuModuleLoadData)(&module, ptx().c_str()), "cuModuleLoadData");
             }},
            {"cuLibraryLoadData", [ptx] {
                 CUlibrary library;
                 driver_check(DRIVER(cuLibraryLoadData)(&library, ptx().c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
             }},
            {"first launch of a kernel", [this, other] {
                 lazy<<<1, 1, 0, other>>>(word_);
                 CUDA(cudaGetLastError());
             }},
            {"cudaMalloc 1 GiB", [keep] { CUDA(cudaMalloc(keep.get(), 1 << 30)); }},
            {"cudaFree 1 GiB", [keep] { CUDA(cudaFree(*keep)); }},
            {"cudaMallocAsync 64 MiB", [keep, other] { CUDA(cudaMallocAsync(keep.get(), 64 << 20, other)); }},
            {"cudaHostAlloc 64 MiB", [keep] { CUDA(cudaHostAlloc(keep.get(), 64 << 20, 0)); }},
            {"cudaFreeHost", [keep] { CUDA(cudaFreeHost(*keep)); }},
            {"cudaDeviceSynchronize", [] { CUDA(cudaDeviceSynchronize()); }},
            {"cudaMemcpy, pageable", [big, pageable] { CUDA(cudaMemcpy(big, pageable->data(), pageable->size(), cudaMemcpyHostToDevice)); }},
            {"cudaStreamCreate", [] {
                 cudaStream_t made;
                 CUDA(cudaStreamCreate(&made));
             }},
            {"cuCtxSetLimit", [] { driver_check(DRIVER(cuCtxSetLimit)(CU_LIMIT_STACK_SIZE, 4096), "cuCtxSetLimit"); }},
            {"cuMemCreate, map, set access", [] { Segments({Where::GPU}, 2 << 20); }},
        };
    }

    void one(const std::string& name, const std::function<void()>& call) {
        rank_.stage(name.c_str());
        for (auto& mover : movers_) mover->begin();
        static_cast<volatile int*>(flag_)[0] = 0;
        works_ = true;
        usleep(50'000);
        spin<<<1, 1>>>(flag_);
        usleep(20'000);
        std::thread end([this] {
            usleep(SPIN_MS * 1000);
            static_cast<volatile int*>(flag_)[0] = 1;
        });
        const double began = now_ms();
        try {
            call();
        } catch (const std::exception& error) {
            rank_.note(error.what());
        }
        const double took = now_ms() - began;
        end.join();
        CUDA(cudaDeviceSynchronize());
        usleep(20'000);
        works_ = false;
        usleep(5000);
        std::string row = format("| %s | %.1f |", name.c_str(), took);
        for (auto& mover : movers_) row += mover->has_failed ? " error |" : format(" %.1f |", mover->gap.load());
        rank_.note(row);
    }
};

PROGRAM(locks) {
    rank.stage("prepare");
    Locks(rank).measure();
}

}  // namespace locks_program
