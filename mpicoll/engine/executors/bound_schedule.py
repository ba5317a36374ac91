"""Schedules bound to memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Combine
from mpicoll.engine.core.arrays import Region
from mpicoll.engine.diagnostics.position import Position
from mpicoll.errors import AlgorithmError, CommunicationError
from mpicoll.schedules import Copy, Local, Schedule
from mpicoll.transport.base import EmptyMessage, Message
from mpicoll.wording import number_list

Action: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]

Extent: TypeAlias = tuple[int, int, int]
"""A region, and the first and last elements, exclusively, of a part of it."""

TOKEN = np.empty(0, np.uint8)
"""Memory of a message that only synchronises."""


PIECE = 256 * 1024
"""Least bytes of a piece: it travels for 2 ms at 1 Gbit/s, where posting and completing it takes about 20 us."""

_MAX_PIECES = 64
"""Most pieces of a message. Larger messages have larger pieces."""

_LARGEST_PIECE = 1 << 30
"""Most bytes of a piece, a multiple of PIECE: MPI takes no message of INT_MAX bytes. Messages of more than 64 GiB have
more pieces."""


def get_piece_size(nbytes: int) -> int:
    """Return the bytes of the pieces of a message of `nbytes`: a multiple of PIECE, so that ends which know the data as
    other elements cut it alike."""
    return min(PIECE * -(-nbytes // (PIECE * _MAX_PIECES)), _LARGEST_PIECE)


class Exchanger(Protocol):
    """Part of a transport that schedules use."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """Carry out one round: post all messages, return when all have completed."""


@dataclass(slots=True)
class BoundRound:
    round: int
    """Index of the round in the schedule; rounds in which this rank has no work are omitted."""
    before: list[Action] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)
    after: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class BoundSchedule:
    """Schedule bound to memory. It may be run any number of times; each run reads and writes that memory."""

    reads_input: ClassVar[bool] = False
    schedule: Schedule
    steps: list[BoundRound]
    at: int = 0
    """The step that is being carried out."""
    rest: int | None = 0
    """After a failure, the first step whose messages have not been exchanged; None if it is the exchange of messages
    that has failed."""

    def run(self, exchanger: Exchanger, tag: int) -> None:
        """Carry out the schedule. Errors of the exchange name the round and the schedule."""
        rest: int | None = 0
        try:
            for number, step in enumerate(self.steps):
                self.at = number
                for function, arguments in step.before:
                    function(*arguments)
                if step.sends or step.recvs:
                    rest = None
                    exchanger.exchange(step.sends, step.recvs, tag)
                rest = number + 1
                for function, arguments in step.after:
                    function(*arguments)
        except EmptyMessage as error:
            self.rest = self.at + 1
            raise peer_failure(self.schedule, self.steps[self.at].round, error) from error
        except BaseException as error:
            self.rest = rest
            if isinstance(error, CommunicationError):
                error.args = (f"{name_round(self.schedule, self.steps[self.at].round)}: {error}",)
            raise

    def fail(self, exchanger: Exchanger, tag: int) -> None:
        """Exchange the messages of the steps that are left after a failure, without data: then no rank waits for this
        one, and those that still need its data fail too."""
        for number in () if self.rest is None else range(self.rest, len(self.steps)):
            self.at, step = number, self.steps[number]
            if step.sends or step.recvs:
                with suppress(EmptyMessage):
                    exchanger.exchange([(peer, TOKEN) for peer, _ in step.sends], step.recvs, tag)

    def position(self, members: Sequence[int]) -> Position:
        """Return the current round, the ranks it sends to, and the ranks it waits for."""
        if not self.steps:
            return Position(name_schedule(self.schedule))
        step = self.steps[self.at]
        # Messages without bytes are not exchanged.
        sent, received = ({peer for peer, _ in messages} for messages in (step.sends, step.recvs))
        return describe_round(self.schedule, step.round, sent, received, members)


def name_schedule(schedule: Schedule) -> str:
    """Return the collective and the algorithm of `schedule`."""
    return f"{schedule.collective}/{schedule.algorithm}"


def name_round(schedule: Schedule, number: int) -> str:
    """Return the name of a round, counted from 0, in errors."""
    where = f"rank {schedule.rank} of {schedule.size}, round {number + 1} of {len(schedule.rounds)}"
    return f"{name_schedule(schedule)} on {where}"


def peer_failure(schedule: Schedule, number: int, error: EmptyMessage) -> CommunicationError:
    """Return the error of a rank that has received `error` in place of data, in a round, counted from 0."""
    return CommunicationError(
        f"{name_round(schedule, number)}: rank {error.source} failed in this operation, as its own error explains"
    )


def describe_round(
    schedule: Schedule,
    number: int,
    sent: Collection[int],
    received: Collection[int],
    members: Sequence[int],
    part: str = "",
) -> Position:
    """Return the position in the messages of a round, or of its `part`, to the ranks `sent` and from `received`."""
    one = schedule.rounds[number]
    words = [f"sends {_format_chunks(send.chunks)} to rank {members[send.to]}" for send in one.sends if send.to in sent]
    words += [
        f"waits for {_format_chunks(recv.chunks)} from rank {members[recv.source]}{' (reduce)' * recv.reduce}"
        for recv in one.recvs
        if recv.source in received
    ]
    where = f"round {number + 1} of {len(schedule.rounds)} of {name_schedule(schedule)}{part}"
    return Position(
        f"{where}: {', '.join(words or ['local steps'])}", tuple(sorted(members[peer] for peer in received))
    )


def _format_chunks(chunks: Sequence[int]) -> str:
    return number_list("chunk", chunks) if chunks else "a token"


def bind(schedule: Schedule, regions: Sequence[Region], combine: Combine | None) -> BoundSchedule:
    """Bind `schedule`, whose chunks lie in `regions` one after the other, to memory.

    Messages are sent from and received into the chunks where they are consecutive; otherwise, and where received data
    is to be reduced, messages go through separate scratch memory.
    """
    return BoundSchedule(schedule, ScheduleBinder(schedule, regions, combine).steps())


class ChunkMap:
    """Memory of the chunks of a schedule, which lie one after the other in regions with these `offsets`."""

    def __init__(self, offsets: Sequence[Sequence[int]]) -> None:
        self._offsets = offsets
        self._where = [(number, i) for number, region in enumerate(offsets) for i in range(len(region) - 1)]

    def count(self, chunks: Sequence[int]) -> int:
        """Return the number of elements of `chunks`."""
        total = 0
        for chunk in chunks:
            _, start, stop = self.find(chunk)
            total += stop - start
        return total

    def find(self, chunk: int) -> Extent:
        """Return the memory of `chunk`."""
        number, i = self._where[chunk]
        offsets = self._offsets[number]
        return number, offsets[i], offsets[i + 1]

    def find_operands(self, local: Local) -> tuple[Extent, Extent]:
        """Return the memory that a local step reads and writes. Raise AlgorithmError if their sizes differ."""
        src, dst = self.find(local.src), self.find(local.dst)
        sizes = src[2] - src[1], dst[2] - dst[1]
        if sizes[0] != sizes[1]:
            raise AlgorithmError(
                f"{local}: chunk {local.src} has {sizes[0]} elements, and chunk {local.dst} has {sizes[1]}; local steps"
                " need chunks of one size"
            )
        return src, dst

    def find_runs(self, chunks: Sequence[int]) -> Iterator[Extent]:
        """Return the memory of `chunks` in order, as the fewest possible extents."""
        current: Extent | None = None
        for chunk in chunks:
            number, start, stop = self.find(chunk)
            if current is not None and current[0] == number and current[2] == start:
                current = (number, current[1], stop)
                continue
            if current is not None:
                yield current
            current = (number, start, stop)
        if current is not None:
            yield current


class ScheduleBinder:
    """Binds parts of `schedule` to the memory of `regions`."""

    def __init__(self, schedule: Schedule, regions: Sequence[Region], combine: Combine | None) -> None:
        self._schedule = schedule
        self._regions = regions
        self._raw = [region.array.view(np.uint8) for region in regions]
        self._combine = combine
        self._chunks = ChunkMap([region.offsets for region in regions])
        incoming = self._count_incoming()
        # For received data that is to be reduced.
        self._incoming = empty_beside(regions[0].array, incoming) if incoming else None

    def steps(self) -> list[BoundRound]:
        steps = (self._bind_round(number, one) for number, one in enumerate(self._schedule.rounds))
        return [step for step in steps if step is not None]

    def _count_incoming(self) -> int:
        """Return the most elements that are received to be reduced in a round."""
        count = self._chunks.count
        return max(
            (sum(count(recv.chunks) for recv in one.recvs if recv.reduce) for one in self._schedule.rounds),
            default=0,
        )

    def _bind_round(self, number: int, one: Any) -> BoundRound | None:
        step = BoundRound(number)
        used = 0
        for recv in one.recvs:
            if not recv.chunks:
                step.recvs.append((recv.source, TOKEN))
                continue
            count = self._chunks.count(recv.chunks)
            if not count:
                continue
            if recv.reduce:
                assert self._incoming is not None
                part = self._incoming[used : used + count]
                used += count
                step.recvs.append((recv.source, part.view(np.uint8)))
                runs = list(self._chunks.find_runs(recv.chunks))
                step.after += self._make_combines(part, runs, incoming_left=recv.source < self._schedule.rank)
            else:
                runs = list(self._chunks.find_runs(recv.chunks))
                step.recvs.append((recv.source, self._make_contiguous(runs, step.after, unpack=True)))
        for send in one.sends:
            if not send.chunks:
                step.sends.append((send.to, TOKEN))
            elif self._chunks.count(send.chunks):
                runs = list(self._chunks.find_runs(send.chunks))
                step.sends.append((send.to, self._make_contiguous(runs, step.before, unpack=False)))
        for local in one.then:
            src, dst = self._chunks.find_operands(local)
            if dst[1] < dst[2]:
                step.after.append(self._bind_local(local, src, dst))
        return step if step.sends or step.recvs or step.after else None

    def _make_contiguous(self, runs: Sequence[Extent], actions: list[Action], *, unpack: bool) -> Array:
        """Return one contiguous buffer of bytes for `runs`: their memory itself, or scratch memory with the copies
        between both."""
        views = []
        for number, start, stop in runs:
            itemsize = self._regions[number].array.itemsize
            views.append(self._raw[number][start * itemsize : stop * itemsize])
        if len(views) == 1:
            return views[0]
        packed = empty_beside(views[0], sum(view.size for view in views))
        at = 0
        for view in views:
            part = packed[at : at + view.size]
            actions.append((np.copyto, (view, part) if unpack else (part, view)))
            at += view.size
        return packed

    def _make_combines(self, part: Array, runs: Sequence[Extent], *, incoming_left: bool) -> Iterator[Action]:
        assert self._combine is not None
        at = 0
        for number, start, stop in runs:
            target = self._regions[number].array[start:stop]
            incoming = part[at : at + stop - start]
            at += stop - start
            left, right = (incoming, target) if incoming_left else (target, incoming)
            yield self._combine, (left, right, target)

    def _bind_local(self, local: Local, src: Extent, dst: Extent) -> Action:
        """Return a local step, or a piece of it, bound to the memory of `src` and `dst`."""
        source, target = self._get_elements(src), self._get_elements(dst)
        if isinstance(local, Copy):
            return np.copyto, (target, source)
        assert self._combine is not None
        left, right = (target, source) if local.src_right else (source, target)
        return self._combine, (left, right, target)

    def _get_elements(self, extent: Extent) -> Array:
        number, start, stop = extent
        return self._regions[number].array[start:stop]
