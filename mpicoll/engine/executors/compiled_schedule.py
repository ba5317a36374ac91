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
from mpicoll.engine.executors.step_layout import LocalPart, Part, Step, count_incoming, lay_out
from mpicoll.engine.executors.streamed import describe_step
from mpicoll.errors import CommunicationError
from mpicoll.schedules import Copy, Schedule
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
        *,
        reads_input: bool,
    ) -> None:
        self.schedule = schedule
        self.reads_input = reads_input
        """True if the input is read where the caller has it, and need not be placed in the memory of the schedule."""
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
    source: Array | None = None,
    *,
    everywhere: bool = False,
) -> CompiledSchedule | None:
    """Return a schedule bound to memory; None if the extension can't carry it out: without MPI, in fault-tolerant jobs,
    and with functions of Python.

    `source` is the input, if it has yet to be placed in the memory of the schedule, a single region. With `everywhere`,
    all ranks do this, whatever the sizes of their messages.
    """
    fused = ("", "") if reduction is None else Fold(reduction).fused
    if fused is None:
        return None
    itemsize = regions[0].array.itemsize
    offsets = tuple(tuple(region.offsets) for region in regions)
    if any(one.then for one in schedule.rounds):
        source = None  # what these local steps read has to be placed
    reads_input = source is not None
    memory = [*(region.array for region in regions), *([] if source is None else [source])]

    def make_plan() -> ProgramPlan:
        return ProgramPlan(
            *make_numbers(schedule, offsets, itemsize, everywhere, reads_input),
            *fused,
            itemsize,
            streamed.FIRST_SENDS,
            streamed.MAX_SENDS * bound_schedule.PIECE,
            streamed.NAP_SHARE,
        )

    make = partial(maker.make_program, make_plan, memory)
    program = make()
    if program is None:
        return None
    lay_out_steps = partial(lay_out, schedule, offsets, itemsize)
    return CompiledSchedule(schedule, lay_out_steps, program, make, reads_input=reads_input)


@lru_cache(maxsize=64)
def make_numbers(
    schedule: Schedule, offsets: tuple[tuple[int, ...], ...], itemsize: int, everywhere: bool, reads_input: bool
) -> tuple[tuple[int, ...], array[int]]:
    """Return the ranks with which connections may be used, and the numbers of a plan, as
    :class:`mpicoll._shm.StreamedProgram` takes them. Calls of one kind share them: making them takes longer than a
    piece travels.

    Both ends of a message must take the same way. A rank that has no large messages carries out its part with MPI, so
    only those that are cut may go over connections, unless all ranks do the same `everywhere`. If it `reads_input`, the
    region after the last one is the input, which the elements that no step has written yet are read from.
    """
    steps = lay_out(schedule, offsets, itemsize)
    chunks = ChunkMap(offsets)
    unwritten = _Unwritten([(0, offsets[0][-1])] if reads_input else [])
    body = array("q")
    for step in steps:
        body.extend((step.needs, len(step.parts), len(step.then)))
        # What is sent was written in earlier steps. What arrives is combined in order, also with results of this one.
        before = unwritten.copy()
        for part in step.parts:
            _add_part(body, part, schedule.rank, itemsize, everywhere or part.cut, before if part.sends else unwritten)
            if not part.sends:
                unwritten.remove(part.runs)
        for one in step.then:
            _add_local(body, one, itemsize)
    # What no step writes may be part of the result.
    copied = unwritten.find_common(_find_result(schedule, chunks))
    plan = array("q", (len(steps), count_incoming(steps) * itemsize, len(copied)))
    for start, stop in copied:
        _add_run(plan, (0, start, stop), itemsize, _INPUT)
    plan += body
    peers = {part.peer for step in steps for part in step.parts if everywhere or part.cut}
    return tuple(sorted(peers)), plan


def _find_result(schedule: Schedule, chunks: ChunkMap) -> tuple[int, int]:
    """Return which elements of the first region are the result of a schedule that may read its input."""
    if schedule.collective == "reduce_scatter":
        _, start, stop = chunks.find(schedule.rank)
        return start, stop
    if schedule.collective == "reduce" and schedule.rank != schedule.root:
        return 0, 0
    _, _, stop = chunks.find(schedule.chunks - 1)
    return 0, stop


_INPUT = 1
"""The region of the input, where the memory of the schedule is a single region."""


class _Unwritten:
    """The elements of a vector that no step has written: `extents`, in order."""

    def __init__(self, extents: list[tuple[int, int]]) -> None:
        self.extents = extents

    def copy(self) -> _Unwritten:
        return _Unwritten(self.extents)

    def cut(self, runs: Sequence[Extent]) -> list[tuple[Extent, int]]:
        """Return `runs`, cut so that each is written or not, with the regions that they are read from."""
        pieces: list[tuple[Extent, int]] = []
        for region, start, stop in runs:
            at = start
            for begin, end in self.extents:
                first, last = max(begin, at), min(end, stop)
                if first < last:
                    if at < first:
                        pieces.append(((region, at, first), region))
                    pieces.append(((region, first, last), _INPUT))
                    at = last
            if at < stop or start == stop:
                pieces.append(((region, at, stop), region))
        return pieces

    def find_common(self, extent: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the extents that are also in `extent`."""
        common = [(max(begin, extent[0]), min(end, extent[1])) for begin, end in self.extents]
        return [(start, stop) for start, stop in common if start < stop]

    def remove(self, runs: Sequence[Extent]) -> None:
        for _, start, stop in runs:
            kept = []
            for begin, end in self.extents:
                kept += [one for one in ((begin, min(end, start)), (max(begin, stop), end)) if one[0] < one[1]]
            self.extents = kept


def _add_part(
    plan: array[int], part: Part, rank: int, itemsize: int, may_use_connection: bool, unwritten: _Unwritten
) -> None:
    is_left = part.incoming is not None and part.peer < rank
    incoming = -1 if part.incoming is None else part.incoming[1] * itemsize
    reads = part.sends or part.incoming is not None
    runs = unwritten.cut(part.runs) if reads else [(run, run[0]) for run in part.runs]
    plan.extend((part.peer, 1 if part.sends else -1 if is_left else 0, incoming, len(runs), may_use_connection))
    for (region, start, stop), operand in runs:
        _add_run(plan, (operand if part.sends else region, start, stop), itemsize, operand)


def _add_local(plan: array[int], part: LocalPart, itemsize: int) -> None:
    kind = part.kind
    copies = isinstance(kind, Copy)
    plan.extend((0 if copies else 1, 0 if isinstance(kind, Copy) or kind.src_right else 1))
    for extent in (part.src, part.dst):
        _add_run(plan, extent, itemsize, extent[0])


def _add_run(plan: array[int], run: Extent, itemsize: int, operand: int) -> None:
    region, start, stop = run
    plan.extend((region, start * itemsize, stop * itemsize, operand))
