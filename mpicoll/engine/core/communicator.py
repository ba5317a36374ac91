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
"""Tags of collectives wrap here: the smallest range that MPI guarantees."""


_SHARING = Position("the making of shared memory")
_SPLITTING = Position("the making of communicators for the nodes")


class Communicator:
    """A group of ranks that talk to each other, apart from all others.

    Made by :func:`mpicoll.world`, :meth:`split`, :meth:`group`, :meth:`node_comm`, or from an mpi4py communicator; it
    is always a private duplicate, so collectives never meet the caller's own messages. A context manager that frees it.

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
        # What the ranks can do with device memory, once an operation had some.
        self.devices: Devices | None = None
        self._levels: tuple[Communicator, Communicator] | None = None
        self._tags = itertools.count()
        self.freed = False
        self._is_world = world
        # Who has to know when another one takes its place.
        self.replaced: Callable[[Communicator], None] | None = None
        # For whom its operations are carried out, if it is part of another one.
        self.outer: Communicator | None = None
        # What the environment asks to be checked, and what is checked.
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
        """What it is called in messages."""
        return self.progress.group.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks, as ranks of the MPI job."""
        return self.progress.group.members

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take, past which the job is ended with a report of where each rank stands.
        ``MPICOLL_TIMEOUT`` unless it is set; communicators made of this one begin with the same."""
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
        if self.transport.traffic is not None:
            self.transport.traffic.uncounted = True
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
        # Making a communicator communicates, so it takes its turn among the collectives.
        made: Transport | None = self.progress.run(self.transport.split, Call("split"), color, key)
        return None if made is None else self._made(made, f"split({color})")

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
        name = f"group({','.join(map(str, ranks))})"
        call = Call(name, collective=False)
        made: Transport = self.progress.aside(lambda: self.transport.group(ranks), call, ranks)
        return self._made(made, name)

    def duplicate(self, tag: int = 0) -> Communicator:
        """Collective over all ranks: another communicator of the same ranks.

        It takes no turn among the collectives of this one. All ranks must make their duplicates of one `tag` (in
        [0, 32767]) in the same order; those of different tags may be under way at once."""
        self.check()
        call = Call(f"duplicate(tag={tag})", collective=False)
        transport: Transport = self.progress.meet(lambda: self.transport.duplicate(tag), call)
        return self._made(transport, "duplicate")

    @property
    def has_arena(self) -> bool:
        """Whether :meth:`arena` was made."""
        return self._arena is not None and self._arena.furnished

    def arena(self) -> Arena | None:
        """Collective at first use, and to be called by operations: the shared memory of the ranks, if it can be had;
        otherwise ``unshared`` or, from now on, ``lost`` says why not."""
        arena = self._flags()
        if arena is None or self.lost is not None:
            return None
        if not arena.furnished:
            self._match_at_once()
            return self._share(arena.furnish)
        return arena

    def _flags(self) -> Arena | None:
        """Collective at first use: what the ranks of a node keep in step by, if it can be had."""
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
        """Collective: what `make` gives, or None if there is no shared memory; ``lost`` says why."""
        executing = self.progress.executing
        outer, executing.executor = executing.executor, _SHARING
        try:
            return make()
        except (RankFailed, Timeout):
            raise  # it is not all ranks that have tried
        except CommunicationError as error:
            self.lost = str(error)
            return None
        finally:
            executing.executor = outer

    def _match_first(self, call: Call) -> None:
        """What the first collective begins with, for which all ranks have to come, whatever they call."""
        flags = self._flags()
        self.progress.match = self._match_between() if flags is None else flags.matcher()
        self.progress.match(call)

    def _match_between(self) -> Callable[[Call], None]:
        """What begins a collective where there is no shared memory."""
        if not self.asked.between:
            return unmatched
        return call_check.Between(self.transport, self.progress, self.watch).match

    def _match_at_once(self) -> None:
        """The same where the collective that runs would be compared in shared memory, which is not there yet."""
        call = None if self.progress.current is None else self.progress.current[2]
        if call is not None and call.signature == WITHIN:
            call.signature = call.sign()
            try:
                self.progress.match(call)
            finally:
                call.signature = WITHIN

    def _described(self) -> str:
        """The collective that runs, for ranks that have called another."""
        return call_check.brief((self.outer or self).progress.current)

    def _check_wait(self) -> None:
        """Raise if the collective that runs can never complete."""
        if self.watch is not None:
            self.watch.check((self.outer or self).progress.current)

    def _judge_rows(self) -> Exception:
        """Collective: the error for blocks whose receivers expect others."""
        return call_check.rows_error(self.transport, (self.outer or self).progress.current, self._check_wait)

    def _judged(self, texts: list[str]) -> Exception | None:
        return call_check.from_texts(self.progress.group, texts)

    def levels(self) -> tuple[Communicator, Communicator]:
        """Collective at first use, and to be called by operations: private communicators of the ranks of this node, and
        of the ranks of equal local rank on all nodes, in the order of nodes."""
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

    def _made(self, transport: Transport, name: str) -> Communicator:
        """The communicator on a transport that was made of this one's."""
        return Communicator(
            transport, self.watch, name=f"{self.name}/{name}", world=False, table=self.context.table, parent=self
        )

    def shrink(self) -> Communicator:
        """Collective over the ranks that live: a communicator of them, in the same order, when others have died.

        To be called by all of them after RankFailed, or without one: whoever still waits on this communicator, or on
        one that was made of it (by ``split``, ``group``, ``node_comm``), gets RankFailed there. None of these can be
        used afterwards; they are freed, without a message. If this is what :func:`mpicoll.world` gives, that is the new
        one from now on; in :func:`mpicoll.run_local` call it on the rank's own thread.

        Further ranks may die meanwhile: they belong to the new communicator or not, alike on all ranks; if they do, its
        operations raise RankFailed. Takes some milliseconds once all have called it; until then it waits, for no longer
        than ``timeout``. Raises CommunicatorError in a job that ends with its first rank: ``mpirun --with-ft ulfm``
        starts one that does not."""
        self.check()

        def shrink() -> Transport:
            self.transport.revoke()
            # What is pending fails now.
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
        """Whether a rank is known to have died, or the communicator was given up because of that; takes a second to
        say that none is, where ranks can survive a death. Without a message."""
        self.check()
        return self.transport.failed_already()

    def let_go(self) -> None:
        """Free it without a message, which is for one that was revoked."""
        self.progress.close()
        self.progress.retire()
        self.freed = True
        self._forget()
        for level in self._levels or ():
            level.let_go()
        self._levels = None

    def _forget(self) -> None:
        """Drop what it has beside MPI's own."""
        self.repeated.clear()
        self._arena = None
        if self.devices is not None:
            self.devices.free()
            self.devices = None

    def agree(self, flag: bool) -> bool:
        """Collective over the ranks that live: whether all of them say True. It is the same on all of them, whoever has
        died, and works after RankFailed too; so it can decide whether to :meth:`shrink`."""
        self.check()
        call = Call("agree", collective=False)
        return bool(self.progress.aside(lambda: self.transport.agree(bool(flag)), call))

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
            # A communicator that was given up, or whose ranks have died, can be freed as well.
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
