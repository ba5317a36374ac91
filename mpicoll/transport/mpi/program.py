"""Schedules with large messages that the extension carries out over MPI."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mpi4py import MPI

from mpicoll.transport.base import Memory, ProgramPlan
from mpicoll.transport.mpi.direct_messages import find_functions
from mpicoll.transport.mpi.messages import may_call_unlocked

if TYPE_CHECKING:
    from mpicoll._shm import Connection, StreamedProgram
    from mpicoll.transport.mpi.fault_tolerance import FailureState


class _Endpoint(Protocol):
    """Part of the transport whose messages they are."""

    @property
    def failures(self) -> FailureState: ...
    def get_connections(self, peers: Collection[int], tag: int) -> tuple[int | Connection, ...]: ...
    def make_program_error(self, code: int, peer: int, expected: int, received: int) -> Exception: ...


class MpiProgram:
    """Program of the extension, on memory that it keeps."""

    def __init__(self, endpoint: _Endpoint, comm: MPI.Intracomm, plan: ProgramPlan, memory: Sequence[Memory]) -> None:
        self._endpoint = endpoint
        self._comm = comm
        self._plan = plan
        self._memory = memory
        self._program: StreamedProgram | None = None
        self._unfinished = False

    @property
    def program(self) -> StreamedProgram:
        assert self._program is not None, "it has not been started"
        return self._program

    @property
    def at(self) -> int:
        return 0 if self._program is None else self._program.at

    @property
    def usable(self) -> bool:
        return self._program is None or self._program.failure is None

    def start(self, tag: int) -> None:
        if self._program is None:
            self._program = self._make(tag)
        self._unfinished = True
        self._program.start(tag)

    def advance(self) -> bool:
        return self._end(self.program.advance())

    def run(self, seconds: float, beside: Sequence[Any]) -> bool:
        others = tuple(one.program for one in beside if isinstance(one, MpiProgram))
        return self._end(self.program.run(seconds, others))

    def discard(self) -> None:
        if self._unfinished:
            self._unfinished = False
            self.program.abandon()
            self._endpoint.failures.retain((self.program, self._memory))

    def _make(self, tag: int) -> StreamedProgram:
        from mpicoll._shm import StreamedProgram

        connections = self._endpoint.get_connections(self._plan.peers, tag)
        places = tuple(number for one in self._memory for number in (one.ctypes.data, one.nbytes))
        return StreamedProgram(MPI._handleof(self._comm), connections, places, *self._plan[1:])

    def _end(self, ended: bool) -> bool:
        if ended and self._unfinished:
            if self.program.failure is not None:
                failure = self.program.failure
                self.discard()
                raise self._endpoint.make_program_error(*failure)
            self._unfinished = False
        return ended


def can_run_programs() -> bool:
    """Return True if the extension carries out schedules in this process. Equal on all ranks of a job that has
    connections: both ends of a message then take the same way."""
    return may_call_unlocked() and find_functions()
