"""Execution of schedules with large messages, in pieces.

Both ends of a message cut it alike, by its size alone. A rank posts its pieces round by round and in order, so that
both ends match them without more tags, and does not wait for the end of a round: a piece is posted as soon as the
memory that it uses is final. So one piece is reduced while the next ones travel, and the next round begins before the
last pieces of a round have arrived. Each element is combined with the same operands, in the same order, as without
pieces.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from mpicoll.buffers.ops import Combine
from mpicoll.engine.core.arrays import Region
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.executors import bound_schedule
from mpicoll.engine.executors.bound_schedule import (
    TOKEN,
    Action,
    BoundRound,
    ChunkMap,
    ScheduleBinder,
    describe_round,
    get_piece_size,
    name_round,
    name_schedule,
    peer_failure,
)
from mpicoll.engine.executors.step_layout import Step, count_incoming, lay_out, list_messages
from mpicoll.errors import CommunicationError
from mpicoll.schedules import Schedule
from mpicoll.transport.base import EmptyMessage, Message, PostedRound
from mpicoll.transport.waiting import poll

R = TypeVar("R")

FIRST_SENDS = 4
"""Sends to a rank that are posted at a time first: MPI libraries let all of them advance alike, so with more the first
pieces would arrive late."""

MAX_SENDS = 8
"""Pieces of the least size that may be posted to a rank at a time, later. MPI libraries announce each, and the link is
idle if this thread, or that of the other rank, gets no core for the time that those take which are posted."""

NAP_SHARE = 1 / 16
"""Seconds between two polls per second that a step takes: so a wait leaves the core to those that compute, or that move
the messages. At 1 Gbit/s that is 130 us."""


class Poster(Protocol):
    """Part of a transport that these schedules use."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> PostedRound:
        """Start the messages of a step."""


def has_large_messages(schedule: Schedule, regions: Sequence[Region]) -> bool:
    """Return True if a message of `schedule` is cut. Each rank decides by its own messages."""
    chunks = ChunkMap([region.offsets for region in regions])
    itemsize = regions[0].array.itemsize
    sizes = (chunks.count(one.chunks) * itemsize for now in schedule.rounds for one in list_messages(now))
    return any(nbytes > get_piece_size(nbytes) for nbytes in sizes)


@dataclass(slots=True)
class _Flight:
    """The messages of a step that has begun."""

    recvs: PostedRound | None
    """None when they have arrived."""
    unsent: int
    """Number of sends that have not completed."""


