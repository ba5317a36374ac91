"""Binding of schedules to memory, and their execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpicoll.buffers.device import empty_beside
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Combine
from mpicoll.engine.core.arrays import Region
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.selection.selector import Choice
from mpicoll.errors import CommunicationError
from mpicoll.schedules import Algorithm, Copy, Schedule
from mpicoll.transport.base import Message
from mpicoll.wording import number_list

Action: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]

_TOKEN = np.empty(0, np.uint8)


class Exchanger(Protocol):
    """Part of a transport that schedules use."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """Carry out one round: post all messages, return when all have completed."""


@dataclass(slots=True)
class _BoundRound:
    round: int
    """Index of the round in the schedule; rounds in which this rank has no work are omitted."""
    before: list[Action] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    recvs: list[Message] = field(default_factory=list)
    after: list[Action] = field(default_factory=list)


@dataclass(slots=True)
class BoundSchedule:
    """Schedule bound to memory. It may be run any number of times; each run reads and writes that memory."""

    schedule: Schedule
    steps: list[_BoundRound]
    at: int = 0
    """The step that is being carried out."""

    def run(self, exchanger: Exchanger, tag: int) -> None:
        """Carry out the schedule. Errors of the exchange name the round and the schedule."""
        try:
            for number, step in enumerate(self.steps):
                self.at = number
                for function, arguments in step.before:
                    function(*arguments)
                if step.sends or step.recvs:
                    exchanger.exchange(step.sends, step.recvs, tag)
                for function, arguments in step.after:
                    function(*arguments)
        except CommunicationError as error:
            now = f"round {self.steps[self.at].round + 1} of {len(self.schedule.rounds)}"
            where = f"rank {self.schedule.rank} of {self.schedule.size}, {now}"
            error.args = (f"{self._name} on {where}: {error}",)
            raise

    @property
    def _name(self) -> str:
        return f"{self.schedule.collective}/{self.schedule.algorithm}"

    def position(self, members: Sequence[int]) -> Position:
        """Return the current round, the ranks it sends to, and the ranks it waits for."""
        if not self.steps:
            return Position(self._name)
        step = self.steps[self.at]
        one = self.schedule.rounds[step.round]
        sent, received = {peer for peer, _ in step.sends}, {peer for peer, _ in step.recvs}
        # Messages without bytes are not exchanged.
        words = [
            f"sends {_format_chunks(send.chunks)} to rank {members[send.to]}" for send in one.sends if send.to in sent
        ]
        words += [
            f"waits for {_format_chunks(recv.chunks)} from rank {members[recv.source]}{' (reduce)' * recv.reduce}"
            for recv in one.recvs
            if recv.source in received
        ]
        where = f"round {step.round + 1} of {len(self.schedule.rounds)} of {self._name}"
        return Position(
            f"{where}: {', '.join(words or ['local steps'])}", tuple(sorted(members[peer] for peer in received))
        )


def _format_chunks(chunks: Sequence[int]) -> str:
    return number_list("chunk", chunks) if chunks else "a token"


def bind_operation(
    operation: Operation, choice: Choice, exchanger: Exchanger, *, fixed: bool = False
) -> Callable[[], None]:
    """Return a function that carries out `operation` by a schedule, over `exchanger`, each time that it is called. With
    `fixed`, memory is bound now, otherwise in each run."""
    comm, algorithm, arrays = operation.comm, choice.algorithm, operation.arrays
    assert isinstance(algorithm, Algorithm)
    schedule = algorithm.schedule(comm.rank, comm.size, arrays.root, choice.segments)
    combine = None if arrays.reduction is None else arrays.reduction.combine
    executing = comm.queue.executing

    def make_bound_schedule() -> BoundSchedule:
        return bind(schedule, arrays.regions(schedule), combine)

    bound = make_bound_schedule() if fixed else None

    def run() -> None:
        # Each run draws a tag, so that late messages of a failed run match no other run. All ranks draw the same tag,
        # since operations run in the same order on all of them; so the tag is drawn first, before anything can fail on
        # one rank.
        tag = comm.next_tag()
        program = bound or make_bound_schedule()
        arrays.load()
        arrays.place()
        outer, executing.executor = executing.executor, program
        try:
            program.run(exchanger, tag)
        finally:
            executing.executor = outer
        arrays.take()
        arrays.store()

    return run


def bind(schedule: Schedule, regions: Sequence[Region], combine: Combine | None) -> BoundSchedule:
    """Bind `schedule`, whose chunks lie in `regions` one after the other, to memory.

    Messages are sent from and received into the chunks where they are consecutive; otherwise, and where received data
    is to be reduced, messages go through separate scratch memory.
    """
    return BoundSchedule(schedule, _Binder(schedule, regions, combine).steps())


class _Binder:
    def __init__(self, schedule: Schedule, regions: Sequence[Region], combine: Combine | None) -> None:
        self._schedule = schedule
        self._regions = regions
        self._raw = [region.array.view(np.uint8) for region in regions]
        self._combine = combine
        self._where = [(number, i) for number, region in enumerate(regions) for i in range(len(region.offsets) - 1)]
        self._incoming: Array | None = None

    def steps(self) -> list[_BoundRound]:
        self._incoming = self._allocate_incoming()
        steps = (self._bind_round(number, one) for number, one in enumerate(self._schedule.rounds))
        return [step for step in steps if step is not None]

    def _allocate_incoming(self) -> Array | None:
        """Scratch memory for received data that is to be reduced, enough for the largest round."""
        need = max(
            (sum(self._count(recv.chunks) for recv in one.recvs if recv.reduce) for one in self._schedule.rounds),
            default=0,
        )
        return empty_beside(self._regions[0].array, need) if need else None

    def _bind_round(self, number: int, one: Any) -> _BoundRound | None:
        step = _BoundRound(number)
        used = 0
        for recv in one.recvs:
            if not recv.chunks:
                step.recvs.append((recv.source, _TOKEN))
                continue
            count = self._count(recv.chunks)
            if not count:
                continue
            if recv.reduce:
                assert self._incoming is not None
                part = self._incoming[used : used + count]
                used += count
                step.recvs.append((recv.source, part.view(np.uint8)))
                step.after += self._make_combines(part, recv.chunks, incoming_left=recv.source < self._schedule.rank)
            else:
                runs = list(self._find_runs(recv.chunks))
                step.recvs.append((recv.source, self._make_contiguous(runs, step.after, unpack=True)))
        for send in one.sends:
            if not send.chunks:
                step.sends.append((send.to, _TOKEN))
            elif self._count(send.chunks):
                runs = list(self._find_runs(send.chunks))
                step.sends.append((send.to, self._make_contiguous(runs, step.before, unpack=False)))
        step.after += [action for local in one.then for action in self._bind_local(local)]
        return step if step.sends or step.recvs or step.after else None

    def _count(self, chunks: Sequence[int]) -> int:
        total = 0
        for chunk in chunks:
            number, i = self._where[chunk]
            offsets = self._regions[number].offsets
            total += offsets[i + 1] - offsets[i]
        return total

    def _find_runs(self, chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Return the memory of `chunks` in order, as the fewest possible (region, start, stop)."""
        current: tuple[int, int, int] | None = None
        for chunk in chunks:
            number, i = self._where[chunk]
            start, stop = self._regions[number].offsets[i], self._regions[number].offsets[i + 1]
            if current is not None and current[0] == number and current[2] == start:
                current = (number, current[1], stop)
                continue
            if current is not None:
                yield current
            current = (number, start, stop)
        if current is not None:
            yield current

    def _make_contiguous(self, runs: list[tuple[int, int, int]], actions: list[Action], *, unpack: bool) -> Array:
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

    def _make_combines(self, part: Array, chunks: Sequence[int], *, incoming_left: bool) -> Iterator[Action]:
        assert self._combine is not None
        at = 0
        for number, start, stop in self._find_runs(chunks):
            target = self._regions[number].array[start:stop]
            incoming = part[at : at + stop - start]
            at += stop - start
            left, right = (incoming, target) if incoming_left else (target, incoming)
            yield self._combine, (left, right, target)

    def _bind_local(self, local: Any) -> Iterator[Action]:
        source, target = self._get_chunk(local.src), self._get_chunk(local.dst)
        if not target.size:
            return
        if isinstance(local, Copy):
            yield np.copyto, (target, source)
        else:
            assert self._combine is not None
            left, right = (target, source) if local.src_right else (source, target)
            yield self._combine, (left, right, target)

    def _get_chunk(self, chunk: int) -> Array:
        number, i = self._where[chunk]
        region = self._regions[number]
        return region.array[region.offsets[i] : region.offsets[i + 1]]
