"""The MPI library's own collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast
from weakref import finalize

import numpy as np
from mpi4py import MPI

from mpicoll.transport import reductions
from mpicoll.transport.base import Memory, Native
from mpicoll.transport.mpi.messages import _INT_MAX
from mpicoll.transport.mpi.ops import _OPS


class MpiNative:
    """The MPI library's own collectives. They raise MPI's exceptions, which the engine has explained."""

    max_count = _INT_MAX

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def allreduce(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Allreduce(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        if source is target and root and not reductions.reduces_in_place():
            source = source.copy()
        self._comm.Reduce(MPI.IN_PLACE if source is target else source, target, _OPS[op], root)

    def scan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Scan(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def exscan(self, source: Memory, target: Memory, op: str) -> None:
        self._comm.Exscan(MPI.IN_PLACE if source is target else source, target, _OPS[op])

    def reduce_scatter(self, source: Memory, target: Memory, counts: Sequence[int] | None, op: str) -> None:
        if counts is None:
            self._comm.Reduce_scatter_block(source, target, _OPS[op])
        else:
            self._comm.Reduce_scatter(source, target, counts, _OPS[op])

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
            self._comm.Allgatherv(source, [target, list(counts)])  # a pair would be counts and displacements

    def alltoall(self, source: Memory, target: Memory) -> None:
        self._comm.Alltoall(source, target)

    def barrier(self) -> None:
        self._comm.Barrier()

    def allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        allreduce, reduction, datatype = self._comm.Allreduce, _OPS[op], MPI.Datatype.fromcode(dtype.char)
        buffer, nbytes, in_place = MPI.buffer.fromaddress, count * dtype.itemsize, MPI.IN_PLACE
        return lambda address: allreduce(in_place, (buffer(address, nbytes), datatype), reduction)

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        bound = _Bound(self._comm, persistent)
        call(bound)
        assert bound.again is not None
        return bound.again

    def typed(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        datatype, itemsize = MPI.Datatype.fromcode(dtype.char), dtype.itemsize
        buffer = MPI.buffer.fromaddress
        # mpi4py takes such a specification wherever it takes an array, and reads it faster. A count in it would mean
        # that of a block where there is one for each rank.
        return lambda address, count: cast(Memory, (buffer(address, count * itemsize), datatype))


class _Bound(MpiNative):
    """Takes down the collective that is called on it, instead of carrying it out."""

    def __init__(self, comm: MPI.Intracomm, persistent: bool) -> None:
        super().__init__(cast(Any, self))
        self._persistent = persistent
        self.again: Callable[[], None] | None = None
        self._real = comm

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        # It may have to copy what is there at each call.
        self.again = lambda: MpiNative(self._real).reduce(source, target, op, root)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """In the place of a method of mpi4py's communicator, which the methods of the base class call."""
        return lambda *args: self._take(name, args)

    def _take(self, name: str, args: tuple[Any, ...]) -> None:
        if self._persistent:
            with suppress(NotImplementedError, AttributeError):  # MPI libraries before MPI 4
                request = getattr(self._real, f"{name}_init")(*args)
                self.again = _repeat(request)
                return
        call = getattr(self._real, name)
        given = [_parsed(one) if isinstance(one, np.ndarray) else one for one in args]
        self.again = lambda: call(*given)


def _repeat(request: MPI.Prequest) -> Callable[[], None]:
    start, wait = request.Start, request.Wait

    def again() -> None:
        start()
        wait()

    finalize(again, _free_request, request).atexit = False
    return again


def _free_request(request: MPI.Prequest) -> None:
    if not MPI.Is_finalized():
        request.Free()


def _parsed(array: Memory) -> Any:
    """`array` in a form that mpi4py reads faster."""
    return MPI.buffer.frombuffer(array, not array.flags.writeable), MPI.Datatype.fromcode(array.dtype.char)
