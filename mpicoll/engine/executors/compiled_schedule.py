"""Execution of schedules with large messages in the extension, as :mod:`mpicoll.engine.executors.streamed` does it in
Python: without the interpreter lock, for which a thread that completes messages competes with the program."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
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

    def fail(self, exchanger: object, tag: int) -> None:
        """Do nothing: no function of the program fails in the extension."""

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
    and with functions of Python.

    With `everywhere`, all ranks do this, whatever the sizes of their messages.
    """
    fused = ("", "") if reduction is None else Fold(reduction).fused
    if fused is None:
        return None
    itemsize = regions[0].array.itemsize
    offsets = tuple(tuple(region.offsets) for region in regions)
    placed = [(number, region.input) for number, region in enumerate(regions) if region.input is not None]
    if not all(regions[number].can_read_input() for number, _ in placed):
        placed = []
    read = tuple(number for number, _ in placed)
    memory = [*(region.array for region in regions), *(given for _, given in placed)]

    def make_plan() -> ProgramPlan:
        return ProgramPlan(
            *make_numbers(schedule, offsets, itemsize, everywhere, read),
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
    return CompiledSchedule(schedule, lay_out_steps, program, make, reads_input=bool(read))


@lru_cache(maxsize=64)
def make_numbers(
    schedule: Schedule, offsets: tuple[tuple[int, ...], ...], itemsize: int, everywhere: bool, read: tuple[int, ...]
) -> tuple[tuple[int, ...], array[int]]:
    """Return the ranks with which connections may be used, and the numbers of a plan, as
    :class:`mpicoll._shm.StreamedProgram` takes them. Calls of one kind share them: making them takes longer than a
    piece travels.

    Both ends of a message must take the same way. A rank that has no large messages carries out its part with MPI, so
    only those that are cut may go over connections, unless all ranks do the same `everywhere`. The inputs of the
    regions `read` follow the regions. Elements that no step has written yet are read from there.
    """
    steps = lay_out(schedule, offsets, itemsize)
    chunks = ChunkMap(offsets)
    unwritten = _Unwritten(
        [(region, 0, offsets[region][-1]) for region in read],
        {region: len(offsets) + number for number, region in enumerate(read)},
    )
    body = array("q")
    for step in steps:
        header = len(body)
        body.extend((step.needs, len(step.parts), 0))
        # What is sent was written in earlier steps. What arrives is combined in order, also with results of this one.
        before = unwritten.copy()
        for part in step.parts:
            _add_part(body, part, schedule.rank, itemsize, everywhere or part.cut, before if part.sends else unwritten)
            if not part.sends:
                unwritten.remove(part.runs)
        for local in step.then:
            body[header + 2] += _add_local(body, local, itemsize, unwritten)
            unwritten.remove([local.dst])
    # What no step writes may be part of the result.
    copied = unwritten.find_common(_find_result(schedule, chunks))
    plan = array("q", (len(steps), count_incoming(steps) * itemsize, len(copied)))
    for run, operand in copied:
        _add_run(plan, run, itemsize, operand)
    plan += body
    peers = {part.peer for step in steps for part in step.parts if everywhere or part.cut}
    return tuple(sorted(peers)), plan


def _find_result(schedule: Schedule, chunks: ChunkMap) -> list[Extent]:
    """Return the memory of the result of a schedule that may read its input."""
    if schedule.collective == "reduce_scatter":
        return [chunks.find(schedule.rank)]
    if schedule.collective == "exscan" or (schedule.collective == "reduce" and schedule.rank != schedule.root):
        return []
    return list(chunks.find_runs(range(schedule.chunks)))


class _Unwritten:
    """The memory that no step has written: `extents`, in order. It is read from the regions `operands` of its input."""

    def __init__(self, extents: list[Extent], operands: Mapping[int, int]) -> None:
        self.extents = extents
        self._operands = operands

    def copy(self) -> _Unwritten:
        return _Unwritten(self.extents, self._operands)

    def cut(self, runs: Sequence[Extent]) -> list[tuple[Extent, int]]:
        """Return `runs`, cut so that each is written or not, with the regions that they are read from."""
        pieces: list[tuple[Extent, int]] = []
        for region, start, stop in runs:
            at = start
            for number, begin, end in self.extents:
                first, last = max(begin, at), min(end, stop)
                if number == region and first < last:
                    if at < first:
                        pieces.append(((region, at, first), region))
                    pieces.append(((region, first, last), self._operands[region]))
                    at = last
            if at < stop or start == stop:
                pieces.append(((region, at, stop), region))
        return pieces

    def find_common(self, runs: Sequence[Extent]) -> list[tuple[Extent, int]]:
        """Return the parts of `runs` that no step has written, with the regions that they are read from."""
        return [(run, operand) for run, operand in self.cut(runs) if operand != run[0]]

    def remove(self, runs: Sequence[Extent]) -> None:
        for region, start, stop in runs:
            kept: list[Extent] = []
            for number, begin, end in self.extents:
                if number != region:
                    kept.append((number, begin, end))
                    continue
                left = [(begin, min(end, start)), (max(begin, stop), end)]
                kept += [(number, first, last) for first, last in left if first < last]
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


def _add_local(plan: array[int], part: LocalPart, itemsize: int, unwritten: _Unwritten) -> int:
    """Add a local step, in pieces each operand of which is written or not. Return the number of pieces."""
    kind = part.kind
    copies = isinstance(kind, Copy)
    source_left = not isinstance(kind, Copy) and not kind.src_right
    count = 0
    shift = part.dst[1] - part.src[1]
    for (region, start, stop), source in unwritten.cut([part.src]):
        target = (part.dst[0], start + shift, stop + shift)
        for run, operand in [(target, target[0])] if copies else unwritten.cut([target]):
            plan.extend((0 if copies else 1, 1 if source_left else 0))
            _add_run(plan, (region, run[1] - shift, run[2] - shift), itemsize, source)
            _add_run(plan, run, itemsize, operand)
            count += 1
    return count


def _add_run(plan: array[int], run: Extent, itemsize: int, operand: int) -> None:
    region, start, stop = run
    plan.extend((region, start * itemsize, stop * itemsize, operand))
