// Runs the programs linked in, those named on the command line or all: `programs [NAME ...] --ranks N ...`. Ranks are
// threads of one process or processes of their own; they stay for the next program as long as all goes well, so that CUDA
// and NCCL start once. The watch, this first process, never touches CUDA: a failure, a hang or a crash costs the ranks
// that had it, and new ones go on with the next program. With --separate new ones do so every time.
//
// For each program: `BEGIN name`, rows and notes, then `PASS name (seconds)`, `ABSENT name (seconds): why`, or
// `FAIL name (seconds): what` and a line for each rank. `LOG file offset` says where its part of NCCL's log begins.
#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "ranks.cuh"

namespace {

const char USAGE[] = "[PROGRAM ...] --ranks N --gpus N --processes --host-size N --quick --seconds N --separate --list "
                     "--blocks N --gin-barrier --only TEXT";

bool separate = false;  // --separate

Options parse(int argc, char** argv) {
    Options o;
    std::sort(programs().begin(), programs().end(), [](auto& a, auto& b) { return strcmp(a.name, b.name) < 0; });
    auto known = [](const std::string& name) {
        return std::any_of(programs().begin(), programs().end(), [&](auto& p) { return name == p.name; });
    };
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
        else if (name == "--separate") separate = true;
        else if (name == "--blocks") o.blocks = number();
        else if (name == "--gin-barrier") o.gin_barrier = true;
        else if (name == "--only" && i + 1 < argc) o.only = argv[++i];
        else if (name == "--list") {
            for (auto& p : programs()) puts(p.name);
            exit(0);
        } else if (known(name)) o.programs.push_back(name);
        else {
            fprintf(stderr, "does not know %s; use %s\n", argv[i], USAGE);
            _exit(2);
        }
    }
    if (o.programs.empty())
        for (auto& p : programs()) o.programs.push_back(p.name);
    if (o.ranks > MAX_RANKS) {
        fprintf(stderr, "--ranks %d: at most %d\n", o.ranks, MAX_RANKS);
        _exit(2);
    }
    return o;
}

const Program& program(const std::string& name) {
    return *std::find_if(programs().begin(), programs().end(), [&](auto& p) { return name == p.name; });
}

// Where this process's part of NCCL's log begins for the next program. Only %p is known.
void say_where_the_log_is() {
    const char* pattern = getenv("NCCL_DEBUG_FILE");
    if (!pattern) return;
    std::string path = pattern;
    if (size_t at = path.find("%p"); at != path.npos) path.replace(at, 2, std::to_string(getpid()));
    struct stat status{};
    printf("LOG %s %lld\n", path.substr(path.rfind('/') + 1).c_str(), stat(path.c_str(), &status) == 0 ? (long long)status.st_size : 0);
    fflush(stdout);
}

// One rank's life: the programs from `first` on, each once the watch says so.
void serve(Board* board, const Options& options, int index, int first) {
    Rank rank(board, options, index);
    for (int i = first; i < (int)options.programs.size(); i++) {
        rank.stage("wait for the program before");
        while (board->current < i) usleep(200);
        if (options.processes || index == 0) {
            Rank::program_name() = program(options.programs[i]).name;
            say_where_the_log_is();
        }
        try {
            rank.stage("start");
            CUDA(cudaSetDevice(rank.gpu()));
            program(options.programs[i]).body(rank);
            rank.finished();
        } catch (const Absent& why) {
            rank.absent(why.what());
        } catch (const std::exception& error) {
            return rank.failed(error.what());
        }
    }
}

bool loads_lazily(const std::string& name) {
    const auto& all = lazily_loading();
    return std::find(all.begin(), all.end(), name) != all.end();
}

// A process of `ranks` ranks on threads of their own.
pid_t start(Board* board, const Options& options, int rank, int ranks, int first) {
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // Kernels of several ranks may share a GPU: loading one lazily would wait for another that spins.
    setenv("CUDA_MODULE_LOADING", loads_lazily(options.programs[first]) ? "LAZY" : "EAGER", 1);
    if (options.host_size)
        setenv("NCCL_HOSTID", format("oxygin-test-host-%d", rank / options.host_size).c_str(), 1);
    std::vector<std::thread> threads;
    for (int r = rank; r < rank + ranks; r++) threads.emplace_back([=, &options] { serve(board, options, r, first); });
    for (auto& thread : threads) thread.join();
    fflush(stdout);
    _exit(board->failed ? 1 : 0);
}

