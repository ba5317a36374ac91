"""Communicators: identity and lifetime of a group of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

import numpy as np

from mpicoll.engine.checks import call_check, message_check
from mpicoll.engine.core.arena import Arena
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.core.queue import Progress, unmatched
from mpicoll.engine.diagnostics.flight_recorder import WITHIN, Call, Group
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.diagnostics.watchdog import Watch
from mpicoll.engine.selection.layout import layout_of
from mpicoll.engine.selection.query import UNTUNED, TunedTable, selection_context
from mpicoll.errors import ArgumentError, CommunicationError, CommunicatorError, RankError, RankFailed, Timeout
from mpicoll.transport.base import Memory, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicoll.engine.executors.device import Devices

T = TypeVar("T")

_TAGS = 1 << 15
"""Number of tags of collectives, which wrap at the smallest range that MPI guarantees."""


_SHARING = Position("the making of shared memory")
_SPLITTING = Position("the making of communicators for the nodes")


class Communicator:
    """Group of ranks with a private communication context.

    Created by :func:`mpicoll.world`, :meth:`split`, :meth:`group`, :meth:`node_comm`, or from an mpi4py communicator;
    it is always a private duplicate, so collectives never match the caller's own messages. Usable as a context manager
    that frees it.

    Attributes: ``rank``, ``size``; ``nodes`` (for each rank the number of its node), ``node`` (this rank's),
    ``num_nodes``; ``local_rank`` and ``local_size`` (rank and size among the ranks of this node); ``mpi``, the mpi4py
    communicator on which this one's point-to-point messages travel (None without MPI).
    """

    def __init__(
        self,
        transport: Transport,
        watch: Watch | None,
        *,
        name: str,
        world: bool = True,
        table: TunedTable = UNTUNED,
        parent: Communicator | None = None,
        checks: call_check.Options | None = None,
        family: call_check.Family | None = None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.nodes = transport.nodes
        self.context = selection_context(layout_of(transport.nodes), table)
        timeout = transport.timeout if parent is None else parent.timeout
        transport.timeout = timeout
        group = Group(transport.key, name, transport.members, transport.rank, timeout, transport.traffic)
        self.progress = Progress(group, watch, background=transport.background, explain=transport.explain)
        # Prepared operations by their keys, including those of torch.
        self.repeated: dict[tuple[Any, ...], Any] = {}
        # True if the ranks have allocated or adopted shared memory.
        self.allocated = False
        self.watch = watch
        # Reasons why memory can't be shared, or read directly, among all ranks; the same on all ranks.
        self.unshared, self.unread = _apart(transport)
        # Reason why the first use of shared memory failed.
        self.lost: str | None = None
        self._arena: Arena | None = None
        # Device memory capabilities of the ranks, set by the first operation on device memory.
        self.devices: Devices | None = None
        self._levels: tuple[Communicator, Communicator] | None = None
        self._tags = itertools.count()
        self.freed = False
        self._is_world = world
        # Called with the communicator that replaces this one.
        self.replaced: Callable[[Communicator], None] | None = None
        # The communicator on behalf of which this one runs operations, if it is one of its levels.
        self.outer: Communicator | None = None
        # The checks that the environment requests, and the checks in effect.
        if parent is not None:
            checks, family = parent.asked, parent.family
        self.asked: call_check.Options = call_check.Options() if checks is None else checks
        self.checks = self.asked
        if self.unshared is None:
            self.progress.match = self._match_first
        elif self.size > 1:
            self.progress.match = self._match_between()
        self.family: call_check.Family = call_check.family if family is None else family
        self.family.add(self)
        # A communicator that is dropped without being freed must not leave its worker behind.
        finalize(self, self.progress.dropped).atexit = False

    __reduce_ex__ = refuse_pickling(
        "Communicator",
        "every process of the job makes its own: by mpicoll.world() and its split() or group(ranks), and by duplicate()"
        " for another one of the same ranks",
    )

    def __repr__(self) -> str:
        return f"<mpicoll.Communicator {self.name}: rank {self.rank} of {self.size}{', freed' if self.freed else ''}>"

    @property
    def name(self) -> str:
        """Name of the communicator in messages."""
        return self.progress.group.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this communicator, as ranks of the MPI job."""
        return self.progress.group.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, past which the job is ended with a report of each rank's position.
        Defaults to ``MPICOLL_TIMEOUT``; communicators derived from this one inherit the value."""
        return self.progress.group.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if not 0 < seconds < float("inf"):
            raise ArgumentError(f"timeout of {self!r} must be a positive number of seconds, got {seconds!r}")
        self.progress.group.timeout = self.transport.timeout = float(seconds)
        for level in self._levels or ():
            level.timeout = seconds

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.nodes[self.rank]

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the ranks."""
        return len(set(self.nodes))

    @property
    def local_rank(self) -> int:
        """This rank's number among those of its node."""
        return self.nodes[: self.rank].count(self.node)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.nodes.count(self.node)

    @property
    def mpi(self) -> Any:
        """The mpi4py communicator of the same ranks; None without MPI.

        The messages of :func:`mpicoll.send` and related functions travel on it, so the caller's own receives from any
        source may match them; collectives are separate from it.
        """
        self.check()
        if self.transport.traffic is not None:
            self.transport.traffic.uncounted = True
        return self.transport.mpi

    def check(self) -> None:
        """Raise CommunicatorError if the communicator was freed."""
        if self.freed:
            raise CommunicatorError(f"{self!r} can't be used any more: it was freed")

    def next_tag(self) -> int:
        """Return the tag of the next collective. It is the same on all ranks, because all ranks call the same
        collectives in the same order."""
        return next(self._tags) % _TAGS

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Create one communicator for each `color` (an integer >= 0), its ranks ordered by `key`, then by rank.
        Collective over all ranks. Return None on a rank that passes None as `color`. Raises RankError for a negative
        color."""
        self.check()
        if color is not None and color < 0:
            raise RankError(f"split: color must be None or >= 0, got {color} on rank {self.rank}")
        # Creating a communicator communicates, so it is ordered with the collectives.
        made: Transport | None = self.progress.run(self.transport.split, Call("split"), color, key)
        return None if made is None else self._made(made, f"split({color})")

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a communicator of `ranks`, in that order. Collective over `ranks` only, all of which pass the same
        `ranks`; return None immediately on any other rank. Raises RankError for ranks out of range or named twice."""
        self.check()
        ranks = [int(rank) for rank in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise RankError(
                f"group: ranks must be distinct, at least one, and in [0, {self.size}), got {ranks} on rank {self.rank}"
            )
        if self.rank not in ranks:
            return None
        name = f"group({','.join(map(str, ranks))})"
        call = Call(name, collective=False)
        made: Transport = self.progress.aside(lambda: self.transport.group(ranks), call, ranks)
        return self._made(made, name)

    def duplicate(self, tag: int = 0) -> Communicator:
        """Create another communicator of the same ranks. Collective over all ranks.

        The call is not ordered with the collectives of this communicator. All ranks must create their duplicates of one
        `tag` (in [0, 32767]) in the same order; duplicates of different tags may be in progress concurrently.
        """
        self.check()
        call = Call(f"duplicate(tag={tag})", collective=False)
        transport: Transport = self.progress.meet(lambda: self.transport.duplicate(tag), call)
        return self._made(transport, "duplicate")

    @property
    def has_arena(self) -> bool:
        """True if :meth:`arena` has created the shared memory."""
        return self._arena is not None and self._arena.furnished

    def arena(self) -> Arena | None:
        """Return the shared memory of the ranks, or None if it is not available; then ``unshared`` or, from this call
        on, ``lost`` holds the reason. Collective at first use; called by operations."""
        arena = self._flags()
        if arena is None or self.lost is not None:
            return None
        if not arena.furnished:
            self._match_at_once()
            return self._share(arena.furnish)
        return arena

    def _flags(self) -> Arena | None:
        """Return the arena, which may have only its flags, or None if shared memory is not available. Collective at
        first use."""
        if self._arena is None and self.unshared is None and self.lost is None:
            self._arena = self._share(
                lambda: Arena(
                    self.transport,
                    self._described,
                    self._judged,
                    self._check_wait,
                    self.progress.executing,
                    self._judge_rows,
                )
            )
        return self._arena

    def _share(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, or None if there is no shared memory; ``lost`` holds the reason. Collective."""
        executing = self.progress.executing
        outer, executing.executor = executing.executor, _SHARING
        try:
            return make()
        except (RankFailed, Timeout):
            raise  # not all ranks have taken part
        except CommunicationError as error:
            self.lost = str(error)
            return None
        finally:
            executing.executor = outer

    def _match_first(self, call: Call) -> None:
        """Begin the first collective, which all ranks have to enter, regardless of the operation that they call."""
        flags = self._flags()
        self.progress.match = self._match_between() if flags is None else flags.matcher()
        self.progress.match(call)

    def _match_between(self) -> Callable[[Call], None]:
        """Return the function that begins a collective where there is no shared memory."""
        if not self.asked.between:
            return unmatched
        return call_check.Between(self.transport, self.progress, self.watch).match

    def _match_at_once(self) -> None:
        """Compare the running collective now, if it would be compared in shared memory that is not allocated yet."""
        call = None if self.progress.current is None else self.progress.current[2]
        if call is not None and call.signature == WITHIN:
            call.signature = call.sign()
            try:
                self.progress.match(call)
            finally:
                call.signature = WITHIN

    def _described(self) -> str:
        """Return a description of the running collective, for ranks that have called a different one."""
        return call_check.brief((self.outer or self).progress.current)

    def _check_wait(self) -> None:
        """Raise CommunicationError if the running collective can never complete."""
        if self.watch is not None:
            self.watch.check((self.outer or self).progress.current)

    def _judge_rows(self) -> Exception:
        """Return the error for blocks that differ from what their receivers expect. Collective."""
        current = (self.outer or self).progress.current
        return call_check.rows_error(self.transport, self.progress.executing, self.watch, current)

    def _judged(self, texts: list[str]) -> Exception | None:
        return call_check.from_texts(self.progress.group, texts)

    def levels(self) -> tuple[Communicator, Communicator]:
        """Return private communicators of the ranks of this node, and of the ranks of equal local rank on all nodes, in
        the order of nodes. Collective at first use; called by operations."""
        if self._levels is None:
            executing = self.progress.executing
            outer, executing.executor = executing.executor, _SPLITTING
            try:
                node = self.transport.split(self.node, self.rank)
                lane = self.transport.split(self.local_rank, self.node)
            finally:
                executing.executor = outer
            assert node is not None
            assert lane is not None
            self._levels = self._made(node, "node"), self._made(lane, "lane")
            for level in self._levels:
                level.outer = self
        return self._levels

    def allocate(self, nbytes: int) -> Memory:
        """Return memory of `nbytes` that all ranks can access, if shared memory is available, otherwise private memory.
        Collective; called by operations. Shared memory lasts as long as an array that views it. The first allocation
        discards the choices of algorithms that were cached for earlier calls."""
        arena = self.arena()
        if arena is None:
            return np.empty(nbytes, np.uint8)
        memory = arena.allocate(nbytes)[:nbytes]
        self._choose_anew()
        return memory

    def adopt(self, memory: Memory, fd: int) -> int:
        """Give all ranks access to `memory`; see :meth:`Arena.adopt`. Collective; called by operations where there is
        an arena."""
        assert self._arena is not None
        number = self._arena.adopt(memory, fd)
        self._choose_anew()
        return number

    def forget(self, number: int) -> None:
        """Unregister adopted memory before it is released."""
        if self._arena is not None:
            self._arena.forget(number)

    def _choose_anew(self) -> None:
        if not self.allocated:
            self.allocated = True
            self.repeated.clear()

    def node_comm(self) -> Communicator:
        """Create the communicator of the ranks on this rank's node, in the order of rank. Collective over all ranks."""
        comm = self.split(self.node)
        assert comm is not None
        return comm

    def _made(self, transport: Transport, name: str) -> Communicator:
        """Return the communicator on a transport that was derived from this communicator's transport."""
        return Communicator(
            transport, self.watch, name=f"{self.name}/{name}", world=False, table=self.context.table, parent=self
        )

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
        self.check()

        def shrink() -> Transport:
            self.transport.revoke()
            # Pending operations fail because of the revocation.
            self.progress.close()
            return self.transport.shrink()

        transport: Transport = self.progress.meet(shrink, Call("shrink", collective=False))
        made = Communicator(
            transport,
            self.watch,
            name=f"{self.name}/shrunk",
            world=self._is_world,
            table=self.context.table,
            parent=self,
        )
        made.replaced = self.replaced
        self.let_go()
        if self.replaced is not None:
            self.replaced(made)
        return made

    def failed(self) -> bool:
        """Return True if a rank is known to have died, or the communicator was revoked because of a death. Where ranks
        can survive a death, it takes a second to return False. Sends no message."""
        self.check()
        return self.transport.failed_already()

    def let_go(self) -> None:
        """Free a revoked communicator, without a message."""
        self.progress.close()
        self.progress.retire()
        self.freed = True
        self._forget()
        for level in self._levels or ():
            level.let_go()
        self._levels = None

    def _forget(self) -> None:
        """Release the resources other than those of MPI."""
        self.repeated.clear()
        self._arena = None
        if self.devices is not None:
            self.devices.free()
            self.devices = None

    def agree(self, flag: bool) -> bool:
        """Return True if all surviving ranks pass True. Collective over the surviving ranks. The result is the same on
        all of them, regardless of which ranks have died, also after RankFailed; so it can decide whether to
        :meth:`shrink`."""
        self.check()
        call = Call("agree", collective=False)
        return bool(self.progress.aside(lambda: self.transport.agree(bool(flag)), call))

    def free(self) -> None:
        """Free the communicator after its pending operations have completed. Collective. Freeing it twice has no
        effect.

        Raises CommunicatorError for the world, which lives as long as the process.
        """
        if self._is_world:
            raise CommunicatorError(f"{self!r} belongs to the library and can't be freed")
        self._release()

    def _release(self) -> None:
        if not self.freed:
            self.progress.close()
            self.freed = True
            # A communicator that was abandoned, or whose ranks have died, can be freed as well.
            self.progress.match = unmatched
            self._forget()
            for level in self._levels or ():
                level.free()
            self._levels = None
            message_check.warn([self])
            self.progress.run(self.transport.free, Call("free"))
            self.progress.retire()

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for ranks that never enter it.
        if kind is None:
            self.free()


def _apart(transport: Transport) -> tuple[str | None, str | None]:
    """Return the reasons why the ranks of `transport` can't share memory, and can't read each other's memory; None
    where they can."""
    if transport.size == 1:
        return ("there is a single rank",) * 2
    if len(set(transport.nodes)) > 1:
        return ("the ranks are on several nodes",) * 2
    return transport.unshared, transport.unread
