"""Ranks as threads of one process: the same engine without an MPI library, and with faults on demand.

Messages are copied into the mailbox of the receiver when they are sent (so a send never waits), and are matched with
receives as MPI does: in the order of posting.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np

from mpicoll.errors import CommunicationError, RankFailed, Timeout, TruncationError
from mpicoll.transport.base import SHARED_MEMORY_GRACE, Envelope, Memory, Message, Read, renumber, truncation_error

T = TypeVar("T")


class Killed(BaseException):
    """The exception that ends the thread of a rank killed by a fault.

    It is not an Exception, so that no handler of the program catches it.
    """


@dataclass(frozen=True, slots=True)
class Delay:
    """Messages from `source` to `dest` (None: any) arrive `seconds` later; later ones never overtake them."""

    seconds: float
    source: int | None = None
    dest: int | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Of the messages from `source` to `dest` (None: any), the `nth` and the `count` - 1 after it are lost.

    Messages are counted from 0 for each pair of ranks.
    """

    source: int | None = None
    dest: int | None = None
    nth: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Kill:
    """`rank` dies when it is about to send its `nth` message, counted from 0."""

    rank: int
    nth: int = 0


Fault: TypeAlias = Delay | Drop | Kill


@dataclass(slots=True, eq=False)
class _Letter:
    source: int
    tag: int
    data: bytes
    due: float

    def fits(self, source: int | None, tag: int | None) -> bool:
        return (source is None or source == self.source) and (tag is None or tag == self.tag)


@dataclass(slots=True, eq=False)
class _Slot:
    """A posted receive."""

    data: Memory
    source: int | None
    tag: int | None
    letter: _Letter | None = None


@dataclass(slots=True)
class _Mailbox:
    """The unexpected messages and the posted receives of one rank in one context, both in order."""

    letters: list[_Letter] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)

    def deliver(self, letter: _Letter) -> None:
        for slot in self.slots:
            if letter.fits(slot.source, slot.tag):
                slot.letter = letter
                self.slots.remove(slot)
                return
        self.letters.append(letter)

    def post(self, slot: _Slot) -> None:
        for letter in self.letters:
            if letter.fits(slot.source, slot.tag):
                slot.letter = letter
                self.letters.remove(letter)
                return
        self.slots.append(slot)


Group: TypeAlias = tuple[int, tuple[int, ...]]
"""A group by its context, which others may share, and its members."""


@dataclass(slots=True)
class Living:
    """A meeting of the living ranks: their flags and, once all have entered, their ranks and new contexts."""

    flags: dict[int, bool]
    ranks: tuple[int, ...] = ()
    contexts: Any = ()


