"""Drawings of a pipeline's timeline: as text, and by matplotlib as SVG or PNG."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from mpicoll.errors import ArgumentError, SetupError
from mpicoll.parallel.pipeline.schedules import Action, ActionKind, PipelineSchedule
from mpicoll.parallel.pipeline.timeline import Timeline, timeline
from mpicoll.schedules.draw import picture_type
from mpicoll.wording import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
}
_FILLS: dict[ActionKind, str] = {"F": "░", "B": "▓", "I": "▒", "W": "█"}


@dataclass(frozen=True, slots=True)
class _Bar:
    """`action` in a picture, in the units of its axis."""

    stage: int
    action: Action
    begin: float
    length: float


def draw(
    schedule: PipelineSchedule | str | Timeline,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int = 1,
    file: str | os.PathLike[str] | None = None,
    *,
    width: int = 180,
) -> str:
    """Draw a pipeline as text: a row per stage, time from left to right, with the numbers of micro-batches.

    A number ends the block of its action, and dots are idle time. With several chunks per stage, a letter after the
    number is the chunk, ``a`` being the first. The title contains the bubble, the part of the time in which stages
    idle.

    Args:
        schedule: a schedule, or its name such as ``"1f1b"``: drawn for F, I and W that take equally long, B twice as
            long, and messages that take no time. Or a timeline, computed with other costs or measured.
        stages: the number of stages of the pipeline; not with a timeline, which has all three numbers.
        microbatches: the number of micro-batches of a batch.
        chunks: the number of parts of the model on each stage.
        file: also write a picture to this file, as SVG, PNG or another format of matplotlib, by its suffix.
        width: the largest number of columns of the text. Numbers that do not fit are left out.

    Returns:
        The text.

    Raises:
        ArgumentError: numbers are missing, or given with a timeline; `width` is below 40.
        SetupError: `file` is given, but matplotlib is not installed.
        AlgorithmError: the name is unknown, or the schedule does not support these numbers.
        ScheduleError: the schedule has a deadlock.

    Example:
        >>> text = mpicoll.parallel.pipeline.draw("1f1b", stages=2, microbatches=3)
        >>> print(text.splitlines()[0])
        1f1b on 2 stages, 3 micro-batches, bubble 1/4 = 25.0 %
    """
    if width < 40:
        raise ArgumentError(f"draw: width must be at least 40 columns, got {width}")
    drawn = _resolve_timeline(schedule, stages, microbatches, chunks)
    if file is not None:
        _save_picture(drawn, file)
    rows = _draw_rows(drawn, width)
    return "\n".join([", ".join(_format_title(drawn)), "", *rows, "", _format_key(drawn, rows)])


def _resolve_timeline(
    schedule: PipelineSchedule | str | Timeline, stages: int | None, microbatches: int | None, chunks: int
) -> Timeline:
    if isinstance(schedule, Timeline):
        if stages is not None or microbatches is not None or chunks != 1:
            raise ArgumentError("draw: a timeline has its own stages, microbatches and chunks; pass none")
        return schedule
    if stages is None or microbatches is None:
        raise ArgumentError("draw: a schedule is drawn for given stages and microbatches; pass both")
    one = Fraction(1)
    return timeline(schedule, stages, microbatches, chunks, forward=one, backward=2 * one, send=0 * one)


def _format_title(drawn: Timeline) -> tuple[str, str]:
    """Return the name, and the numbers."""
    parts = [count(drawn.microbatches, "micro-batch", "micro-batches")]
    if drawn.chunks > 1:
        parts.append(f"{drawn.chunks} chunks per stage")
    if drawn.measured:
        parts.append(f"measured {_format_seconds(float(drawn.makespan))}")
    bubble = drawn.bubble
    exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble > 0 and bubble.denominator < 1000 else ""
    parts.append(f"bubble {exact}{100 * float(bubble):.1f} %")
    return f"{drawn.name} on {count(drawn.stages, 'stage')}", ", ".join(parts)


def _format_seconds(time: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if time * factor >= 1:
            return f"{time * factor:.3g} {unit}"
    return f"{time * 1e6:.3g} µs"


def _get_chunk_letter(chunk: int) -> str:
    return chr(ord("a") + chunk)


def _draw_rows(drawn: Timeline, width: int) -> list[str]:
    heads = [f"stage {stage}" for stage in range(drawn.stages)]
    margin = len(heads[-1]) + 2
    lengths = [span.end - span.begin for spans in drawn.spans for span in spans if span.end > span.begin]
    widest = max(len(_format_label(span.action, drawn.chunks)) for spans in drawn.spans for span in spans)
    # As narrow as the shortest action lets it be, with the widest label and a column to show its kind.
    scale = min((widest + 1) / min(lengths), (width - margin) / drawn.makespan) if lengths else Fraction(0)
    rows = []
    for head, spans in zip(heads, drawn.spans, strict=True):
        row = ["·"] * round(drawn.makespan * scale)
        for span in spans:
            left, right = (round((time - drawn.begin) * scale) for time in (span.begin, span.end))
            label = _format_label(span.action, drawn.chunks) if right - left > widest else ""
            row[left:right] = label.rjust(right - left, _FILLS[span.action.kind])
        rows.append(f"{head.ljust(margin - 2)} │{''.join(row)}")
    return rows


def _format_label(action: Action, chunks: int) -> str:
    return f"{action.microbatch}{_get_chunk_letter(action.chunk)}" if chunks > 1 else str(action.microbatch)


def _format_key(drawn: Timeline, rows: list[str]) -> str:
    parts = [f"{_FILLS[kind]} {_NAMES[kind]}" for kind in _find_kinds(drawn)] + ["· idle"]
    if drawn.chunks > 1 and any(_get_chunk_letter(0) in row.partition("│")[2] for row in rows):
        parts.append(f"a-{_get_chunk_letter(drawn.chunks - 1)} chunks")
    return "   ".join(parts)


def _find_kinds(drawn: Timeline) -> list[ActionKind]:
    there = {span.action.kind for spans in drawn.spans for span in spans}
    return [kind for kind in _NAMES if kind in there]


_COLOURS: dict[ActionKind, str] = {"F": "#2f6fd0", "B": "#1f9d72", "I": "#4f9e2f", "W": "#d9932b"}
_INK, _GREY, _BAND = "#1f2a33", "#5b6770", "#eef1f5"


def _save_picture(drawn: Timeline, file: str | os.PathLike[str]) -> None:
    """Draw stages as rows and actions as bars."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(f"a picture needs matplotlib: pip install 'mpicoll[plot]' ({error})") from error
    picture_type(file)
    factor = 1e3 if drawn.measured else 1
    begin, makespan = float(drawn.begin) * factor, float(drawn.makespan) * factor
    bars = [
        _Bar(stage, span.action, float(span.begin) * factor - begin, float(span.end - span.begin) * factor)
        for stage, spans in enumerate(drawn.spans)
        for span in spans
    ]
    typical = median(bar.length for bar in bars)
    digits = max(len(str(bar.action.microbatch)) for bar in bars)
    # Wide enough for the numbers in most bars.
    wide = min(max(1 + (0.16 + 0.08 * digits) * makespan / typical, 7.5), 24) if typical else 7.5
    # The same timeline must give the same file: no date in it, no random ids, and no style of the user's.
    with rc_context({"svg.hashsalt": "mpicoll", "font.family": "DejaVu Sans"}):
        figure = Figure((wide, min(1.75 + 0.42 * drawn.stages, 48)), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlim(0, makespan or 1)
        axes.set_ylim(drawn.stages - 0.5, -0.5)
        for stage in range(drawn.stages):
            axes.barh(stage, makespan, height=0.86, color=_BAND, zorder=0)
        for bar in bars:
            _draw_bar(axes, bar, drawn.chunks, digits, inches=(wide - 1) * bar.length / makespan if makespan else 0)
        axes.set_xlabel("milliseconds" if drawn.measured else "time", color=_GREY)
        axes.set_yticks(range(drawn.stages), [f"stage {stage}" for stage in range(drawn.stages)])
        axes.tick_params(length=0, labelcolor=_INK, labelsize=10)
        axes.tick_params(axis="x", labelcolor=_GREY, labelsize=9)
        axes.spines[:].set_visible(False)
        name, rest = _format_title(drawn)
        axes.set_title(name, loc="left", fontsize=15, fontweight="bold", color=_INK, pad=26)
        axes.annotate(
            rest, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", fontsize=10.5, color=_GREY
        )
        _draw_legend(figure, drawn)
        figure.savefig(file, dpi=150, metadata={"Date": None} if Path(file).suffix.lower() == ".svg" else None)


def _draw_bar(axes: Axes, bar: _Bar, chunks: int, digits: int, inches: float) -> None:
    """Draw a bar, `inches` wide, with the number of its micro-batch where `digits` digits fit."""
    axes.barh(
        bar.stage,
        bar.length,
        left=bar.begin,
        height=0.86,
        color=_lighten(_COLOURS[bar.action.kind], bar.action.chunk, chunks),
        edgecolor="white",
        linewidth=min(0.8, 12 * inches),
        zorder=2,
    )
    size = min(9.5, 72 * inches / (0.75 * digits + 0.4))
    if size >= 4.5:
        axes.text(
            bar.begin + bar.length / 2,
            bar.stage,
            str(bar.action.microbatch),
            color="white" if _compute_lightness(bar.action.chunk, chunks) < 0.5 else _INK,
            fontsize=size,
            ha="center",
            va="center_baseline",
            zorder=3,
        )


def _compute_lightness(chunk: int, chunks: int) -> float:
    """Return the share of white in the colour of a chunk: 0 for the first, and the most for the last."""
    return 0.62 * chunk / (chunks - 1) if chunks > 1 else 0.0


def _lighten(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    white = _compute_lightness(chunk, chunks)
    red, green, blue = (part + (1 - part) * white for part in to_rgb(colour))
    return red, green, blue


def _draw_legend(figure: Figure, drawn: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds, chunks = _find_kinds(drawn), drawn.chunks
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in kinds]
    handles.append(Patch(facecolor=_BAND, label="idle"))
    if chunks > 1:
        shades = [_lighten(_GREY, chunk, chunks) for chunk in range(chunks)]
        handles += [Patch(facecolor=shade, label=f"chunk {chunk}") for chunk, shade in enumerate(shades)]
    columns = 4 if "I" in kinds else 7
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=_INK)
