"""The transport of a rank that is a thread."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from mpicoll.errors import CommunicationError, RankFailed, Timeout
from mpicoll.extension import find_missing_reason
from mpicoll.transport import cores
from mpicoll.transport.base import SHARED_MEMORY_GRACE, Envelope, Memory, Message, renumber, truncation_error
from mpicoll.transport.local.job import Contexts, Group, LocalJob, exit_error
from mpicoll.transport.local.mailbox import LocalMessage, PostedRecv
from mpicoll.transport.local.posted_round import LocalRound
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from mpicoll.transport.files import PosixFile
    from mpicoll.transport.windows import RemoteMemory


class LocalPending:
    """A transfer of the local transport."""

    def __init__(self, transport: LocalTransport, recv: PostedRecv | None, done: Envelope | None) -> None:
        self._transport = transport
        self._recv = recv
        self._done = done

    def test(self) -> Envelope | None:
        recv, job = self._recv, self._transport.job
        if self._done is None and recv is not None:
            with job.changed:
                if self._take() is None and recv.message is None:
                    self._transport.check()
                    dead = self._transport.required_senders(recv.source) & job.dead
                    if dead:
                        raise exit_error(f"rank {self._transport.rank}", dead)
        return self._done

    def withdraw(self) -> None:
        """Remove a receive for which no message has arrived, so that it matches no later message."""
        with self._transport.job.changed:
            self._transport.withdraw(self._recv)

    def cancel(self) -> Envelope | None:
        with self._transport.job.changed:
            if self._done is None and self._recv is not None and self._recv.message is None:
                self._transport.withdraw(self._recv)
                return None
        return self.wait(None)

    def wait(self, timeout: float | None) -> Envelope:
        if self._done is None:
            recv = self._recv
            assert recv is not None
            who = "any rank" if recv.source is None else f"rank {recv.source}"
            with self._transport.job.changed:
                self._transport.job.wait(
                    self._take,
                    # A delayed message is delivered even if its sender has died.
                    lambda: set() if recv.message else self._transport.required_senders(recv.source),
                    self._transport.timeout if timeout is None else timeout,
                    f"rank {self._transport.rank} waits for a message from {who}, tag {recv.tag}",
                    self._transport.group_key,
                )
        assert self._done is not None
        return self._done

    def _take(self) -> Envelope | None:
        """Copy the data of the message if it has arrived. The lock is held."""
        recv = self._recv
        if self._done is None and recv is not None and recv.message is not None:
            message = recv.message
            if message.arrival > time.monotonic():
                return None
            if len(message.data) > recv.data.size:
                # MPI libraries fill the buffer on truncation, too.
                recv.data[:] = memoryview(message.data)[: recv.data.size]
                raise truncation_error(self._transport.rank, message.envelope, recv.data.size)
            recv.data[: len(message.data)] = memoryview(message.data)
            self._done = message.envelope
        return self._done


class _MemoryReference:
    """One rank's reference to memory, which is released independently of the references of other ranks."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


