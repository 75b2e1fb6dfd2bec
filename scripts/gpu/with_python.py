"""Runs the programs that are scripts for Python, which take one that has PyTorch, and packages beside it."""
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import time

from . import runner
from .layouts import LAYOUTS

CUDA = pathlib.Path(__file__).resolve().parent.parent.parent / "cuda"


@dataclasses.dataclass(frozen=True)
class Script:
    """A script says `NAME ...` in capitals once its packages are loaded, `USED ...`, `ABSENT name: ...`, `PASS name`."""
    file: str
    least_seconds: int  # its packages alone take long to load the first time
    falls_back: bool = False  # where it does not load with the NCCL given, it runs with the one that PyTorch brings along
    as_hosts: bool = False  # is told how many ranks are a host, and where the NCCL is


KNOWN = {
    "torch": Script("torch_collectives.py", 60, falls_back=True),
    # Its compiler takes 40 s.
    "nccl4py": Script("nccl4py_ring.py", 120, as_hosts=True),
}


def command(python, name, layout, nccl):
    one, script = LAYOUTS[layout], KNOWN[name]
    words = [python, str(CUDA / script.file), str(one.ranks)]
    if script.as_hosts:
        words += ["--nccl", str(nccl)] + [word for word in one.arguments if word != "--processes"]
    return words


def attempt(python, name, layout, given, nccl, plugin, version, gpus, until, log, engine):
    """The lines it said, its status (None: it was killed at `until`), and what its processes' NCCL logged. `given`: with the
    NCCL given, or else the one that PyTorch brings along."""
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    env = runner.environment(nccl, plugin, version, layout, gpus, log, {}, engine=engine)
    if given:
        # Before the one that PyTorch's libraries name by path.
        env["LD_PRELOAD"] = str(nccl / "lib/libnccl.so.2")
    else:
        env["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        # Whichever of them that NCCL knows.
        env.update(NCCL_GIN_PLUGIN=str(plugin), NCCL_RMA_PLUGIN=str(plugin), NCCL_GIN_TYPE="2")
    process = runner.start(command(python, name, layout, nccl), env)
    lines = list(runner.lines_of(process, until))
    killed = lines[-1:] == [None]
    lines = lines[:-1] if killed else lines
    (log / "output").write_text("\n".join(lines) + "\n")
    texts = [path.read_text(errors="replace") for path in sorted(log.glob("nccl.*"))]
    return lines, None if killed else process.returncode, "\n".join(texts)


def run(name, python, layout, nccl, plugin, version, gpus, seconds, log, deadline, record, engine="auto"):
    """Calls `record(result)`, whose `notes` say what it was run with. `False`: cut by `deadline` (time.monotonic), no call."""
    started, script = time.monotonic(), KNOWN[name]

    def once(given):
        until = min(deadline, time.monotonic() + max(seconds, script.least_seconds))
        return attempt(python, name, layout, given, nccl, plugin, version, gpus, until, log / name, engine)

    result = {"program": name, "layout": layout, "rows": [], "used": {}}
    if not shutil.which(python):
        result.update(status="absent", why=f"there is no {python}", seconds=0)
        record(result)
        return True
    lines, status, text = once(True)
    given, notes = True, []
    if script.falls_back and status not in (0, None) and not any(line.startswith(f"{name.upper()} ") for line in lines):
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
    absent = [line.split(": ", 1)[1] for line in lines if line.startswith(f"ABSENT {name}: ")]
    if absent and status == 0:
        result.update(status="absent", why=absent[0])
        record(result)
        return True
    ran = re.findall(r"NCCL version (\d+)\.(\d+)\.(\d+)", text)
    facts, wrong, warnings = runner.used(text, text, version if given or not ran else tuple(map(int, ran[-1])), plugin, layout, name,
                                         engine)
    if not given:
        wrong = []  # an NCCL that nobody chose loads what it loads
    result["used"] = facts
    if status == 0 and f"PASS {name}" in lines and not wrong:
        result["status"] = "pass"
    else:
        result["status"] = "hang" if status is None else "not ours" if status == 0 else "fail"
        result["why"] = ([l.strip() for l in lines if l.strip()][-8:] or ["it ended without a word"]) + wrong + warnings[:4]
    record(result)
    return True
