#!/usr/bin/env python3
"""Stands in for a Python with PyTorch and nccl4py that runs a script of cuda/. FAKE_MOOD says by name how it goes."""
import json
import os
import pathlib
import sys
import time

name = {"cuda/torch_collectives.py": "torch", "cuda/nccl4py_ring.py": "nccl4py"}["/".join(sys.argv[1].rsplit("/", 2)[1:])]
ranks = int(sys.argv[2])
if name == "nccl4py":
    nccl = pathlib.Path(sys.argv[sys.argv.index("--nccl") + 1])
    assert os.environ["LD_PRELOAD"] == f"{nccl}/lib/libnccl.so.2", sys.argv
    assert "--processes" not in sys.argv
assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) in (1, ranks)
mood = json.loads(os.environ.get("FAKE_MOOD", "{}")).get(name, "")
if mood == "absent":
    print(f"ABSENT {name}: it has no PyTorch")
    sys.exit()
if mood == "hangs":
    time.sleep(60)
given = os.environ.pop("LD_PRELOAD", None)
if given and mood == "takes only its own":
    sys.exit("undefined symbol: ncclNew")
ran = pathlib.Path(given).parent.parent.joinpath("version").read_text().strip() if given and mood != "takes another" else "2.28.9"
print({"torch": "TORCH 2.11.0", "nccl4py": "NCCL4PY 0.6.0"}[name])
with open(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())), "a") as log:
    both = "NCCL_RMA_PLUGIN" in os.environ
    tables = "Loaded rma plugin oxygin (v16)\nLoaded gin plugin oxygin (v14)" if both else "Loaded gin plugin oxygin (v12)"
    log.write(f"NCCL version {ran}+cuda13.0\n{tables}\nRMA/Plugin: Assigned plugin oxygin to comm\n")
    if name == "nccl4py":
        engine = os.environ.get("OXYGIN_ENGINE") or ("gdaki-soft" if both else "own")
        way = "over TCP" if os.environ.get("OXYGIN_SOFT_TRANSPORT") == "tcp" else "on this host"
        log.write(f"fabric soft\nengine {engine}: 1 contexts\nrank 1: {way}\n")
if mood == "wrong sums":
    sys.exit("AssertionError: all_reduce")
if name == "torch":
    print(f"USED torch 2.11.0, built for NCCL 2.28.9, with NCCL {ran}, {ranks} ranks\nPASS torch")
else:
    print(f"USED nccl4py 0.6.0, {ranks} ranks, {' '.join(sys.argv[5:]) or 'one host'}\nPASS nccl4py")
