"""NCCL's Python bindings with a kernel in CuTe DSL: each rank puts to its right neighbour and gets from its left one.

usage: python3 cuda/nccl4py_ring.py RANKS [--host-size N] [--nccl FOLDER]

Needs nccl4py with its extra cu13, and PyTorch. The DSL compiles the kernel with NCCL's device code as bitcode, so by another
compiler than nvcc; the bitcode is FOLDER/lib/libnccl_device.bc, or what the package nvidia-nccl-cu13 brings. A process a
rank; with --host-size N ranks are a host for NCCL. Says `NCCL4PY ...` once the packages are loaded, `USED ...`, then `PASS
nccl4py`; or `ABSENT nccl4py: ...`. A failure is a traceback and a status other than 0.
"""
import argparse
import importlib.util
import multiprocessing
import os
import pathlib
import sys

import rank_processes
from rank_processes import ABSENT

WANTED = ("nccl", "cutlass", "torch")
ROUNDS = 300
COUNT = 4096  # words of 8 bytes in a put
THREADS = 128
# A window: the parts of two rounds, the word of `put_value`, what `get` brings, and a word of each thread.
VALUE = 2 * COUNT
GOT = VALUE + 8
WRONG = GOT + COUNT
WORDS = WRONG + THREADS
ARRIVED, VALUES, ADDED = range(3)  # signals
INC, ADD = 0, 1  # ncclGinSignalOp_t


def compiled():
    """A function of communicator and windows that launches the kernel."""
    import cutlass
    import cutlass.cute as cute
    from nccl.core.device import cute as nc
    from nccl.core.device.cute import barrier, runtime

    @cute.kernel
    def ring(comm: nc.DevComm, out: nc.Window, into: nc.Window):
        thread, _, _ = cute.arch.thread_idx()
        team, gin, block = comm.team_world, comm.gin(nc.GinBackendMask.ALL, 0), nc.cta()
        right = (comm.rank + 1) % comm.n_ranks
        left = (comm.rank + comm.n_ranks - 1) % comm.n_ranks
        whole, word = cute.make_layout(COUNT), cute.make_layout(1)
        value, got = into.tensor(cutlass.Int64, word, VALUE * 8), into.tensor(cutlass.Int64, whole, GOT * 8)
        bad = cutlass.Int64(0)
        meet = barrier.world_gin(block, gin, comm, 0)
        meet.sync(block, nc.MemoryOrder.ACQ_REL, nc.GinFenceLevel.NONE)
        for i in cutlass.range(ROUNDS, unroll=1):
            # Parts in turns, so that nobody writes over what is still looked at.
            at = (i % 2) * (COUNT * 8)
            source, place = out.tensor(cutlass.Int64, whole, at), into.tensor(cutlass.Int64, whole, at)
            for k in cutlass.range(thread, COUNT, THREADS):
                source[k] = (cutlass.Int64(comm.rank) * ROUNDS + i) * COUNT + k
            gin.put(team, right, into, place, out, source, block, is_signal=True, signal_id=ARRIVED, signal_op=INC,
                    signal_op_arg=1, is_counter=True, counter_id=0)
            gin.put_value(team, right, into, value, i + 1, block, is_signal=True, signal_id=VALUES, signal_op=INC,
                          signal_op_arg=1)
            gin.signal(team, right, True, ADDED, ADD, 3, block)
            gin.wait_signal(block, signal=ARRIVED, least=i + 1)
            gin.wait_signal(block, signal=VALUES, least=i + 1)
            gin.wait_signal(block, signal=ADDED, least=3 * (i + 1))
            gin.wait_counter(block, counter=0, least=i + 1)
            # What was just put here is still where it came from.
            gin.get(team, left, out, source, into, got, block)
            gin.flush(block)
            for k in cutlass.range(thread, COUNT, THREADS):
                expected = (cutlass.Int64(left) * ROUNDS + i) * COUNT + k
                if place[k] != expected:
                    bad += 1
                if got[k] != expected:
                    bad += 1
            if value[0] != i + 1:
                bad += 1
            meet.sync(block, nc.MemoryOrder.ACQ_REL, nc.GinFenceLevel.PUT)
        meet.destroy()
        wrong = into.tensor(cutlass.Int64, cute.make_layout(THREADS), WRONG * 8)
        wrong[thread] = bad

    @cute.jit
    def launch(comm: nc.DevComm, out: nc.Window, into: nc.Window):
        ring(comm, out, into).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], cooperative=True)

    window = runtime.make_fake_window()
    return cute.compile(launch, runtime.make_fake_dev_comm(), window, window)


def rank_main(rank, ranks, host_size, folder, theirs):
    if host_size:
        os.environ["NCCL_HOSTID"] = f"host{rank // host_size}"
    if folder:
        os.environ["NCCL_HOME"] = folder
    import nccl.core as nccl
    import torch
    from nccl.core.interop.torch import empty
    versions = nccl.get_version()
    # By every rank: the first that ends ends the others.
    print(f"NCCL4PY {versions.nccl4py}", flush=True)
    if versions.nccl_bindings != versions.libnccl.version:
        print(f"ABSENT nccl4py: its kernels are for NCCL {versions.nccl_bindings}, and {versions.libnccl.version} runs", flush=True)
        sys.exit(ABSENT)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    launch = compiled()
    if rank == 0:
        unique = nccl.get_unique_id()
        for one in theirs:
            one.send(bytes(unique))
    else:
        unique = nccl.UniqueId.from_bytes(theirs.recv())
    comm = nccl.Communicator.init(nranks=ranks, rank=rank, unique_id=unique)
    out, into = (empty(WORDS, dtype=torch.int64).fill_(-1) for _ in range(2))
    windows = [comm.register_window(buffer) for buffer in (out, into)]
    dev_comm = comm.create_dev_comm(requirements=nccl.NCCLDevCommRequirements(
        gin_connection_type=nccl.NcclGinConnectionType.FULL, gin_context_count=1, gin_signal_count=3, gin_counter_count=1,
        world_gin_barrier_count=1))
    torch.cuda.synchronize()
    launch(dev_comm, *windows)
    torch.cuda.synchronize()
    wrong = into[WRONG:]
    assert bool((wrong == 0).all()), f"rank {rank}: {int(wrong.sum())} words were not what the left neighbour had sent"
    assert int(into[VALUE]) == ROUNDS, f"rank {rank}: the value is {int(into[VALUE])}, not {ROUNDS}"
    if rank == 0:
        print(f"USED nccl4py {versions.nccl4py}, {ranks} ranks, {ROUNDS} rounds, NCCL {versions.libnccl}", flush=True)
    dev_comm.close()
    for window in windows:
        window.close()
    comm.destroy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--host-size", type=int, default=0)
    parser.add_argument("--nccl", type=pathlib.Path)
    a = parser.parse_args()
    if missing := [name for name in WANTED if importlib.util.find_spec(name) is None]:
        print(f"ABSENT nccl4py: {sys.executable} has no {', '.join(missing)}")
        return 0
    if a.nccl and not (a.nccl / "lib/libnccl_device.bc").exists():
        print(f"ABSENT nccl4py: there is no {a.nccl}/lib/libnccl_device.bc")
        return 0
    pipes = [multiprocessing.Pipe() for _ in range(1, a.ranks)]
    ends = [[one for _, one in pipes]] + [one for one, _ in pipes]
    folder = a.nccl and str(a.nccl)
    return rank_processes.run("nccl4py", rank_main, [(rank, a.ranks, a.host_size, folder, ends[rank]) for rank in range(a.ranks)])


if __name__ == "__main__":
    sys.exit(main())
