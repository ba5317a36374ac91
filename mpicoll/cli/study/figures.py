"""Figures of the study, as SVG. The colours are those of Okabe and Ito, which colour-blind readers tell apart; markers
and dashes distinguish the lines as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting
from mpicoll.cli.study import report
from mpicoll.cli.study.laws import LAWS
from mpicoll.cli.study.methods import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = {
    "parameter server": ("#D55E00", "o"),
    "master-worker": ("#E69F00", "s"),
    "ring": ("#0072B2", "^"),
    "tree": ("#009E73", "v"),
    "halving-doubling": ("#56B4E9", "D"),
    "native": ("#000000", "x"),
    "shared memory": ("#CC79A7", "*"),
    "hierarchical": ("#8B7500", "P"),
}
"""Colour and marker of each method, by its label without the number of servers."""

_UNDERNEATH = ("parameter server", "ring")
"""Methods whose line is wide, as another one may lie on it."""

_DASHES = ("-", "--", ":", "-.")
"""Lines of parameter servers, by their number of servers in ascending order."""

_RC: Any = {"svg.hashsalt": "mpicoll", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 11}
"""The same study gives the same files; text stays text, so that files are small and can be searched."""


def draw_all(folder: Path, study: dict[str, Any]) -> dict[str, str]:
    """Write the figures of a study to `folder`; return their file names by what they show."""
    from matplotlib import rc_context

    with rc_context(_RC):
        made = {"patterns": _draw_patterns(), "bytes": _draw_bytes(study["runs"])}
        if any(run["points"] for run in study["runs"]):
            made["time"] = _draw_times(study["runs"])
        if study["prediction"] is not None and study["prediction"]["points"]:
            made["prediction"] = _draw_prediction(study["prediction"])
        names = {}
        for what, figure in made.items():
            names[what] = f"sync-{what}.svg"
            figure.savefig(folder / names[what], metadata={"Date": None})
    return names


def _make_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure as New

    return New((width, height), layout="constrained", facecolor="white")


def _plot_line(axes: Axes, label: str, dash: int, points: Sequence[tuple[float, float]]) -> None:
    name = label.partition(",")[0]
    colour, marker = _STYLES[name]
    wide = name in _UNDERNEATH
    axes.plot(
        *zip(*sorted(points), strict=True),
        label=label,
        color=colour,
        marker=marker,
        linestyle=_DASHES[dash % len(_DASHES)],
        markersize=10 if wide else 5,
        linewidth=3.5 if wide else 1.5,
        zorder=2 if wide else 3,
    )


def _finish(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(visible=True, which="major", alpha=0.35)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Draw points of a label, x and y; lines of parameter servers differ in their dashes."""
    labels = list(dict.fromkeys(label for label, *_ in points))
    servers = [label for label in labels if label.startswith("parameter server")]
    for label in labels:
        dash = servers.index(label) if label in servers else 0
        _plot_line(axes, label, dash, [(x, y) for one, x, y in points if one == label])


def _set_ranks_axis(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{one:,}" for one in ranks])
    axes.minorticks_off()


def _draw_bytes(runs: Sequence[dict[str, Any]]) -> Figure:
    """Draw the laws over the number of ranks, with what was measured on the wire."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    figure = _make_figure(8.4, 4.8)
    axes = figure.add_subplot()
    ranks = [2, 4, 8, 16, 32, 64]
    points = []
    for name in LAWS:
        for servers in (1, 2, 4) if name == "parameter_server" else (0,):
            method = Method(name, servers)
            shares = [(one, method.law(one)) for one in ranks if one > servers]
            points += [(method.label, one, float(share)) for one, share in shares if share is not None]
    _draw_lines(axes, points)
    handles, labels = axes.get_legend_handles_labels()
    wired = [(run, point) for run in runs for point in run["points"] if point["wire"] and point["method"] in LAWS]
    for run, point in wired:
        amount = report.busiest(point) / point["nbytes"]
        axes.plot(run["ranks"], amount, marker="o", color="black", markersize=16, fillstyle="none", linestyle="none")
    if wired:
        handles.append(Line2D([], [], marker="o", color="black", markersize=16, fillstyle="none", linestyle="none"))
        labels.append("measured on the wire")
    _set_ranks_axis(axes, ranks)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} N"))
    _finish(axes, "Bytes through the busiest link, each way", "number of ranks P", "bytes per step (N: the model)")
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def _draw_times(runs: Sequence[dict[str, Any]]) -> Figure:
    """Draw the measured times over the size of the model, a panel for each run."""
    across = min(2, len(runs))
    down = -(-len(runs) // across)
    figure = _make_figure(5.0 * across + 2.6, 4.2 * down)
    panels = list(figure.subplots(down, across, squeeze=False, sharey=True).flat)
    handles: dict[str, Any] = {}
    for axes, run in zip(panels, runs, strict=False):
        points = [
            (Method(point["method"], point["servers"]).label, point["nbytes"], point["seconds"])
            for point in run["points"]
        ]
        _draw_lines(axes, points)
        handles.update(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        sizes = report.sizes_of(run["points"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [formatting.nbytes(size) for size in sizes])
        axes.minorticks_off()
        _set_seconds_axis(axes)
        first = panels.index(axes) % across == 0
        _finish(axes, report.describe(run), "size of the model N", "time of a step" if first else "")
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    labels = sorted(handles, key=lambda label: list(_STYLES).index(label.partition(",")[0]))
    figure.legend([handles[label] for label in labels], labels, loc="outside right center", frameon=False)
    return figure


def _set_seconds_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _format_power(seconds)))


def _format_power(seconds: float) -> str:
    """Format a power of ten of seconds: ``10 ms``, ``100 µs``, ``1 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9)):
        if seconds * scale >= 0.9995:
            return f"{seconds * scale:.0f} {unit}"
    return f"{seconds:g} s"


