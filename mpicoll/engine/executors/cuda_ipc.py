"""Collectives of the ranks of one node on device memory that they access directly.

In an operation the ranks first exchange the locations of their buffers; then each rank works in the memory of the
others, which :mod:`mpicoll.engine.executors.peer_memory` opens; after a final synchronisation no rank accesses the
memory of the others any more.

:meth:`Arena.sync` waits for the device before it releases the other ranks: the data that they read has been written by
then. In the order of streams (:mod:`mpicoll.engine.executors.stream_order`) the host does not wait, and the streams of
the ranks do.

Operands are combined in the order of ranks, each element by one rank: results have the same bits on every rank and in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import Fold
from mpicoll.engine.core.arrays import displacements, do_nothing
from mpicoll.engine.executors.collective_spec import CollectiveSpec, Program
from mpicoll.engine.executors.peer_memory import NO_LOCATION, Location, PeerMemory
from mpicoll.engine.executors.slots import Move, get_share_offsets, make_moves
from mpicoll.errors import CommunicationError

if TYPE_CHECKING:
    from mpicoll.engine.core.arena import Arena
    from mpicoll.engine.executors.stream_order import StreamOrder

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "bcast", "allgather", "gather", "scatter", "alltoall")
"""Collectives that :func:`bind` supports."""

_SOURCE, _TARGET = 0, 1

_MAX_KNOWN = 64
"""Maximum number of pairs of addresses that a repeated collective remembers."""


def bind(
    arena: Arena,
    peers: PeerMemory,
    spec: CollectiveSpec,
    *,
    repeated: bool = False,
    order: StreamOrder | None = None,
) -> Program:
    """Return a function that carries out `spec` on device memory, by :meth:`Arena.run` inside of ``device.working``,
    each time that it is called. `repeated` states that it will be called often, on arrays without owners. With `order`,
    it is called by :meth:`StreamOrder.carry_out` instead, and returns when the work is submitted; there is none for
    functions of the caller.

    Processes take turns on a device, which takes hundreds of microseconds for each turn: on a device that several
    ranks share, the first of them does the work of all.

    For vectors of n bytes on P ranks with W devices, in traffic of device memory, with two synchronisations each:

    * allreduce: each working rank combines its share of all sources and writes it to all targets, in one device
      operation: nP/W read and nP/W written. An element is read and written by one rank alone, which reads it from all
      sources before it writes it to any target; so the targets may be the sources.
    * reduce: as allreduce, but to the root's target alone: nP/W read and n/W written.
    * reduce_scatter: each working rank combines the blocks of the ranks on its device: nP/W read and n/W written.
    * bcast, allgather, gather, scatter, alltoall: each working rank fetches the results of the ranks on its device: as
      much read as written.

    Reductions by an elementwise function of the caller need other methods where several ranks get the result: for
    allreduce each rank combines its share to its own target, and after one more synchronisation fetches the rest, 2n
    read and n written per rank, plus the traffic of the function itself. For reduce the root combines the whole vector.

    Memory that other processes can't open is copied to and from substitute memory: n more read and n more written.
    """
    collective = _PeerCollective(arena, peers, spec, repeated)
    if order is None:
        return collective.run, collective.steps
    return partial(collective.submit, order), collective.steps


class _PeerCollective:
    """Collective on device memory, as one rank carries it out."""

    def __init__(self, arena: Arena, peers: PeerMemory, spec: CollectiveSpec, repeated: bool) -> None:
        self._arena = arena
        self._peers = peers
        self._spec = spec
        self._repeated = repeated
        self._fused = None if spec.fold is None else spec.fold.fused
        rank, size, workers = arena.rank, arena.size, peers.workers
        # The ranks for which this one works
        self._clients = [one for one, worker in enumerate(workers) if worker == rank]
        # The elements that each rank combines, for itself or for all ranks that get the result
        self._shares = self._get_shares()
        moves: list[tuple[int, Move]] = []
        if spec.fold is None:
            moves = [(one, move) for one in self._clients for move in make_moves(spec, one, size)]
        elif spec.collective == "allreduce" and self._fused is None:
            shares = enumerate(self._shares)
            moves = [(rank, Move(peer, low, low, high - low)) for peer, (low, high) in shares if peer != rank]
        # The next rank first, so that not all ranks read from the same one.
        self._moves = sorted(
            ((one, move) for one, move in moves if move.count), key=lambda one: (one[1].peer - one[0]) % size
        )
        self.steps = 3 if spec.collective == "allreduce" and self._fused is None else 2
        self._exports_target = self._needs_target()
        # Of earlier calls, by the addresses of input and output: addresses with the numbers of their allocations, and
        # what the other ranks need to know.
        self._known: dict[tuple[int, int], tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = {}

    def _needs_target(self) -> bool:
        """Return True if other ranks write to this rank's output, or read it."""
        spec, rank = self._spec, self._arena.rank
        if spec.collective == "allreduce":
            return True
        if spec.fold is not None and self._fused is None:
            return False
        return rank == spec.root if spec.collective == "reduce" else self._peers.workers[rank] != rank

    def _get_shares(self) -> list[tuple[int, int]]:
        spec, workers, nothing = self._spec, self._peers.workers, (0, 0)
        ranks = range(self._arena.size)
        if spec.fold is None:
            return [nothing for _ in ranks]
        if spec.collective == "reduce_scatter":
            return list(pairwise(displacements(spec.counts)))
        if spec.collective == "reduce" and self._fused is None:
            return [(0, spec.counts[0]) if one == spec.root else nothing for one in ranks]
        working = sorted(set(workers))
        offsets = get_share_offsets(spec.counts[0], len(working), spec.dtype.itemsize)
        by_worker = dict(zip(working, pairwise(offsets), strict=True))
        return [by_worker.get(one, nothing) for one in ranks]

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
        exported, result, locations = self._find_exported(source, target)
        if exported is not source:
            peers.device.copy(exported, source)
        arena.post(*locations)
        arena.sync()
        # It is referenced until the work has completed.
        work = self._bind_work(exported, result)
        work()
        arena.sync()
        self._store(result, source, target)

    def submit(self, order: StreamOrder, source: Any, target: Any) -> None:
        """Submit the collective on this rank's flat input and output, in the order of streams."""
        arena, peers = self._arena, self._peers
        number = arena.last
        order.begin(number)
        others_may_submit = False
        try:
            exported, result, locations = self._find_exported(source, target)
            arena.post(*locations)
            arena.step()
            work = self._bind_work(exported, result)
            others_may_submit = True
            # After this step all ranks can do their work.
            arena.step()
            load = do_nothing if exported is source else partial(peers.device.copy, exported, source)
            store = do_nothing if result is target else partial(self._store, result, source, target)
            order.submit(number, load, work, store, (work, exported, result, peers.take_used()))
        except BaseException as error:
            peers.end()
            # If another rank could not do its work, no rank has submitted its own.
            if others_may_submit and (arena.unusable or not isinstance(error, CommunicationError)):
                order.fail(error)
            raise

    def _find_exported(self, source: Any, target: Any) -> tuple[Any, Any, tuple[int, ...]]:
        """Return what :meth:`_export` returns, from an earlier call on the same memory if it has not changed since."""
        if not self._repeated:
            return self._export(source, target)
        peers, known = self._peers, self._known
        key = 0 if source is None else source.address, 0 if target is None else target.address
        found = known.get(key)
        if found is not None and not peers.has_unpublished:
            allocations, locations = found
            for address, number in allocations:
                if not peers.is_published(address, number):
                    break
            else:
                return source, target, locations
        exported = own, result, locations = self._export(source, target)
        if not peers.has_unpublished and own is source and (result is target or result is source):
            if len(known) >= _MAX_KNOWN:
                known.clear()
            places = zip(key, locations[1::2], strict=True)
            known[key] = tuple(one for one in places if one[1] != NO_LOCATION[0]), locations
        return exported

    def _export(self, source: Any, target: Any) -> tuple[Any, Any, tuple[int, ...]]:
        """Return the memory that other ranks access for the input and the output, and what they need to know of it."""
        peers = self._peers
        exported, at = peers.export_buffer(_SOURCE, source)
        result, to = target, NO_LOCATION
        if self._exports_target and target is not None:
            # In place, both buffers have the same substitute.
            in_place = source is not None and (target.address, target.size) == (source.address, source.size)
            result, to = (exported, at) if in_place else peers.export_buffer(_TARGET, target)
        return exported, result, (peers.has_unpublished, *at, *to)

    def _store(self, result: Any, source: Any, target: Any) -> None:
        """Copy the result from its substitute, if it has one."""
        if self._exports_target and result is not target and result is not source:
            self._peers.device.copy(target, result)

    def _bind_work(self, source: Any, target: Any) -> Callable[[], None]:
        """Return the function that submits the work of this rank, after the ranks have posted their locations."""
        exchanged = self._arena.read_posted(5)
        for one in exchanged:
            if one[0]:
                self._peers.publish_exports()
                exchanged = [(0, *one[1:]) for one in exchanged]
                break
        if not self._repeated:
            return self._get_work(exchanged, source, target)
        addresses = 0 if source is None else source.address, 0 if target is None else target.address
        key = (self, *addresses, *exchanged)
        return self._peers.get_bound(key, lambda: self._get_work(exchanged, source, target))

    def _get_work(self, exchanged: list[tuple[int, ...]], source: Any, target: Any) -> Callable[[], None]:
        """Return the function that submits the work of this rank, after the ranks have exchanged where their memory
        is."""
        sources, targets = [one[1:3] for one in exchanged], [one[3:5] for one in exchanged]
        fold = self._spec.fold
        if fold is not None and self._fused is None:
            return partial(self._reduce, fold, sources, targets, source, target)
        bind = self._bind_moves if fold is None else self._bind_reduction
        return bind(sources, targets, source, target)

    def _bind_moves(
        self, sources: Sequence[Location], targets: Sequence[Location], source: Any, target: Any
    ) -> Callable[[], None]:
        """Return the function that fetches the results of the ranks for which this one works."""
        copies = []
        for one, move in self._moves:
            there = self._get_part(move.peer, sources, source, move.start, move.count)
            here = self._get_part(one, targets, target, move.to, move.count)
            if here.address != there.address:
                copies.append(self._peers.device.bind_copy(here, there))
        return partial(_call_each, copies)

    def _get_part(self, rank: int, places: Sequence[Location], own: Any, start: int, count: int) -> Any:
        """Return `count` elements, from `start` on, of the buffers of a rank, which lie at `places`."""
        if rank == self._arena.rank:
            return own[start : start + count]
        return self._peers.get_view(rank, places[rank], start, count, self._spec.dtype)

    def _bind_reduction(
        self, sources: Sequence[Location], targets: Sequence[Location], source: Any, target: Any
    ) -> Callable[[], None]:
        """Return the function that combines what this rank has to combine, each share by one piece of work."""
        assert self._fused is not None
        op, dtype = self._fused
        spec, rank = self._spec, self._arena.rank
        if spec.collective == "reduce_scatter":
            shares = [(*self._shares[one], 0, [one]) for one in self._clients]
        else:
            low, high = self._shares[rank]
            shares = [(low, high, low, [spec.root] if spec.collective == "reduce" else list(range(self._arena.size)))]
        folds = []
        for low, high, to, receivers in shares:
            if low < high:
                parts = [self._get_part(one, sources, source, low, high - low) for one in range(self._arena.size)]
                outs = [self._get_part(one, targets, target, to, high - low) for one in receivers]
                folds.append(self._peers.device.bind_fold(op, parts, outs, dtype))
        if len(folds) == 1:
            return folds[0]
        return partial(_call_each, folds)

    def _reduce(
        self, fold: Fold, sources: Sequence[Location], targets: Sequence[Location], source: Array, target: Any
    ) -> None:
        """Combine this rank's share by a function of the caller, and fetch the shares of the others."""
        low, high = self._shares[self._arena.rank]
        everywhere = self._spec.collective == "allreduce"
        if low < high:
            parts = [self._get_part(one, sources, source, low, high - low) for one in range(self._arena.size)]
            # Functions of the caller's libraries take no arrays of several devices.
            parts = [
                part if one == self._arena.rank else self._peers.copy_if_remote(one, sources[one], part)
                for one, part in enumerate(parts)
            ]
            fold(parts, target[low:high] if everywhere else target)
        if everywhere:
            self._arena.sync()
            for _, move in self._moves:
                there = self._get_part(move.peer, targets, target, move.start, move.count)
                self._peers.device.copy(target[move.to : move.to + move.count], there)


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for one in functions:
        one()
