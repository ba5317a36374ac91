"""Communicators, as users see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload
from weakref import finalize

import numpy as np

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicatorError, MismatchError, RankError
from mpicoll.extension import set_communicator_type
from mpicoll.transport.base import Transport

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicoll.engine.core.topology import CartesianTopology


_INT_END = 1 << 31
"""The first number that C's int does not hold, which MPI takes colors and keys as."""


class Communicator:
    """Group of ranks with a private communication context.

    Created by :func:`mpicoll.world`, :meth:`split`, :meth:`group`, :meth:`node_comm`, or from an mpi4py communicator;
    it is always a private duplicate, so collectives never match the caller's own messages. Usable as a context manager
    that frees it.

    Attributes:
        rank, size: This rank, and the number of ranks.
        nodes: For each rank the number of its node.
        node, num_nodes: The number of this rank's node, and the number of nodes.
        local_rank, local_size: Rank and size among the ranks of this node.
        mpi: The mpi4py communicator on which the point-to-point messages travel; None without MPI.

    Example:
        >>> def sum_of_half():
        ...     world = mpicoll.world()
        ...     with world.split(world.rank % 2) as half:
        ...         return mpicoll.allreduce(world.rank, comm=half)
        >>> mpicoll.run_local(sum_of_half, 4)
        [2, 4, 2, 4]
    """

    def __init__(self, core: CommunicatorCore, on_shrink: Callable[[Communicator], None] | None = None) -> None:
        self._core = core
        self._on_shrink = on_shrink
        # Read by the extension.
        self._calls = core.queue.calls
        self.rank = core.rank
        self.size = core.size
        self.nodes = core.nodes
        # Prepared operations refer to the communicator, which therefore would live until the next garbage collection.
        finalize(self, core.call_cache.clear).atexit = False

    __reduce_ex__ = refuse_pickling(
        "Communicator",
        "every process of the job makes its own: by mpicoll.world() and its split() or group(ranks), and by duplicate()"
        " for another one of the same ranks",
    )

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def name(self) -> str:
        """Name of the communicator in messages."""
        return self._core.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this communicator, as ranks of the MPI job."""
        return self._core.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, past which the job is ended with a report of each rank's position.
        Defaults to ``MPICOLL_TIMEOUT``; communicators derived from this one inherit the value."""
        return self._core.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self._core.node

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the ranks."""
        return self._core.num_nodes

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self._core.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._core.local_size

    @property
    def mpi(self) -> Any:
        """The mpi4py communicator of the same ranks; None without MPI.

        The messages of :func:`mpicoll.send` and related functions travel on it, so the caller's own receives from any
        source may match them; collectives are separate from it.
        """
        self._core.check()
        transport = self._core.transport
        if transport.traffic is not None:
            transport.traffic.uncounted = True
        return transport.mpi

    @overload
    def split(self, color: int, key: int = ...) -> Communicator: ...
    @overload
    def split(self, color: int | None, key: int = ...) -> Communicator | None: ...
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create one communicator for each `color` (an integer from 0 to 2**31 - 1), its ranks ordered by `key` (an
        integer of 32 bits), then by rank. Collective over all ranks. Return None on a rank that passes None as `color`.
        Raises RankError for any other color or key."""
        core = self._core
        core.check()
        if color is not None:
            color = self._check_split_number("color", color, 0)
        key = self._check_split_number("key", key, -_INT_END)
        # Creating a communicator communicates, so it is ordered with the collectives.
        part: Transport | None = core.queue.run(core.transport.split, Call("split"), color, key)
        return None if part is None else Communicator(core.derive(part, f"split({color})"))

    def _check_split_number(self, name: str, value: Any, least: int) -> int:
        """Return `value` as an integer that an ``int`` of C holds, from `least` on. Raises RankError for others."""
        try:
            number = index(value.item() if isinstance(value, np.generic) else value)  # numpy's bool is no integer
        except TypeError:
            number = None
        if number is None or not least <= number < _INT_END:
            allowed = f"an integer in [{least}, 2**31)" + (" or None" if name == "color" else "")
            raise RankError(f"split: {name} must be {allowed}, got {value!r} on rank {self.rank}")
        return number

    def cart(self, dims: int | Sequence[int], periods: bool | Sequence[bool] = False) -> CartesianCommunicator | None:
        """Create a communicator whose ranks form a grid, in the order of rank: the last coordinate changes fastest.
        Collective over all ranks, which pass the same arguments. Return None on the ranks beyond the grid.

        `dims` are the extents of the grid, of which each 0 is replaced as :func:`mpicoll.dims_create` does, or the
        number of its dimensions. `periods` states for each dimension, or for all, if the last rank and the first one
        are neighbours. Raises ArgumentError for invalid arguments, and for a grid that has more ranks than this
        communicator.
        """
        from mpicoll.engine.core.topology import CartesianTopology, check_cart

        core = self._core
        core.check()
        extents, periodic = check_cart("cart", self.size, dims, periods)
        count = prod(extents)
        name = f"cart({list(extents)}, periods={list(periodic)})"
        color = 0 if self.rank < count else None
        part: Transport | None = core.queue.run(core.transport.split, Call(name), color, self.rank)
        if part is None:
            return None
        return CartesianCommunicator(core.derive(part, name, topology=CartesianTopology(extents, periodic, part.rank)))

    def graph(self, sources: Sequence[int], destinations: Sequence[int]) -> GraphCommunicator:
        """Create a communicator of the same ranks with the neighbours that each rank passes. Collective over all ranks.

        This rank receives from `sources` and sends to `destinations`, which are ranks of this communicator; a rank may
        occur several times, and may be this rank itself. Each edge must be passed by both of its ranks. Raises
        RankError for a rank that is out of range, before any message; MismatchError on all ranks for an edge that one
        of its ranks has not passed.
        """
        from mpicoll.engine.core.topology import Topology, check_neighbours

        core = self._core
        core.check()
        given = check_neighbours("graph", "sources", sources, self.size)
        targets = check_neighbours("graph", "destinations", destinations, self.size)
        part: Transport = core.queue.run(_connect, Call("graph"), core.transport, given, targets)
        return GraphCommunicator(core.derive(part, "graph", topology=Topology(given, targets, range(len(given)))))

    def node_comm(self) -> Communicator:
        """Create the communicator of the ranks on this rank's node, in the order of rank. Collective over all ranks."""
        comm = self.split(self.node)
        assert comm is not None
        return comm

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a communicator of `ranks`, in that order. Collective over `ranks` only, all of which pass the same
        `ranks`; return None immediately on any other rank. Raises RankError for ranks out of range or named twice."""
        core = self._core
        core.check()
        ranks = [int(rank) for rank in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise RankError(
                f"group: ranks must be distinct, at least one, and in [0, {self.size}), got {ranks} on rank {self.rank}"
            )
        if self.rank not in ranks:
            return None
        name = f"group({','.join(map(str, ranks))})"
        call = Call(name, collective=False)
        part: Transport = core.queue.run_after_pending(lambda: core.transport.group(ranks), call, ranks)
        return Communicator(core.derive(part, name))

    def duplicate(self, tag: int = 0) -> Self:
        """Create another communicator of the same ranks and neighbours. Collective over all ranks.

        The call is not ordered with the collectives of this communicator. All ranks must create their duplicates of one
        `tag` (in [0, 32767]) in the same order; duplicates of different tags may be in progress concurrently.
        """
        core = self._core
        core.check()
        call = Call(f"duplicate(tag={tag})", collective=False)
        transport: Transport = core.queue.run_unqueued(lambda: core.transport.duplicate(tag), call)
        return type(self)(core.derive(transport, "duplicate", topology=core.topology))

    def shrink(self) -> Communicator:
        """Create a communicator of the surviving ranks, in the same order, after other ranks have died. Collective over
        the surviving ranks.

        All surviving ranks must call it, after RankFailed or without one: a rank that still waits on this communicator,
        or on one derived from it (by ``split``, ``group``, ``node_comm``), gets RankFailed there. None of these
        communicators can be used afterwards; they are freed, without a message. If this communicator is the one that
        :func:`mpicoll.world` returns, ``world`` returns the new one from now on; in :func:`mpicoll.run_local` call
        ``shrink`` on the rank's own thread.

        Further ranks may die meanwhile: they belong to the new communicator or not, alike on all ranks; if they do, its
        operations raise RankFailed. The call takes some milliseconds once all ranks have entered it; until then it
        waits, for at most ``timeout``. Raises CommunicatorError in a job that ends with its first failed rank: ``mpirun
        --with-ft ulfm`` starts a job that does not.
        """
        core = self._core
        core.check()

        def shrink() -> Transport:
            core.transport.revoke()
            # Pending operations fail because of the revocation.
            core.queue.close()
            return core.transport.shrink()

        transport: Transport = core.queue.run_unqueued(shrink, Call("shrink", collective=False))
        survivors = Communicator(core.derive(transport, "shrunk", world=core.is_world), self._on_shrink)
        core.free_locally()
        if self._on_shrink is not None:
            self._on_shrink(survivors)
        return survivors

    def failed(self) -> bool:
        """Return True if a rank is known to have died, or the communicator was revoked because of a death. Where ranks
        can survive a death, it takes a second to return False. Sends no message."""
        self._core.check()
        return self._core.transport.detect_failure()

    def agree(self, flag: bool) -> bool:
        """Return True if all surviving ranks pass True. Collective over the surviving ranks. The result is the same on
        all of them, regardless of which ranks have died, also after RankFailed; so it can decide whether to
        :meth:`shrink`."""
        core = self._core
        core.check()
        call = Call("agree", collective=False)
        return bool(core.queue.run_after_pending(lambda: core.transport.agree(bool(flag)), call))

    def free(self) -> None:
        """Free the communicator after its pending operations have completed. Collective. Freeing it twice has no
        effect.

        Raises CommunicatorError for the world, which lives as long as the process; MismatchError if the ranks have
        called different collectives, and this was not found before.
        """
        if self._core.is_world:
            raise CommunicatorError(f"{self!r} belongs to the library and can't be freed")
        self._core.free()

    def __enter__(self) -> Self:
        self._core.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for ranks that never enter it.
        if kind is None:
            self.free()


class CartesianCommunicator(Communicator):
    """Communicator whose ranks form a grid, created by :meth:`Communicator.cart` and :meth:`sub`.

    Example:
        >>> def describe():
        ...     grid = mpicoll.world().cart([2, 2], periods=[False, True])
        ...     return grid.coords, grid.shift(0), grid.shift(1)
        >>> mpicoll.run_local(describe, 4)[1]
        ((0, 1), (mpicoll.PROC_NULL, 3), (0, 0))
    """

    @property
    def _grid(self) -> CartesianTopology:
        topology: Any = self._core.topology
        return topology  # type: ignore[no-any-return]

    @property
    def dims(self) -> tuple[int, ...]:
        """The extents of the grid."""
        return self._grid.dims

    @property
    def periods(self) -> tuple[bool, ...]:
        """For each dimension True if its last rank and its first one are neighbours."""
        return self._grid.periods

    @property
    def coords(self) -> tuple[int, ...]:
        """The coordinates of this rank."""
        return self._grid.coords

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`. Raises RankError if it is out of range."""
        if not 0 <= rank < self.size:
            raise RankError(f"coords_of: rank must be in [0, {self.size}), got {rank} on rank {self.rank}")
        return self._grid.find_coords(rank)

    def rank_of(self, coords: Sequence[int]) -> int:
        """Return the rank at `coords`; PROC_NULL beyond a border. In a periodic dimension all integers are valid.
        Raises ArgumentError unless there is one integer for each dimension."""
        from mpicoll.engine.core.topology import check_coords

        return self._grid.find_rank(check_coords("rank_of", coords, self.dims))

    def shift(self, dimension: int, displacement: int = 1) -> tuple[int, int]:
        """Return the ranks ``(source, dest)`` from which this rank receives and to which it sends if all ranks send by
        `displacement` along a dimension; PROC_NULL for a rank beyond a border. Raises ArgumentError for a dimension
        that does not exist."""
        from mpicoll.engine.core.topology import check_shift

        return self._grid.shift(*check_shift("shift", dimension, displacement, self.dims))

    def sub(self, remain: bool | Sequence[bool]) -> CartesianCommunicator:
        """Create a communicator for each part of the grid that has the dimensions for which `remain` is True, such as
        each row. Collective over all ranks, which pass the same `remain`. Raises ArgumentError unless it is one bool
        for each dimension."""
        from mpicoll.engine.core.topology import CartesianTopology, check_flags

        core, grid = self._core, self._grid
        core.check()
        kept = check_flags("sub", "remain", remain, len(grid.dims))
        dims = [extent for extent, keep in zip(grid.dims, kept, strict=True) if keep]
        periods = [periodic for periodic, keep in zip(grid.periods, kept, strict=True) if keep]
        first = [0 if keep else at for at, keep in zip(grid.coords, kept, strict=True)]
        name = f"sub({list(kept)})"
        part: Transport = core.queue.run(core.transport.split, Call(name), grid.find_rank(first), self.rank)
        return CartesianCommunicator(core.derive(part, name, topology=CartesianTopology(dims, periods, part.rank)))


