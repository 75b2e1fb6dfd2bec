#!/usr/bin/env python3
"""Stands in for the executable of the GPU programs: says what they would say and writes the log that NCCL would write.

FAKE_MOOD is a JSON object, "LAYOUT-FOLDER/PROGRAM": "fail", "late" (a hang that the executable ends),
"hang", "crash", "other plugin", "other engine" or "other fabric".
FAKE_TRACE is a file that gets a line at the start and the end of each program, with the GPUs.
"""
import json
import os
import pathlib
import sys
import time

LIMITS = {"two hops, copy + stream write": (8, 15.0, "us"), "two hops, stream write": (0, 8.0, "us"),
          "batched copies, 64 a call": (8, 1.8, "M/s"), "cudaMemcpyPeerAsync, one way": (64 << 20, 400.0, "GB/s")}
FIGURES = {"pingpong": [("put + signal round trip", 8, 16.5, "us"), ("signal round trip", 0, 12.0, "us")],
           "flood": [("put + signal, 1 context", 8, 0.5, "M/s"), ("put + signal, 8 contexts", 8, 0.6, "M/s"),
                     ("put + signal, 1 context, one way", 64 << 20, 380.0, "GB/s")],
           "alltoall_large": [("all-to-all, a rank's bytes", 1 << 30, 3.0, "GB/s")],
           "alltoall": [("all-to-all between barriers, 16 blocks", 16 << 10, 110.0, "us")],
           "nccl_alltoall": [("all-to-all, a rank's bytes", 1 << 30, 1.5, "GB/s"), ("all-to-all, an iteration", 16 << 10, 55.0, "us")]}


def main():
    arguments, programs = sys.argv[1:], []
    while arguments and not arguments[0].startswith("-"):
        programs.append(arguments.pop(0))
    gpus = int(arguments[arguments.index("--gpus") + 1])
    visible = os.environ["CUDA_VISIBLE_DEVICES"]
    assert len(visible.split(",")) == gpus, visible
    folders = os.environ["LD_LIBRARY_PATH"].split(":")
    assert all(folders), folders
    version = pathlib.Path(folders[0]).parent.joinpath("version").read_text().strip()
    plugin = os.environ.get("NCCL_RMA_PLUGIN") or os.environ.get("NCCL_GIN_PLUGIN")
    # NCCL 2.29.7 forgets a plugin that it unloads; it is kept, and processes are not shared. Others reload it.
    forgets = version == "2.29.7"
    assert forgets == ("--separate" in arguments), arguments
    assert (forgets and plugin is not None) == ("NCCL_GIN_PLUGIN_REF_COUNT" in os.environ)
    log = pathlib.Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid())))
    moods = json.loads(os.environ.get("FAKE_MOOD", "{}"))
    fabric = os.environ.get("OXYGIN_FABRIC", "soft")
    libraries = [os.environ.get(f"OXYGIN_LIB{name}") for name in ("IBVERBS", "RDMACM", "MLX5", "CUDA")]
    assert all(pathlib.Path(path or "none").exists() for path in libraries) == (fabric == "verbs"), libraries

    def trace(what):
        with open(os.environ["FAKE_TRACE"], "a") as file:
            file.write(f"{what} {visible} {os.getpid()}\n")

    for i, program in enumerate(programs):
        print(f"BEGIN {program}\nLOG {log.name} {log.stat().st_size if log.exists() else 0}", flush=True)
        trace("+")
        mood = moods.get(f"{log.parent.name}/{program}", "")
        with open(log, "a") as file:
            if i == 0:
                file.write(f"NCCL version {version}+cuda13.4\n")
            if not plugin:
                file.write("NET/Socket : Using [0]lo\n")
            else:
                loaded = "/elsewhere/liboxygin.so" if mood == "other plugin" else plugin
                with_rma, gin_type = "NCCL_RMA_PLUGIN" in os.environ, os.environ.get("NCCL_GIN_TYPE")
                is_early = tuple(map(int, version.split("."))) < (2, 30, 7)
                if is_early:
                    by_itself = "own"
                else:
                    by_itself = "nccl" if gin_type == "2" else "gdaki" if fabric == "verbs" else "gdaki-soft"
                fabric = "soft" if mood == "other fabric" else fabric
                engine = os.environ.get("OXYGIN_ENGINE", by_itself)
                file.write(f"Successfully loaded external plugin {loaded}\n")
                if with_rma:
                    file.write("Loaded rma plugin oxygin (v16)\n")
                if engine == "nccl":
                    file.write(f"RMA/Plugin: Assigned plugin oxygin to comm\nfabric {fabric}\n")
                else:
                    assert gin_type in (None, "3") and "NCCL_GIN_PLUGIN" in os.environ
                    file.write(f"Loaded gin plugin oxygin ({'v12' if is_early else 'v14'})\n")
                    if with_rma or is_early:
                        file.write("GIN/Plugin: Assigned plugin oxygin type 3 to comm\n")
                    file.write(f"fabric {fabric}\n")
                    file.write(f"engine {'own' if mood == 'other engine' else engine}: 4 contexts\n")
                if "OXYGIN_SOFT_TRANSPORT" in os.environ:
                    file.write("rank 1: over TCP\n")
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0.01")))
        if program == "pingpong" and "OXYGIN_GPU_ISSUE" in os.environ:
            print(f"| pingpong | set to {os.environ['OXYGIN_GPU_ISSUE']} | 0 | 1 | x |")
        if program == "limits":
            where = "two GPUs" if gpus == 2 else "one GPU"
            for case, (size, value, unit) in LIMITS.items():
                print(f"| limits | {where}: {case} | {size} | {value} | {unit} |")
            print("NOTE limits: mmap fails with errno 524")
        for case, size, value, unit in FIGURES.get(program, []):
            print(f"| {program} | {case} | {size} | {value} | {unit} |")
        trace("-")
        if mood == "hang":
            time.sleep(60)
        if mood == "crash":
            os._exit(9)
        if mood == "late":
            print(f"FAIL {program} (9.00 s): did not end in time\n  rank 0, at 'start': no error of its own", flush=True)
        elif mood == "fail":
            print(f"FAIL {program} (0.10 s): a rank failed\n  rank 0, at 'start': wrong data", flush=True)
        else:
            print(f"PASS {program} (0.10 s)", flush=True)


main()
