"""Runs programs of one executable in one layout and reads what came of them."""
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import time

from . import fake_nic
from .layouts import HOST_CALLS, LAYOUTS, NO_FABRIC, NO_NCCL, OWN_QUEUES, has_fabric

# As in cli/src/env/select.rs, with which tests/gpu_programs compares them. The first NCCL that finds a GIN plugin again
# after it has unloaded it: an older one is told to keep it.
FIRST_RELOADING = (2, 30, 3)
# The first one with the table GIN v14, whose proxy drives an RMA plugin.
FIRST_WITH_GIN_V14 = (2, 30, 7)


def environment(nccl, plugin, version, layout, gpus, log, extra, engine="auto"):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "OXYGIN_"))}
    # Kept where it is set: on some shared machines multicast must stay off.
    for name in ("NCCL_NVLS_ENABLE",):
        if name in os.environ:
            env[name] = os.environ[name]
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    # NET: how each peer is reached is said there.
    env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,BOOTSTRAP,ENV,NET", NCCL_DEBUG_FILE=str(log / "nccl.%p"),
               # An empty name in it would be the working directory.
               LD_LIBRARY_PATH=":".join(filter(None, [f"{nccl}/lib", env.get("LD_LIBRARY_PATH")])),
               CUDA_VISIBLE_DEVICES=",".join(visible[g] if visible else str(g) for g in gpus))
    if LAYOUTS[layout].plugin:
        if version < FIRST_WITH_GIN_V14:
            env.update(NCCL_GIN_PLUGIN=str(plugin))
            if version < FIRST_RELOADING:
                env.update(NCCL_GIN_PLUGIN_REF_COUNT="1")
        elif engine == "nccl":
            env.update(NCCL_RMA_PLUGIN=str(plugin), NCCL_GIN_TYPE="2")
        else:
            env.update(NCCL_GIN_PLUGIN=str(plugin))
            if LAYOUTS[layout].rma:
                env.update(NCCL_RMA_PLUGIN=str(plugin))
        if engine != "auto":
            env.update(OXYGIN_ENGINE=engine)
    env.update(LAYOUTS[layout].environment)
    if LAYOUTS[layout].nic:
        libraries = fake_nic.libraries()
        env.update(fake_nic.environment(libraries))
        # One of them finds another by its name.
        env["LD_LIBRARY_PATH"] += f":{libraries['verbs'].parent}"
    env.update(extra)
    return env


def taken(engine, version, layout):
    """The engine that `auto` is: the README's table, and what it says of verbs."""
    if engine != "auto":
        return engine
    if LAYOUTS[layout].nic:
        return "own" if version < FIRST_WITH_GIN_V14 else "gdaki"
    return "own" if version < FIRST_WITH_GIN_V14 else "gdaki-soft" if version < (2, 33) else "nccl"