class GraphCommunicator(Communicator):
    """Communicator with neighbours that each rank has passed, created by :meth:`Communicator.graph`.

    Example:
        >>> mpicoll.world().graph(sources=[0], destinations=[0]).sources  # on one rank
        (0,)
    """

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks from which this rank receives."""
        assert self._core.topology is not None
        return self._core.topology.sources

    @property
    def destinations(self) -> tuple[int, ...]:
        """The ranks to which this rank sends."""
        assert self._core.topology is not None
        return self._core.topology.destinations


def _connect(transport: Transport, sources: Sequence[int], destinations: Sequence[int]) -> Transport:
    """Return a transport of the same ranks. Raises MismatchError on all ranks if two of them disagree about an edge.
    Collective."""
    import json

    from mpicoll.engine.core.topology import find_unmatched_edge

    lists = [json.loads(text) for text in transport.allgather_text(json.dumps([sources, destinations]))]
    unmatched = find_unmatched_edge(lists)
    if unmatched is not None:
        raise MismatchError(f"graph: {unmatched} (rank {transport.rank} of {transport.size})", (), ("neighbours",))
    part = transport.split(0, transport.rank)
    assert part is not None
    return part


set_communicator_type(Communicator)


def core_of(comm: Communicator) -> CommunicatorCore:
    """Return the resources of `comm`, for code of this package."""
    return comm._core  # noqa: SLF001  hidden from users only
