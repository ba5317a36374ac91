"""Pictures of an algorithm: as text, and through matplotlib as SVG or PNG."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll.errors import ArgumentError, SetupError
from mpicoll.schedules.model import Algorithm, Chunks, Copy, find
from mpicoll.schedules.timeline import DrawnMessage, DrawnStep, format_runs, make_timeline, make_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    algorithm: Algorithm | str,
    size: int,
    root: int = 0,
    segments: int = 1,
    file: str | os.PathLike[str] | None = None,
    *,
    width: int | None = None,
) -> str:
    """Draw `algorithm` as text: a column per rank, a row per round, and in each cell what is sent and received.

    ``→2 [0]`` sends chunk 0 to rank 2, ``←1 [3]`` receives chunk 3 from rank 1, and ``←1 +[3]`` reduces it with what is
    there. A row shows the messages that are in flight together if all take equally long.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks; up to 8 stays readable.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm.
        file: the file of an additional picture, as SVG, PNG or another type that matplotlib supports, by the suffix.
        width: the columns of the text: ranks that find no room follow below. None puts all ranks side by side.

    Raises:
        SetupError: `file` is given, but matplotlib is not installed.
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.
        ScheduleError: the algorithm deadlocks.

    Example:
        >>> text = mpicoll.schedules.draw("bcast/chain", 3)
        >>> print(text.splitlines()[0])
        bcast/chain on 3 ranks, 1 segment, 2 rounds, 2 messages, at most 1 n sent per rank
    """
    algorithm = find(algorithm)
    timeline = make_timeline(algorithm, size, root, segments)
    messages, steps = timeline.messages, timeline.steps
    title = make_title(algorithm, size, root, segments)
    if file is not None:
        _picture(title, size, messages, file)
    return f"{title}\n\n{_table(size, messages, steps, width)}"


def _brackets(chunks: Chunks, reduce: bool = False) -> str:
    return f" {'+' * reduce}[{format_runs(chunks)}]" if chunks else ""


def _table(size: int, messages: list[DrawnMessage], steps: list[DrawnStep], width: int | None) -> str:
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for message in messages:
        cells[message.time, message.source].append(f"→{message.to}{_brackets(message.sent)}")
    for message in messages:
        cells[message.time, message.to].append(f"←{message.source}{_brackets(message.received, message.reduce)}")
    for local in steps:
        step = local.step
        if isinstance(step, Copy):
            text = f"[{step.dst}] = [{step.src}]"
        else:
            pair = (step.dst, step.src) if step.src_right else (step.src, step.dst)
            text = f"[{step.dst}] = [{pair[0]}]+[{pair[1]}]"
        cells[local.time, local.rank].append(text)
    times = sorted({time for time, _ in cells})
    widths = [
        max(len(f"rank {rank}"), *(len(text) for time in times for text in cells[time, rank]), 0)
        for rank in range(size)
    ]
    return "\n\n".join("\n".join(_draw_ranks(ranks, cells, times, widths)) for ranks in _divide(widths, width))


_ROUND = len("round")


def _divide(widths: list[int], width: int | None) -> list[range]:
    """Return the ranks that stand beside each other in a text of `width` columns; None: all of them."""
    parts, first, room = [], 0, 0
    for rank, needed in enumerate(widths):
        room += len(" │ ") + needed
        if width is not None and rank > first and _ROUND + room > width:
            parts.append(range(first, rank))
            first, room = rank, len(" │ ") + needed
    return [*parts, range(first, len(widths))]


def _draw_ranks(
    ranks: range, cells: dict[tuple[int, int], list[str]], times: list[int], widths: list[int]
) -> Iterator[str]:
    """Yield the lines of the columns of `ranks`."""

    def join(first: str, texts: Iterable[str]) -> str:
        parts = [text.ljust(widths[rank]) for rank, text in zip(ranks, texts, strict=True)]
        return " │ ".join([first, *parts]).rstrip()

    rule = "─┼─".join("─" * width for width in (_ROUND, *(widths[rank] for rank in ranks)))
    yield join("round", (f"rank {rank}" for rank in ranks))
    yield rule
    for row, time in enumerate(times):
        if row:
            yield rule.replace("─", "╌")
        for line in range(max(len(texts) for (at, _), texts in cells.items() if at == time)):
            texts = (cells[time, rank][line] if line < len(cells[time, rank]) else "" for rank in ranks)
            yield join((str(time) if line == 0 else "").rjust(_ROUND), texts)


_COLOURS = (
    "#2f6fd0",
    "#e2672b",
    "#1f9d72",
    "#c2357a",
    "#8367d6",
    "#c4950f",
    "#1fa3b8",
    "#8d5a38",
    "#6c8f1c",
    "#c23b3b",
)
_INK, _GREY, _PALE, _BAND = "#1f2a33", "#5b6770", "#cfd6dd", "#f3f5f8"
_DASHES = (0, (4, 1.6))
_Palette = dict[int, str]


def _picture(title: str, size: int, messages: list[DrawnMessage], file: str | os.PathLike[str]) -> None:
    """Draw ranks as lines through time and messages as arrows across their round."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(f"a picture needs matplotlib: pip install 'mpicoll[plot]' ({error})") from error
    picture_type(file)
    rounds = max((message.time for message in messages), default=1)
    palette = _palette(messages)
    # The same schedule must give the same file: no date, no random ids, and no style of the user.
    with rc_context({"svg.hashsalt": "mpicoll", "font.family": "DejaVu Sans"}):
        figure = Figure((min(max(2.2 + 1.3 * rounds, 7.5), 48), min(2.1 + 0.7 * size, 48)), layout="constrained")
        axes = figure.add_subplot()
        for time in range(0, rounds, 2):
            axes.axvspan(time, time + 1, color=_BAND, linewidth=0, zorder=0)
        axes.hlines(range(size), 0, rounds, color=_PALE, linewidth=1.5, zorder=1)
        for message in messages:
            _arrow(axes, message, palette)
        if size <= 16 and rounds <= 40:
            _labels(axes, messages, palette)
        _legend(axes, messages, palette)
        axes.set(xlim=(-0.02, rounds + 0.02), ylim=(size - 0.5, -0.5))
        axes.set_xlabel("round", color=_GREY)
        axes.set_xticks([time + 0.5 for time in range(rounds)], [str(time + 1) for time in range(rounds)])
        axes.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
        axes.tick_params(length=0, labelcolor=_INK, labelsize=10)
        axes.spines[:].set_visible(False)
        name, _, costs = title.partition(", ")
        axes.set_title(name, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=28)
        axes.annotate(
            costs, (0, 1), (0, 10), xycoords="axes fraction", textcoords="offset points", fontsize=10.5, color=_GREY
        )
        figure.savefig(file, dpi=150, metadata={"Date": None} if Path(file).suffix.lower() == ".svg" else None)


