// The combine of jit_moe.cu, for a module of its own: one block for each other rank.
#include "../common/jit_moe.cuh"

extern "C" __global__ void jit_combine(moe_ll::JitArguments a) {
    const moe_ll::Pair pair{a.comm, a.window, a.plan, int(blockIdx.x), a.round, a.out};
    if (!a.host_lets_go()) return;
    pair.send_answers();
    pair.receive_answers();
}
