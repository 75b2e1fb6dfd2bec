"""torch.distributed over NCCL, one process a GPU, with whatever plugins the environment names: sums must be right.

usage: python3 cuda/torch_collectives.py [RANKS]    (default: one for each GPU)
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_main(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    ones = torch.full((1 << 20,), float(rank + 1), device="cuda")
    dist.all_reduce(ones)
    assert bool((ones == ranks * (ranks + 1) / 2).all()), "all_reduce"
    parts = [torch.empty(1000, device="cuda") for _ in range(ranks)]
    dist.all_gather(parts, torch.full((1000,), float(rank), device="cuda"))
    assert all(bool((part == r).all()) for r, part in enumerate(parts)), "all_gather"
    dist.destroy_process_group()
    if rank == 0:
        print(f"PASS torch_collectives: torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {ranks} ranks")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    mp.spawn(rank_main, args=(count,), nprocs=count)