def picture_type(file: str | os.PathLike[str]) -> None:
    """Raise ArgumentError if matplotlib does not support the type of picture in the suffix of `file`."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if Path(file).suffix[1:].lower() not in known:
        raise ArgumentError(f"{os.fspath(file)}: no type of picture; the name must end in .png, .svg, .pdf or such")


def _palette(messages: list[DrawnMessage]) -> _Palette:
    """Return a colour for each first chunk of a message; many chunks share a scale, with neighbours alike."""
    firsts = sorted({message.sent[0] for message in messages if message.sent})
    if len(firsts) <= len(_COLOURS):
        return dict(zip(firsts, _COLOURS, strict=False))
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["turbo"]
    return {first: to_hex(scale(0.05 + 0.88 * i / (len(firsts) - 1))) for i, first in enumerate(firsts)}


def _ends(message: DrawnMessage) -> tuple[tuple[float, float], tuple[float, float]]:
    return (message.time - 0.94, message.source), (message.time - 0.07, message.to)


def _arrow(axes: Axes, message: DrawnMessage, palette: _Palette) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour = palette[message.sent[0]] if message.sent else _GREY
    tail, head = _ends(message)
    arrow = FancyArrowPatch(
        tail,
        head,
        arrowstyle="-|>",
        mutation_scale=13,
        shrinkA=0,
        shrinkB=4 if message.reduce else 0,
        color=colour,
        linewidth=2.2 if message.reduce else 1.4,
        linestyle="-" if message.reduce else _DASHES,
        zorder=3,
    )
    axes.add_patch(arrow)
    axes.plot(*tail, "o", color=colour, markersize=3.5, zorder=4)
    if message.reduce:
        axes.plot(*head, "o", color="white", markeredgecolor=colour, markeredgewidth=1.4, markersize=9, zorder=5)
        axes.plot(*head, "+", color=colour, markeredgewidth=1.4, markersize=6, zorder=6)


def _labels(axes: Axes, messages: list[DrawnMessage], palette: _Palette) -> None:
    """Write the chunks on the arrows, each where it overlaps no other label of the round."""
    taken: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for message in messages:
        if not message.sent:
            continue
        text = format_runs(message.sent)
        if len(text) > 14:
            text = f"{len(message.sent)} chunks"
        width = 0.08 + 0.06 * len(text)
        (x0, y0), (x1, y1) = _ends(message)
        spots = [(x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in (0.27, 0.4, 0.5, 0.6, 0.7, 0.17)]

        def free(spot: tuple[float, float], width: float = width, time: int = message.time) -> bool:
            return all(abs(spot[0] - x) > (width + other) / 2 or abs(spot[1] - y) > 0.27 for x, y, other in taken[time])

        x, y = next(filter(free, spots), spots[0])
        taken[message.time].append((x, y, width))
        box = {"boxstyle": "round,pad=0.22", "facecolor": palette[message.sent[0]], "edgecolor": "white"}
        axes.text(x, y, text, color="white", fontsize=8, ha="center", va="center", bbox=box, zorder=7)


def _legend(axes: Axes, messages: list[DrawnMessage], palette: _Palette) -> None:
    from matplotlib.lines import Line2D

    handles = []
    if any(message.reduce for message in messages):
        handles.append(Line2D([], [], color=_INK, lw=2.2, marker=r"$\oplus$", markersize=11, label="reduced"))
    if any(message.sent and not message.reduce for message in messages):
        handles.append(Line2D([], [], color=_INK, lw=1.4, linestyle=_DASHES, label="moved"))
    if not all(message.sent for message in messages):
        handles.append(Line2D([], [], color=_GREY, lw=1.4, linestyle=_DASHES, label="token"))
    noun = "from chunk" if any(len(message.sent) > 1 for message in messages) else "chunk"
    stride = -(-len(palette) // 16)
    handles += [
        Line2D([], [], color=palette[first], lw=6, solid_capstyle="butt", label=f"{noun} {first}")
        for first in list(palette)[:: max(1, stride)]
    ]
    if handles:
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9, labelcolor=_INK
        )
