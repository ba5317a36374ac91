"""Collectives of neighbours in memory that the ranks of a node share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.proc_null import PROC_NULL
from mpicoll.engine.diagnostics.flight_recorder import COMPARED_BY_EXECUTOR, Call

if TYPE_CHECKING:
    from mpicoll._shm import NeighbourCollective
    from mpicoll.buffers.dtypes import Array

Box: TypeAlias = "tuple[int, int, tuple[int, ...], tuple[int, ...]]"
"""Bytes of an array: the offset of the first one, the number of contiguous ones, and the extents and strides of runs of
so many."""

Round: TypeAlias = "tuple[Sequence[tuple[int, Box]], Sequence[tuple[int, Box]]]"
"""The boxes that are sent to, and received from, each neighbour, which may be this rank or PROC_NULL. Of the messages
between two ranks, the first in the one list is the first in the other one of the other rank."""

_SIGN = 0x4E65_6967
"""Part of the signature, which differs from that of the same call without shared memory."""


def slice_box(begin: int, end: int) -> Box:
    """Return the box of the bytes from `begin` to `end`."""
    return begin, end - begin, (), ()


def find_box(part: Array, whole: Array) -> Box:
    """Return the box of `part`, a view of the C-contiguous array `whole`."""
    offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    run, extents, strides = part.itemsize, list[int](), list[int]()
    if not part.size:
        return 0, 0, (), ()
    for extent, stride in zip(reversed(part.shape), reversed(part.strides), strict=True):
        if extent == 1:
            continue
        if not extents and stride == run:
            run *= extent
        elif extents and stride == strides[0] * extents[0]:
            extents[0] *= extent
        else:
            extents.insert(0, extent)
            strides.insert(0, stride)
    return offset, run, tuple(extents), tuple(strides)


class SharedExchange:
    """The collective `call` of neighbours on C-contiguous arrays, by the extension. `in_place` states that messages are
    sent from the output, to which the input is copied first."""

    __slots__ = ("_carrier", "_comm", "_name", "_nbytes", "_rounds", "call", "in_place")

    def __init__(
        self,
        comm: CommunicatorCore,
        name: str,
        rounds: Iterable[Round],
        source_bytes: int,
        target_bytes: int,
        call: Call,
        *,
        in_place: bool,
    ) -> None:
        self._comm = comm
        self._name = name
        self._rounds = tuple((_list_messages(sends), _list_messages(recvs)) for sends, recvs in rounds)
        self._nbytes = source_bytes, target_bytes
        self.call = call
        self.in_place = in_place
        self._carrier: NeighbourCollective | None = None
        call.signature = COMPARED_BY_EXECUTOR

    def find_carrier(self) -> NeighbourCollective | None:
        """Return what carries out the collective, which compares the calls of the ranks; None if shared memory is not
        available. Called by operations."""
        arena = self._comm.arena()
        if arena is not None and self._carrier is None:
            from mpicoll._shm import NeighbourCollective  # there is an arena, so there is the extension

            signature = self.call.sign() ^ _SIGN or 1
            addresses, half = arena.share_message_memory(signature)
            self._carrier = NeighbourCollective(
                arena, self._name, signature, self.in_place, *self._nbytes, self._rounds, addresses, half
            )
        return self._carrier


def _list_messages(
    messages: Iterable[tuple[int, Box]],
) -> tuple[tuple[int, int, int, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((peer, *box) for peer, box in messages if peer is not PROC_NULL)


def may_share(comm: CommunicatorCore) -> bool:
    """Return True if neighbours exchange messages in shared memory; the same on all ranks."""
    # Large messages are read from the memory of their senders.
    return comm.no_shm_reason is None and comm.no_cma_reason is None and comm.shm_failed_reason is None
