"""Memory of a group of ranks that each of them reads and writes without the help of its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from mpicoll._shm import WindowMemory

Memory: TypeAlias = "np.ndarray[Any, Any]"
"""Contiguous flat memory of bytes."""

Wait: TypeAlias = "Callable[[Callable[[], bool], Callable[[], list[int]], str], None]"
"""Function that returns when its first argument, called repeatedly, returns True. The second one returns the ranks that
are waited for, and the third one describes the wait."""


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


class SharedWindow:
    """The memory of ranks of one node, as this process sees it. Its locks lie in shared memory, and are those of
    `direct`, which also carries out most calls; a window of a single rank without the extension has none, and needs
    none. `wait` has a bound."""

    def __init__(self, memories: Sequence[Memory], direct: WindowMemory | None, wait: Wait) -> None:
        self._memories = list(memories)
        self.direct = direct
        self._wait = wait

    def put(self, rank: int, offset: int, data: Memory) -> None:
        self._memories[rank][offset : offset + data.size] = data

    def get(self, rank: int, offset: int, into: Memory) -> None:
        into[...] = self._memories[rank][offset : offset + into.size]

    def lock(self, rank: int, number: int, exclusive: bool, lazy: bool = False) -> None:
        direct = self.direct
        if direct is None or direct.take(rank, number != 0, exclusive):
            return
        try:
            self._wait(
                lambda: direct.take(rank, number != 0, exclusive),
                lambda: direct.list_holders(rank),
                f"the lock of rank {rank}'s memory",
            )
        finally:
            direct.give_up(rank)

    def unlock(self, rank: int, number: int) -> None:
        if self.direct is not None:
            self.direct.release(rank, number != 0)

    def view(self, rank: int) -> Memory | None:
        return self._memories[rank]

    def sync(self) -> None:
        """Do nothing: the memory is coherent, and a barrier orders the accesses."""

    def free(self) -> None:
        self._memories = []
        self.direct = None
