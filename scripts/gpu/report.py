"""What was measured beside what it is compared with, and the summary."""
import re

from .layouts import LAYOUTS, SCRIPTS

PUT, SIGNAL = "put + signal round trip", "signal round trip"
LARGE = 64 << 20
BARRIERS, ITERATION = "all-to-all between barriers, 16 blocks", "all-to-all, an iteration"
BARRIER_SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20]
# What, the figure (layout, program, case, bytes), its limit (and what to multiply that with), and the ratio to reach; or the
# figure to reach, with its unit.
COMPARISONS = [
    ("8-byte put + signal round trip, two GPUs", ("2gpu-threads", "pingpong", PUT, 8),
     ("2gpu", "limits", "two GPUs: two hops, copy + stream write", 8), "<=", 1.2),
    ("the same, two processes", ("2gpu-processes", "pingpong", PUT, 8),
     ("2gpu", "limits", "two GPUs: two hops, copy + stream write", 8), "<=", 1.2),
    ("8-byte put + signal round trip, two ranks on one GPU", ("1gpu-2threads", "pingpong", PUT, 8),
     ("1gpu", "limits", "one GPU: two hops, copy + stream write", 8), "<=", 1.2),
    ("signal round trip, two GPUs", ("2gpu-threads", "pingpong", SIGNAL, 0),
     ("2gpu", "limits", "two GPUs: two hops, stream write", 0), "<=", 1.3),
    ("the same, two processes", ("2gpu-processes", "pingpong", SIGNAL, 0),
     ("2gpu", "limits", "two GPUs: two hops, stream write", 0), "<=", 1.3),
    ("signal round trip, two ranks on one GPU", ("1gpu-2threads", "pingpong", SIGNAL, 0),
     ("1gpu", "limits", "one GPU: two hops, stream write", 0), "<=", 1.3),
    *[(f"flood of 8-byte put + signal, {contexts}, {layout}", (layout, "flood", f"put + signal, {contexts}", 8),
       (limits, "limits", f"{where}: batched copies, 64 a call", 8), ">= M/s", least)
      for layout, limits, where in [("2gpu-threads", "2gpu", "two GPUs"), ("2gpu-processes", "2gpu", "two GPUs"),
                                    ("1gpu-2threads", "1gpu", "one GPU")]
      for contexts, least in [("1 context", 0.4), ("8 contexts", 0.8)]],
    # To see where the time of a flood goes and what another engine could reach; nothing to reach.
    *[(f"flood of 8-byte {messages}, 2gpu-threads", ("2gpu-threads", "flood", messages, 8),
       ("2gpu", "limits", "two GPUs: batched copies, 64 a call", 8), "", 0)
      for messages in ("put + signal, 1 context, 32 threads", "put + signal, 1 context, no fence")],
    *[(f"flood of {messages}, 2gpu-threads", ("2gpu-threads", "flood", messages, 0),
       ("2gpu", "limits", "two GPUs: batched stream writes, 64 a call", 8), "", 0)
      for messages in ("signal, 1 context", "signal, 8 contexts")],
    *[(f"{what} round trip, {where}, against a resident kernel", (layout, "pingpong", case, size),
       (limits, "limits", f"{where}: two hops, resident kernel: {action}", size), "", 0)
      for layout, limits, where in [("2gpu-threads", "2gpu", "two GPUs"), ("1gpu-2threads", "1gpu", "one GPU")]
      for what, case, size, action in [("8-byte put + signal", PUT, 8, "copy + signal"), ("signal", SIGNAL, 0, "signal")]],
    ("64 MiB puts, two ranks on one GPU, one way", ("1gpu-2threads", "flood", "put + signal, 1 context, one way", LARGE),
     ("1gpu", "limits", "one GPU: cudaMemcpyPeerAsync, one way", LARGE), "", 0),
    ("64 MiB puts, two GPUs, two processes, one way", ("2gpu-processes", "flood", "put + signal, 1 context, one way", LARGE),
     ("2gpu", "limits", "two GPUs: cudaMemcpyPeerAsync, one way", LARGE), ">=", 0.9),
    # The limit counts both directions, the figure each rank's own.
    ("the same, both ways at once, each", ("2gpu-processes", "flood", "put + signal, 1 context", LARGE),
     ("2gpu", "limits", "two GPUs: cudaMemcpyPeerAsync, both ways", LARGE, 0.5), "", 0),
    *[(f"all-to-all over TCP loopback, {size >> 20} MiB", ("2gpu-loopback", "alltoall_large", "all-to-all, a rank's bytes", size),
       ("2gpu-sockets", "nccl_alltoall", "all-to-all, a rank's bytes", size), ">=", 1.5)
      for size in (32 << 20, 128 << 20, 1 << 30)],
    *[(f"all-to-all between GIN barriers, {n} GPUs, GPU to GPU, {size >> 10} KiB",
       (f"{n}gpu-hosts-mapped", "alltoall", BARRIERS, size), (f"{n}gpu-sockets", "nccl_alltoall", ITERATION, size),
       "<= us" if size <= 1 << 20 else "", most)
      for n, most in [(2, 60), (4, 150)] for size in BARRIER_SIZES],
    *[(f"all-to-all between GIN barriers, {n} GPUs, over TCP, {size >> 10} KiB",
       (f"{n}gpu-hosts", "alltoall", BARRIERS, size), (f"{n}gpu-sockets", "nccl_alltoall", ITERATION, size),
       "<=", 3 if size <= 256 << 10 else 1)
      for n in (2, 4) for size in BARRIER_SIZES],
]


