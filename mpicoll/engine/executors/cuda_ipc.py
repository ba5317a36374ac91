"""Collectives of the ranks of one node on device memory that they access directly.

In an operation the ranks first exchange the locations of their buffers; then each rank works in the memory of the
others, which :mod:`mpicoll.engine.executors.peer_memory` opens; after a final synchronisation no rank accesses the
memory of the others any more.

:meth:`Arena.sync` waits for the device before it releases the other ranks: the data that they read has been written by
then.

Operands are combined in the order of ranks, each element by one rank: results have the same bits on every rank and in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.buffers.device import DeviceArray
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold
from mpicoll.engine.core.arrays import displacements, do_nothing
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program
from mpicoll.engine.executors.peer_memory import NO_LOCATION, Location, PeerMemory
from mpicoll.engine.executors.slots import Move, get_share_offsets, make_moves, make_own_copy

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "bcast", "allgather", "gather", "scatter", "alltoall")
"""Collectives that :func:`bind` supports."""

_SOURCE, _TARGET = 0, 1


def bind(arena: Arena, peers: PeerMemory, spec: CollectiveSpec, *, repeated: bool = False) -> Program:
    """Return a function that carries out `spec` on device memory, by :meth:`Arena.run` inside of ``device.working``,
    each time that it is called. `repeated` states that it will be called often, on arrays without owners.

    For vectors of n bytes on P ranks, in traffic of device memory, with two synchronisations each:

    * allreduce: each rank combines its share of all sources and writes it to all targets, in one device operation: n
      read and n written per rank. An element is read and written by one rank alone, which reads it from all sources
      before it writes it to any target; so the targets may be the sources.
    * reduce: as allreduce, but to the root's target alone: n read and n/P written per rank.
    * reduce_scatter: each rank combines its own block of all sources: n read and n/P written per rank.
    * bcast, allgather, gather, scatter, alltoall: each rank fetches its result: as much read as written.

    Reductions by an elementwise function of the caller need other methods where several ranks get the result: for
    allreduce each rank combines its share to its own target, and after one more synchronisation fetches the rest, 2n
    read and n written per rank, plus the traffic of the function itself. For reduce the root combines the whole vector.

    Memory that other processes can't open is copied to and from substitute memory: n more read and n more written.
    """
    collective = _PeerCollective(arena, peers, spec, repeated)
    return collective.run, collective.steps


class _PeerCollective:
    """Collective on device memory, as one rank carries it out."""

    def __init__(self, arena: Arena, peers: PeerMemory, spec: CollectiveSpec, repeated: bool) -> None:
        self._arena = arena
        self._peers = peers
        self._spec = spec
        self._repeated = repeated
        self._fused = None if spec.fold is None else spec.fold.fused
        rank, size = arena.rank, arena.size
        moves = make_moves(spec, rank, size) if spec.fold is None else []
        self._copy_own = make_own_copy(moves, rank)
        # The elements that this rank combines
        shares = get_share_offsets(spec.counts[0], size, spec.dtype.itemsize)
        self._share_range = shares[rank], shares[rank + 1]
        everywhere = spec.collective == "allreduce"
        if spec.collective == "reduce_scatter":
            ends = displacements(spec.counts)
            self._share_range = ends[rank], ends[rank + 1]
        elif self._fused is None and not everywhere:
            self._share_range = 0, spec.counts[0] if rank == spec.root else 0
        if everywhere and self._fused is None:
            moves = [Move(peer, low, low, shares[peer + 1] - low) for peer, low in enumerate(shares[:-1])]
        # The next rank first, so that not all ranks read from the same one.
        theirs = [one for one in moves if one.peer != rank and one.count]
        self._incoming_moves = sorted(theirs, key=lambda one: (one.peer - rank) % size)
        self.steps = 3 if everywhere and self._fused is None else 2
        # Other ranks write to the memory, or read it.
        self._exports_target = everywhere or (
            spec.collective == "reduce" and rank == spec.root and self._fused is not None
        )

    def run(self, source: Any, target: Any) -> None:
        """Carry out the collective on this rank's flat input and output."""
        try:
            self._run(source, target)
        except BaseException:
            # A failed rank ends the operation for the other ranks, which may free their memory then.
            self._peers.device.synchronize()
            raise
        finally:
            self._peers.end()

    def _run(self, source: Any, target: Any) -> None:
        arena, peers = self._arena, self._peers
        exported, at = peers.export_buffer(_SOURCE, source)
        if exported is not source:
            peers.device.copy(exported, source)
        result, to = target, NO_LOCATION
        if self._exports_target:
            # In place, both buffers have the same substitute.
            in_place = source is not None and target.address == source.address
            result, to = (exported, at) if in_place else peers.export_buffer(_TARGET, target)
        arena.post(peers.has_unpublished, *at, *to)
        arena.sync()
        exchanged = arena.read_posted(5)
        if any(news for news, *_ in exchanged):
            peers.publish_exports()
        # It is referenced until the work has completed.
        work = self._get_work(exchanged, exported, result)
        work()
        arena.sync()
        if self._exports_target and result is not target and result is not source:
            peers.device.copy(target, result)

    def _get_work(self, exchanged: list[tuple[int, ...]], source: Any, target: Any) -> Callable[[], None]:
        """Return the function that submits the work of this rank, after the ranks have exchanged where their memory
        is."""
        sources, targets = [one[1:3] for one in exchanged], [one[3:5] for one in exchanged]
        fold = self._spec.fold
        if fold is not None and self._fused is None:
            return partial(self._reduce, fold, sources, targets, source, target)
        bind = (
            partial(self._bind_moves, sources, source, target)
            if fold is None
            else partial(self._bind_reduction, sources, targets, source, target)
        )
        if not self._repeated:
            return bind()
        addresses = [0 if one is None else one.address for one in (source, target)]
        return self._peers.get_bound((self, *addresses, *sources, *targets), bind)

    def _bind_moves(self, places: Sequence[Location], source: Any, target: Any) -> Callable[[], None]:
        """Return the function that fetches this rank's result, and copies its own part of it."""
        copies = [
            self._peers.device.bind_copy(target[one.to : one.to + one.count], there)
            for one, there in self._get_incoming(places)
        ]
        own = partial(self._copy_own, source, target)
        return partial(_call_each, [*copies, own])

    def _get_incoming(self, places: Sequence[Location]) -> list[tuple[Move, DeviceArray]]:
        """Return the moves from other ranks, and their data there."""
        return [
            (one, self._peers.get_view(one.peer, places[one.peer], one.start, one.count, self._spec.dtype))
            for one in self._incoming_moves
        ]

    def _bind_reduction(
        self, sources: Sequence[Location], targets: Sequence[Location], source: Any, target: Any
    ) -> Callable[[], None]:
        """Return the function that combines this rank's share, where one piece of work does all."""
        low, high = self._share_range
        if low == high:
            return do_nothing
        assert self._fused is not None
        op, dtype = self._fused
        parts, outs = self._get_operands(sources, source), self._get_targets(targets, target)
        return self._peers.device.bind_fold(op, parts, outs, dtype)

    def _reduce(
        self, fold: Fold, sources: Sequence[Location], targets: Sequence[Location], source: Array, target: Any
    ) -> None:
        """Combine this rank's share by a function of the caller, and fetch the shares of the others."""
        low, high = self._share_range
        everywhere = self._spec.collective == "allreduce"
        if low < high:
            fold(self._get_operands(sources, source), target[low:high] if everywhere else target)
        if everywhere:
            self._arena.sync()
            for one, there in self._get_incoming(targets):
                self._peers.device.copy(target[one.to : one.to + one.count], there)

    def _get_operands(self, places: Sequence[Location], own: Array) -> list[Any]:
        """Return the elements of all ranks' inputs that this rank combines."""
        low, high = self._share_range
        parts: list[Any] = []
        for rank, place in enumerate(places):
            if rank == self._arena.rank:
                parts.append(own[low:high])
                continue
            part = self._peers.get_view(rank, place, low, high - low, self._spec.dtype)
            # Functions of the caller's libraries take no arrays of several devices.
            parts.append(self._peers.copy_if_remote(rank, place, part) if self._fused is None else part)
        return parts

    def _get_targets(self, places: Sequence[Location], own: Any) -> list[Any]:
        """Return the targets for the elements that this rank combines."""
        spec, rank = self._spec, self._arena.rank
        low, high = self._share_range
        if spec.collective == "reduce_scatter":
            return [own]
        receivers = [spec.root] if spec.collective == "reduce" else range(self._arena.size)
        return [
            own[low:high] if one == rank else self._peers.get_view(one, places[one], low, high - low, spec.dtype)
            for one in receivers
        ]


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for one in functions:
        one()
