"""Output of the measurements: tables, JSON and plots."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting
from mpicoll.cli.bench.measure import Point, Result
from mpicoll.cli.bench.peers import WRITE
from mpicoll.engine.core.communicator import Communicator

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STATES = {"wrong": "wrong", "absent": "-"}
"""Cells of results without a time."""

_SLOWEST = 10
"""Number of forms of calls that are listed as the slowest."""


def table(
    points: Sequence[Point], *, first_peer: str | None, settings: str, bound: str | None = None
) -> formatting.Table:
    """Return the table of one collective: a row for each size, a column for each contestant. Ratios are relative to
    `first_peer`, and those of mpicoll's own choice also to `bound`."""
    workload = points[0].workload
    # Contestants that lack the operation at every size are listed in the caption.
    names = [name for name in points[0].results if any(point.results[name].state != "absent" for point in points)]
    if first_peer not in names:
        first_peer = None
    if bound not in names or bound == first_peer:
        bound = None
    columns = ["size"]
    for name in names:
        columns.append(name)
        if name == WRITE:
            continue
        if first_peer not in (None, name):
            columns.append(f"/ {first_peer}")
        if bound is not None and name == "mpicoll":
            columns.append(f"/ {bound}")
        if workload.nbytes:
            columns.append("GB/s")
        if any(point.results[name].takes for point in points):
            columns.append("takes")
    rows = []
    for point in points:
        row = [formatting.nbytes(point.workload.nbytes)]
        for name in names:
            others = [one for one in (first_peer, bound if name == "mpicoll" else None) if one not in (None, name)]
            row += _cells(point, name, [point.results[one] for one in others])[: 1 if name == WRITE else None]
            if "takes" in columns and any(one.results[name].takes for one in points):
                row.append(point.results[name].takes)
        rows.append(row)
    what = f"{workload.collective}, {workload.ranks} ranks, {settings}: median time per call"
    what += ", and busbw" if workload.nbytes else ""
    return formatting.table(what, columns, rows, caption="\n".join(_notes(points)) or None)


def overhead(points: Sequence[Point], kinds: Mapping[str, str]) -> list[formatting.Table]:
    """Return the costs of the forms of a call, a table for each collective and one of the slowest forms. Ratios are
    relative to mpi4py on the same kind of array, given by `kinds`."""
    reference: dict[str, str] = {}
    for name, kind in kinds.items():
        reference.setdefault(kind, name)
    workload = points[0].workload
    settings = f"{workload.ranks} ranks, {workload.dtype} {workload.op}"
    tables, found = [], []
    for collective in dict.fromkeys(point.workload.collective for point in points):
        chosen = [point for point in points if point.workload.collective == collective]
        rows = []
        for name, kind in kinds.items():
            row = [name]
            for point in chosen:
                result, base = point.results[name], point.results[reference[kind]]
                cell = formatting.seconds(result.median) if result.state == "timed" else _STATES[result.state]
                if base is not result and result.state == base.state == "timed":
                    ratio = result.median / base.median
                    cell += f" {ratio:5.2f}"
                    found.append((ratio, f"{collective} {formatting.nbytes(point.workload.nbytes)}", name))
                row.append(cell)
            if set(row[1:]) != {_STATES["absent"]}:
                rows.append(row)
        what = f"{collective}, {settings}: median time, and its ratio to mpi4py's on such arrays"
        sizes = [formatting.nbytes(point.workload.nbytes) for point in chosen]
        wrong = [note for note in _notes(chosen) if "is wrong" in note]
        tables.append(formatting.table(what, ["", *sizes], rows, caption="\n".join(wrong) or None))
    slowest = [[name, where, f"{ratio:.2f}"] for ratio, where, name in sorted(found, reverse=True)[:_SLOWEST]]
    tables.append(formatting.table("the slowest", ["", "", "/ mpi4py"], slowest))
    return tables


def _cells(point: Point, name: str, references: Sequence[Result]) -> list[str]:
    """Return the time, its ratio to each of the `references`, and busbw."""
    result = point.results[name]
    done = result.state == "timed"
    cells = [formatting.seconds(result.median) if done else _STATES[result.state]]
    for reference in references:
        both = done and reference.state == "timed"
        cells.append(f"{result.median / reference.median:.2f}" if both else "")
    if point.workload.nbytes:
        cells.append(formatting.rate(point.workload.busbw(result.median)) if done else "")
    return cells


