#!/usr/bin/env python3
"""Write the page of benchmarks and its figures from what `mpicoll bench --json` has measured.

    python ci/docs/benchmarks.py FILE...

writes docs/benchmarks.json from these files, without the times of single blocks, then docs/benchmarks.md and the
figures. Several files may have the same collectives and sizes: of each contestant the run with the smallest median
counts. Without files it writes the page of docs/benchmarks.json again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.cli import formatting
from mpicoll.cli.bench.cases import COLLECTIVES

ROOT = Path(__file__).resolve().parents[2]
DATA, PAGE = ROOT / "docs" / "benchmarks.json", ROOT / "docs" / "benchmarks.md"

OURS, THEIRS = "mpicoll", "mpi4py"

# Okabe and Ito's blue and vermilion, which people with any kind of colour vision can distinguish.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#0072b2", "marker": "o", "linewidth": 2.0},
    THEIRS: {"color": "#d55e00", "marker": "s", "linewidth": 1.4, "linestyle": "--"},
}


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the page: the best run of each contestant at each point, and the machine and versions.

    Raises SystemExit if the runs differ in these.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        for point in run["points"]:
            about = {name: point[name] for name in ("collective", "size", "nbytes", "dtype", "op", "ranks")}
            kept = found.setdefault((point["collective"], point["size"]), {**about, "runs": 0, "contestants": {}})
            kept["runs"] += 1
            for name in (OURS, THEIRS):
                one, best = condense(point["contestants"][name]), kept["contestants"].get(name)
                if best is None or one["median"] < best["median"]:
                    kept["contestants"][name] = one
    order = {name: place for place, name in enumerate(COLLECTIVES)}
    abouts = [describe(run) for run in runs]
    if any(about != abouts[0] for about in abouts):
        raise SystemExit("the files differ in machine, versions or ranks; measure all of them again")
    return {
        **abouts[0],
        "commands": sorted({re.sub(r"--json \S+", "--json bench.json", run["command"]) for run in runs}),
        "dates": sorted({run["date"][:10] for run in runs}),
        "points": sorted(found.values(), key=lambda point: (order[point["collective"]], point["size"])),
    }


def describe(run: dict[str, Any]) -> dict[str, Any]:
    """Return the machine, the versions and the method of a run, without the name of the machine."""
    machine = {name: run["machine"][name] for name in ("system", "processor", "cores")}
    return {"machine": machine, **{name: run[name] for name in ("ranks", "nodes", "mpi", "versions", "method")}}


DARK = """
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaee !important; }
  [style*="fill: #ffffff"] { fill: #16191d !important; }
  [style*="stroke: #000000"] { stroke: #a3adb6 !important; }
  [style*="stroke: #0072b2"] { stroke: #56b4e9 !important; }
  [style*="fill: #0072b2"] { fill: #56b4e9 !important; }
}
"""
"""Colours of a figure for readers whose system is in dark mode: those of matplotlib, replaced."""


def condense(contestant: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a contestant with the number and the quartiles of its blocks in place of their times."""
    low, high = np.percentile(contestant["blocks"], [25, 75])
    made = {name: contestant[name] for name in ("state", "verified", "takes") if name in contestant}
    times = {"median": contestant["median"], "lower_quartile": low, "upper_quartile": high}
    rounded = {name: float(f"{time:.4g}") for name, time in times.items()}
    return {**made, **rounded, "blocks": len(contestant["blocks"])}


def group(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the points of each collective."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in data["points"]:
        found.setdefault(point["collective"], []).append(point)
    return found


def find_ratio(point: dict[str, Any]) -> float:
    """Return the time of mpicoll divided by that of mpi4py."""
    return float(point["contestants"][OURS]["median"] / point["contestants"][THEIRS]["median"])


def write_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [write_row(columns), write_row(["---"] + ["--:"] * (len(columns) - 1)), *map(write_row, rows)]


def write_ratios(points: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the table of ratios: a row for each collective, a column for each size."""
    sizes = sorted({point["size"] for chosen in points.values() for point in chosen if point["nbytes"]})
    rows = []
    for collective, chosen in points.items():
        ratios = {point["size"]: find_ratio(point) for point in chosen if point["nbytes"]}
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            cells = [f"{ratios[size]:.2f}" if size in ratios else "" for size in sizes]
            rows.append([f"[{collective}](#{collective})", *cells, f"{mean:.2f}"])
    return write_table(["", *map(formatting.nbytes, sizes), "mean"], rows)


def write_collective(collective: str, chosen: list[dict[str, Any]]) -> list[str]:
    """Return the section of a collective."""
    lines = [f"## {collective}", ""]
    if chosen[0]["nbytes"]:
        lines += [f"![Time of {collective} against the size, logarithmic](images/bench-{collective}.svg)", ""]
    rows = []
    for point in chosen:
        ours, theirs = point["contestants"][OURS], point["contestants"][THEIRS]
        times = [formatting.seconds(one["median"]) for one in (ours, theirs)]
        spread = f"{formatting.seconds(ours['lower_quartile'])} to {formatting.seconds(ours['upper_quartile'])}"
        size = formatting.nbytes(point["nbytes"]) if point["nbytes"] else "-"
        rows.append([size, *times, f"{find_ratio(point):.2f}", spread, f"`{ours['takes']}`"])
    return [*lines, *write_table(["size", OURS, THEIRS, "ratio", f"quartiles of {OURS}", "algorithm"], rows), ""]


def write_page(data: dict[str, Any]) -> str:
    """Return the page."""
    points, machine, dates = group(data), data["machine"], data["dates"]
    facts = [
        ["processor", f"{machine['processor']}, {machine['cores']} cores"],
        ["system", machine["system"]],
        ["ranks", f"{data['ranks']}, on one node"],
        ["MPI", data["mpi"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in data["versions"].items())],
        ["date", " to ".join(dates[:: max(1, len(dates) - 1)])],
    ]
    lines = [
        "# Benchmarks",
        "",
        HEAD.format(ranks=data["ranks"], cores=machine["cores"]),
        write_row(["", ""]),
        write_row(["---", "---"]),
        *map(write_row, facts),
        "",
        "## Ratios",
        "",
        RATIOS,
        *write_ratios(points),
        "",
        MEASURE.format(runs=max(point["runs"] for point in data["points"]), commands="\n".join(data["commands"])),
    ]
    for collective, chosen in points.items():
        lines += write_collective(collective, chosen)
    return "\n".join(lines).rstrip() + "\n"


HEAD = """\
Blocking collectives of float32 arrays of numpy, with `out=`, beside the same calls of mpi4py on the same MPI library.
The tables and figures are made from [benchmarks.json](benchmarks.json), which `mpicoll bench --json` has written.

This is a small machine: {cores} cores, one for each of {ranks} ranks of one node. It shows what a call costs, and
how fast ranks exchange data through memory. It shows nothing of networks, or of nodes with many cores: measure those
that you have. [Speed](speed.md) has measurements between hosts.
"""

RATIOS = """\
The time of mpicoll divided by that of mpi4py: below 1, mpicoll is faster. The size is that of the vector, or of all
blocks of one buffer. The mean is the geometric one.
"""

MEASURE = """\
## How it was measured

```sh
{commands}
```

The result of each call is compared with a reference first. A time is the median over blocks of calls, of which the
slowest rank counts; mpicoll and mpi4py take turns. Each point was measured in up to {runs} runs, of which the one with
the smallest median counts, for each of the two: other programs, which ran on this machine now and then, can only make a
call slower. Calls are repeated on one input, which stays in the caches up to their size; see `--rewrite` in
[Command line](command-line.md#bench).

To make such a page of other measurements, of one or several files of `--json`:

```sh
python ci/docs/benchmarks.py bench.json
```
"""


def draw(collective: str, chosen: list[dict[str, Any]], file: Path) -> None:
    """Draw time against size, both logarithmic."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    # The same measurement must give the same file: no date, no random ids.
    with rc_context({"svg.hashsalt": "mpicoll", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.4, 3.5), layout="constrained")
        axes = figure.add_subplot()
        sizes = [point["nbytes"] for point in chosen]
        for name, style in STYLES.items():
            results = [point["contestants"][name] for point in chosen]
            axes.plot(sizes, [one["median"] for one in results], label=name, markersize=5, zorder=3, **style)
            low, high = ([one[f"{which}_quartile"] for one in results] for which in ("lower", "upper"))
            axes.fill_between(sizes, low, high, color=style["color"], alpha=0.18, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [formatting.nbytes(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: re.sub(r"\.0+ ", " ", formatting.seconds(time))))
        axes.set_xlabel("size")
        axes.set_ylabel("time per call")
        axes.set_title(f"{collective}, {chosen[0]['ranks']} ranks, {chosen[0]['dtype']}", loc="left", fontsize=11)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(file, metadata={"Date": None})
    # Lines that end with blanks, as matplotlib writes them, are no part of the picture.
    text = "\n".join(line.rstrip() for line in file.read_text().splitlines()) + "\n"
    file.write_text(text.replace("<defs>", f"<style>{DARK}</style>\n<defs>", 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of mpicoll bench --json")
    files = parser.parse_args().files
    if files:
        DATA.write_text(json.dumps(merge([json.loads(file.read_text()) for file in files]), indent=1) + "\n")
    data = json.loads(DATA.read_text())
    PAGE.write_text(write_page(data))
    for collective, chosen in group(data).items():
        if chosen[0]["nbytes"]:
            draw(collective, chosen, ROOT / "docs" / "images" / f"bench-{collective}.svg")


if __name__ == "__main__":
    main()