class World:
    """The state that the threads share: mailboxes, dead ranks, faults, and meetings."""

    def __init__(self, size: int, faults: Sequence[Fault] = (), timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.dead: set[int] = set()
        self.killed: set[int] = set()
        # Revoked groups, as in ULFM.
        self.revoked: set[Group] = set()
        self.faulty = bool(faults)
        self._faults = tuple(faults)
        self._delays = any(isinstance(fault, Delay) for fault in faults)
        self._boxes: dict[tuple[int, int], _Mailbox] = {}
        self._contexts = itertools.count(1)
        self._meetings: dict[Hashable, dict[int, Any]] = {}
        self._living: dict[Hashable, Living] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._sent_by: dict[int, int] = {}
        self._due: dict[tuple[int, int], float] = {}

    def box(self, context: int, rank: int) -> _Mailbox:
        return self._boxes.setdefault((context, rank), _Mailbox())

    def deliver(self, context: int, source: int, dest: int, letter: _Letter) -> None:
        """Put `letter` into the mailbox of rank `dest` of the world, unless a fault prevents it. The lock is held."""
        pair = (source, dest)
        number = self._sent[pair] = self._sent.get(pair, -1) + 1
        own = self._sent_by[source] = self._sent_by.get(source, -1) + 1
        for fault in self._faults:
            if isinstance(fault, Kill):
                if fault.rank == source and fault.nth <= own:
                    self.killed.add(source)
                    self.bury(source)
                    raise Killed(f"rank {source} was killed before its message {own}")
            elif (fault.source in (None, source)) and (fault.dest in (None, dest)):
                if isinstance(fault, Delay):
                    letter.due += fault.seconds
                elif fault.nth <= number < fault.nth + fault.count:
                    return
        letter.due = self._due[pair] = max(letter.due, self._due.get(pair, 0.0))
        self.box(context, dest).deliver(letter)
        self.changed.notify_all()

    def bury(self, rank: int) -> None:
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()

    def wait(
        self,
        ready: Callable[[], T | None],
        peers: Callable[[], set[int]],
        timeout: float,
        what: str,
        group: Group | None = None,
    ) -> T:
        """Wait until `ready` returns a value other than None. The lock is held. Raises RankFailed or Timeout.

        `peers` are the ranks of the world whose death makes that impossible; `group` is the group of the
        operation.
        """
        deadline = time.monotonic() + timeout
        while (value := ready()) is None:
            lost = peers() & self.dead
            if lost:
                raise RankFailed(f"{what}: rank {min(lost)} is gone", tuple(sorted(lost)))
            if group in self.revoked:
                raise self.lost(what)
            now = time.monotonic()
            if now >= deadline:
                raise Timeout(f"{what}: nothing within {timeout:g} s")
            # No notification is sent when a delayed letter becomes due.
            self.changed.wait(min(deadline - now, 0.002 if self._delays else 1.0))
        return value

    def lost(self, what: str) -> RankFailed:
        """Return the error for an operation in a revoked group."""
        ranks = tuple(sorted(self.killed))
        names = ", ".join(map(str, ranks)) or "none"
        return RankFailed(f"{what}: the group was given up (killed: rank {names}); go on by comm.shrink()", ranks)

    def living(self, key: Hashable, members: Sequence[int], rank: int, flag: bool, timeout: float) -> Living:
        """Meet with those of `members` that live."""
        with self.changed:
            mine = self._living.setdefault(key, Living({}))
            mine.flags[rank] = flag
            self.changed.notify_all()

            def ended() -> bool | None:
                if not mine.contexts and mine.flags.keys() | self.dead >= set(members):
                    # The first thread that finds the meeting complete determines the result for all.
                    mine.ranks = tuple(m for m in members if m in mine.flags and m not in self.dead)
                    mine.contexts = next(self._contexts), next(self._contexts)
                return bool(mine.contexts) or None

            self.wait(ended, set, timeout, "meeting of those that are left")
            return mine

    def meet(
        self,
        key: Hashable,
        members: Sequence[int],
        rank: int,
        value: Any,
        timeout: float,
        what: str = "meeting of a new group",
        group: Group | None = None,
    ) -> dict[int, Any]:
        """Exchange a value with all of `members`, and return the values by member.

        The key -1 has two new contexts that the members share.
        """
        with self.changed:
            table = self._meetings.setdefault(key, {-1: (next(self._contexts), next(self._contexts))})
            table[rank] = value
            self.changed.notify_all()

            def missing() -> set[int]:
                return {m for m in members if m not in table}

            try:
                self.wait(lambda: None if missing() else True, missing, timeout, what, group)
            except Timeout as error:
                raise Timeout(f"{error} from rank {', '.join(map(str, sorted(missing())))}") from None
            self._meetings.pop(key, None)
            return dict(table)


class LocalPending:
    """A transfer of the local transport."""

    def __init__(self, transport: LocalTransport, slot: _Slot | None, done: Envelope | None) -> None:
        self._transport = transport
        self._slot = slot
        self._done = done

    def test(self) -> Envelope | None:
        slot, world = self._slot, self._transport.world
        if self._done is None and slot is not None:
            with world.changed:
                if self._take() is None and slot.letter is None:
                    self._transport.check()
                    lost = self._transport.needed(slot.source) & world.dead
                    if lost:
                        raise RankFailed(f"rank {self._transport.rank}: rank {min(lost)} is gone", tuple(sorted(lost)))
        return self._done

    def withdraw(self) -> None:
        """Remove a receive for which no message has arrived, so that it matches no later message."""
        with self._transport.world.changed:
            self._transport.withdraw(self._slot)

    def cancel(self) -> Envelope | None:
        with self._transport.world.changed:
            if self._done is None and self._slot is not None and self._slot.letter is None:
                self._transport.withdraw(self._slot)
                return None
        return self.wait(None)

    def wait(self, timeout: float | None) -> Envelope:
        if self._done is None:
            slot = self._slot
            assert slot is not None
            who = "any rank" if slot.source is None else f"rank {slot.source}"
            with self._transport.world.changed:
                self._transport.world.wait(
                    self._take,
                    # A delayed letter is delivered even if its sender has died.
                    lambda: set() if slot.letter else self._transport.needed(slot.source),
                    self._transport.timeout if timeout is None else timeout,
                    f"rank {self._transport.rank} waits for a message from {who}, tag {slot.tag}",
                    self._transport.group_key,
                )
        assert self._done is not None
        return self._done

    def _take(self) -> Envelope | None:
        """Copy the data of the letter if it has arrived. The lock is held."""
        slot = self._slot
        if self._done is None and slot is not None and slot.letter is not None:
            letter = slot.letter
            if letter.due > time.monotonic():
                return None
            if len(letter.data) > slot.data.size:
                # MPI libraries fill the buffer on truncation, too.
                slot.data[:] = memoryview(letter.data)[: slot.data.size]
                message = Envelope(letter.source, letter.tag, len(letter.data))
                raise truncation_error(self._transport.rank, message, slot.data.size)
            slot.data[: len(letter.data)] = memoryview(letter.data)
            self._done = Envelope(letter.source, letter.tag, len(letter.data))
        return self._done


class _Reach:
    """One rank's reference to memory, which is released independently of the references of other ranks."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


def _read(source: int, target: int, nbytes: int) -> None:
    """Copy memory: threads share their private memory."""
    ctypes.memmove(target, source, nbytes)


class LocalTransport:
    """The transport of one thread."""

    native = None
    mpi = None
    max_tag = 2**31 - 1
    background = True
    unread = None
    own_cores = False
    fence = None
    traffic = None

    def __init__(
        self, world: World, members: tuple[int, ...], me: int, contexts: tuple[int, int], nodes: tuple[int, ...]
    ) -> None:
        self.world = world
        self.timeout = world.timeout
        self.rank = members.index(me)
        self.size = len(members)
        self.nodes = nodes
        # Faults would have no effect on ranks that communicate through shared memory.
        self.unshared = "faults are injected into messages" if world.faulty else None
        self._shares = itertools.count()
        self._compared = itertools.count()
        self._texts = itertools.count()
        self._members = members
        self._me = me
        self._collective, self._p2p = contexts
        self.members = members
        self.group_key: Group = (self._collective, members)
        self.key = f"{contexts[0]}:{','.join(map(str, members))}"
        self._splits = itertools.count()
        self._agreements = itertools.count()
        self._made: WeakSet[LocalTransport] = WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}
        self._duplicates: dict[int, int] = {}

    def needed(self, source: int | None) -> set[int]:
        """Return the ranks of the world whose death means that no message from `source` can arrive."""
        if source is not None:
            return {self._members[source]}
        others = {m for m in self._members if m != self._me}
        return others if others <= self.world.dead else set()

    def _send(self, context: int, data: Memory, dest: int, tag: int) -> None:
        letter = _Letter(self.rank, tag, data.tobytes(), time.monotonic())
        with self.world.changed:
            self.check()
            self.world.deliver(context, self._me, self._members[dest], letter)

    def _post(self, context: int, data: Memory, source: int | None, tag: int | None) -> LocalPending:
        slot = _Slot(data, source, tag)
        with self.world.changed:
            self.check()
            self.world.box(context, self._me).post(slot)
        return LocalPending(self, slot, None)

    def _meet(
        self, name: Hashable, value: Any, members: Sequence[int] = (), what: str = "meeting of a new group"
    ) -> dict[int, Any]:
        """Meet with `members`, or with all ranks of the group."""
        with self.world.changed:
            self.check()
        return self.world.meet(name, members or self._members, self._me, value, self.timeout, what, self.group_key)

    def check(self) -> None:
        """Raise RankFailed if the group is revoked. The lock is held."""
        if self.group_key in self.world.revoked:
            raise self.world.lost(f"rank {self.rank}")

    def explain(self, error: Exception) -> Exception:
        killed = self.world.killed & set(self._members)
        if isinstance(error, RankFailed) and killed:
            self.revoke()  # other ranks may wait for this rank
        elif type(error) is CommunicationError and (killed or self.group_key in self.world.revoked):
            return self.world.lost(str(error))
        return error

    def texts(self, text: str) -> list[str]:
        name = ("texts", self._collective, self._members, next(self._texts))
        table = self._meet(name, text)
        return [table[member] for member in self._members]

    def misreduces(self, op: str, dtype: np.dtype[Any]) -> str | None:
        return None  # there is no library that could

    def share(self, nbytes: int) -> list[Memory]:
        own: Any
        try:
            # Separate pages, as processes have: memory is registered with devices in whole pages.
            own = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
        except (OSError, ValueError, OverflowError) as error:
            own = f"rank {self.rank} can't allocate {nbytes} bytes of shared memory: {error}"
        return self._met(own)

    def adopt(self, memory: Memory, fd: int) -> list[Memory]:
        return self._met(memory)

    def _met(self, own: Any) -> list[Memory]:
        name = ("share", self._collective, self._members, next(self._shares))
        table = self._meet(name, own)
        memories = [table[member] for member in self._members]
        failure = next((one for one in memories if isinstance(one, str)), None)
        if failure is not None:
            raise CommunicationError(failure)
        return [np.asarray(_Reach(memory)) for memory in memories]

    def readers(self) -> list[Read]:
        return [_read] * self.size

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        lost = self.world.dead & {self._members[peer] for peer in peers}
        if lost:
            raise RankFailed(f"rank {self.rank}: rank {min(lost)} is gone", tuple(sorted(lost)))
        if self.group_key in self.world.revoked:
            raise self.world.lost(f"rank {self.rank}")
        if waited > self.timeout + SHARED_MEMORY_GRACE:
            missing = ", ".join(str(self._members[peer]) for peer in peers)
            raise Timeout(f"in shared memory, rank {missing} did not come within {self.timeout:g} s")

    def compare(self, word: int, text: Callable[[], str], idle: Callable[[], None]) -> list[str] | None:
        """Compare `word` between the ranks. The world detects missing ranks by itself, so `idle` is not called."""
        name = ("compare", self._collective, self._members, next(self._compared))
        what = f"rank {self.rank} waits for the others, to compare what they call"
        table = self._meet(name, word, what=what)
        return None if all(table[member] == word for member in self._members) else self.texts(text())

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        pending = [self._post(self._collective, data, source, tag) for source, data in recvs]
        try:
            for dest, data in sends:
                self._send(self._collective, data, dest, tag)
            for one, (source, data) in zip(pending, recvs, strict=True):
                got = one.wait(None).nbytes
                if got != data.size:
                    raise TruncationError(f"rank {self.rank} expected {data.size} bytes from rank {source}, got {got}")
        except BaseException:
            for one in pending:
                one.withdraw()
            raise

    def send(self, data: Memory, dest: int, tag: int) -> None:
        self._send(self._p2p, data, dest, tag)

    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        return self._received(self.irecv(data, source, tag))

    def _received(self, receiving: LocalPending) -> Envelope:
        try:
            return receiving.wait(None)
        except BaseException:
            receiving.withdraw()
            raise

    def withdraw(self, slot: _Slot | None) -> None:
        """Remove `slot` from where it is posted, if it still is. The lock is held."""
        for context in (self._collective, self._p2p):
            slots = self.world.box(context, self._me).slots
            if slot in slots:
                slots.remove(slot)

    def takes_own(self, tag: int) -> bool:
        with self.world.changed:
            letter = _Letter(self.rank, tag, b"", 0.0)
            return any(letter.fits(slot.source, slot.tag) for slot in self.world.box(self._p2p, self._me).slots)

    def receiving(self) -> list[tuple[int | None, int | None]]:
        with self.world.changed:
            return [(slot.source, slot.tag) for slot in self.world.box(self._p2p, self._me).slots]

    def settle(self, seconds: float) -> bool:
        """Return True: a message has arrived when its send returns."""
        return True

    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        receiving = self.irecv(into, source, recvtag)
        self.send(data, dest, tag)
        return self._received(receiving)

    def isend(self, data: Memory, dest: int, tag: int) -> LocalPending:
        self._send(self._p2p, data, dest, tag)
        return LocalPending(self, None, Envelope(self.rank, tag, data.size))

    def irecv(self, data: Memory, source: int | None, tag: int | None) -> LocalPending:
        return self._post(self._p2p, data, source, tag)

    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
        with self.world.changed:
            self.check()
            return self._peek(source, tag)

    def _peek(self, source: int | None, tag: int | None) -> Envelope | None:
        letter = self._first(source, tag)
        due = letter is not None and letter.due <= time.monotonic()
        return Envelope(letter.source, letter.tag, len(letter.data)) if letter and due else None

    def _first(self, source: int | None, tag: int | None) -> _Letter | None:
        """Return the first letter that a receive would match, due or not."""
        letters = self.world.box(self._p2p, self._me).letters
        return next((letter for letter in letters if letter.fits(source, tag)), None)

    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope:
        with self.world.changed:
            return self.world.wait(
                lambda: self._peek(source, tag),
                lambda: set() if self._first(source, tag) else self.needed(source),
                self.timeout if timeout is None else timeout,
                f"rank {self.rank} probes for a message from {'any rank' if source is None else source}, tag {tag}",
                self.group_key,
            )

    def split(self, color: int | None, key: int) -> LocalTransport | None:
        # The groups of one split share their contexts, so the members are a part of a meeting's name.
        name = ("split", self._collective, self._members, next(self._splits))
        table = self._meet(name, (color, key))
        base = table.pop(-1)
        if color is None:
            return None
        order = {member: index for index, member in enumerate(self._members)}
        mine = sorted((m for m in table if table[m][0] == color), key=lambda m: (table[m][1], order[m]))
        # Groups of one split share nothing, so they may share the pair of contexts.
        return self._child(tuple(mine), base)

    def group(self, ranks: Sequence[int]) -> LocalTransport:
        members = tuple(self._members[rank] for rank in ranks)
        number = self._groups[members] = self._groups.get(members, -1) + 1
        table = self._meet(("group", self._collective, members, number), None, members)
        return self._child(members, table[-1])

    def duplicate(self, tag: int) -> LocalTransport:
        number = self._duplicates[tag] = self._duplicates.get(tag, -1) + 1
        name = ("duplicate", self._collective, self._members, tag, number)  # as in split()
        table = self._meet(name, None)
        return self._child(self._members, table[-1])

    def _child(self, members: tuple[int, ...], contexts: tuple[int, int]) -> LocalTransport:
        """Return a transport that is revoked with this one."""
        child = self._derive(members, contexts)
        with self.world.changed:
            self._made.add(child)
        return child

    def _derive(self, members: tuple[int, ...], contexts: tuple[int, int]) -> LocalTransport:
        nodes = [self.nodes[self._members.index(member)] for member in members]
        return LocalTransport(self.world, members, self._me, contexts, renumber(nodes))

    def revoke(self) -> None:
        with self.world.changed:
            self.world.revoked.add(self.group_key)
            self.world.changed.notify_all()
            made = list(self._made)
        for one in made:
            one.revoke()

    def shrink(self) -> LocalTransport:
        self.revoke()
        name = ("shrink", self._collective, self._members)
        living = self.world.living(name, self._members, self._me, flag=True, timeout=self.timeout)
        # Not one of _made: a late failure on this group revokes those again, and the new one must outlive it.
        return self._derive(living.ranks, living.contexts)

    def failed_already(self) -> bool:
        return bool(self.group_key in self.world.revoked or self.world.killed & set(self._members))

    def agree(self, flag: bool) -> bool:
        name = ("agree", self._collective, self._members, next(self._agreements))
        return all(self.world.living(name, self._members, self._me, flag, self.timeout).flags.values())

    def free(self) -> None:
        """Do nothing: mailboxes are empty once every message was received, and there is no handle to free."""


def transports(world: World, ranks_per_node: int | None = None) -> list[LocalTransport]:
    """Return the transports of all ranks of `world`.

    `ranks_per_node` consecutive ranks are on a node (None: all on one).
    """
    members = tuple(range(world.size))
    nodes = tuple(rank // (ranks_per_node or world.size) for rank in members)
    return [LocalTransport(world, members, rank, (-1, -2), nodes) for rank in members]
