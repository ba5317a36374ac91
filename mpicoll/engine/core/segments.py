"""Memory of the ranks of a node that all of them can access, besides the slots of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import finalize

from mpicoll.buffers.dtypes import Array
from mpicoll.transport.base import Memory, Transport


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that each rank contributes and all ranks of the node can access: the address and size of this rank's part,
    and the parts of the other ranks."""

    address: int
    nbytes: int
    others: dict[int, Memory]


class SegmentTable:
    """The segments of a node by number. The numbers are the same on all ranks."""

    def __init__(self, transport: Transport) -> None:
        self.allocated = 0
        self.by_number: dict[int, Segment] = {}
        self._transport = transport

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of `nbytes` that all ranks of the node can access. Collective. The memory stays registered as
        long as the memory that the returned array views."""
        memories = self._transport.share(max(nbytes, 1))
        number, own = self._register(memories), memories[self._transport.rank]
        # The caller's arrays keep the base of the memory alive, not the array that is returned here.
        finalize(own if own.base is None else own.base, self.by_number.pop, number, None).atexit = False
        return own

    def adopt(self, memory: Memory, fd: int) -> int:
        """Give all ranks of the node access to `memory`, the beginning of the file behind `fd`, until
        :meth:`unregister` is called with the returned number. Collective."""
        return self._register(self._transport.adopt(memory, fd))

    def unregister(self, number: int) -> None:
        """Unregister adopted memory before it is released."""
        self.by_number.pop(number, None)

    def _register(self, memories: Sequence[Memory]) -> int:
        self.allocated += 1
        own = memories[self._transport.rank]
        others = {peer: memory for peer, memory in enumerate(memories) if peer != self._transport.rank}
        self.by_number[self.allocated] = Segment(own.__array_interface__["data"][0], own.nbytes, others)
        return self.allocated

    def find(self, array: Array | None) -> tuple[int, int]:
        """Return the number of the segment that contains `array`, and the offset in it; (0, 0) if no segment contains
        it."""
        if array is not None:
            address = array.__array_interface__["data"][0]
            for number, segment in self.by_number.copy().items():  # a finalizer may remove an entry meanwhile
                offset = address - segment.address
                if 0 <= offset < segment.nbytes:
                    return number, offset
        return 0, 0
