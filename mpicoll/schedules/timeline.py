"""The messages of an algorithm as they travel if all take equally long, and what each chunk contains after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mpicoll.errors import ScheduleError
from mpicoll.schedules.cost import cost
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.model import Algorithm, Chunks, Copy, Local
from mpicoll.schedules.specs import SPECS, Seat
from mpicoll.wording import count


@dataclass(frozen=True, slots=True)
class DrawnMessage:
    """A message in flight at `time`, the number of its round if all messages take equally long.

    `contents` are the ranks that have contributed to each of its chunks, as masks.
    """

    time: int
    source: int
    to: int
    sent: Chunks
    received: Chunks
    reduce: bool
    contents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A local step after the messages of `time`."""

    time: int
    rank: int
    step: Local


@dataclass(frozen=True, slots=True)
class Change:
    """The new content of a chunk after `time`: the ranks that have contributed to it, as a mask."""

    time: int
    rank: int
    chunk: int
    content: int


@dataclass(slots=True)
class Timeline:
    """Messages, local steps and changes of chunks, each in the order of time. `before` are the contents of the chunks
    of each rank at the begin; `chunks` carry data, `scratch` further ones are temporary."""

    chunks: int
    scratch: int
    before: list[dict[int, int]]
    messages: list[DrawnMessage] = field(default_factory=list)
    steps: list[DrawnStep] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def make_timeline(algorithm: Algorithm, size: int, root: int, segments: int) -> Timeline:
    """Return the timeline of `algorithm`. Raises ScheduleError if it deadlocks."""
    return _Walk(algorithm, size, root, segments).run()


class _Walk:
    """All ranks of an algorithm, and what their chunks contain."""

    def __init__(self, algorithm: Algorithm, size: int, root: int, segments: int) -> None:
        self.name = f"{algorithm.collective}/{algorithm.name}, size {size}"
        self.exchange = Exchange(algorithm, size, root, segments)
        chunks, scratch = algorithm.slots(size, segments)
        pieces = chunks // 2 if algorithm.collective == "alltoall" else chunks
        before = SPECS[algorithm.collective].before
        self.contents = [
            {chunk: value.ranks for chunk, value in before(Seat(rank, size, root, pieces)).items()}
            for rank in range(size)
        ]
        self.timeline = Timeline(chunks, scratch, [dict(one) for one in self.contents])
        self.clock, self.latest = [0] * size, [0] * size
        # What the messages of the current round of each rank contain: those that it sends, and those that have arrived.
        self.outgoing: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        self.arrived: list[dict[int, tuple[int, ...]]] = [{} for _ in range(size)]
        self.todo = deque(range(size))

    def run(self) -> Timeline:
        exchange = self.exchange
        while self.todo:
            rank = self.todo.popleft()
            if not exchange.enter(rank):
                continue
            self.outgoing[rank] = [self.read(rank, send.chunks) for send in exchange.round[rank].sends]
            self.arrived[rank] = {}
            if not exchange.open[rank]:
                self.leave(rank)
            for match in exchange.post(rank):
                self.deliver(match)
                for over in exchange.close(match):
                    self.leave(over)
        if not all(exchange.done):
            raise ScheduleError(f"{self.name}: ranks wait for ever; verify says where")
        self.timeline.messages.sort(key=lambda m: (m.time, m.source, m.to))
        self.timeline.changes.sort(key=lambda one: one.time)
        return self.timeline

    def read(self, rank: int, chunks: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.contents[rank].get(chunk, 0) for chunk in chunks)

    def deliver(self, match: Match) -> None:
        source, to = match.source, match.to
        send, recv = self.exchange.round[source].sends[match.i], self.exchange.round[to].recvs[match.j]
        time = max(self.clock[source], self.clock[to]) + 1
        self.latest[source], self.latest[to] = max(self.latest[source], time), max(self.latest[to], time)
        inside = self.arrived[to][match.j] = self.outgoing[source][match.i]
        self.timeline.messages.append(DrawnMessage(time, source, to, send.chunks, recv.chunks, recv.reduce, inside))

    def leave(self, rank: int) -> None:
        """Complete the round of `rank`: reductions of what has arrived, then local steps."""
        self.clock[rank] = self.latest[rank]
        now = self.exchange.round[rank]
        for j, recv in enumerate(now.recvs):
            for chunk, content in zip(recv.chunks, self.arrived[rank][j], strict=False):
                self.write(rank, chunk, content, reduce=recv.reduce)
        for step in now.then:
            (content,) = self.read(rank, [step.src])
            self.write(rank, step.dst, content, reduce=not isinstance(step, Copy))
            self.timeline.steps.append(DrawnStep(self.clock[rank], rank, step))
        self.todo.append(rank)

    def write(self, rank: int, chunk: int, content: int, *, reduce: bool) -> None:
        former = self.contents[rank].get(chunk, 0)
        content |= former if reduce else 0
        if content != former:
            self.contents[rank][chunk] = content
            self.timeline.changes.append(Change(self.clock[rank], rank, chunk, content))


def make_title(algorithm: Algorithm, size: int, root: int, segments: int) -> str:
    """Return the name of `algorithm`, the number of ranks, and its costs."""
    costs = cost(algorithm, size, root, segments)
    parts = [f"{algorithm.collective}/{algorithm.name} on {count(size, 'rank')}"]
    if algorithm.segmented:
        parts.append(count(segments, "segment"))
    parts += [count(costs.rounds, "round"), count(costs.messages, "message")]
    if costs.sent:
        parts.append(f"at most {costs.sent} n sent per rank")
    return ", ".join(parts)


def format_runs(chunks: Chunks) -> str:
    """Format chunk indices with consecutive runs joined: ``0-3,7``."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