def used(before, text, version, plugin, layout, program, engine="auto"):
    """What NCCL says it used, and what is wrong with that: `text` is the program's part of the log, `before` all of its
    processes' log up to the end of that part."""
    one = LAYOUTS[layout]
    engine = taken(engine, version, layout)

    def last(pattern, where):
        found = re.findall(pattern, where)
        return found[-1] if found else None

    wrong = []
    warnings = [w for w in re.findall(r"NCCL WARN ([^\n]+)", text)]
    if program in NO_NCCL:
        return {}, wrong, warnings
    facts = {
        "nccl": last(r"NCCL version (\d+\.\d+\.\d+)", before),
        "plugin": last(r"Successfully loaded external plugin (\S+)", before),
        "gin_table": last(r"Loaded gin plugin oxygin \((v\d+)\)", before),
        "rma_table": last(r"Loaded rma plugin oxygin \((v\d+)\)", before),
        "fabric": last(r"\bfabric (soft|verbs)\b", text),
        "engine": last(r"\bengine (own|gdaki-soft|gdaki): ", text),
        "paths": sorted(set(re.findall(r"rank \d+: (over TCP|on this host[^\n]*)", text))),
        "hosts": last(r"nNodes (\d+)", text),
    }
    want = ".".join(map(str, version))
    if facts["nccl"] != want:
        wrong.append(f"NCCL {facts['nccl']} ran, not {want}")
    if not one.plugin:
        facts["fabric"] = "NCCL's sockets" if "NET/Socket" in text else None
        if not facts["fabric"]:
            wrong.append("NCCL's log names no NET/Socket")
        if re.search(r"via (P2P|SHM)", text):
            wrong.append("NCCL used " + re.search(r"via (P2P\S*|SHM\S*)", text).group(1))
        if facts["plugin"]:
            wrong.append("a plugin was loaded")
        return facts, wrong, warnings
    table = "rma_table" if version >= FIRST_WITH_GIN_V14 and (engine not in OWN_QUEUES or program in HOST_CALLS) else "gin_table"
    if not facts[table]:
        wrong.append(f"NCCL's log does not say that it loaded oxygin's {table[:3].upper()} table")
    if facts["plugin"] and pathlib.Path(facts["plugin"]).resolve() != plugin:
        wrong.append(f"NCCL loaded {facts['plugin']}, not {plugin}")
    if facts["plugin"]:
        # Checked; where it lay on that machine is nobody's business later.
        facts["plugin"] = pathlib.Path(facts["plugin"]).name
    if version >= FIRST_WITH_GIN_V14 and one.rma and not re.search(r"Assigned plugin oxygin (type \d+ )?to comm", text):
        wrong.append("NCCL did not assign oxygin to the communicator")
    if engine in OWN_QUEUES and program not in HOST_CALLS and has_fabric(layout, program) and facts["engine"] != engine:
        wrong.append(f"the log names engine {facts['engine']}, not {engine}")
    if has_fabric(layout, program) and not facts["fabric"]:
        wrong.append("the log names no fabric")
    if one.nic and facts["fabric"] not in ("verbs", None):
        wrong.append(f"the log names fabric {facts['fabric']}, not verbs")
    if "OXYGIN_SOFT_TRANSPORT" in one.environment and facts["fabric"] == "soft" and any(p != "over TCP" for p in facts["paths"]):
        wrong.append("copies were to go through TCP, but: " + ", ".join(facts["paths"]))
    return facts, wrong, warnings


# Processes that run, leaders of their groups.
running = set()


def start(command, env):
    """A process that can be ended with all that it starts."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=env)
    running.add(process)
    return process


def kill(process):
    """Ends it with all that it has started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    running.discard(process)


def end_all():
    """Ends all that run."""
    for process in list(running):
        kill(process)


class Part:
    """What one program wrote."""

    def __init__(self, program):
        self.program, self.lines, self.rows, self.notes, self.logs = program, [], [], [], {}
        self.started = time.monotonic()
        self.verdict, self.seconds = None, 0.0

    def take(self, line):
        """True at the line after which nothing more is to come, but for a failure's reasons."""
        cells = [c.strip() for c in line.split("|")[1:-1]]
        log = re.match(r"LOG (\S+) (\d+)$", line)
        verdict = re.match(r"(PASS|FAIL|ABSENT) (\S+) \(([\d.]+) s\)(?:: (.*))?$", line)
        if len(cells) == 5 and line.startswith("|"):
            self.rows.append({"case": cells[1], "bytes": int(cells[2]), "value": float(cells[3]), "unit": cells[4]})
        elif log:
            self.logs[log.group(1)] = int(log.group(2))
        elif line.startswith("NOTE "):
            self.notes.append(line.split(": ", 1)[-1])
        else:
            self.lines.append(line)
        if verdict and verdict.group(2) == self.program:
            self.verdict, self.seconds = verdict.group(1), float(verdict.group(3))
        return bool(verdict)


def ending(log, lines=8):
    """The last lines of a process's part of NCCL's log, without host, process and thread: what there is of a hang."""
    return [re.sub(r"^.*?(?=NCCL )", "", line) for line in log.splitlines()[-lines:]]


