"""Windows of MPI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicoll.transport.mpi.translation import translates_errors
from mpicoll.transport.windows import Memory

_CHUNK = 1 << 30
"""Bytes of one call: MPI's counts are ints."""

_exposed: set[MpiWindow] = set()
"""The windows that are not freed: MPI writes to their memory until they are, even if the program has dropped them."""


class MpiWindow:
    """The memory `memory` of each rank of `comm`, as a window of MPI, and a second window for locks. Collective.

    Each access is made while this rank holds the lock. MPI's locks have no bound: the watchdog ends the job if one
    lasts too long.
    """

    def __init__(self, comm: MPI.Intracomm, memory: Memory, translate: Callable[[Exception], Exception]) -> None:
        self.translate_error = translate
        self._rank = comm.rank
        self._memories = memory, np.zeros(1, np.uint8)
        self._windows = [MPI.Win.Create(one, 1, comm=comm) for one in self._memories]
        self._token = np.empty(1, np.uint8)
        _exposed.add(self)

    @translates_errors
    def put(self, rank: int, offset: int, data: Memory) -> None:
        window = self._windows[0]
        for at in range(0, data.size, _CHUNK):
            part = data[at : at + _CHUNK]
            window.Put([part, part.size, MPI.BYTE], rank, (offset + at, part.size, MPI.BYTE))
        window.Flush(rank)

    @translates_errors
    def get(self, rank: int, offset: int, into: Memory) -> None:
        window = self._windows[0]
        for at in range(0, into.size, _CHUNK):
            part = into[at : at + _CHUNK]
            window.Get([part, part.size, MPI.BYTE], rank, (offset + at, part.size, MPI.BYTE))
        window.Flush(rank)

    @translates_errors
    def lock(self, rank: int, number: int, exclusive: bool, lazy: bool = False) -> None:
        window = self._windows[number]
        window.Lock(rank, MPI.LOCK_EXCLUSIVE if exclusive else MPI.LOCK_SHARED)
        if not lazy:
            # MPI may acquire the lock as late as at the first access.
            window.Get([self._token, 1, MPI.BYTE], rank, (0, 1, MPI.BYTE))
            window.Flush(rank)

    @translates_errors
    def unlock(self, rank: int, number: int) -> None:
        self._windows[number].Unlock(rank)

    def view(self, rank: int) -> Memory | None:
        return None

    @translates_errors
    def sync(self) -> None:
        # The standard has only this for windows whose public copy differs from the memory.
        self._windows[0].Lock(self._rank, MPI.LOCK_SHARED)
        self._windows[0].Unlock(self._rank)

    @translates_errors
    def free(self) -> None:
        for window in self._windows:
            window.Free()
        _exposed.discard(self)