std::vector<pid_t> start_all(Board* board, const Options& options, int first) {
    std::vector<pid_t> children;
    const int each = options.processes ? 1 : options.ranks;
    for (int r = 0; r < options.ranks; r += each) {
        pid_t child = start(board, options, r, each, first);
        if (child < 0) {
            perror("fork");
            _exit(2);
        }
        children.push_back(child);
    }
    return children;
}

// Where each thread of ranks that hang stands: beside NCCL's log, if that has a folder, and where eu-stack (elfutils) is.
void keep_stacks(const std::vector<pid_t>& children) {
    const char* pattern = getenv("NCCL_DEBUG_FILE");
    const char* slash = pattern ? strrchr(pattern, '/') : nullptr;
    if (!slash) return;
    const std::string folder(pattern, slash);
    for (pid_t child : children) {
        const std::string command = format("command -v eu-stack >/dev/null && timeout 10 eu-stack -p %d >'%s/stacks.%d' 2>&1",
                                           child, folder.c_str(), child);
        if (system(command.c_str()) != 0) return;
    }
}

void end_all(std::vector<pid_t>& children) {
    for (pid_t child : children) kill(child, SIGKILL);
    for (pid_t child : children) waitpid(child, nullptr, 0);
    children.clear();
}

// What went wrong with the program that runs, or nullptr once every rank has finished it.
const char* watch(Board* board, const Options& options, const std::vector<pid_t>& children) {
    const auto started = std::chrono::steady_clock::now();
    const char* died = nullptr;
    while (board->finished < options.ranks) {
        usleep(2000);
        if (board->failed) {
            usleep(300'000);  // the other ranks' reasons
            return "a rank failed";
        }
        if (died) return died;
        if (std::chrono::steady_clock::now() - started > std::chrono::seconds(options.seconds)) return "did not end in time";
        for (pid_t child : children) {
            siginfo_t info{};
            // Left to be reaped at the end. A rank may be through with all while others are not, and one that died may
            // have finished before: one more look at the board.
            if (waitid(P_PID, child, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == child &&
                !(info.si_code == CLD_EXITED && info.si_status == 0))
                died = "a rank's process died";
        }
    }
    return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const Options options = parse(argc, argv);
    void* shared = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) {
        perror("mmap");
        _exit(2);
    }
    auto* board = static_cast<Board*>(shared);

    std::vector<pid_t> children;
    bool good = true;
    for (int i = 0; i < (int)options.programs.size(); i++) {
        const char* name = options.programs[i].c_str();
        const auto started = std::chrono::steady_clock::now();
        // Those who stayed for it may load kernels in the other way.
        if (i > 0 && loads_lazily(options.programs[i]) != loads_lazily(options.programs[i - 1])) end_all(children);
        // Nobody uses the board now.
        board->arrived = board->finished = board->failed = board->absent = 0;
        memset(board->reason, 0, sizeof board->reason);
        memset(board->stage, 0, sizeof board->stage);
        printf("BEGIN %s\n", name);
        board->current = i;
        if (children.empty()) children = start_all(board, options, i);
        const char* headline = watch(board, options, children);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
        if (headline) {
            good = false;
            printf("FAIL %s (%.2f s): %s\n", name, seconds, headline);
            for (int r = 0; r < options.ranks; r++)
                printf("  rank %d, at '%s': %s\n", r, board->stage[r], board->reason[r][0] ? board->reason[r] : "no error of its own");
            fflush(stdout);
            if (!board->failed) keep_stacks(children);
            end_all(children);
        } else if (board->absent) {
            printf("ABSENT %s (%.2f s): %s\n", name, seconds, board->reason[0]);
        } else {
            printf("PASS %s (%.2f s)\n", name, seconds);
        }
        fflush(stdout);
        if (separate) end_all(children);
    }
    // They have nothing left to do; one that does not end is none of the programs' failures.
    for (int tenths = 0; tenths < 20 && !children.empty(); tenths++) {
        children.erase(std::remove_if(children.begin(), children.end(), [](pid_t c) { return waitpid(c, nullptr, WNOHANG) == c; }),
                       children.end());
        usleep(children.empty() ? 0 : 100'000);
    }
    end_all(children);
    return good ? 0 : 1;
}
