"""Collectives by slots in shared memory, in Python: for data on a device, and for reductions without a kernel in C.

Every rank writes its data to its slot, whole or piece by piece, and reads the slots of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers.device import DeviceArray, device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arrays import displacements, even_displacements
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program, get_piece_bytes
from mpicoll.engine.selection.catalogue import SLOT_BYTES

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena

_LINE = 64
"""Alignment in bytes of the parts that ranks write to, so that they share no cache line."""


def bind(arena: Arena, spec: CollectiveSpec) -> Program:
    """Return the program that carries out `spec`."""
    return _STAGED[spec.collective](arena, spec)


class _Pieces:
    """Partition of `count` elements into the pieces that go through slots, each of which has room for `parts` such
    pieces."""

    __slots__ = ("cuts", "width")

    def __init__(self, arena: Arena, spec: CollectiveSpec, count: int, parts: int = 1) -> None:
        itemsize = spec.dtype.itemsize
        room = min(SLOT_BYTES, spec.segment or get_piece_bytes(arena.size))
        self.width = max(1, room // parts // itemsize)
        line = max(1, _LINE // itemsize)
        if self.width > line:
            self.width -= self.width % line
        pieces = max(1, -(-count // self.width))
        if pieces == 1:
            self.width = max(1, count)
        self.cuts = [(min(i * self.width, count), min((i + 1) * self.width, count)) for i in range(pieces)]


def _view_as(memory: Array, spec: CollectiveSpec) -> Array:
    itemsize = spec.dtype.itemsize
    return memory[: memory.nbytes // itemsize * itemsize].view(spec.dtype)


def _get_slots(arena: Arena, spec: CollectiveSpec) -> tuple[list[Array], list[Array]]:
    even, odd = ([_view_as(slot, spec) for slot in slots] for slots in arena.slots)
    return even, odd


def _allreduce_flat(arena: Arena, spec: CollectiveSpec) -> Program:
    """Synchronise once, then reduce all vectors on every rank: n bytes written and n P read per rank."""
    (count,), fold = spec.counts, spec.fold
    assert fold is not None
    slots = [[slot[:count] for slot in both] for both in _get_slots(arena, spec)]
    own = [both[arena.rank] for both in slots]
    has_result = spec.collective == "allreduce" or arena.rank == spec.root

    def body(source: Array, target: Array) -> None:
        w = arena.parity
        np.copyto(own[w], source)
        arena.sync()
        if not has_result:
            return
        device = device_of(target)
        if device is None:
            fold(slots[w], target)
            return
        result = device.allocate_pinned(target.nbytes).view(target.dtype)
        fold(slots[w], result)
        np.copyto(target, result)
        device.synchronize()

    return body, 1


def get_share_offsets(count: int, size: int, itemsize: int) -> list[int]:
    """Return the offsets of each rank's share of a piece, aligned to cache lines."""
    line = max(1, _LINE // itemsize)
    lines = even_displacements(-(-count // line), size)
    return [min(count, at * line) for at in lines]


def _allreduce_pipelined(arena: Arena, spec: CollectiveSpec) -> Program:
    """In each step, write a piece, reduce this rank's share of the previous piece, and fetch the result of the piece
    before that. Per rank n(P-1)/P bytes written to slots, n read and n/P written in reducing, n copied out; one
    synchronisation a piece and one more."""
    (count,), fold, rank, size = spec.counts, spec.fold, arena.rank, arena.size
    assert fold is not None
    cuts = _Pieces(arena, spec, count).cuts
    slots = _get_slots(arena, spec)
    results = [_view_as(result, spec) for result in arena.results]
    has_result = spec.collective == "allreduce" or rank == spec.root
    shares = {stop - start: get_share_offsets(stop - start, size, spec.dtype.itemsize) for start, stop in cuts}

    def write(piece: tuple[int, int], source: Array) -> None:
        start, stop = piece
        low, high = shares[stop - start][rank : rank + 2]
        slot = slots[arena.parity][rank]
        if isinstance(source, DeviceArray):
            np.copyto(slot[: stop - start], source[start:stop])
            return
        # No other rank reads this rank's own share.
        slot[:low] = source[start : start + low]
        slot[high : stop - start] = source[start + high : stop]

    def reduce(piece: tuple[int, int], source: Array) -> None:
        start, stop = piece
        low, high = shares[stop - start][rank : rank + 2]
        parts = [slot[low:high] for slot in slots[1 - arena.parity]]
        if not isinstance(source, DeviceArray):
            parts[rank] = source[start + low : start + high]
        fold(parts, results[arena.parity][low:high])

    def fetch(piece: tuple[int, int], target: Array) -> None:
        start, stop = piece
        np.copyto(target[start:stop], results[1 - arena.parity][: stop - start])

    def body(source: Array, target: Array) -> None:
        last, on_device = len(cuts), isinstance(source, DeviceArray)
        for i in range(last + 2):
            # The oldest piece first: where target is source, that piece has been read by now.
            if i > 1 and has_result:
                fetch(cuts[i - 2], target)
            # A device copies while this rank reduces.
            for do, at in ((write, i), (reduce, i - 1)) if on_device else ((reduce, i - 1), (write, i)):
                if 0 <= at < last:
                    do(cuts[at], source)
            if i <= last:
                arena.sync()

    return body, len(cuts) + 1


def _reduce_scatter_pipelined(arena: Arena, spec: CollectiveSpec) -> Program:
    """In each step, write a piece of every block, and reduce the pieces of this rank's block of the previous step. Per
    rank n(P-1)/P bytes written to slots, and n read in reducing; one synchronisation a piece."""
    counts, fold, rank, size = spec.counts, spec.fold, arena.rank, arena.size
    assert fold is not None
    offsets = displacements(counts)
    pieces = _Pieces(arena, spec, max(counts), size)
    width, slots = pieces.width, _get_slots(arena, spec)

    def body(source: Array, target: Array) -> None:
        previous: tuple[int, int] | None = None
        device = device_of(source)
        reduced = None if device is None else device.allocate_pinned(width * spec.dtype.itemsize).view(spec.dtype)
        for piece in [*pieces.cuts, None]:
            if previous is not None:
                start, stop = previous[0], min(previous[1], counts[rank])
                if start < stop:
                    at = rank * width
                    parts = [slot[at : at + stop - start] for slot in slots[1 - arena.parity]]
                    if reduced is None:
                        parts[rank] = source[offsets[rank] + start : offsets[rank] + stop]
                        fold(parts, target[start:stop])
                    else:
                        fold(parts, reduced[: stop - start])
                        np.copyto(target[start:stop], reduced[: stop - start])
            if piece is not None:
                slot = slots[arena.parity][rank]
                for peer in range(size):
                    start, stop = piece[0], min(piece[1], counts[peer])
                    # No other rank reads the block for this rank.
                    if (peer != rank or device is not None) and start < stop:
                        at = peer * width
                        np.copyto(slot[at : at + stop - start], source[offsets[peer] + start : offsets[peer] + stop])
                arena.sync()
            previous = piece
        if device is not None:
            device.synchronize()

    return body, len(pieces.cuts)


class Move:
    """Transfer from the input of `peer` to this rank's output: `count` elements, from element `start` of the input to
    element `to` of the output."""

    __slots__ = ("count", "peer", "start", "to")

    def __init__(self, peer: int, start: int, to: int, count: int) -> None:
        self.peer = peer
        self.start = start
        self.to = to
        self.count = count


def make_moves(spec: CollectiveSpec, rank: int, size: int) -> list[Move]:
    """Return the transfers from all ranks to `rank`, including its own."""
    counts, offsets = spec.counts, displacements(spec.counts)
    if spec.collective == "bcast":
        return [Move(spec.root, 0, 0, counts[0])]
    if spec.collective == "allgather":
        return [Move(peer, 0, offsets[peer], counts[peer]) for peer in range(size)]
    if spec.collective == "gather":
        return [Move(peer, 0, offsets[peer], counts[peer]) for peer in range(size)] if rank == spec.root else []
    if spec.collective == "scatter":
        return [Move(spec.root, offsets[rank], 0, counts[rank])]
    assert spec.collective == "alltoall"
    return [Move(peer, offsets[rank], offsets[peer], counts[peer]) for peer in range(size)]


def _make_own_copy(moves: Sequence[Move], rank: int) -> Callable[[Any, Any], None]:
    """Return a function that copies a rank's own data to its output."""
    own = [move for move in moves if move.peer == rank and move.count]

    def copy(source: Array, target: Array) -> None:
        for move in own:
            there = source[move.start : move.start + move.count]
            here = target[move.to : move.to + move.count]
            if _address(there) != _address(here):
                np.copyto(here, there)

    return copy


def _move_pipelined(arena: Arena, spec: CollectiveSpec) -> Program:
    """In each step, write a piece of the data for other ranks, and copy the pieces that they wrote in the previous
    step. A rank that sends the same data to all ranks writes it once. One synchronisation a piece."""
    rank, size = arena.rank, arena.size
    moves_by_rank = [make_moves(spec, peer, size) for peer in range(size)]
    same = spec.collective in ("bcast", "allgather", "gather")
    pieces = _Pieces(arena, spec, max(spec.counts), 1 if same else size)
    width, slots = pieces.width, _get_slots(arena, spec)
    incoming = [move for move in moves_by_rank[rank] if move.peer != rank]
    outgoing = [
        (peer, move) for peer in range(size) for move in moves_by_rank[peer] if move.peer == rank and peer != rank
    ]
    if same:
        outgoing = outgoing[:1]
    copy_own = _make_own_copy(moves_by_rank[rank], rank)

    def body(source: Array, target: Array) -> None:
        previous: tuple[int, int] | None = None
        for piece in [*pieces.cuts, None]:
            if previous is not None:
                for move in incoming:
                    start, stop = previous[0], min(previous[1], move.count)
                    if start < stop:
                        at = 0 if same else rank * width
                        slot = slots[1 - arena.parity][move.peer]
                        np.copyto(target[move.to + start : move.to + stop], slot[at : at + stop - start])
            if piece is not None:
                slot = slots[arena.parity][rank]
                for peer, move in outgoing:
                    start, stop = piece[0], min(piece[1], move.count)
                    if start < stop:
                        at = 0 if same else peer * width
                        np.copyto(slot[at : at + stop - start], source[move.start + start : move.start + stop])
                arena.sync()
            previous = piece
        copy_own(source, target)

    return body, len(pieces.cuts)


def _bind_reduction(arena: Arena, spec: CollectiveSpec) -> Program:
    return (_allreduce_flat if spec.method == "shm_flat" else _allreduce_pipelined)(arena, spec)


_STAGED: dict[str, Callable[[Arena, CollectiveSpec], Program]] = {
    "allreduce": _bind_reduction,
    "reduce": _bind_reduction,
    "reduce_scatter": _reduce_scatter_pipelined,
    **dict.fromkeys(("bcast", "allgather", "gather", "scatter", "alltoall"), _move_pipelined),
}


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
