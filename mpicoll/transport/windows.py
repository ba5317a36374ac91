"""Memory of a group of ranks that each of them reads and writes without the help of its owner."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    def lock(self, rank: int, number: int, exclusive: bool, lazy: bool = False) -> None:
        """Acquire a lock. A `lazy` one may be acquired as late as at the first access of the memory."""

    def unlock(self, rank: int, number: int) -> None: ...
    def view(self, rank: int) -> Memory | None:
        """Return the memory of `rank` itself, if this process can access it."""

    def sync(self) -> None:
        """Make what other ranks have written visible to loads of this one, before and after a barrier."""

    def free(self) -> None:
        """Release the locks and the window, but not the memory of this rank. Collective."""


_DIRECTORY = "/dev/shm"


class LockFile:
    """File of the locks of a window, by a descriptor of each rank. One rank creates it; the name is removed when all
    have opened it."""

    def __init__(self) -> None:
        self.fd = -1
        self._name = ""

    def create(self) -> tuple[str, str]:
        """Create the file. Return its name, and the reason if it failed."""
        # There, unlike in a directory for temporary files, containers of a node see it, and it is no network's.
        directory = _DIRECTORY if os.access(_DIRECTORY, os.W_OK) else None
        try:
            self.fd, self._name = tempfile.mkstemp(prefix="mpicoll-", dir=directory)
        except OSError as error:
            return "", str(error)
        return self._name, ""

    def open(self, name: str) -> str:
        """Open the file that another rank has created. Return the reason if it failed."""
        try:
            self.fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return str(error)
        return ""

    def remove_name(self) -> None:
        """Remove the name of the file that this rank has created."""
        if self._name:
            with suppress(OSError):
                os.unlink(self._name)  # noqa: PTH108

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


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

    def lock(self, rank: int, number: int, exclusive: bool, lazy: bool = False) -> None:
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
        self._fd = -1  # the number may be that of another file from now on
        self._memories = []
