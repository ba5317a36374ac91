"""Memory of the ranks of a node that all of them can access, besides the slots of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize, ref

from mpicoll._shm import Steps
from mpicoll.transport.base import Memory, Transport


class SegmentTable:
    """The segments of a node by number: memory that each rank contributes and all ranks of the node can access. The
    numbers are the same on all ranks. The extension finds arrays in them by the addresses, which `steps` has."""

    def __init__(self, steps: Steps, transport: Transport) -> None:
        self.allocated = 0
        # The parts of the other ranks, which are mapped as long as they are referenced here.
        self.by_number: dict[int, dict[int, Memory]] = {}
        self._steps = ref(steps)
        self._transport = transport

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of `nbytes` that all ranks of the node can access. Collective. The memory stays registered as
        long as the memory that the returned array views."""
        memories = self._transport.share(max(nbytes, 1))
        number, own = self._register(memories), memories[self._transport.rank]
        # The caller's arrays keep the base of the memory alive, not the array that is returned here.
        finalize(own if own.base is None else own.base, self.unregister, number).atexit = False
        return own

    def adopt(self, memory: Memory, fd: int) -> int:
        """Give all ranks of the node access to `memory`, the beginning of the file behind `fd`, until
        :meth:`unregister` is called with the returned number. Collective."""
        return self._register(self._transport.adopt(memory, fd))

    def unregister(self, number: int) -> None:
        """Unregister memory before it is released."""
        steps = self._steps()
        if steps is not None:
            steps.remove_segment(number)
        self.by_number.pop(number, None)

    def _register(self, memories: Sequence[Memory]) -> int:
        self.allocated += 1
        rank, steps = self._transport.rank, self._steps()
        self.by_number[self.allocated] = {peer: memory for peer, memory in enumerate(memories) if peer != rank}
        if steps is not None:
            addresses = [memory.__array_interface__["data"][0] for memory in memories]
            steps.add_segment(self.allocated, addresses, memories[rank].nbytes)
        return self.allocated
