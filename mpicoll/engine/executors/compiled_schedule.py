"""Execution of schedules with large messages in the extension, as :mod:`mpicoll.engine.executors.streamed` does it in
Python: without the interpreter lock, for which a thread that completes messages competes with the program."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

from mpicoll.buffers.ops import Fold, Reduction
from mpicoll.engine.core.arrays import Region
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.executors import bound_schedule, streamed
from mpicoll.engine.executors.bound_schedule import ChunkMap, Extent, name_round
from mpicoll.engine.executors.step_layout import Part, Step, lay_out
from mpicoll.engine.executors.streamed import describe_step
from mpicoll.errors import CommunicationError
from mpicoll.schedules import Copy, Local, Schedule
from mpicoll.transport.base import Program, ProgramPlan

if TYPE_CHECKING:
    from mpicoll.buffers.dtypes import Array

_LONGEST_RUN = 0.1
"""Most seconds without the interpreter lock: signals are handled, and errors of other threads raised, between two."""


class ProgramMaker(Protocol):
    """Part of a transport that these schedules use."""

    def make_program(self, make_plan: Callable[[], ProgramPlan], memory: Sequence[Array]) -> Program | None: ...


class CompiledSchedule:
    """Schedule bound to memory, in pieces. It may be run any number of times, one after the other."""

    def __init__(
        self,
        schedule: Schedule,
        lay_out_steps: Callable[[], Sequence[Step]],
        program: Program,
        make: Callable[[], Program | None],
    ) -> None:
        self.schedule = schedule
        self.program = program
        self._lay_out_steps = lay_out_steps
        self._make = make

    @property
    def at(self) -> int:
        """Number of the steps that have ended: the first step that has not."""
        return self.program.at

    def start(self, tag: int) -> None:
        """Post the first messages."""
        if not self.program.usable:
            again = self._make()
            assert again is not None
            self.program = again
        self.program.start(tag)

    def advance(self) -> bool:
        """Post and complete what can be without waiting. Return True if all steps have ended."""
        return self._guard(self.program.advance)

    def wait(self, beside: Sequence[object] = ()) -> None:
        """Carry out all steps, while those `beside` advance. Errors name the round and the schedule."""
        others = [one.program for one in beside if isinstance(one, CompiledSchedule)]
        try:
            while not self._guard(lambda: self.program.run(_LONGEST_RUN, others)):
                pass
        except BaseException:  # a signal handler may raise between two runs
            self.discard()
            raise

    def discard(self) -> None:
        """Abandon the messages in flight, after a failure elsewhere."""
        self.program.discard()

    def position(self, members: Sequence[int]) -> Position:
        """Return the current round and piece, the ranks it sends to, and the ranks it waits for."""
        return describe_step(self.schedule, self._lay_out_steps(), self.at, members)

    def _guard(self, function: Callable[[], bool]) -> bool:
        try:
            return function()
        except CommunicationError as error:
            steps = self._lay_out_steps()
            number = steps[min(self.at, len(steps) - 1)].round
            error.args = (f"{name_round(self.schedule, number)}: {error}",)
            raise


def compile_schedule(
    maker: ProgramMaker,
    schedule: Schedule,
    regions: Sequence[Region],
    reduction: Reduction | None,
    *,
    everywhere: bool = False,
) -> CompiledSchedule | None:
    """Return a schedule bound to memory; None if the extension can't carry it out: without MPI, in fault-tolerant jobs,
    and with functions of Python. With `everywhere`, all ranks do this, whatever the sizes of their messages.
    """
    fused = ("", "") if reduction is None else Fold(reduction).fused
    if fused is None:
        return None
    itemsize = regions[0].array.itemsize
    offsets = tuple(tuple(region.offsets) for region in regions)

    def make_plan() -> ProgramPlan:
        return ProgramPlan(
            *make_numbers(schedule, offsets, itemsize, everywhere),
            *fused,
            itemsize,
            streamed.FIRST_SENDS,
            streamed.MAX_SENDS * bound_schedule.PIECE,
            streamed.NAP_SHARE,
        )

    make = partial(maker.make_program, make_plan, [region.array for region in regions])
    program = make()
    if program is None:
        return None
    return CompiledSchedule(schedule, partial(lay_out, schedule, offsets, itemsize), program, make)


@lru_cache(maxsize=64)
def make_numbers(
    schedule: Schedule, offsets: tuple[tuple[int, ...], ...], itemsize: int, everywhere: bool
) -> tuple[tuple[int, ...], array[int]]:
    """Return the ranks with which connections may be used, and the numbers of a plan, as
    :class:`mpicoll._shm.StreamedProgram` takes them. Calls of one kind share them: making them takes longer than a
    piece travels.

    Both ends of a message must take the same way. A rank that has no large messages carries out its part with MPI, so
    only those that are cut may go over connections, unless all ranks do the same `everywhere`.
    """
    steps = lay_out(schedule, offsets, itemsize)
    chunks = ChunkMap(offsets)
    ends = [part.incoming[2] for step in steps for part in step.parts if part.incoming is not None]
    plan = array("q", (len(steps), max(ends, default=0) * itemsize))
    for step in steps:
        local = schedule.rounds[step.round].then if step.local else ()
        local = tuple(one for one in local if not _is_empty(chunks.find(one.dst)))
        plan.extend((step.needs, len(step.parts), len(local)))
        for part in step.parts:
            _add_part(plan, part, schedule.rank, itemsize, everywhere or part.cut)
        for one in local:
            _add_local(plan, one, chunks, itemsize)
    peers = {part.peer for step in steps for part in step.parts if everywhere or part.cut}
    return tuple(sorted(peers)), plan


def _add_part(plan: array[int], part: Part, rank: int, itemsize: int, may_use_connection: bool) -> None:
    is_left = part.incoming is not None and part.peer < rank
    incoming = -1 if part.incoming is None else part.incoming[1] * itemsize
    plan.extend((part.peer, 1 if part.sends else -1 if is_left else 0, incoming, len(part.runs), may_use_connection))
    for run in part.runs:
        _add_run(plan, run, itemsize)


def _add_local(plan: array[int], local: Local, chunks: ChunkMap, itemsize: int) -> None:
    copies = isinstance(local, Copy)
    plan.extend((0 if copies else 1, 0 if isinstance(local, Copy) or local.src_right else 1))
    _add_run(plan, chunks.find(local.src), itemsize)
    _add_run(plan, chunks.find(local.dst), itemsize)


def _add_run(plan: array[int], run: Extent, itemsize: int) -> None:
    region, start, stop = run
    plan.extend((region, start * itemsize, stop * itemsize))


def _is_empty(extent: Extent) -> bool:
    return extent[1] == extent[2]
