// Ranks as threads or as processes, and what they share: one board in shared memory with the NCCL id, a barrier,
// failures and the stage each rank is in. A run that fails or hangs ends with one line that says where.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime.h>
#include <nccl.h>

constexpr int MAX_RANKS = 64;

// What a rank's body throws: the reason that FAIL prints.
struct Failure : std::runtime_error {
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

// In memory that all ranks map: zero at the start.
struct Board {
    std::atomic<int> id_ready;
    std::atomic<int> arrived;
    std::atomic<int> generation;
    std::atomic<int> failed;
    std::atomic<int> finished;
    ncclUniqueId id;
    char reason[MAX_RANKS][512];
    char stage[MAX_RANKS][64];
};

struct Options {
    int ranks = 2;
    int gpus = 1;
    bool processes = false;
    int host_size = 0;  // ranks a host, for NCCL; 0: all on the real one
    bool quick = false;
    int seconds = 60;
};

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

    // The NCCL id, made by rank 0.
    ncclUniqueId id() {
        if (index == 0) {
            NCCL(ncclGetUniqueId(&board_->id));
            board_->id_ready = 1;
        }
        while (!board_->id_ready) {
            if (board_->failed) throw Failure("another rank failed");
            usleep(100);
        }
        return board_->id;
    }

    // A line of the table, printed by rank 0: `| program | case | bytes | value | unit |`.
    void row(const char* what, size_t bytes, double value, const char* unit) {
        if (index != 0) return;
        printf("| %-10s | %-28s | %9zu | %10.3f | %-8s |\n", program_name(), what, bytes, value, unit);
        fflush(stdout);
    }

    static const char*& program_name() {
        static const char* name = "";
        return name;
    }

    void failed(const std::string& why) {
        snprintf(board_->reason[index], sizeof board_->reason[index], "%s", why.c_str());
        board_->failed = 1;
    }

    void finished() { board_->finished.fetch_add(1); }

  private:
    Board* board_;
};

namespace detail {

inline Options parse(int argc, char** argv) {
    Options o;
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        auto number = [&] {
            if (++i >= argc || atoi(argv[i]) < 1) {
                fprintf(stderr, "%s needs a number above 0\n", name.c_str());
                _exit(2);
            }
            return atoi(argv[i]);
        };
        if (name == "--ranks") o.ranks = number();
        else if (name == "--gpus") o.gpus = number();
        else if (name == "--seconds") o.seconds = number();
        else if (name == "--processes") o.processes = true;
        else if (name == "--host-size") o.processes = true, o.host_size = number();
        else if (name == "--quick") o.quick = true;
        else {
            fprintf(stderr, "does not know %s; use --ranks N --gpus N --processes --host-size N --quick --seconds N\n", argv[i]);
            _exit(2);
        }
    }
    if (o.ranks > MAX_RANKS) {
        fprintf(stderr, "--ranks %d: at most %d\n", o.ranks, MAX_RANKS);
        _exit(2);
    }
    return o;
}

inline void one_rank(Board* board, const Options& options, int index, const std::function<void(Rank&)>& body) {
    Rank rank(board, options, index);
    try {
        rank.stage("start");
        CUDA(cudaSetDevice(rank.gpu()));
        body(rank);
        rank.finished();
    } catch (const std::exception& error) {
        rank.failed(error.what());
    }
}

// Prints FAIL with every reason, or with every stage where no rank gave one.
inline void report_failure(const Board* board, const Options& options, const char* headline) {
    printf("FAIL %s: %s\n", Rank::program_name(), headline);
    for (int r = 0; r < options.ranks; r++)
        printf("  rank %d, at '%s': %s\n", r, board->stage[r], board->reason[r][0] ? board->reason[r] : "no error of its own");
    fflush(stdout);
}

}  // namespace detail

// Runs `body` on every rank and ends the process: 0 and PASS when all returned, 1 and FAIL otherwise.
[[noreturn]] inline void run_ranks(const char* name, int argc, char** argv, std::function<void(Rank&)> body) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    Rank::program_name() = name;
    const Options options = detail::parse(argc, argv);
    // Kernels of several ranks may share a GPU: loading one lazily would wait for another that spins.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        _exit(2);
    }
    auto* board = static_cast<Board*>(shared);

    std::vector<pid_t> children;
    std::vector<std::thread> threads;
    for (int r = 0; r < options.ranks; r++) {
        if (!options.processes) {
            threads.emplace_back([=, &options, &body] { detail::one_rank(board, options, r, body); });
            continue;
        }
        pid_t child = fork();
        if (child < 0) {
            perror("fork");
            _exit(2);
        }
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (options.host_size)
                setenv("NCCL_HOSTID", format("oxygin-test-host-%d", r / options.host_size).c_str(), 1);
            detail::one_rank(board, options, r, body);
            fflush(stdout);
            _exit(board->failed ? 1 : 0);
        }
        children.push_back(child);
    }

    // The watch: a hang is a failure, and so is a process that died without a word.
    const char* headline = nullptr;
    for (int tenths = 0; board->finished < options.ranks && !headline; tenths++) {
        usleep(100'000);
        if (tenths > options.seconds * 10) headline = "did not end in time";
        for (pid_t child : children) {
            int status = 0;
            if (waitpid(child, &status, WNOHANG) == child && !(WIFEXITED(status) && WEXITSTATUS(status) == 0) && !board->failed)
                headline = "a rank's process died";
        }
        if (board->failed) {
            usleep(500'000);  // the other ranks' reasons
            headline = "a rank failed";
        }
    }
    if (headline) {
        detail::report_failure(board, options, headline);
        for (pid_t child : children) kill(child, SIGKILL);
        _exit(1);
    }
    for (auto& thread : threads) thread.join();
    for (pid_t child : children) waitpid(child, nullptr, 0);
    printf("PASS %s\n", name);
    fflush(stdout);
    _exit(0);
}
