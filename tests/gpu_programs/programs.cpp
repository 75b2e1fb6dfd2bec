// Programs that end in every way, to be run by cuda/common/main.cu without a GPU.
#include <signal.h>

#include "ranks.cuh"

namespace {

void log_line(const char* text) {
    std::string path = getenv("NCCL_DEBUG_FILE") ? getenv("NCCL_DEBUG_FILE") : "";
    if (size_t at = path.find("%p"); at != path.npos) path.replace(at, 2, std::to_string(getpid()));
    if (path.empty()) return;
    FILE* file = fopen(path.c_str(), "a");
    fprintf(file, "%s\n", text);
    fclose(file);
}

PROGRAM(good) {
    rank.id();
    rank.barrier();
    // In one process the ranks are threads.
    rank.row("pid", 8, getpid(), "pid");
    rank.note(format("host %s", getenv("NCCL_HOSTID") ? getenv("NCCL_HOSTID") : "none"));
    log_line("good was here");
    rank.barrier();
}

// As for many communicators, one after another: all ranks have the same id, and nobody one of before.
PROGRAM(ids) {
    uint64_t last = 0;
    for (int i = 0; i < 300; i++) {
        if (rank.index == i % rank.count()) usleep(100);
        uint64_t id;
        const ncclUniqueId whole = rank.id();
        memcpy(&id, whole.internal, sizeof id);
        if (i > 0 && id != last + 1)
            throw Failure(format("id %llu after %llu", (unsigned long long)id, (unsigned long long)last));
        last = id;
    }
}

// What rank 0 says holds for all, each time.
PROGRAM(agreed) {
    for (uint64_t i = 1; i <= 200; i++) {
        const uint64_t found = rank.agree(i * 100 + rank.index);
        if (found != i * 100) throw Failure(format("%llu in turn %llu", (unsigned long long)found, (unsigned long long)i));
    }
}

void say_settings(Rank& rank) {
    rank.row("pid", 8, getpid(), "pid");
    rank.note(format("loading %s, %d blocks%s", getenv("CUDA_MODULE_LOADING"), rank.options.blocks,
                     rank.options.gin_barrier ? ", barrier" : ""));
}

PROGRAM(lazy) { say_settings(rank); }
LOADS_LAZILY(lazy)

PROGRAM(eager) { say_settings(rank); }

PROGRAM(absent) { throw Absent("there is no such thing"); }

PROGRAM(bad) {
    rank.stage("think");
    if (rank.index == 1) throw Failure("rank 1 does not want to");
    rank.barrier();
}

PROGRAM(crash) {
    rank.stage("crash");
    if (rank.index == 1) raise(SIGSEGV);
    rank.barrier();
}

PROGRAM(hang) {
    rank.stage("hang");
    if (rank.index == 1)
        for (;;) pause();
    rank.barrier();
}

}  // namespace