def lines_of(process, deadline):
    """The lines of its output as they come; ends with it, or kills it at `deadline`. The last item is None if it was cut."""
    pipe = process.stdout
    os.set_blocking(pipe.fileno(), False)
    rest = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            kill(process)
            yield None
            return
        if select.select([pipe], [], [], left)[0]:
            data = pipe.read()
            if data is None:
                continue
            if not data:
                process.wait()
                running.discard(process)
                if rest:
                    yield rest.decode(errors="replace")
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)


# Failures in a row after which a layout is taken to be broken: the programs after it would only cost time.
GIVE_UP = 3


def run(executable, programs, layout, nccl, plugin, version, gpus, seconds, flags, log, deadline, record, extra=(), engine="auto"):
    """Calls `record(result)` for each program as soon as it has ended. Returns the programs that got no call, and why: cut by
    `deadline` (time.monotonic), or because too many failed. `extra`: variables beside the layout's own."""
    one = LAYOUTS[layout]
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    command = [str(executable), *programs, "--ranks", str(one.ranks), "--gpus", str(one.gpus), "--seconds", str(seconds),
               *one.arguments, *flags]
    process = start(command, environment(nccl, plugin, version, layout, gpus, log, dict(extra), engine))
    # The executable ends a program that takes too long; this is for when it does not.
    last = time.monotonic() + (seconds + 2) * len(programs) + 10
    # The one that has ended waits for the next to say where its part of NCCL's log begins.
    part, ended, done = None, None, set()
    row = 0  # of failures

    def end(part, following=None, hung=False):
        nonlocal row
        texts, sections = [], []
        for path in sorted(log.glob("nccl.*")):
            if path.name not in part.logs:
                continue
            text = path.read_bytes()[:following.logs.get(path.name) if following else None]
            texts.append(text.decode(errors="replace"))
            sections.append(text[part.logs[path.name]:].decode(errors="replace"))
        facts, wrong, warnings = used("\n".join(texts), "\n".join(sections), version, plugin, layout, part.program, engine)
        result = {"program": part.program, "layout": layout, "seconds": round(part.seconds, 2), "rows": part.rows, "used": facts}
        # What oxygin says of its work on the GPU when a communicator closes.
        notes = part.notes + re.findall(r"(rank \d+: \d+ (?:submissions|flights) [^\n]*)", "\n".join(sections))[:2]
        if notes:
            result["notes"] = notes
        text = "\n".join(part.lines)
        if part.verdict == "ABSENT":
            result.update(status="absent", why=text.split(": ", 1)[-1])
        elif part.verdict == "PASS" and not wrong:
            result["status"] = "pass"
        else:
            hung = hung or "did not end in time" in text
            result["status"] = "hang" if hung else "not ours" if part.verdict == "PASS" else "fail"
            words = [l.strip() for l in part.lines if l.strip()][-8:] or ["it ended without a word"]
            result["why"] = words + wrong + warnings[:4]
            if result["status"] == "hang":
                result["log_ends"] = [ending(section) for section in sections]
        if result["status"] not in ("pass", "absent"):
            row += 1
        elif part.program not in NO_FABRIC:
            row = 0
        done.add(part.program)
        record(result)

    def left():
        return [p for p in programs if p not in done]

    with open(log / "output", "w") as output:
        for line in lines_of(process, min(last, deadline)):
            if line is None:
                if ended:
                    end(ended)
                if part and time.monotonic() < deadline:
                    end(part, hung=True)
                return left(), "the time was over"
            output.write(line + "\n")
            begin = re.match(r"BEGIN (\S+)$", line)
            if begin:
                if part:
                    ended = part  # a failure, whose reasons came after the verdict
                part = Part(begin.group(1))
                continue
            part = part or Part(programs[0])
            verdict = part.take(line)
            if ended and not line.startswith("LOG "):
                end(ended, part)
                ended = None
                if row >= GIVE_UP:
                    kill(process)
                    return left(), f"{row} programs in a row failed in this layout"
            if verdict and part.verdict in ("PASS", "ABSENT"):
                part, ended = None, part
    if ended:
        end(ended)
    if part:
        if not part.verdict:
            part.lines.append(f"the executable ended with status {process.returncode}")
        end(part)
    return left(), "the executable ended before it came to this program"