def _draw_prediction(prediction: dict[str, Any]) -> Figure:
    """Draw the predicted times of the largest model over the number of ranks."""
    figure = _make_figure(8.8, 4.8)
    axes = figure.add_subplot()
    nbytes = report.sizes_of(prediction["points"])[-1]
    points = [p for p in prediction["points"] if p["nbytes"] == nbytes]
    order = sorted(points, key=lambda point: not point["label"].startswith("parameter"))
    _draw_lines(axes, [(point["label"], point["ranks"], point["seconds"]) for point in order])
    _set_ranks_axis(axes, sorted({point["ranks"] for point in points}))
    _set_seconds_axis(axes)
    title = f"Simulated time of a step, a model of N = {formatting.nbytes(nbytes)}"
    _finish(axes, title, "number of ranks P", "time of a step")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _draw_patterns() -> Figure:
    """Draw which ranks send to which ones, and how much."""
    figure = _make_figure(11.0, 3.2)
    panels = figure.subplots(1, 4)
    row = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0)]
    servers = [(0.5, 1.3), (1.5, 1.3)]
    _draw_pattern(
        panels[0],
        "parameter server",
        "3 workers, S = 2 servers\neach arrow N / 2, both ways",
        dict(zip(["S0", "S1", "W0", "W1", "W2"], [*servers, *row], strict=True)),
        [(worker, server) for worker in ("W0", "W1", "W2") for server in ("S0", "S1")],
        both=True,
    )
    _draw_pattern(
        panels[1],
        "master-worker",
        "rank 0 adds up\neach arrow N, both ways",
        dict(zip("0123", [(1.0, 1.3), *row], strict=True)),
        [("1", "0"), ("2", "0"), ("3", "0")],
        both=True,
    )
    _draw_pattern(
        panels[2],
        "tree",
        "pairs, then pairs of pairs\neach arrow N, both ways",
        dict(zip("0123", [(1.0, 1.3), (0.2, 0.65), (1.8, 0.65), (1.8, -0.1)], strict=True)),
        [("1", "0"), ("2", "0"), ("3", "2")],
        both=True,
    )
    _draw_pattern(
        panels[3],
        "ring",
        "each to its right neighbour\neach arrow 2 (P - 1) / P N, one way",
        dict(zip("0123", [(0.4, 1.3), (1.6, 1.3), (1.6, 0.0), (0.4, 0.0)], strict=True)),
        [("0", "1"), ("1", "2"), ("2", "3"), ("3", "0")],
        both=False,
    )
    return figure


def _draw_pattern(
    axes: Axes,
    label: str,
    text: str,
    places: dict[str, tuple[float, float]],
    arrows: Sequence[tuple[str, str]],
    *,
    both: bool,
) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour, _ = _STYLES[label]
    for source, to in arrows:
        style = "<|-|>" if both else "-|>"
        ends = (places[source], places[to])
        axes.add_patch(
            FancyArrowPatch(*ends, arrowstyle=style, mutation_scale=13, shrinkA=14, shrinkB=14, color=colour)
        )
    for name, (x, y) in places.items():
        face = "#f2f2f2" if name.startswith("W") or len(name) == 1 else "#ffe0cc"
        axes.plot(x, y, marker="o", markersize=25, color=face, markeredgecolor="#333333")
        axes.text(x, y, name, ha="center", va="center", fontsize=11)
    axes.set(xlim=(-0.45, 2.45), ylim=(-0.55, 1.75))
    axes.set_title(label, fontsize=12, fontweight="bold")
    axes.set_xlabel(text, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