def lookup(results, where):
    layout, program, case, size, *factor = where
    for x in results:
        if x["layout"] == layout and x["program"] == program and x.get("alone"):
            for row in x["rows"]:
                if row["case"] == case and row["bytes"] == size:
                    return row["value"] * (factor or [1])[0], row["unit"], x["status"] == "pass"
    return None


def compare(results):
    """The comparisons whose figure was measured on an idle machine."""
    found = []
    for what, figure, limit, relation, target in COMPARISONS:
        ours = lookup(results, figure)
        if ours is None:
            continue
        theirs = lookup(results, limit)
        one = {"what": what, "figure": ours[0], "unit": ours[1], "verified": ours[2]}
        if theirs and theirs[0]:
            one.update(limit=theirs[0], limit_is=limit[2], ratio=round(ours[0] / theirs[0], 3))
        if relation == ">= M/s":
            one.update(target=f">= {target} M/s", reached=ours[0] >= target)
        elif relation == "<= us":
            one.update(target=f"<= {target} us", reached=ours[0] <= target)
        elif relation and "ratio" in one:
            one.update(target=f"{relation} {target} x", reached=one["ratio"] <= target if relation == "<=" else one["ratio"] >= target)
        found.append(one)
    return found


def comparison_lines(comparison):
    lines = ["| what | figure | compared with | ratio | to reach | |", "|---|---|---|---|---|---|"]
    for c in comparison:
        limit = f"{c['limit_is'].split(': ', 1)[-1]}: {c['limit']:g} {c['unit']}" if "limit" in c else ""
        verdict = "" if "target" not in c else "reached" if c["reached"] else "missed"
        lines.append(f"| {c['what']} | {c['figure']:g} {c['unit']} | {limit} | {c.get('ratio', '')} | {c.get('target', '')} | "
                     f"{verdict}{'' if c['verified'] else ' (the program did not pass)'} |")
    return lines


def title(report):
    """The NCCL, and the engine where one was asked for."""
    engine = report.get("engine", "auto")
    return f"NCCL {report['nccl']}" + ("" if engine == "auto" else f", OXYGIN_ENGINE={engine}")


def layouts_of(results):
    return [l for l in LAYOUTS if any(x["layout"] == l for x in results)]


def variant_text(variant):
    """Its small messages, and all round trips, in one line."""
    found = [f"{row['case']}{size(row)} {row['value']:g} {row['unit']}" for x in variant["results"] for row in x["rows"]
             if row["bytes"] <= 8 or x["program"] == "pingpong"]
    bad = [f"{x['program']} {x['status']}: {' '.join(x.get('why', []))[:200]}" for x in variant["results"] if x["status"] != "pass"]
    return "; ".join(found + bad)


def size(row):
    return f" of {row['bytes']} bytes" if row["bytes"] > 8 else ""


MARKS = {"pass": ".", "absent": "a", "fail": "F", "hang": "H", "not ours": "N", "not run": "-"}


def summary(reports, most=10_000):
    """All of it in `most` characters: comparisons, notes, a letter a cell, then the failures as far as they fit."""
    lines = []
    for r in reports:
        for c in r.get("comparison", []):
            limit = f" / {c['limit']:g} = {c['ratio']}" if "limit" in c else ""
            verdict = "" if "target" not in c else "reached" if c["reached"] else "MISSED"
            lines.append(f"{c['what']}: {c['figure']:g} {c['unit']}{limit} ({c.get('target', 'no target')}) {verdict}"
                         + ("" if c["verified"] else " (did not pass)"))
        lines += [f"{v['set']}, {v['layout']}: {variant_text(v)}"[:400] for v in r.get("variants", [])]
        for x in r["results"]:
            if x.get("alone") or x["program"] in SCRIPTS:
                lines += [f"{x['layout']} {x['program']}: {note[:200]}" for note in x.get("notes", [])]
    order = layouts_of([x for r in reports for x in r["results"]])
    lines.append("matrix: . pass, r pass at the second try, F fail, H hang, N not ours, a absent, - not run; columns: "
                 + " ".join(order))
    for r in reports:
        counts = {}
        for x in r["results"]:
            counts[x["status"]] = counts.get(x["status"], 0) + 1
        lines.append(f"{title(r)}: " + ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
        cells = {(x["program"], x["layout"]): x for x in r["results"]}
        for program in sorted({x["program"] for x in r["results"]}):
            def mark(layout):
                x = cells.get((program, layout))
                return " " if x is None else "r" if x["status"] == "pass" and x.get("first_try") else MARKS[x["status"]]
            lines.append(f"  {program:14} " + "".join(map(mark, order)).rstrip())
    text = "\n".join(lines)[:most]
    seen = {}
    for r in reports:
        for x in r["results"]:
            if x["status"] in ("fail", "hang", "not ours"):
                # Without the program's name and time, to see what fails alike.
                why = re.sub(r"^FAIL \S+ \([\d.]+ s\): ", "", " | ".join(x.get("why", [])))[-600:]
                seen.setdefault(why, []).append(f"{title(r)} {x['layout']} {x['program']} {x['status']}")
    for why, cells in seen.items():
        more = "\n" + ", ".join(cells[:4]) + (f" and {len(cells) - 4} more" if len(cells) > 4 else "") + "\n    " + why
        if len(text) + len(more) > most - 60:
            text += f"\n{len(seen)} kinds of failures in all; the others are in the pages of the NCCLs"
            break
        text += more
    return text
