"""torch.distributed over NCCL, one process a GPU, with whatever plugins the environment names: sums must be right.

usage: python3 cuda/torch_collectives.py RANKS

Says `TORCH ...` once PyTorch is loaded, `USED ...` (the NCCL it was built for and the one that ran), then `PASS torch`; or
`ABSENT torch: ...`. A failure is a traceback and a status other than 0.
"""
import ctypes
import importlib.util
import os
import socket
import sys

import rank_processes
from rank_processes import ABSENT


def running_nccl():
    """The library in this process; torch.cuda.nccl.version() is the one that torch was built for."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def rank_main(rank, ranks, port):
    import torch
    import torch.distributed as dist
    # By every rank: the first that ends ends the others.
    print(f"TORCH {torch.__version__}", flush=True)
    if torch.cuda.device_count() < ranks:
        print(f"ABSENT torch: PyTorch finds {torch.cuda.device_count()} GPUs, not {ranks}", flush=True)
        sys.exit(ABSENT)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    ones = torch.full((1 << 20,), float(rank + 1), device="cuda")
    dist.all_reduce(ones)
    assert bool((ones == ranks * (ranks + 1) / 2).all()), "all_reduce"
    parts = [torch.empty(1000, device="cuda") for _ in range(ranks)]
    dist.all_gather(parts, torch.full((1000,), float(rank), device="cuda"))
    assert all(bool((part == r).all()) for r, part in enumerate(parts)), "all_gather"
    if rank == 0:
        built = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"USED torch {torch.__version__}, built for NCCL {built}, with NCCL {running_nccl()}, {ranks} ranks", flush=True)
    dist.destroy_process_group()


def main():
    ranks = int(sys.argv[1])
    if importlib.util.find_spec("torch") is None:
        print(f"ABSENT torch: {sys.executable} has no PyTorch")
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return rank_processes.run("torch", rank_main, [(rank, ranks, port) for rank in range(ranks)])


if __name__ == "__main__":
    sys.exit(main())