def _notes(points: Sequence[Point]) -> list[str]:
    notes: dict[str, None] = {}
    for point in points:
        for name, result in point.results.items():
            if result.state == "wrong":
                notes[result.note] = None
            elif result.state == "absent":
                notes[f"{name}: {result.note}"] = None
            elif result.phase != "mpi":
                notes[f"{name} is timed apart from the others, where nothing else spins"] = None
    return list(notes)


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return all measurements. Times are in seconds per call, rates in bytes per second."""
    return [
        {
            "collective": point.workload.collective,
            "size": point.workload.size,
            "nbytes": point.workload.nbytes,
            "dtype": point.workload.dtype,
            "op": point.workload.op,
            "ranks": point.workload.ranks,
            "contestants": {name: _as_json(point, name, result) for name, result in point.results.items()},
        }
        for point in points
    ]


def _as_json(point: Point, name: str, result: Result) -> dict[str, Any]:
    made: dict[str, Any] = {"state": result.state, "verified": result.state == "timed"}
    for field in ("note", "takes"):
        if value := getattr(result, field):
            made[field] = value
    if result.state == "timed":
        made |= {"median": result.median, "p99": result.p99}
        if name != WRITE:
            made |= {
                "algbw": point.workload.nbytes / result.median,
                "busbw": point.workload.busbw(result.median),
            }
        made |= {
            "phase": result.phase,
            "calls_per_block": result.calls,
            "blocks": result.blocks,
        }
    return made


def describe_run(comm: Communicator) -> dict[str, Any]:
    """Return the date, the machine, the ranks and the versions of a measurement."""
    from mpicoll.transport import mpi

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "node": platform.node(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "ranks": comm.size,
        "nodes": comm.num_nodes,
        "ranks_of_this_node": comm.local_size,
        "mpi": mpi.library(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def write(
    target: str | Path, comm: Communicator, command: str, settings: dict[str, Any], measured: dict[str, Any]
) -> None:
    """Write `measured` as JSON to a file, or to stdout if `target` is ``-``, with the machine, the date, the versions
    and the method."""
    head = {
        "command": command,
        **describe_run(comm),
        "method": (
            "Each contestant is checked against the oracle, then timed in blocks of calls that begin with a barrier;"
            " contestants of one phase take turns, and the phases come one after the other at each size. The time of a"
            " block is that of its slowest rank. Times are in seconds per call, rates in bytes per second."
        ),
        "settings": settings,
    }
    formatting.write_json(target, {**head, **measured})


def _processor() -> str:
    """Return the CPU's name from /proc/cpuinfo on x86; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("mpicoll", "numpy", "mpi4py", "torch"):
        if name in sys.modules:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "unknown"
    return found


def plot(path: Path, points: Sequence[Point], *, against: str, title: str) -> None:
    """Draw `against` ("time" or "busbw") over size, both logarithmic, one picture for each collective.

    Raises SetupError without matplotlib.
    """
    formatting.require_matplotlib()
    from matplotlib.figure import Figure

    collectives = list(dict.fromkeys(point.workload.collective for point in points if point.workload.nbytes))
    across = min(3, len(collectives))
    down = -(-len(collectives) // across)
    figure = Figure(figsize=(max(7.0, 5.5 * across), 4.6 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for place in range(down * across):
        if place < len(collectives):
            chosen = [point for point in points if point.workload.collective == collectives[place]]
            _draw(axes.flat[place], chosen, against)
        else:
            axes.flat[place].set_axis_off()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _plain(number: float) -> str:
    """Format a power of ten without an exponent."""
    return f"{number:,.0f}" if number >= 1 else f"{number:g}"


def _draw(axes: Axes, points: Sequence[Point], against: str) -> None:
    from matplotlib.ticker import FuncFormatter

    for number, name in enumerate(points[0].results):
        done = [point for point in points if point.results[name].state == "timed"]
        if not done or (name == WRITE and against == "busbw"):
            continue
        times = [point.results[name].median for point in done]
        values = times
        if against == "busbw":
            values = [point.workload.busbw(time) / 1e9 for point, time in zip(done, times, strict=True)]
        axes.plot(
            [point.workload.nbytes for point in done],
            values,
            color=formatting.COLOURS[number % len(formatting.COLOURS)],
            marker="osD^v<>pX*"[number % 10],
            markersize=4,
            linewidth=2 if name == "mpicoll" else 1.3,
            zorder=3 if name == "mpicoll" else 2,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: formatting.nbytes(size)))
    axes.tick_params(axis="x", labelrotation=45)
    axes.set_xlabel("size")
    if against == "time":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: _plain(time * 1e6)))
        axes.set_ylabel("µs per call (median)")
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: _plain(rate)))
        axes.set_ylabel("busbw in GB/s")
    axes.set_title(points[0].workload.collective)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
