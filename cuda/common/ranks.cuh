// Ranks as threads or as processes, and what they share: one board in shared memory with the NCCL id, a barrier,
// failures and the stage each rank is in. main.cu runs programs over it.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include <cuda_runtime.h>
#include <nccl.h>

constexpr int MAX_RANKS = 64;

// What a rank's body throws: the reason that FAIL prints.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What every rank's body throws, before anything collective, if this NCCL or this machine cannot do what the program is about.
struct Absent : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
inline std::string format(const char* text, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(line, sizeof line, text, arguments);
    va_end(arguments);
    return line;
}

#define CUDA(call)                                                                                             \
    do {                                                                                                       \
        cudaError_t status_ = (call);                                                                          \
        if (status_ != cudaSuccess)                                                                            \
            throw Failure(format("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(status_)));    \
    } while (0)

#define NCCL(call)                                                                                             \
    do {                                                                                                       \
        ncclResult_t status_ = (call);                                                                         \
        if (status_ != ncclSuccess)                                                                            \
            throw Failure(format("%s:%d: %s: %s (%s)", __FILE__, __LINE__, #call, ncclGetErrorString(status_), \
                                 ncclGetLastError(nullptr)));                                                  \
    } while (0)

// In memory that all ranks and the watch map: zero at the start.
struct Board {
    std::atomic<int> current;  // the program that may run, counted from 0; only the watch sets it
    std::atomic<int> arrived;
    std::atomic<int> generation;
    std::atomic<int> failed;
    std::atomic<int> absent;
    std::atomic<int> finished;
    ncclUniqueId id;
    char reason[MAX_RANKS][512];
    char stage[MAX_RANKS][64];
    std::atomic<uint64_t> agreed;
};

struct Options {
    int ranks = 2;
    int gpus = 1;
    bool processes = false;
    int host_size = 0;  // ranks a host, for NCCL; 0: all on the real one
    bool quick = false;
    int seconds = 60;  // for one program
    std::vector<std::string> programs;
    int blocks = 16;           // alltoall: of the kernel between barriers
    bool gin_barrier = false;  // alltoall: nothing but that
    std::string only;          // busy_host: the calls; flood, hardware_queues: the cases that have this in their name
};

class Rank;

// A program that this executable holds: `body` runs on every rank and throws what went wrong.
struct Program {
    const char* name;
    void (*body)(Rank&);
};

inline std::vector<Program>& programs() {
    static std::vector<Program> all;
    return all;
}

// PROGRAM(name) { body with `Rank& rank` }
#define PROGRAM(name)                                                                  \
    void name##_body(Rank& rank);                                                      \
    const bool name##_known = (programs().push_back({#name, name##_body}), true);      \
    void name##_body([[maybe_unused]] Rank& rank)

// Programs whose processes load kernels lazily, as CUDA does unless told otherwise; all others have theirs from the start.
inline std::vector<std::string>& lazily_loading() {
    static std::vector<std::string> all;
    return all;
}

// LOADS_LAZILY(name): after PROGRAM(name).
#define LOADS_LAZILY(name) const bool name##_lazy = (lazily_loading().push_back(#name), true);

// One rank, on its own thread or in its own process.
class Rank {
  public:
    Rank(Board* board, const Options& options, int index) : options(options), index(index), board_(board) {}

    const Options& options;
    const int index;

    int count() const { return options.ranks; }
    int gpu() const { return index % options.gpus; }

    // What FAIL names if the run hangs from here on.
    void stage(const char* name) { snprintf(board_->stage[index], sizeof board_->stage[index], "%s", name); }

    // Waits for every rank; throws once one has failed.
    void barrier() {
        int generation = board_->generation.load();
        if (board_->arrived.fetch_add(1) + 1 == count()) {
            board_->arrived = 0;
            board_->generation.fetch_add(1);
        }
        while (board_->generation.load() == generation) {
            if (board_->failed) throw Failure("another rank failed");
            usleep(20);
        }
    }

    // A new NCCL id for one communicator, made by rank 0. Collective.
    ncclUniqueId id() {
        barrier();  // everybody has read the one before
        if (index == 0) NCCL(ncclGetUniqueId(&board_->id));
        barrier();
        return board_->id;
    }

    // Rank 0's value, for every rank. Collective.
    uint64_t agree(uint64_t value) {
        barrier();  // everybody has read the one before
        if (index == 0) board_->agreed = value;
        barrier();
        return board_->agreed;
    }

    // A line of the table, printed by rank 0: `| program | case | bytes | value | unit |`.
    void row(const char* what, size_t bytes, double value, const char* unit) {
        if (index != 0) return;
        printf("| %-14s | %-44s | %10zu | %12.3f | %-8s |\n", program_name(), what, bytes, value, unit);
        fflush(stdout);
    }

    // A line of prose for whoever reads the figures, printed by rank 0.
    void note(const std::string& text) {
        if (index != 0) return;
        printf("NOTE %s: %s\n", program_name(), text.c_str());
        fflush(stdout);
    }

    static const char*& program_name() {
        static const char* name = "";
        return name;
    }

    // What the program ends with on this rank.
    void failed(const std::string& why) {
        give_reason(why);
        board_->failed = 1;
    }

    void absent(const std::string& why) {
        give_reason(why);
        board_->absent = 1;
        finished();
    }

    void finished() { board_->finished.fetch_add(1); }

  private:
    void give_reason(const std::string& why) { snprintf(board_->reason[index], sizeof board_->reason[index], "%s", why.c_str()); }

    Board* board_;
};