class LocalTransport:
    """The transport of one thread."""

    native = None
    mpi = None
    max_tag = 2**31 - 1
    background = True
    no_cma_reason = None
    has_own_cores = False
    survives_deaths = False
    connects = False
    traffic = None

    def __init__(
        self, job: LocalJob, members: tuple[int, ...], me: int, contexts: Contexts, nodes: tuple[int, ...]
    ) -> None:
        self.job = job
        self.timeout = job.timeout
        self.rank = members.index(me)
        self.size = len(members)
        self.nodes = nodes
        # Faults would have no effect on ranks that communicate through shared memory.
        self.no_shm_reason = "faults are injected into messages" if job.faults else find_missing_reason()
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
        self._derived: WeakSet[LocalTransport] = WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}
        self._duplicates: dict[int, int] = {}

    def required_senders(self, source: int | None) -> set[int]:
        """Return the ranks of the job whose death means that no message from `source` can arrive."""
        if source is not None:
            return {self._members[source]}
        others = {m for m in self._members if m != self._me}
        return others if others <= self.job.dead else set()

    def _send(self, context: int, data: Memory, dest: int, tag: int) -> None:
        message = LocalMessage(self.rank, tag, data.tobytes(), time.monotonic())
        with self.job.changed:
            self.check()
            self.job.deliver(context, self._me, self._members[dest], message)

    def _post(self, context: int, data: Memory, source: int | None, tag: int | None) -> LocalPending:
        recv = PostedRecv(data, source, tag)
        with self.job.changed:
            self.check()
            self.job.mailbox(context, self._me).post(recv)
        return LocalPending(self, recv, None)

    def _exchange_values(
        self, name: Hashable, value: Any, members: Sequence[int] = (), what: str = "creation of a group"
    ) -> tuple[dict[int, Any], Contexts]:
        """Exchange a value with `members`, or with all ranks of the group. Also returns new contexts for them."""
        with self.job.changed:
            self.check()
        return self.job.exchange(name, members or self._members, self._me, value, self.timeout, what, self.group_key)

    def check(self) -> None:
        """Raise RankFailed if the group is revoked. The lock is held."""
        if self.group_key in self.job.revoked:
            raise self.job.revoked_error(f"rank {self.rank}")

    def translate_error(self, error: Exception) -> Exception:
        killed = self.job.killed & set(self._members)
        if isinstance(error, RankFailed) and killed:
            self.revoke()  # other ranks may wait for this rank
        elif type(error) is CommunicationError and (killed or self.group_key in self.job.revoked):
            return self.job.revoked_error(str(error))
        return error

    def allgather_text(self, text: str) -> list[str]:
        name = ("texts", self._collective, self._members, next(self._texts))
        table, _ = self._exchange_values(name, text)
        return [table[member] for member in self._members]

    def find_native_defect(
        self, collective: str, op: str = "", dtype: np.dtype[Any] | None = None, *, uneven: bool = False
    ) -> str | None:
        return None  # there is no library that could

    def share(self, nbytes: int) -> list[Memory]:
        own: Any
        try:
            # Separate pages, as processes have: memory is registered with devices in whole pages.
            own = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
        except (OSError, ValueError, OverflowError) as error:
            own = f"rank {self.rank} can't allocate {nbytes} bytes of shared memory: {error}"
        return self._exchange_memory(own)

    def adopt(self, memory: Memory, fd: int) -> list[Memory]:
        return self._exchange_memory(memory)

    def _exchange_memory(self, own: Any) -> list[Memory]:
        name = ("share", self._collective, self._members, next(self._shares))
        table, _ = self._exchange_values(name, own)
        memories = [table[member] for member in self._members]
        failure = next((one for one in memories if isinstance(one, str)), None)
        if failure is not None:
            raise CommunicationError(failure)
        return [np.asarray(_MemoryReference(memory)) for memory in memories]

    def count_cores(self) -> int:
        return cores.count_cores([0], 0, self.size)

    def open_file(self, path: str, fd: int, *, reads: bool, writes: bool, driver: str) -> PosixFile:
        from mpicoll.transport.files import PosixFile  # late: few programs open files

        return PosixFile(fd, self.rank)

    def create_window(self, memory: Memory) -> RemoteMemory:
        raise AssertionError("there is no MPI library")

    def list_processes(self) -> list[int]:
        return [0] * self.size

    def check_peers(self, waited: float, peers: Sequence[int]) -> None:
        dead = self.job.dead & {self._members[peer] for peer in peers}
        if dead:
            raise exit_error(f"rank {self.rank}", dead)
        if self.group_key in self.job.revoked:
            raise self.job.revoked_error(f"rank {self.rank}")
        if waited > self.timeout + SHARED_MEMORY_GRACE:
            missing = rank_list(self._members[peer] for peer in peers)
            raise Timeout(f"in shared memory, {missing} did not arrive within {self.timeout:g} s")

    def compare(
        self, word: int, text: Callable[[], str], idle: Callable[[], None], interrupts: list[BaseException]
    ) -> list[str] | None:
        """Compare `word` between the ranks. The job detects missing ranks by itself, so `idle` is not called. Signal
        handlers run on no thread of a rank."""
        name = ("compare", self._collective, self._members, next(self._compared))
        what = f"rank {self.rank}, comparing the calls of all ranks"
        table, _ = self._exchange_values(name, word, what=what)
        return None if all(table[member] == word for member in self._members) else self.allgather_text(text())

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        self.post(sends, recvs, tag).wait()

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> LocalRound:
        pending = [self._post(self._collective, data, source, tag) for source, data in recvs]

        def send_all() -> None:
            for dest, data in sends:
                self._send(self._collective, data, dest, tag)

        return LocalRound(self.rank, self.timeout, recvs, pending, send_all)

    def make_program(self, *arguments: Any) -> None:
        return None

    def send(self, data: Memory, dest: int, tag: int) -> None:
        self._send(self._p2p, data, dest, tag)

    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        return self._wait_or_withdraw(self.irecv(data, source, tag))

    def _wait_or_withdraw(self, receiving: LocalPending) -> Envelope:
        try:
            return receiving.wait(None)
        except BaseException:
            receiving.withdraw()
            raise

    def withdraw(self, recv: PostedRecv | None) -> None:
        """Remove `recv` from where it is posted, if it still is. The lock is held."""
        for context in (self._collective, self._p2p):
            posted = self.job.mailbox(context, self._me).posted
            if recv in posted:
                posted.remove(recv)

    def bind_messages(self, *args: Any) -> None:
        """Return None: messages are carried out in Python."""

    def bind_started_message(self, *args: Any, **options: Any) -> None:
        """Return None: only Python can start messages."""

    def bind_line_end(self, *args: Any) -> None:
        """Return None: only Python can pass values."""

    def bind_background_messages(self, peers: Sequence[int]) -> None:
        """Return None: messages move by themselves."""

    def matches_own_message(self, tag: int) -> bool:
        with self.job.changed:
            message = LocalMessage(self.rank, tag, b"", 0.0)
            return any(message.matches(recv.source, recv.tag) for recv in self.job.mailbox(self._p2p, self._me).posted)

    def list_posted_receives(self) -> list[tuple[int | None, int | None]]:
        with self.job.changed:
            return [(recv.source, recv.tag) for recv in self.job.mailbox(self._p2p, self._me).posted]

    def wait_for_all_ranks(self, seconds: float) -> bool:
        """Return True: a message has arrived when its send returns."""
        return True

    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        receiving = self.irecv(into, source, recvtag)
        self.send(data, dest, tag)
        return self._wait_or_withdraw(receiving)

    def isend(self, data: Memory, dest: int, tag: int) -> LocalPending:
        self._send(self._p2p, data, dest, tag)
        return LocalPending(self, None, Envelope(self.rank, tag, data.size))

    def irecv(self, data: Memory, source: int | None, tag: int | None) -> LocalPending:
        return self._post(self._p2p, data, source, tag)

    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
        with self.job.changed:
            self.check()
            return self._peek(source, tag)

    def _peek(self, source: int | None, tag: int | None) -> Envelope | None:
        message = self._first(source, tag)
        return message.envelope if message is not None and message.arrival <= time.monotonic() else None

    def _first(self, source: int | None, tag: int | None) -> LocalMessage | None:
        return self.job.mailbox(self._p2p, self._me).first(source, tag)

    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope:
        with self.job.changed:
            return self.job.wait(
                lambda: self._peek(source, tag),
                lambda: set() if self._first(source, tag) else self.required_senders(source),
                self.timeout if timeout is None else timeout,
                f"rank {self.rank} probes for a message from {'any rank' if source is None else source}, tag {tag}",
                self.group_key,
            )

    def split(self, color: int | None, key: int) -> LocalTransport | None:
        # The groups of one split share their contexts, so the members are a part of an exchange's name.
        name = ("split", self._collective, self._members, next(self._splits))
        table, contexts = self._exchange_values(name, (color, key))
        if color is None:
            return None
        order = {member: index for index, member in enumerate(self._members)}
        mine = sorted((m for m in table if table[m][0] == color), key=lambda m: (table[m][1], order[m]))
        # Groups of one split share nothing, so they may share the pair of contexts.
        return self._child(tuple(mine), contexts)

    def group(self, ranks: Sequence[int], independent: bool = False) -> LocalTransport:
        members = tuple(self._members[rank] for rank in ranks)
        number = self._groups[members] = self._groups.get(members, -1) + 1
        _, contexts = self._exchange_values(("group", self._collective, members, number), None, members)
        return (self._derive if independent else self._child)(members, contexts)

    def duplicate(self, tag: int) -> LocalTransport:
        number = self._duplicates[tag] = self._duplicates.get(tag, -1) + 1
        name = ("duplicate", self._collective, self._members, tag, number)  # as in split()
        _, contexts = self._exchange_values(name, None)
        return self._child(self._members, contexts)

    def _child(self, members: tuple[int, ...], contexts: Contexts) -> LocalTransport:
        """Return a transport that is revoked with this one."""
        child = self._derive(members, contexts)
        with self.job.changed:
            self._derived.add(child)
        return child

    def _derive(self, members: tuple[int, ...], contexts: Contexts) -> LocalTransport:
        nodes = [self.nodes[self._members.index(member)] for member in members]
        return LocalTransport(self.job, members, self._me, contexts, renumber(nodes))

    def revoke(self) -> None:
        with self.job.changed:
            self.job.revoked.add(self.group_key)
            self.job.changed.notify_all()
            derived = list(self._derived)
        for one in derived:
            one.revoke()

    def shrink(self) -> LocalTransport:
        self.revoke()
        name = ("shrink", self._collective, self._members)
        living = self.job.agree(name, self._members, self._me, flag=True, timeout=self.timeout)
        # Not one of _derived: a late failure on this group revokes those again, and the new one must outlive it.
        return self._derive(living.ranks, living.contexts)

    def detect_failure(self) -> bool:
        return bool(self.group_key in self.job.revoked or self.job.killed & set(self._members))

    def agree(self, flag: bool) -> bool:
        name = ("agree", self._collective, self._members, next(self._agreements))
        return all(self.job.agree(name, self._members, self._me, flag, self.timeout).flags.values())

    def free(self) -> None:
        """Do nothing: mailboxes are empty once every message was received, and there is no handle to free."""


def transports(job: LocalJob, ranks_per_node: int | None = None) -> list[LocalTransport]:
    """Return the transports of all ranks of `job`.

    `ranks_per_node` consecutive ranks are on a node (None: all on one).
    """
    members = tuple(range(job.size))
    nodes = tuple(rank // (ranks_per_node or job.size) for rank in members)
    return [LocalTransport(job, members, rank, (-1, -2), nodes) for rank in members]
