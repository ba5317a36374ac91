"""Memory of a group of ranks that each of them reads and writes without the help of its owner."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import finalize

import numpy as np

Memory: TypeAlias = "np.ndarray[Any, Any]"
"""Contiguous flat memory of bytes."""

Wait: TypeAlias = "Callable[[Callable[[], bool], str], None]"
"""Function that returns when its first argument, called repeatedly, returns True. The second one describes the wait."""


class RemoteMemory(Protocol):
    """The memory of all ranks, and two locks for each of them.

    Bytes have been copied when the methods return. Ranks are those of the group. The lock of number 0 is that of the
    program, which is held during each access; that of number 1 is held while elements are combined.
    """

    def put(self, rank: int, offset: int, data: Memory) -> None: ...
    def get(self, rank: int, offset: int, into: Memory) -> None: ...
    def lock(self, rank: int, number: int, exclusive: bool) -> None: ...
    def unlock(self, rank: int, number: int) -> None: ...
    def view(self, rank: int) -> Memory | None:
        """Return the memory of `rank` itself, if this process can access it."""

    def sync(self) -> None:
        """Make what other ranks have written visible to loads of this one, before and after a barrier."""

    def free(self) -> None:
        """Release the locks and the window, but not the memory of this rank. Collective."""


class SharedWindow:
    """The memory of ranks of one node, as this process sees it. The locks are those of bytes of a file, `fd`, which the
    kernel releases when a process ends. `wait` has a bound."""

    def __init__(self, memories: Sequence[Memory], fd: int, wait: Wait) -> None:
        self._memories = list(memories)
        self._fd = fd
        self._wait = wait
        self._close = finalize(self, os.close, fd)

    def put(self, rank: int, offset: int, data: Memory) -> None:
        self._memories[rank][offset : offset + data.size] = data

    def get(self, rank: int, offset: int, into: Memory) -> None:
        into[...] = self._memories[rank][offset : offset + into.size]

    def lock(self, rank: int, number: int, exclusive: bool) -> None:
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        if not self._set_lock(kind, rank, number):
            self._wait(lambda: self._set_lock(kind, rank, number), f"the lock of rank {rank}'s memory")

    def unlock(self, rank: int, number: int) -> None:
        self._set_lock(fcntl.F_UNLCK, rank, number)

    def _set_lock(self, kind: int, rank: int, number: int) -> bool:
        # Of the open file, not of the process: ranks may be threads.
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, 2 * rank + number, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def view(self, rank: int) -> Memory | None:
        return self._memories[rank]

    def sync(self) -> None:
        """Do nothing: the memory is coherent, and a barrier orders the accesses."""

    def free(self) -> None:
        if self._close.detach() is not None:
            os.close(self._fd)
        self._memories = []
