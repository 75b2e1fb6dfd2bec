"""The pages that are made of the results: one of all runs, a line each, and one for each NCCL with every cell and failure."""
import collections
import json

from .layouts import LAYOUTS, SCRIPTS
from .report import comparison_lines, layouts_of, title, variant_text

NOT_RUN = ("absent", "not run")


def load(folder):
    """The results of a folder, by NCCL, each with the name of its file."""
    reports = [{"file": p.name, **json.loads(p.read_text())} for p in sorted(folder.glob("nccl-*.json"))]
    return sorted(reports, key=lambda r: ([int(n) for n in r["nccl"].split(".")], r.get("engine", "auto") != "auto", title(r)))


def write(folder):
    """Writes matrix.md, and a page for each NCCL, from every JSON file of the folder."""
    reports = load(folder)
    lines = ["# GPU programs through released NCCL", "",
             "Written by `scripts/gpu-test` from the JSON files beside it, a line each; [docs/gpu](../gpu/results.md) says what follows from them.",
             "Passed: of those that ran. What did not pass is told in the page of that NCCL, with every program and layout.", "",
             "| NCCL | `OXYGIN_ENGINE` | GPUs | oxygin | date | layouts | passed | did not | |", "|---|---|---|---|---|---|---|---|---|"]
    lines += [overview(r) for r in reports]
    (folder / "matrix.md").write_text("\n".join(lines) + "\n")
    for nccl in dict.fromkeys(r["nccl"] for r in reports):
        (folder / f"nccl-{nccl}.md").write_text(page(nccl, [r for r in reports if r["nccl"] == nccl]))


def heading(report):
    """One run is told from others by its file."""
    return report["file"].removesuffix(".json").removeprefix("nccl-")


def overview(r):
    """One run in a line."""
    ran = [x for x in r["results"] if x["status"] not in NOT_RUN]
    bad = collections.Counter((x["program"], x["status"]) for x in ran if x["status"] != "pass")
    named = ", ".join(f"`{program}` {status}" + (f" × {n}" if n > 1 else "") for (program, status), n in bad.items())
    link = f"[cells](nccl-{r['nccl']}.md#{heading(r).lower().replace('.', '')})"
    return (f"| {r['nccl']} | {r.get('engine', 'auto')} | {r['machine']['gpus']} | {r['commit']} | {r['date']} | "
            f"{', '.join(layouts_of(r['results']))} | {sum(x['status'] == 'pass' for x in ran)} of {len(ran)} | {named} | {link} |")


def page(nccl, reports):
    """All runs of one NCCL."""
    lines = [f"# GPU programs through NCCL {nccl}", "",
             "Written by `scripts/gpu-test` from the JSON files beside it, which have all figures. A cell: the result and the seconds, with those of",
             "the set-up where the program was the first of its processes; `alone`: measured by itself on an idle machine, at full length.",
             "`absent`: that NCCL or that machine has no such thing. `not run`: the time was over. `-`: not asked for.", ""]
    for r in reports:
        lines += [f"## {heading(r)}", "",
                  f"{title(r)}, {r['machine']['gpus']}, oxygin {r['commit']}, driver {r['machine']['driver']}, {r['date']}"
                  + (f", beside {r['busy']} processes that compute" if r.get("busy") else "")
                  + (", short runs (`--quick`)" if r["quick"] else "")
                  + (f", up to {r['share']} programs on a GPU at a time" if r.get("share", 1) > 1 else "")
                  + f"; `{r['file']}`", ""]
        if r.get("comparison"):
            lines += comparison_lines(r["comparison"]) + [""]
        if r.get("variants"):
            lines += ["With other settings, short runs:", ""]
            lines += [f"* `{v['set']}`, {v['layout']}: {variant_text(v)}" for v in r["variants"]] + [""]
        lines += cells(r["results"]) + [""] + facts(r["results"]) + [""] + failures(r["results"]) + [""]
    return "\n".join(lines) + "\n"


def cells(results):
    """A table of programs and layouts."""
    layouts = layouts_of(results)
    found = {(x["program"], x["layout"]): x for x in results}
    lines = ["| program | " + " | ".join(layouts) + " |", "|---|" + "---|" * len(layouts)]
    for program in sorted({x["program"] for x in results}):
        row = []
        for layout in layouts:
            x = found.get((program, layout))
            if x is None:
                row.append("-")
            elif x["status"] in NOT_RUN:
                row.append(x["status"])
            else:
                row.append(f"{x['status']} {x['seconds']} s" + (", alone" if x.get("alone") else "")
                           + (", second try" if x.get("first_try") else ""))
        lines.append(f"| {program} | " + " | ".join(row) + " |")
    return lines


def facts(results):
    """What NCCL's log says of each layout: what was loaded, and which way the bytes went."""
    lines = []
    for layout in layouts_of(results):
        seen = {json.dumps({k: v for k, v in x["used"].items() if k != "plugin"}, sort_keys=True)
                for x in results if x["layout"] == layout and x["status"] == "pass" and x["used"].get("fabric")}
        for used in map(json.loads, sorted(seen)):
            tables = ", ".join(f"{n[:3].upper()} {used[n]}" for n in ("gin_table", "rma_table") if used.get(n))
            lines.append(f"* {layout} ({LAYOUTS[layout].what}): NCCL {used['nccl']}, "
                         + (f"table {tables}, fabric {used['fabric']}" if tables else used["fabric"])
                         + (f", engine {used['engine']}" if used.get("engine") else "")
                         + "".join(f", {p}" for p in used["paths"]))
    return lines


def failures(results):
    """What did not pass, or not at once, and notes of what ran alone."""
    lines = []
    for x in results:
        where = f"* {x['program']} in {x['layout']}"
        if x["status"] not in ("pass",) + NOT_RUN:
            lines.append(f"{where}, {x['status']}: " + "; ".join(x.get("why", []))[:500])
        if x.get("first_try"):
            lines.append(f"{where}, first try beside others, {x['first_try']['status']}: " + "; ".join(x["first_try"].get("why", []))[:300])
        for note in x.get("notes", []) if x.get("alone") or x["program"] in SCRIPTS else []:
            lines.append(f"{where} notes: {note}")
    return lines
