"""The MPI library's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import finalize

import numpy as np
from mpi4py import MPI

from mpicoll.transport.base import Memory, Native
from mpicoll.transport.mpi.ops import OPS

INT_MAX = 2**31 - 1
"""The largest count that MPI libraries without the large-count interface (MPI 4) accept."""


class MpiNative:
    """The MPI library's own collectives.

    They raise MPI's exceptions, which :meth:`MpiTransport.translate_error` translates.
    """

    max_count = INT_MAX

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    @property
    def has_persistent(self) -> bool:
        return _has_persistent()

    def allreduce(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE if source is target else source, target, OPS[op])

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        if source is target and root:
            from mpicoll.transport import reductions  # late: few calls need it

            if not reductions.reduces_in_place():
                source = source.copy()
        self._comm.Reduce(MPI.IN_PLACE if source is target else source, target, OPS[op], root)

    def scan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Scan(MPI.IN_PLACE if source is target else source, target, OPS[op])

    def exscan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Exscan(MPI.IN_PLACE if source is target else source, target, OPS[op])

    def reduce_scatter(self, source: Memory, target: Memory, counts: Sequence[int] | None, op: str) -> None:
        if counts is None:
            self._comm.Reduce_scatter_block(source, target, OPS[op])
        else:
            self._comm.Reduce_scatter(source, target, counts, OPS[op])

    def bcast(self, data: Memory, root: int) -> None:
        self._comm.Bcast(data, root)

    def gather(self, source: Memory, target: Memory | None, counts: Sequence[int] | None, root: int) -> None:
        if counts is None:
            self._comm.Gather(source, target, root)
        else:
            self._comm.Gatherv(source, None if target is None else [target, list(counts)], root)

    def scatter(self, source: Memory | None, target: Memory, counts: Sequence[int] | None, root: int) -> None:
        if counts is None:
            self._comm.Scatter(source, target, root)
        else:
            self._comm.Scatterv(None if source is None else [source, list(counts)], target, root)

    def allgather(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None:
        if counts is None:
            self._comm.Allgather(source, target)
        else:
            self._comm.Allgatherv(source, [target, list(counts)])  # a tuple would be (counts, displacements)

    def alltoall(self, source: Memory, target: Memory) -> None:
        self._comm.Alltoall(source, target)

    def barrier(self) -> None:
        self._comm.Barrier()

    def bind_allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        allreduce, reduction, datatype = self._comm.Allreduce, OPS[op], MPI.Datatype.fromcode(dtype.char)
        buffer, nbytes, in_place = MPI.buffer.fromaddress, count * dtype.itemsize, MPI.IN_PLACE
        return lambda address: allreduce(in_place, (buffer(address, nbytes), datatype), reduction)

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        bound = _Bound(self._comm, persistent)
        call(bound)
        assert bound.again is not None
        return bound.again

    def record(
        self, call: Callable[[Native], None], buffers: Sequence[tuple[Memory, Any]]
    ) -> tuple[Callable[..., object], tuple[Any, ...]] | None:
        recorder = _Recorder()
        call(recorder)
        known = {id(array): (buffer, MPI.Datatype.fromcode(array.dtype.char)) for array, buffer in buffers}
        arguments: list[Any] = []
        for one in recorder.arguments:
            array, counts = one if isinstance(one, list) else (one, None)
            if not isinstance(array, np.ndarray):
                arguments.append(array)
                continue
            if id(array) not in known:
                return None
            buffer, datatype = known[id(array)]
            arguments.append((buffer, datatype) if counts is None else [buffer, counts, datatype])
        return getattr(self._comm, recorder.name), tuple(arguments)

    def bind_dtype(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        datatype, itemsize = MPI.Datatype.fromcode(dtype.char), dtype.itemsize
        buffer = MPI.buffer.fromaddress
        # mpi4py accepts such a specification wherever it accepts an array, and parses it faster. It must not contain a
        # count: in calls with one block for each rank that would be the count of a block.
        return lambda address, count: cast(Memory, (buffer(address, count * itemsize), datatype))


@lru_cache(maxsize=1)
def _has_persistent() -> bool:
    from mpicoll.transport import quirks  # late: only plans need it

    return MPI.Get_version() >= (4, 0) and not quirks.PERSISTENT_COLLECTIVES.applies_to(MPI.Get_library_version())


class _Recorder(MpiNative):
    """Stands in for mpi4py's communicator, and keeps the name and the arguments of the method that is called."""

    def __init__(self) -> None:
        super().__init__(cast(Any, self))
        self.name = ""
        self.arguments: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def keep(*arguments: Any) -> None:
            self.name, self.arguments = name, arguments

        return keep


class _Bound(MpiNative):
    """Records the collective that is called on it as the function :attr:`again`, without running it."""

    def __init__(self, comm: MPI.Intracomm, persistent: bool) -> None:
        super().__init__(cast(Any, self))
        self._persistent = persistent
        self.again: Callable[[], None] | None = None
        self._real = comm

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        # Each call may have to copy the operand.
        self.again = lambda: MpiNative(self._real).reduce(source, target, op, root)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Stand in for the methods of mpi4py's communicator, which the methods of the base class call."""
        return lambda *args: self._record(name, args)

    def _record(self, name: str, args: tuple[Any, ...]) -> None:
        if self._persistent:
            self.again = _bind_persistent(getattr(self._real, f"{name}_init")(*args))
            return
        call = getattr(self._real, name)
        given = [buffer_spec(one) if isinstance(one, np.ndarray) else one for one in args]
        self.again = lambda: call(*given)


def _bind_persistent(request: MPI.Prequest) -> Callable[[], None]:
    start, wait = request.Start, request.Wait

    def again() -> None:
        start()
        wait()

    finalize(again, _free_request, request).atexit = False
    return again


def _free_request(request: MPI.Prequest) -> None:
    if not MPI.Is_finalized():
        request.Free()


def buffer_spec(array: Memory) -> Any:
    """Return a buffer specification of `array`, which mpi4py parses faster than an array."""
    return MPI.buffer.frombuffer(array, not array.flags.writeable), MPI.Datatype.fromcode(array.dtype.char)
