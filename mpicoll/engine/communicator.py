"""Communicators: identity and lifetime of a group of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from mpicoll.engine.arena import Arena
from mpicoll.engine.model import UNTUNED, Table, shape_of, site
from mpicoll.engine.progress import Progress
from mpicoll.engine.watch import Watch
from mpicoll.errors import CommunicationError, CommunicatorError, RankError
from mpicoll.transport.base import Memory, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

_TAGS = 1 << 15
"""Tags of collectives wrap here: the smallest range that MPI guarantees."""


class Communicator:
    """A group of ranks that talk to each other, apart from all others.

    Made by :func:`mpicoll.world`, :meth:`split`, :meth:`group`, :meth:`node_comm`, or from an mpi4py communicator; it
    is always a private duplicate, so collectives never meet the caller's own messages. A context manager that frees it.

    Attributes: ``rank``, ``size``; ``nodes`` (for each rank the number of its node), ``node`` (this rank's),
    ``num_nodes``; ``local_rank`` and ``local_size`` (rank and size among the ranks of this node); ``mpi``, the mpi4py
    communicator on which this one's point-to-point messages travel (None without MPI).
    """

    def __init__(
        self, transport: Transport, watch: Watch | None, *, name: str, world: bool = True, table: Table = UNTUNED
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.nodes = transport.nodes
        self.name = name
        self.site = site(shape_of(transport.nodes), table)
        self.progress = Progress(name, watch, background=transport.background, explain=transport.explain)
        # Operations that were prepared once, by what tells them apart; those of torch among them.
        self.repeated: dict[tuple[Any, ...], Any] = {}
        # Whether the ranks have made memory that all of them reach.
        self.allocated = False
        self.watch = watch
        # Why no memory can be shared, or read directly, among all ranks; the same on all of them.
        self.unshared, self.unread = _apart(transport)
        # Why there was none after all when it was first used.
        self.lost: str | None = None
        self._arena: Arena | None = None
        self._levels: tuple[Communicator, Communicator] | None = None
        self._tags = itertools.count()
        self.freed = False
        self._is_world = world
        # A communicator that is dropped without being freed must not leave its worker behind.
        finalize(self, self.progress.stop).atexit = False

    def __repr__(self) -> str:
        return f"<mpicoll.Communicator {self.name}: rank {self.rank} of {self.size}{', freed' if self.freed else ''}>"

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        """How many nodes the ranks are on."""
        return len(set(self.nodes))

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self.nodes[: self.rank].count(self.node)

    @property
    def local_size(self) -> int:
        """How many ranks are on this node."""
        return self.nodes.count(self.node)

    @property
    def mpi(self) -> Any:
        """An mpi4py communicator of the same ranks; None without MPI.

        The messages of :func:`mpicoll.send` and its kin travel on it, so the caller's own receives from any source meet
        them there; collectives are apart from it."""
        self.check()
        return self.transport.mpi

    def check(self) -> None:
        """Raise CommunicatorError if it was freed."""
        if self.freed:
            raise CommunicatorError(f"{self!r} can't be used any more: it was freed")

    def next_tag(self) -> int:
        """The tag of the next collective; the same on all ranks, as all call the same collectives in the same order."""
        return next(self._tags) % _TAGS

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective over all ranks: one communicator for each `color` (an integer >= 0), its ranks ordered by `key`,
        then by rank. A rank that passes None gets None. Raises RankError for a negative color."""
        self.check()
        if color is not None and color < 0:
            raise RankError(f"split: color must be None or >= 0, got {color} on rank {self.rank}")
        return self._child(lambda: self.transport.split(color, key), f"{self.name}/split({color})")

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of `ranks`, in that order. Only they take part, with the same `ranks`; any other rank gets
        None at once. Raises RankError for ranks out of range or named twice."""
        self.check()
        ranks = [int(rank) for rank in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise RankError(
                f"group: ranks must be distinct, at least one, and in [0, {self.size}), got {ranks} on rank {self.rank}"
            )
        if self.rank not in ranks:
            return None
        return self._child(lambda: self.transport.group(ranks), f"{self.name}/group({','.join(map(str, ranks))})")

    def duplicate(self, tag: int = 0) -> Communicator:
        """Collective over all ranks: another communicator of the same ranks.

        It takes no turn among the collectives of this one. All ranks must make their duplicates of one `tag` (in
        [0, 32767]) in the same order; those of different tags may be under way at once."""
        self.check()
        what = (f"duplicating {self.name}", f"on rank {self.rank} of {self.size}")
        transport: Transport = self.progress.guarded(self.transport.duplicate, what, tag)
        return Communicator(transport, self.watch, name=f"{self.name}/duplicate", world=False, table=self.site.table)

    def arena(self) -> Arena | None:
        """Collective at first use, and to be called by operations: the shared memory of the ranks, if it can be had;
        otherwise ``unshared`` or, from now on, ``lost`` says why not."""
        if self._arena is None and self.unshared is None and self.lost is None:
            try:
                self._arena = Arena(self.transport)
            except CommunicationError as error:
                self.lost = str(error)
        return self._arena

    def levels(self) -> tuple[Communicator, Communicator]:
        """Collective at first use, and to be called by operations: private communicators of the ranks of this node, and
        of the ranks of equal local rank on all nodes, in the order of nodes."""
        if self._levels is None:
            node = self.transport.split(self.node, self.rank)
            lane = self.transport.split(self.local_rank, self.node)
            assert node is not None
            assert lane is not None
            name, table = self.name, self.site.table
            self._levels = (
                Communicator(node, self.watch, name=f"{name}/node", world=False, table=table),
                Communicator(lane, self.watch, name=f"{name}/lane", world=False, table=table),
            )
        return self._levels

    def allocate(self, nbytes: int) -> Memory:
        """Collective, to be called by operations: memory of `nbytes` that all ranks reach, if it can be had, for as
        long as an array lies in it. What was chosen for earlier calls is chosen anew."""
        arena = self.arena()
        if arena is None:
            return np.empty(nbytes, np.uint8)
        memory = arena.allocate(nbytes)[:nbytes]
        self._choose_anew()
        return memory

    def adopt(self, memory: Memory, fd: int) -> int:
        """Collective, to be called by operations where there is an arena: see :meth:`Arena.adopt`."""
        assert self._arena is not None
        number = self._arena.adopt(memory, fd)
        self._choose_anew()
        return number

    def forget(self, number: int) -> None:
        """Memory that was adopted is about to go."""
        if self._arena is not None:
            self._arena.forget(number)

    def _choose_anew(self) -> None:
        if not self.allocated:
            self.allocated = True
            self.repeated.clear()

    def node_comm(self) -> Communicator:
        """Collective over all ranks: the communicator of the ranks on this rank's node, in the order of rank."""
        comm = self.split(self.node)
        assert comm is not None
        return comm

    def _child(self, make: Callable[[], Transport | None], name: str) -> Communicator | None:
        # Making a communicator communicates, so it takes its turn among the collectives.
        transport: Transport | None = self.progress.run(make, (f"making {name}", f"on rank {self.rank} of {self.size}"))
        if transport is None:
            return None
        return Communicator(transport, self.watch, name=name, world=False, table=self.site.table)

    def free(self) -> None:
        """Collective: give the communicator back, after what is pending on it has completed. Freeing it twice does
        nothing.

        Raises CommunicatorError for the world, which lives as long as the process."""
        if self._is_world:
            raise CommunicatorError(f"{self!r} belongs to the library and can't be freed")
        self._release()

    def _release(self) -> None:
        if not self.freed:
            self.progress.close()
            self.freed = True
            self.repeated.clear()
            self._arena = None
            for level in self._levels or ():
                level.free()
            self._levels = None
            self.progress.run(self.transport.free, (f"freeing {self.name}", f"on rank {self.rank} of {self.size}"))

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for ranks that don't come.
        if kind is None:
            self.free()


def _apart(transport: Transport) -> tuple[str | None, str | None]:
    """Why the ranks of `transport` can't share memory, and why they can't read each other's."""
    if transport.size == 1:
        return ("there is a single rank",) * 2
    if len(set(transport.nodes)) > 1:
        return ("the ranks are on several nodes",) * 2
    return transport.unshared, transport.unread
