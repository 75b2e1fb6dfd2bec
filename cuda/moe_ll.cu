// Mixture of experts, the low-latency form (common/moe_ll.cuh), one kernel a round. Routing is random, rounds follow
// one another without the host, and every sum is compared with one made on the CPU.
#include "common/moe_ll.cuh"

namespace moe_ll_program {

using namespace moe_ll;

// A block for each other rank: sends it tokens, answers its tokens, takes its answers.
__global__ void round_of(ncclDevComm comm, ncclWindow_t window, Plan plan, int round, Outcome* out) {
    const Pair pair{comm, window, plan, int(blockIdx.x), round, out};
    pair.send_tokens();
    if (!pair.receive_tokens()) return;
    pair.send_answers();
    pair.receive_answers();
}

__global__ void combine(ncclWindow_t window, Plan plan, int round) { add_up(window, plan, round); }

PROGRAM(moe_ll) {
    const int rounds = rank.options.quick ? 6 : 30, n = rank.count();
    const Plan plan{n};
    World world(rank, (plan.sums(rounds) + 4095) / 4096 * 4096, {.signals = plan.signals(), .contexts = 4});
    world.fill(0, world.bytes, 0xEE);
    world.run("dispatch and combine", [&] {
        for (int round = 0; round < rounds; round++) {
            round_of<<<n, THREADS, 0, world.stream>>>(world.device, world.window, plan, round, world.out);
            combine<<<8, THREADS, 0, world.stream>>>(world.window, plan, round);
        }
    });
    for (int round = 0; round < rounds; round++) verify_sums(world, plan, round);
    rank.row("low-latency rounds", MESSAGE, rounds, "rounds");
    world.close();
}

}  // namespace moe_ll_program
