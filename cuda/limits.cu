// What this machine's CUDA primitives cost, and so the limit of what a software fabric can reach with them, between two GPUs
// (--gpus 2) or on one; and which ways there are for the CPU to reach GPU memory. No NCCL, one rank.
#include <chrono>
#include <functional>

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include "common/resident.cuh"
#include "common/vmm.cuh"

namespace limits_program {

using Word = unsigned long long;

double now_us() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Answers each count in `in` with the same one in `out`; gives up after four seconds without a change.
__global__ void echo(volatile Word* in, volatile Word* out, Word count) {
    for (Word i = 1; i <= count; i++) {
        const long long started = clock64();
        while (*in < i)
            if (clock64() - started > 8'000'000'000ll) return;
        __threadfence_system();
        *out = i;
    }
}

__global__ void nothing() {}

Word load(const Word* at) { return *static_cast<const volatile Word*>(at); }
void store(Word* at, Word value) { *static_cast<volatile Word*>(at) = value; }

void wait_for(const Word* at, Word value) {
    const double started = now_us();
    for (int polls = 1; load(at) < value; polls++)
        if (polls % 4096 == 0 && now_us() - started > 3e6) throw Failure("a kernel did not answer within 3 s");
}

sigjmp_buf out_of_access;
void access_failed(int) { siglongjmp(out_of_access, 1); }

// Whether `access` ends without SIGSEGV and SIGBUS.
bool survives(const std::function<void()>& access) {
    struct sigaction handler{}, segv{}, bus{};
    handler.sa_handler = access_failed;
    sigaction(SIGSEGV, &handler, &segv);
    sigaction(SIGBUS, &handler, &bus);
    volatile bool good = false;
    if (sigsetjmp(out_of_access, 1) == 0) {
        access();
        good = true;
    }
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    return good;
}

// One of the two ends: what lies on its GPU, and its streams.
struct End {
    int device;
    char* data;       // 64 MiB
    Word *flag;       // in GPU memory
    Word *host_flag, *answer;  // in mapped host memory
    Command* command;          // there, too
    cudaStream_t stream, kernels, resident;

    explicit End(int device) : device(device) {
        CUDA(cudaSetDevice(device));
        CUDA(cudaMalloc(&data, 64 << 20));
        CUDA(cudaMemset(data, 0, 64 << 20));
        CUDA(cudaMalloc(&flag, 1 << 20));
        CUDA(cudaMemset(flag, 0, 1 << 20));
        CUDA(cudaHostAlloc(&host_flag, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
        CUDA(cudaHostAlloc(&answer, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
        CUDA(cudaHostAlloc(&command, 4096, cudaHostAllocMapped | cudaHostAllocPortable));
        for (cudaStream_t* s : {&stream, &kernels, &resident}) CUDA(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
        nothing<<<1, 1, 0, kernels>>>();
        CUDA(cudaDeviceSynchronize());
    }
};

struct Limits {
    Rank& rank;
    std::vector<End> ends;
    std::string where;
    int rounds;

    explicit Limits(Rank& rank) : rank(rank), rounds(rank.options.quick ? 200 : 2000) {
        if (rank.count() != 1 || rank.options.gpus > 2) throw Failure("takes one rank and one or two GPUs");
        const bool two = rank.options.gpus == 2;
        where = two ? "two GPUs" : "one GPU";
        ends.emplace_back(0);
        ends.emplace_back(two ? 1 : 0);
        for (int i = 0; two && i < 2; i++) {
            CUDA(cudaSetDevice(i));
            CUDA(cudaDeviceEnablePeerAccess(1 - i, 0));
        }
    }

    void row(const std::string& what, size_t bytes, double value, const char* unit) {
        rank.row((where + ": " + what).c_str(), bytes, value, unit);
    }

    // The round trip when `hop(to, from, i)` brings count `i` to the flag that `flag` picks at the end `to`.
    void two_hops(const char* what, size_t bytes, Word* End::*flag, const std::function<void(End&, End&, Word)>& hop) {
        rank.stage(what);
        for (End& end : ends) {
            CUDA(cudaSetDevice(end.device));
            store(end.host_flag, 0), store(end.answer, 0);
            CUDA(cudaMemsetAsync(end.flag, 0, 4096, end.kernels));
            CUDA(cudaStreamSynchronize(end.kernels));
        }
        for (End& end : ends) {
            CUDA(cudaSetDevice(end.device));
            echo<<<1, 1, 0, end.kernels>>>(end.*flag, end.answer, rounds);
        }
        double started = 0;
        const int warm = rounds / 10;
        for (int i = 1; i <= rounds; i++) {
            if (i == warm + 1) started = now_us();
            for (int turn = 0; turn < 2; turn++) {
                End &to = ends[turn], &from = ends[1 - turn];
                hop(to, from, i);
                wait_for(to.answer, i);
            }
        }
        row(what, bytes, (now_us() - started) / (rounds - warm), "us");
        for (End& end : ends) CUDA(cudaStreamSynchronize(end.kernels));
    }

    void copy8(End& to, End& from) {
        CUDA(cudaSetDevice(to.device));
        CUDA(cudaMemcpyAsync(to.data, from.data, 8, cudaMemcpyDefault, to.stream));
    }

    void hops() {
        static const auto write_value = DRIVER(cuStreamWriteValue64);
        auto write = [](End& to, Word i) {
            if (CUresult r = write_value(to.stream, CUdeviceptr(to.flag), i, 0)) driver_check(r, "cuStreamWriteValue64");
        };
        two_hops("two hops, store to mapped host memory", 0, &End::host_flag, [](End& to, End&, Word i) { store(to.host_flag, i); });
        two_hops("two hops, stream write", 0, &End::flag, [&](End& to, End&, Word i) {
            CUDA(cudaSetDevice(to.device));
            write(to, i);
        });
        two_hops("two hops, copy + stream write", 8, &End::flag, [&](End& to, End& from, Word i) {
            copy8(to, from);
            write(to, i);
        });
        two_hops("two hops, copy + stream write to host memory", 8, &End::host_flag, [&](End& to, End& from, Word i) {
            copy8(to, from);
            if (CUresult r = write_value(to.stream, CUdeviceptr(to.host_flag), i, 0)) driver_check(r, "cuStreamWriteValue64");
        });
        cudaGraphExec_t graphs[2];
        for (int turn = 0; turn < 2; turn++) {
            End &to = ends[turn], &from = ends[1 - turn];
            cudaGraph_t graph;
            CUDA(cudaSetDevice(to.device));
            CUDA(cudaStreamBeginCapture(to.stream, cudaStreamCaptureModeThreadLocal));
            CUDA(cudaMemcpyAsync(to.data, from.data, 8, cudaMemcpyDefault, to.stream));
            CUDA(cudaStreamEndCapture(to.stream, &graph));
            CUDA(cudaGraphInstantiate(&graphs[turn], graph, 0));
            CUDA(cudaGraphUpload(graphs[turn], to.stream));
            CUDA(cudaStreamSynchronize(to.stream));
        }
        two_hops("two hops, graph of a copy + stream write", 8, &End::flag, [&](End& to, End&, Word i) {
            CUDA(cudaSetDevice(to.device));
            CUDA(cudaGraphLaunch(graphs[&to == &ends[0] ? 0 : 1], to.stream));
            write(to, i);
        });
        // Last: a driver may refuse to write to the other GPU.
        two_hops("two hops, copy by the source + stream write", 8, &End::flag, [&](End& to, End& from, Word i) {
            CUDA(cudaSetDevice(from.device));
            CUDA(cudaMemcpyAsync(to.data, from.data, 8, cudaMemcpyDefault, from.stream));
            if (CUresult r = write_value(from.stream, CUdeviceptr(to.flag), i, 0)) driver_check(r, "cuStreamWriteValue64 to the other GPU");
        });
    }

    // A kernel on each GPU that waits for commands of the CPU: no call of the driver on the way.
    void resident_kernel() {
        auto measure = [&](const char* what, uint32_t bytes) {
            for (End& end : ends) {
                CUDA(cudaSetDevice(end.device));
                memset(end.command, 0, sizeof *end.command);
                CUDA(cudaMemsetAsync(end.data, &end == &ends[0] ? 0x11 : 0x22, 8, end.stream));
                CUDA(cudaStreamSynchronize(end.stream));
            }
            for (End& end : ends) {
                CUDA(cudaSetDevice(end.device));
                resident<<<1, 32, 0, end.resident>>>(end.command);
                CUDA(cudaGetLastError());
            }
            two_hops(what, bytes, &End::flag, [&](End& to, End& from, Word i) {
                to.command->post(from.data, to.data, to.flag, bytes, uint32_t(i));
            });
            for (End& end : ends) end.command->post(nullptr, nullptr, nullptr, STOP, rounds + 1);
            for (End& end : ends) {
                CUDA(cudaStreamSynchronize(end.resident));
                Word found = 0;
                CUDA(cudaMemcpyAsync(&found, end.data, 8, cudaMemcpyDefault, end.stream));
                CUDA(cudaStreamSynchronize(end.stream));
                // The first hop goes to the first end.
                if (bytes && found != 0x2222222222222222) throw Failure(format("%s: nothing was copied, but %llx", what, found));
            }
        };
        measure("two hops, resident kernel: copy + signal", 8);
        measure("two hops, resident kernel: signal", 0);
    }

    // Host time of a call, and the rate of its entries when calls follow one another.
    void calls(const char* what, size_t entries, const std::function<CUresult()>& call) {
        rank.stage(what);
        End& end = ends[0];
        CUDA(cudaSetDevice(end.device));
        for (int i = 0; i < 3; i++) driver_check(call(), what);
        CUDA(cudaStreamSynchronize(end.stream));
        const int times = std::max<int>(rank.options.quick ? 5 : 20, 500 / entries);
        double started = now_us(), issue = 0;
        for (int i = 0; i < times; i++)
            if (CUresult result = call()) driver_check(result, what);
        issue = (now_us() - started) / times;
        CUDA(cudaStreamSynchronize(end.stream));
        row(format("%s, %zu a call: host time", what, entries), 8, issue, "us/call");
        row(format("%s, %zu a call", what, entries), 8, entries * times / (now_us() - started), "M/s");
    }

    void batches() {
        End &a = ends[0], &b = ends[1];
        static const auto write_value = DRIVER(cuStreamWriteValue64);
        static const auto copy = DRIVER(cuMemcpyAsync);
        static const auto copies = DRIVER(cuMemcpyBatchAsync);
        static const auto memops = DRIVER(cuStreamBatchMemOp);
        calls("stream write", 1, [&] { return write_value(a.stream, CUdeviceptr(a.flag), 1, 0); });
        calls("copy", 1, [&] { return copy(CUdeviceptr(b.data), CUdeviceptr(a.data), 8, a.stream); });
        for (size_t n : {1, 8, 64, 256}) {
            std::vector<CUdeviceptr> to(n), from(n);
            std::vector<size_t> sizes(n, 8);
            for (size_t i = 0; i < n; i++) to[i] = CUdeviceptr(b.data) + 64 * i, from[i] = CUdeviceptr(a.data) + 64 * i;
            CUmemcpyAttributes attributes{};
            attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
            size_t first = 0;
            calls("batched copies", n, [&] {
#if CUDA_VERSION >= 13000
                return copies(to.data(), from.data(), sizes.data(), n, &attributes, &first, 1, a.stream);
#else
                size_t failed = 0;
                return copies(to.data(), from.data(), sizes.data(), n, &attributes, &first, 1, &failed, a.stream);
#endif
            });
        }
        for (size_t n : {1, 8, 64, 128}) {
            auto ops = writes(n);
            calls("batched stream writes", n, [&] { return memops(a.stream, n, ops.data(), 0); });
        }
    }

    // To one place each in the first end's flags, which have room for 131,072.
    std::vector<CUstreamBatchMemOpParams> writes(size_t n) {
        std::vector<CUstreamBatchMemOpParams> ops(n);
        for (size_t i = 0; i < n; i++) {
            ops[i].operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
            ops[i].writeValue.address = CUdeviceptr(ends[0].flag) + 8 * i;
            ops[i].writeValue.value64 = 1;
        }
        return ops;
    }

    void bandwidth() {
        End &a = ends[0], &b = ends[1];
        const size_t bytes = 64 << 20;
        const int times = rank.options.quick ? 10 : 50;
        auto measure = [&](const char* what, int ways, const std::function<void()>& issue) {
            rank.stage(what);
            auto settle = [&] {
                CUDA(cudaStreamSynchronize(a.stream));
                CUDA(cudaStreamSynchronize(b.stream));
            };
            issue();
            settle();
            const double started = now_us();
            for (int i = 0; i < times; i++) issue();
            settle();
            row(what, bytes, double(bytes) * times * ways / (now_us() - started) / 1e3, "GB/s");
        };
        auto go = [&](End& from, End& to) {
            CUDA(cudaSetDevice(from.device));
            CUDA(cudaMemcpyPeerAsync(to.data, to.device, from.data, from.device, bytes, from.stream));
        };
        measure("cudaMemcpyPeerAsync, one way", 1, [&] { go(a, b); });
        measure("cudaMemcpyPeerAsync, both ways", 2, [&] { go(a, b), go(b, a); });
        char* pinned;
        CUDA(cudaHostAlloc(&pinned, 2 * bytes, cudaHostAllocPortable));
        CUDA(cudaSetDevice(a.device));
        measure("GPU to pinned memory", 1, [&] { CUDA(cudaMemcpyAsync(pinned, a.data, bytes, cudaMemcpyDefault, a.stream)); });
        measure("pinned memory to GPU", 1, [&] { CUDA(cudaMemcpyAsync(a.data, pinned, bytes, cudaMemcpyDefault, a.stream)); });
        CUDA(cudaFreeHost(pinned));
    }

    // The most entries that one call takes, up to 4096. Last of all, as nobody says what a driver does beyond.
    void largest_batch() {
        rank.stage("cuStreamBatchMemOp with many entries");
        End& a = ends[0];
        CUDA(cudaSetDevice(a.device));
        const auto memops = DRIVER(cuStreamBatchMemOp);
        auto taken = [&](size_t n) {
            auto ops = writes(n);
            const CUresult result = memops(a.stream, n, ops.data(), 0);
            CUDA(cudaStreamSynchronize(a.stream));
            return result == CUDA_SUCCESS;
        };
        size_t good = 1, bad = 4097;
        while (bad - good > 1) {
            const size_t middle = (good + bad) / 2;
            (taken(middle) ? good : bad) = middle;
        }
        row("most entries of cuStreamBatchMemOp", 0, good, "entries");
    }

    // What a CPU mapping of GPU memory costs, once there is one. `gpu` and `cpu` are the same 4096 bytes or more.
    void mapped(const char* way, Word* gpu, Word* cpu) {
        if (!survives([&] { store(cpu, 0), (void)load(cpu); })) {
            rank.note(format("%s: a CPU access ends with SIGSEGV or SIGBUS", way));
            return;
        }
        End& a = ends[0];
        const int times = 1000;
        double started = now_us();
        for (int i = 0; i < times; i++) store(cpu + 64, i), __sync_synchronize();
        row(format("%s: CPU store", way), 8, (now_us() - started) / times, "us");
        started = now_us();
        for (int i = 0; i < times; i++) (void)load(cpu + 64);
        row(format("%s: CPU load", way), 8, (now_us() - started) / times, "us");
        CUDA(cudaSetDevice(a.device));
        store(a.answer, 0);
        echo<<<1, 1, 0, a.kernels>>>(gpu, a.answer, times);
        started = now_us();
        for (int i = 1; i <= times; i++) store(cpu, i), __sync_synchronize(), wait_for(a.answer, i);
        row(format("%s: CPU store, answer of a spinning kernel", way), 8, (now_us() - started) / times, "us");
        CUDA(cudaStreamSynchronize(a.kernels));
    }

    void dma_buf(const char* kind, void* gpu, size_t bytes) {
        const auto get = DRIVER(cuMemGetHandleForAddressRange);
        for (unsigned long long flags : {0ull, 1ull /* by PCIe, where that differs */}) {
            const std::string way = format("DMA-BUF of %s, flags %llu", kind, flags);
            rank.stage(way.c_str());
            int fd = -1;
            if (CUresult r = get(&fd, CUdeviceptr(gpu), bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flags)) {
                rank.note(format("%s: cuMemGetHandleForAddressRange gives error %d", way.c_str(), r));
                continue;
            }
            void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (at == MAP_FAILED) {
                rank.note(format("%s: mmap fails with errno %d", way.c_str(), errno));
            } else {
                rank.note(way + ": mmap works");
                mapped(way.c_str(), static_cast<Word*>(gpu), static_cast<Word*>(at));
                munmap(at, bytes);
            }
            close(fd);
        }
    }

    void ways_of_the_cpu() {
        CUDA(cudaSetDevice(0));
        const std::pair<const char*, CUdevice_attribute> attributes[] = {
            {"DMA-BUF", CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED},
            {"GPUDirect RDMA", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED},
            {"GPUDirect RDMA with VMM", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
            {"host NUMA VMM", CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
            {"pageable memory access", CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS},
            {"managed memory from the host", CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST},
            {"fabric handles", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED},
            {"copy engines", CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT},
        };
        std::string text = "attributes:";
        for (auto& [name, attribute] : attributes) {
            int value = -1;
            DRIVER(cuDeviceGetAttribute)(&value, attribute, 0);
            text += format(" %s %d;", name, value);
        }
        text += format(" /dev/gdrdrv %s", access("/dev/gdrdrv", F_OK) == 0 ? "there" : "absent");
        rank.note(text);
        void* plain;
        CUDA(cudaMalloc(&plain, 2 << 20));
        dma_buf("cudaMalloc memory", plain, 2 << 20);
        Segments segment({Where::GPU}, 2 << 20);
        dma_buf("cuMemCreate memory", segment.base(), segment.bytes());
        const auto set_access = DRIVER(cuMemSetAccess);
        for (auto [name, type] : {std::pair{"host", CU_MEM_LOCATION_TYPE_HOST}, std::pair{"NUMA node 0", CU_MEM_LOCATION_TYPE_HOST_NUMA}}) {
            CUmemAccessDesc access{{type, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
            const CUresult r = set_access(CUdeviceptr(segment.base()), segment.bytes(), &access, 1);
            rank.note(format("cuMemSetAccess of GPU memory for %s: %s %d", name, r ? "error" : "works", r));
            if (!r) mapped("cuMemSetAccess for the host", static_cast<Word*>(segment.base()), static_cast<Word*>(segment.base()));
        }
        segment.free();
        CUDA(cudaFree(plain));
    }
};

PROGRAM(limits) {
    rank.stage("prepare");
    Limits limits(rank);
    // Each on its own: what one machine cannot do says nothing about the others.
    std::string failures;
    for (auto part : {&Limits::hops, &Limits::resident_kernel, &Limits::batches, &Limits::bandwidth, &Limits::ways_of_the_cpu,
                      &Limits::largest_batch}) try {
            (limits.*part)();
        } catch (const std::exception& error) {
            rank.note(error.what());
            // Kernels that wait for an answer give up.
            for (End& end : limits.ends) cudaStreamSynchronize(end.kernels), cudaStreamSynchronize(end.resident);
            failures += failures.empty() ? error.what() : std::string("; ") + error.what();
        }
    if (!failures.empty()) throw Failure(failures);
}

}  // namespace limits_program
