"""Operations that are carried out by schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from mpicoll.buffers.ops import Fold
from mpicoll.engine.core.arrays import Region
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.executors.bound_schedule import BoundSchedule, Exchanger, bind, get_piece_size
from mpicoll.engine.selection.selector import Choice
from mpicoll.errors import CommunicationError
from mpicoll.schedules import Algorithm

if TYPE_CHECKING:
    from typing import TypeAlias

    from mpicoll.engine.executors.compiled_schedule import CompiledSchedule
    from mpicoll.engine.executors.streamed import StreamedSchedule

    Program: TypeAlias = BoundSchedule | StreamedSchedule | CompiledSchedule


class ScheduledOperation:
    """Operation that is carried out by a schedule over `exchanger`, each time that it is called. With `fixed`, memory
    is bound now, otherwise in each run. With `streamed`, it can advance beside other operations, however small its
    messages are."""

    def __init__(
        self,
        operation: Operation,
        choice: Choice,
        exchanger: Exchanger,
        *,
        fixed: bool = False,
        streamed: bool = False,
    ) -> None:
        comm, algorithm, arrays = operation.comm, choice.algorithm, operation.arrays
        assert isinstance(algorithm, Algorithm)
        self._comm, self._arrays, self._exchanger = comm, arrays, exchanger
        self._schedule = algorithm.schedule(comm.rank, comm.size, arrays.root, choice.segments)
        self._combine = None if arrays.reduction is None else arrays.reduction.combine
        # Device memory passes through host memory in pieces anyway. Some functions need whole arrays.
        self._may_stream = exchanger is comm.transport and operation.query.elementwise
        self._streamed = streamed
        self._bound = self._bind() if fixed else None
        self.running: Program | None = None
        self._tag = 0

    def __call__(self) -> None:
        self.start()
        program, executing = self.running, self._comm.queue.executing
        if not isinstance(program, BoundSchedule):
            self.finish()
            return
        # As finish() does, in less time: small messages are most of the calls.
        outer, executing.executor = executing.executor, program
        try:
            program.run(self._exchanger, self._tag)
        except BaseException:
            self._fail(program)
            raise
        finally:
            executing.executor = outer
        self._arrays.take()
        self._arrays.store()

    def start(self) -> None:
        """Post the first messages, if they are cut into pieces."""
        # Each run draws a tag, so that late messages of a failed run match no other run. All ranks draw the same tag,
        # since operations run in the same order on all of them; so the tag is drawn first, before anything can fail on
        # one rank.
        self._tag = self._comm.next_tag()
        program = self._bound or self._bind()
        try:
            self._arrays.load()
            if not program.reads_input:
                self._arrays.place()
        except BaseException:
            if isinstance(program, BoundSchedule):
                program.rest = 0
            self._fail(program)
            raise
        self.running = program
        if isinstance(program, BoundSchedule):
            return
        program.start(self._tag)

    def advance(self) -> bool:
        """Carry out what can be without waiting, if it is cut into pieces. Return True if only :meth:`finish` is
        left."""
        return isinstance(self.running, BoundSchedule) or self.running is None or self.running.advance()

    def wait(self, beside: Sequence[ScheduledOperation]) -> None:
        """Carry out all but :meth:`finish`, if it is cut into pieces, while those `beside` advance."""
        program = self.running
        if isinstance(program, BoundSchedule) or program is None:
            return
        with self.published(program):
            program.wait([one.running for one in beside])

    def finish(self) -> None:
        """Carry out the rest."""
        program = self.running
        assert program is not None
        with self.published(program):
            if isinstance(program, BoundSchedule):
                try:
                    program.run(self._exchanger, self._tag)
                except BaseException:
                    self._fail(program)
                    raise
            else:
                program.wait()
        self.running = None
        self._arrays.take()
        self._arrays.store()

    @contextmanager
    def published(self, program: Program) -> Iterator[None]:
        """Publish the position in the schedule."""
        executing = self._comm.queue.executing
        outer, executing.executor = executing.executor, program
        try:
            yield
        finally:
            executing.executor = outer

    def _fail(self, program: Program) -> None:
        """Release the other ranks after a failure of this rank, which its caller raises."""
        # Device memory may pass through the host in pieces, each of which would need a message. Ranks that have the
        # extension carry out their part leave at once when data is missing, and this rank would wait for them.
        reduction = self._arrays.reduction
        if self._exchanger is self._comm.transport and reduction is not None and Fold(reduction).fused is None:
            with suppress(CommunicationError), self.published(program):
                program.fail(self._exchanger, self._tag)

    def discard(self) -> None:
        """Abandon the messages in flight, after a failure elsewhere."""
        program, self.running = self.running, None
        if program is not None and not isinstance(program, BoundSchedule):
            program.discard()

    def _bind(self) -> Program:
        regions = self._arrays.regions(self._schedule)
        if self._streamed or (self._may_stream and _may_be_cut(regions)):
            # Not at module level: few jobs need it.
            from mpicoll.engine.executors.compiled_schedule import compile_schedule
            from mpicoll.engine.executors.streamed import StreamedSchedule, has_large_messages

            if self._streamed or has_large_messages(self._schedule, regions):
                reduction, transport = self._arrays.reduction, self._comm.transport
                compiled = compile_schedule(transport, self._schedule, regions, reduction, everywhere=self._streamed)
                return compiled or StreamedSchedule(self._schedule, regions, self._combine, transport)
        return bind(self._schedule, regions, self._combine)


def _may_be_cut(regions: Sequence[Region]) -> bool:
    nbytes = 0
    for region in regions:
        nbytes += region.array.nbytes
    return nbytes > get_piece_size(nbytes)
