"""An algorithm as an animated picture: SVG with animations in CSS, which a browser plays without scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from mpicoll.errors import ArgumentError
from mpicoll.schedules.model import Algorithm, find
from mpicoll.schedules.timeline import DrawnMessage, Timeline, make_timeline, make_title

_RANKS, _BOXES = 16, 1500
"""Maximum numbers of ranks and of moving boxes, beyond which the eye can not follow."""

_BEGIN, _ROUND, _END = 1.2, 2.0, 3.0
"""Seconds before the first round, for each round, and after the last one."""

_FLIGHT = (0.08, 0.72)
"""Part of a round in which the messages move."""

_ARRIVAL = 0.8
"""Part of a round after which its results are shown."""

_LEFT, _TOP, _GAP, _HEIGHT = 74, 108, 26, 30
"""Place of the first cell, the gap between the columns of two ranks, and the height of a row with its gap."""

_CELL = 22
"""Height of a cell."""

# Okabe and Ito's colours, which people with any kind of colour vision can distinguish; grey in place of black.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#7f8790")

_LEGEND = "A stripe in a cell is the contribution of the rank of that colour."

_STYLE = """
:root { --paper: #ffffff; --ink: #1f2a33; --grey: #5b6770; --cell: #e9edf1; --line: #aeb8c1; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16191d; --ink: #e6eaee; --grey: #a3adb6; --cell: #2b3138; --line: #56616b; }
}
text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 13px; fill: var(--ink); }
.name { font-size: 17px; font-weight: 600; }
.grey { fill: var(--grey); }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.paper { fill: var(--paper); }
.cell { fill: var(--cell); stroke: var(--line); }
.box { fill: var(--paper); stroke: var(--ink); stroke-width: 1.6; }
.message, .round { opacity: 0; }
"""

_NO_MOTION = "@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }"


def animate(algorithm: Algorithm | str, size: int, root: int = 0, segments: int = 1) -> str:
    """Return a picture of `algorithm` that moves, as the text of an SVG file.

    A column is a rank, and a cell a chunk of its array. A cell has a stripe in the colour of each rank that has
    contributed to it. Boxes move from the cell that is sent to the cell that receives it; all messages take equally
    long. The animation repeats, and needs no script. Readers whose system asks for reduced motion, and programs that
    show no animations, see the result of the last round. Colours follow the light or dark mode of the reader's system.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks, up to 16.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm.

    Raises:
        ArgumentError: there are too many ranks or chunks to be followed by eye.
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.
        ScheduleError: the algorithm deadlocks.

    Example:
        >>> picture = mpicoll.schedules.animate("allreduce/ring", 4)
        >>> picture.startswith("<svg")
        True
    """
    algorithm = find(algorithm)
    name = f"{algorithm.collective}/{algorithm.name}"
    if size > _RANKS:
        raise ArgumentError(f"animate: {name} on {size} ranks: a picture that moves shows up to {_RANKS} ranks")
    timeline = make_timeline(algorithm, size, root, segments)
    boxes = sum(max(1, len(message.sent)) for message in timeline.messages)
    if boxes > _BOXES:
        raise ArgumentError(
            f"animate: {name} on {size} ranks moves {boxes} chunks; a picture shows up to {_BOXES}, take fewer ranks"
        )
    title = make_title(algorithm, size, root, segments)
    return "\n".join(_Animation(timeline, size, title).write()) + "\n"


@dataclass(frozen=True, slots=True)
class _Frames:
    """Keyframes: pairs of a part of the duration and the declarations that hold there."""

    steps: tuple[tuple[float, str], ...]

    def write(self, name: str) -> str:
        return f"@keyframes {name} {{ " + " ".join(f"{100 * at:.2f}% {{ {css} }}" for at, css in self.steps) + " }"


class _Animation:
    """The writer of a picture. Equal keyframes have one name."""

    def __init__(self, timeline: Timeline, size: int, title: str) -> None:
        self.timeline, self.size, self.title = timeline, size, title
        self.rounds = max((message.time for message in timeline.messages), default=0)
        self.duration = _BEGIN + self.rounds * _ROUND + _END
        self.rows = timeline.chunks + timeline.scratch
        self.stripe = max(8, 56 // size)
        self.column = self.stripe * size + _GAP
        self.names: dict[_Frames, str] = {}

    def write(self) -> Iterator[str]:
        """Yield the lines of the file."""
        width = max(_LEFT + self.size * self.column + 16, 520)
        height = _TOP + max(1, self.rows) * _HEIGHT + 46
        name, _, costs = self.title.partition(", ")
        body = [
            f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
            f'<text class="name" x="20" y="30">{escape(name)}</text>',
            f'<text class="grey" x="20" y="50">{escape(costs)}</text>',
            *self.write_rounds(),
            *self.write_cells(),
            *self.write_messages(),
            f'<text class="grey" x="20" y="{height - 16}">{_LEGEND}</text>',
        ]
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" aria-labelledby="title description">'
        )
        yield f'<title id="title">{escape(self.title)}</title>'
        yield (
            f'<desc id="description">{self.size} columns, one for each rank, with a cell for each chunk. Boxes move in'
            f" {self.rounds} rounds from the cells that are sent to those that receive them.</desc>"
        )
        yield f"<style>{_STYLE}"
        yield from (frames.write(name) for frames, name in self.names.items())
        yield f"{_NO_MOTION}</style>"
        yield from body
        yield "</svg>"

    def play(self, *steps: tuple[float, str]) -> str:
        """Return the attribute of an element that is animated by `steps`: seconds and declarations."""
        frames = _Frames(tuple((at / self.duration, css) for at, css in steps))
        name = self.names.setdefault(frames, f"k{len(self.names)}")
        return f' style="animation: {name} {self.duration:g}s linear infinite"'

    def toggle(self, *times: float, shown: bool = False) -> str:
        """Return the attribute of an element that is `shown` at the begin, and changes at once at each of `times`."""
        steps = [(0.0, f"opacity: {shown:d}")]
        for time in times:
            steps.append((time, f"opacity: {shown:d}"))
            shown = not shown
            steps.append((time + 0.05, f"opacity: {shown:d}"))
        return self.play(*steps, (self.duration, f"opacity: {shown:d}"))

    @staticmethod
    def begin(time: int) -> float:
        """Return the second at which the round `time` begins."""
        return _BEGIN + (time - 1) * _ROUND

    def place(self, rank: int, chunk: int) -> tuple[float, float]:
        return _LEFT + rank * self.column, _TOP + chunk * _HEIGHT

    def write_rounds(self) -> Iterator[str]:
        """Yield the number of the round, at the top; without animation the last line is seen."""
        at = 'x="20" y="72"'
        for time in range(1, self.rounds + 1):
            playing = self.toggle(self.begin(time), self.begin(time + 1) - 0.05)
            yield f'<text class="round" {at}{playing}>round {time} of {self.rounds}</text>'
        end = self.begin(self.rounds + 1)
        playing = self.toggle(end) if self.rounds else ""
        noun = "round" if self.rounds == 1 else "rounds"
        yield f"<text {at}{playing}>after {self.rounds} {noun}</text>"

    def write_cells(self) -> Iterator[str]:
        """Yield the heads of rows and columns, and the cells with the stripes of those that contribute to them."""
        for rank in range(self.size):
            x, _ = self.place(rank, 0)
            middle = x + self.stripe * self.size / 2
            yield f'<rect x="{x}" y="{_TOP - 10}" width="{self.stripe * self.size}" height="4" fill="{_colour(rank)}"/>'
            yield f'<text class="middle" x="{middle:g}" y="{_TOP - 16}">rank {rank}</text>'
        for chunk in range(self.rows):
            kind = "chunk" if chunk < self.timeline.chunks else "scratch"
            number = chunk if kind == "chunk" else chunk - self.timeline.chunks
            yield f'<text class="grey end" x="{_LEFT - 8}" y="{_TOP + chunk * _HEIGHT + 16}">{kind} {number}</text>'
        toggles = self.find_toggles()
        for rank in range(self.size):
            for chunk in range(self.rows):
                x, y = self.place(rank, chunk)
                before = self.timeline.before[rank].get(chunk, 0)
                yield f'<rect class="cell" x="{x}" y="{y}" width="{self.stripe * self.size}" height="{_CELL}"/>'
                for one in range(self.size):
                    times, shown = toggles[rank, chunk, one], bool(before >> one & 1)
                    at_end = shown ^ bool(len(times) % 2)
                    if shown or times:
                        playing = self.toggle(*times, shown=shown) if times else ""
                        yield self.write_stripe(x, y, one, _CELL, playing, shown=at_end)

    def find_toggles(self) -> dict[tuple[int, int, int], list[float]]:
        """Return the seconds at which each rank begins or ceases to contribute to a chunk of a rank."""
        found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        contents = [dict(one) for one in self.timeline.before]
        for change in self.timeline.changes:
            second = self.begin(change.time) + _ARRIVAL * _ROUND if change.time else _BEGIN / 2
            changed = contents[change.rank].get(change.chunk, 0) ^ change.content
            contents[change.rank][change.chunk] = change.content
            for one in range(self.size):
                if changed >> one & 1:
                    times = found[change.rank, change.chunk, one]
                    # Two changes of one moment, as of a chunk that is overwritten and then reduced into.
                    if times and times[-1] == second:
                        times.pop()
                    else:
                        times.append(second)
        return found

    def write_stripe(self, x: float, y: float, rank: int, height: int, playing: str, *, shown: bool) -> str:
        left, width = x + rank * self.stripe + 1, self.stripe - 2
        hidden = "" if shown else ' opacity="0"'
        return (
            f'<rect x="{left:g}" y="{y + 3:g}" width="{width}" height="{height - 6}" fill="{_colour(rank)}"'
            f"{hidden}{playing}/>"
        )

    def write_messages(self) -> Iterator[str]:
        for message in self.timeline.messages:
            if not message.sent:
                yield from self.write_box(message, None, None, 0)
            for sent, received, content in zip(message.sent, message.received, message.contents, strict=False):
                yield from self.write_box(message, sent, received, content)

    def write_box(self, message: DrawnMessage, sent: int | None, received: int | None, content: int) -> Iterator[str]:
        """Yield a box with the stripes of `content` that moves from one cell to another; a token, from rank to rank."""
        width = self.stripe * self.size
        x, y = self.place(message.source, sent or 0)
        to_x, to_y = self.place(message.to, received or 0)
        yield f'<g class="message"{self.fly(message.time, to_x - x, to_y - y)}>'
        yield f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{_CELL}" rx="4"/>'
        for one in range(self.size):
            if content >> one & 1:
                yield self.write_stripe(x, y, one, _CELL, "", shown=True)
        if sent is None:
            yield f'<text class="middle" x="{x + width / 2:g}" y="{y + 16}">token</text>'
        elif message.reduce:
            yield f'<text class="middle" x="{x + width + 9}" y="{y + 16}">+</text>'
        yield "</g>"

    def fly(self, time: int, dx: float, dy: float) -> str:
        """Return the attribute of a box that moves by (dx, dy), in an arc, in the round `time`."""
        begin = self.begin(time)
        first, last = begin + _FLIGHT[0] * _ROUND, begin + _FLIGHT[1] * _ROUND
        lift = 8 + abs(dx) / 12
        lift = lift if dx >= 0 else -lift  # so that those of an exchange pass each other
        steps = [(0.0, "opacity: 0; transform: none"), (begin, "opacity: 0; transform: none")]
        steps.append((begin + 0.05, "opacity: 1; transform: none"))
        for number in range(9):
            part = number / 8
            way = part * part * (3 - 2 * part)  # slow at both ends
            x, y = dx * way, dy * way - lift * 4 * way * (1 - way)
            steps.append((first + part * (last - first), f"opacity: 1; transform: translate({x:.1f}px, {y:.1f}px)"))
        there = f"transform: translate({dx:.1f}px, {dy:.1f}px)"
        steps.append((begin + _ARRIVAL * _ROUND, f"opacity: 1; {there}"))
        steps.append((begin + _ARRIVAL * _ROUND + 0.1, f"opacity: 0; {there}"))
        return self.play(*steps, (self.duration, f"opacity: 0; {there}"))


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]
