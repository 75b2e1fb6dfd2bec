"""Runs cuda/torch_collectives.py, the program `torch`: not the executable's, as it takes a Python that has PyTorch."""
import os
import pathlib
import re
import shutil
import subprocess
import time

from . import runner
from .layouts import LAYOUTS

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / "cuda/torch_collectives.py"
# PyTorch alone takes long to load the first time.
LEAST_SECONDS = 60


def attempt(python, layout, given, nccl, plugin, version, gpus, until, log):
    """The lines it said, its status (None: it was killed at `until`), and what its processes' NCCL logged. `given`: with the
    NCCL given, or else the one that PyTorch brings along."""
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    env = runner.environment(nccl, plugin, version, layout, gpus, log, {})
    if given:
        # Before the one that PyTorch's libraries name by path.
        env["LD_PRELOAD"] = str(nccl / "lib/libnccl.so.2")
    else:
        env["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        # Whichever of them that NCCL knows.
        env.update(NCCL_GIN_PLUGIN=str(plugin), NCCL_RMA_PLUGIN=str(plugin), NCCL_GIN_TYPE="2")
    process = runner.start([python, str(SCRIPT), str(LAYOUTS[layout].ranks)], env)
    lines = list(runner.lines_of(process, until))
    killed = lines[-1:] == [None]
    lines = lines[:-1] if killed else lines
    (log / "output").write_text("\n".join(lines) + "\n")
    texts = [path.read_text(errors="replace") for path in sorted(log.glob("nccl.*"))]
    return lines, None if killed else process.returncode, "\n".join(texts)


def run(python, layout, nccl, plugin, version, gpus, seconds, log, deadline, record):
    """Calls `record(result)`, whose `notes` say which NCCL it was. `False`: cut by `deadline` (time.monotonic), no call."""
    started = time.monotonic()

    def once(given):
        until = min(deadline, time.monotonic() + max(seconds, LEAST_SECONDS))
        return attempt(python, layout, given, nccl, plugin, version, gpus, until, log / "torch")

    result = {"program": "torch", "layout": layout, "rows": [], "used": {}}
    if not shutil.which(python):
        result.update(status="absent", why=f"there is no {python}", seconds=0)
        record(result)
        return True
    lines, status, text = once(True)
    given, notes = True, []
    if status not in (0, None) and not any(line.startswith("TORCH ") for line in lines):
        # It came to nothing before any NCCL was used.
        notes.append(f"PyTorch does not load with NCCL {'.'.join(map(str, version))}: {(lines or ['no word'])[-1][:200]}")
        lines, status, text = once(False)
        given = False
    if status is None and time.monotonic() >= deadline:
        return False
    result["seconds"] = round(time.monotonic() - started, 2)
    notes += [line.split(" ", 1)[1] + ("" if given else ", its own") for line in lines if line.startswith("USED ")]
    if notes:
        result["notes"] = notes
    absent = [line.split(": ", 1)[1] for line in lines if line.startswith("ABSENT torch: ")]
    if absent and status == 0:
        result.update(status="absent", why=absent[0])
        record(result)
        return True
    ran = re.findall(r"NCCL version (\d+)\.(\d+)\.(\d+)", text)
    facts, wrong, warnings = runner.used(text, text, version if given or not ran else tuple(map(int, ran[-1])), plugin, layout, "torch")
    if not given:
        wrong = []  # an NCCL that nobody chose loads what it loads
    result["used"] = facts
    if status == 0 and "PASS torch" in lines and not wrong:
        result["status"] = "pass"
    else:
        result["status"] = "hang" if status is None else "not ours" if status == 0 else "fail"
        result["why"] = ([l.strip() for l in lines if l.strip()][-8:] or ["it ended without a word"]) + wrong + warnings[:4]
    record(result)
    return True