class _Outgoing:
    """The sends to a rank, in order, which are posted when there is room."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[_Flight, Message]] = deque()
        self.posted: deque[tuple[_Flight, PostedRound]] = deque()
        self.completed = 0

    def has_room(self) -> bool:
        """Return True if the next send may be posted."""
        count = len(self.posted)
        if count < FIRST_SENDS:
            return True
        nbytes = self.waiting[0][1][1].size
        return count < FIRST_SENDS + self.completed and (count + 1) * nbytes <= MAX_SENDS * bound_schedule.PIECE


class StreamedSchedule:
    """Schedule bound to memory, in pieces. It may be run any number of times, one after the other."""

    reads_input = False

    def __init__(self, schedule: Schedule, regions: Sequence[Region], combine: Combine | None, poster: Poster) -> None:
        self.schedule = schedule
        self._poster = poster
        offsets = tuple(tuple(region.offsets) for region in regions)
        self.steps = lay_out(schedule, offsets, regions[0].array.itemsize)
        self.at = 0
        """Number of the steps that have ended: the first step that has not."""
        self._binder = _StepBinder(schedule, regions, combine, self.steps)
        # The steps that have begun in a run.
        self._bound: list[BoundRound] = []
        self._flights: deque[_Flight] = deque()
        # By rank, so that none waits for what is sent to another one.
        self._outgoing: dict[int, _Outgoing] = {}
        # What this rank has failed with: it sends no data any more, so that the ranks that need it fail too.
        self._failure: BaseException | None = None

    @property
    def finished(self) -> bool:
        """True if all steps have ended."""
        return self.at == len(self.steps)

    def bind_step(self, number: int) -> BoundRound:
        """Return a step bound to memory: when it begins for the first time, while the messages of earlier ones travel.
        Steps begin in order."""
        if number == len(self._bound):
            self._bound.append(self._binder.bind_step(self.steps[number]))
        return self._bound[number]

    def start(self, tag: int, failure: BaseException | None = None) -> None:
        """Post the first messages; of a rank that has failed with `failure` before, without data."""
        self.discard()
        self._failure = failure
        self.at = 0
        self._begin = time.monotonic()
        self._tag = tag
        self._guard(self._begin_steps)

    def advance(self) -> bool:
        """Post and complete what can be without waiting. Return True if all steps have ended."""
        self._guard(self._advance)
        return self.finished

    def wait(self, beside: Sequence[object] = ()) -> None:
        """Carry out all steps, while those `beside` advance. Errors name the round and the schedule. A failure of this
        rank alone is raised at the end, when no rank waits for this one."""
        others = [one for one in beside if isinstance(one, StreamedSchedule)]

        def advance() -> bool:
            for other in others:
                other.advance()
            return self._guard(self._advance)

        try:
            while not self.finished:
                poll(advance, None, "round", nap=self.find_nap())
        except BaseException:  # a signal handler may raise between two tests
            self.discard()
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def fail(self, exchanger: object, tag: int) -> None:
        """Exchange the messages, without data, of a rank that has failed before. Raises CommunicationError."""
        self.start(tag, CommunicationError("failed before"))
        self.wait()

    def find_nap(self) -> float:
        """Return the seconds between two polls of a wait for the end of a step, by how long steps have taken so far."""
        return NAP_SHARE * (time.monotonic() - self._begin) / self.at if self.at else 0.0

    def discard(self) -> None:
        """Abandon the messages in flight, after a failure elsewhere."""
        sends = [posted for one in self._outgoing.values() for _, posted in one.posted]
        for posted in (*sends, *(flight.recvs for flight in self._flights)):
            if posted is not None:
                posted.discard()
        self._outgoing.clear()
        self._flights.clear()

    def _advance(self) -> bool:
        """Return True if a step has ended."""
        first = self.at
        for outgoing in self._outgoing.values():
            self._send(outgoing)
        while self._flights:
            flight = self._flights[0]
            if flight.recvs is not None and self._test(flight.recvs):
                flight.recvs = None
            if flight.recvs is not None or flight.unsent:
                break
            self._carry_out(self._bound[self.at].after)
            self._flights.popleft()
            self.at += 1
            self._begin_steps()
        return self.at > first

    def _test(self, recvs: PostedRound) -> bool:
        """Return True if messages have arrived, also those of a rank that has failed."""
        try:
            return recvs.test()
        except EmptyMessage as error:
            self._failure = self._failure or peer_failure(self.schedule, self.steps[self.at].round, error)
            return True

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out the local part of a step, unless this rank has failed."""
        if self._failure is not None:
            return
        try:
            for function, arguments in actions:
                function(*arguments)
        except BaseException as error:  # noqa: BLE001  raised by wait()
            self._failure = error

    def _begin_steps(self) -> None:
        """Begin the steps whose memory is final. Step `at` always is one, so the schedule advances."""
        while (number := self.at + len(self._flights)) < len(self.steps):
            if self.steps[number].needs > self.at:
                break
            step = self.bind_step(number)
            self._carry_out(step.before)
            recvs = self._poster.post((), step.recvs, self._tag) if step.recvs else None
            flight = _Flight(recvs, len(step.sends))
            self._flights.append(flight)
            for message in step.sends:
                outgoing = self._outgoing.get(message[0])
                if outgoing is None:
                    outgoing = self._outgoing[message[0]] = _Outgoing()
                outgoing.waiting.append((flight, message))
                self._send(outgoing)

    def _send(self, outgoing: _Outgoing) -> None:
        """Post the next sends to a rank, and remove those that have completed."""
        while True:
            while outgoing.waiting and outgoing.has_room():
                flight, message = outgoing.waiting.popleft()
                if self._failure is not None:
                    message = (message[0], TOKEN)
                outgoing.posted.append((flight, self._poster.post((message,), (), self._tag)))
            if not outgoing.posted or not outgoing.posted[0][1].test():
                return
            flight, _ = outgoing.posted.popleft()
            flight.unsent -= 1
            outgoing.completed += 1

    def _guard(self, function: Callable[[], R]) -> R:
        try:
            return function()
        except BaseException as error:
            self.discard()
            if isinstance(error, CommunicationError):
                number = self.steps[min(self.at, len(self.steps) - 1)].round
                error.args = (f"{name_round(self.schedule, number)}: {error}",)
            raise

    def position(self, members: Sequence[int]) -> Position:
        """Return the current round and piece, the ranks it sends to, and the ranks it waits for."""
        return describe_step(self.schedule, self.steps, self.at, members)


def describe_step(schedule: Schedule, steps: Sequence[Step], at: int, members: Sequence[int]) -> Position:
    """Return the position in the step `at` of `steps`; of a schedule that has ended, its name."""
    if at == len(steps):
        return Position(name_schedule(schedule))
    step = steps[at]
    where = f", piece {step.piece + 1} of {step.pieces}" if step.pieces > 1 else ""
    sent, received = ({part.peer for part in step.parts if part.sends == sends} for sends in (True, False))
    return describe_round(schedule, step.round, sent, received, members, where)


class _StepBinder(ScheduleBinder):
    """Binds steps to memory."""

    def __init__(
        self, schedule: Schedule, regions: Sequence[Region], combine: Combine | None, steps: Sequence[Step]
    ) -> None:
        self._incoming_count = count_incoming(steps)
        super().__init__(schedule, regions, combine)

    def _count_incoming(self) -> int:
        return self._incoming_count

    def bind_step(self, step: Step) -> BoundRound:
        bound = BoundRound(step.round)
        for part in step.parts:
            if not part.runs:
                (bound.sends if part.sends else bound.recvs).append((part.peer, TOKEN))
            elif part.incoming is not None:
                assert self._incoming is not None
                _, start, stop = part.incoming
                memory = self._incoming[start:stop]
                bound.recvs.append((part.peer, memory.view(np.uint8)))
                bound.after += self._make_combines(memory, part.runs, incoming_left=part.peer < self._schedule.rank)
            elif part.sends:
                bound.sends.append((part.peer, self._make_contiguous(part.runs, bound.before, unpack=False)))
            else:
                bound.recvs.append((part.peer, self._make_contiguous(part.runs, bound.after, unpack=True)))
        for local in step.then:
            bound.after.append(self._bind_local(local.kind, local.src, local.dst))
        return bound
