#!/usr/bin/env python3
"""Stands in for a Python with PyTorch that runs cuda/torch_collectives.py. FAKE_MOOD's "torch" says how it goes."""
import json
import os
import pathlib
import sys
import time

assert sys.argv[1].endswith("cuda/torch_collectives.py"), sys.argv
ranks = int(sys.argv[2])
assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == ranks
mood = json.loads(os.environ.get("FAKE_MOOD", "{}")).get("torch", "")
if mood == "absent":
    print("ABSENT torch: it has no PyTorch")
    sys.exit()
if mood == "hangs":
    time.sleep(60)
given = os.environ.pop("LD_PRELOAD", None)
if given and mood == "takes only its own":
    sys.exit("undefined symbol: ncclNew")
ran = pathlib.Path(given).parent.parent.joinpath("version").read_text().strip() if given and mood != "takes another" else "2.28.9"
print("TORCH 2.11.0")
with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "a") as log:
    both = "NCCL_RMA_PLUGIN" in os.environ
    tables = "Loaded rma plugin oxygin (v16)\nLoaded gin plugin oxygin (v14)" if both else "Loaded gin plugin oxygin (v12)"
    log.write(f"NCCL version {ran}+cuda13.0\n{tables}\nRMA/Plugin: Assigned plugin oxygin to comm\n")
if mood == "wrong sums":
    sys.exit("AssertionError: all_reduce")
print(f"USED torch 2.11.0, built for NCCL 2.28.9, with NCCL {ran}, {ranks} ranks\nPASS torch")
