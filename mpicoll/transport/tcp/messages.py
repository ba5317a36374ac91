"""Messages over the connections of a mesh: the rounds of schedules, and the caller's point-to-point messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mpicoll.config import config
from mpicoll.errors import Timeout, TruncationError
from mpicoll.transport.base import Envelope, Memory, Message, round_size_error, truncation_error
from mpicoll.transport.hashes import blake2b
from mpicoll.transport.tcp.mailbox import PostedReceive
from mpicoll.transport.tcp.mesh import Mesh
from mpicoll.transport.tcp.posted_round import TcpRound

T = TypeVar("T")

_ROUND = "rank {}, in a round of a collective"
"""Description of a round in errors."""

_NAP = 1.0
"""Most seconds between two looks at the clock of a rank that waits; all else is notified."""

_IDLE_NAP = 0.01
"""Most seconds between two calls of a function that a wait calls from time to time."""

_DEATH_GRACE = 1.0
"""Seconds for which a collective goes on after the death of a rank that it does not wait for itself: that rank may have
completed its part, and the message of another one may be on its way."""

_CAUSE_GRACE = 0.25
"""Seconds in which the death of a rank may be noticed after another one has left because of it: the ends of several
connections are read in any order."""


class TcpPending:
    """A transfer of this transport: a receive, or a send, which has completed when it has been started."""

    def __init__(self, transport: MessagePassing, receive: PostedReceive | None, done: Envelope | None) -> None:
        self._transport = transport
        self._receive = receive
        self._done = done
        self._error: TruncationError | None = None

    def test(self) -> Envelope | None:
        receive = self._receive
        if self._done is None and receive is not None:
            with self._transport.mesh.changed:
                if self._take() is None:
                    self._transport.check_awaited(receive, f"rank {self._transport.rank}")
        return self._done

    def wait(self, timeout: float | None) -> Envelope:
        receive = self._receive
        if self._done is None and receive is not None:
            who = "any rank" if receive.source is None else self._transport.mesh.describe(receive.source)
            what = f"rank {self._transport.rank} waits for a message from {who}, tag {receive.tag}"
            self._transport.wait(self._take, lambda: self._transport.check_awaited(receive, what), timeout, what)
        assert self._done is not None
        return self._done

    def cancel(self) -> Envelope | None:
        receive = self._receive
        with self._transport.mesh.changed:
            if self._done is None and receive is not None and receive.arrival is None:
                self._transport.withdraw([receive])
                return None
        return self.wait(None)

    def withdraw(self) -> None:
        """Let a receive for which no message has arrived match no later message."""
        if self._receive is not None:
            with self._transport.mesh.changed:
                self._transport.withdraw([self._receive])

    def _take(self) -> Envelope | None:
        """Return the envelope of the message if it has arrived, after its data was copied. The lock is held."""
        if self._error is not None:
            raise self._error
        receive = self._receive
        if self._done is None and receive is not None and receive.arrival is not None and receive.arrival.is_complete:
            envelope = self._transport.envelope_of(receive)
            try:
                self._transport.copy_arrival(receive, envelope)
            except TruncationError as error:
                self._error = error
                raise
            self._done = envelope
        return self._done


class MessagePassing:
    """The messages of one process within a group, named `key`, of `ranks` of a mesh."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int], key: str) -> None:
        self.mesh = mesh
        self.timeout = config().timeout
        self.rank = list(ranks).index(mesh.rank)
        self.size = len(ranks)
        self.key = key
        self.members = tuple(mesh.peers[peer].name for peer in ranks)
        self._peers = tuple(ranks)
        self._index = {peer: rank for rank, peer in enumerate(ranks)}
        kinds = "collective", "p2p", "service"
        self._collective, self._p2p, self._service = self._contexts = [_name_context(key, kind) for kind in kinds]

    # --- waits

    def wait(
        self,
        ready: Callable[[], T | None],
        check: Callable[[], None],
        timeout: float | None,
        what: str,
        idle: Callable[[], None] | None = None,
    ) -> T:
        """Wait until `ready` returns a value other than None.

        `check` raises if that can't happen any more. Both are called while the lock of the mesh is held; `idle`, called
        from time to time, is not. Raises Timeout after `timeout` seconds (None: the timeout of the group).
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while True:
            with self.mesh.changed:
                while (value := ready()) is None:
                    self.mesh.check_usable()
                    check()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise Timeout(f"{what}: nothing within {seconds:g} s")
                    nap = _NAP if idle is None and not self.mesh.ends else _IDLE_NAP
                    self.mesh.changed.wait(min(left, nap))
                    if idle is not None:
                        break
                else:
                    return value
            if idle is not None:
                idle()

    def check_awaited(self, receive: PostedReceive, what: str) -> None:
        """Raise RankFailed if no message for `receive` can arrive, since its sender has ended. The lock is held."""
        ends = self.mesh.ends
        if not ends:
            return
        source = receive.source if receive.arrival is None else receive.arrival.source
        others = {source} if source is not None else {peer for peer in self._peers if peer != self.mesh.rank}
        ended = others & ends.keys()
        # One of any that has died may be the one that was to send; one that has left had nothing more to send.
        dead = {peer for peer in ended if not ends[peer].is_announced}
        if dead or (ended and ended == others):
            raise self.mesh.make_end_error(what, sorted(dead or ended))

    def _check_members(self, awaited: Iterable[int], what: str) -> None:
        """Raise RankFailed if a rank of `awaited` has ended, or another member has died some time ago. The lock is
        held."""
        ends = self.mesh.ends
        if not ends:
            return
        ended = {peer for peer in awaited if peer in ends}
        dead = {peer for peer in self._peers if peer in ends and not ends[peer].is_announced}
        now = time.monotonic()
        # A rank that has left may have done so because of a death, which is the cause to name.
        grace = 0 if dead else _CAUSE_GRACE
        if any(now - ends[peer].time >= grace for peer in ended) or any(
            now - ends[peer].time > _DEATH_GRACE for peer in dead
        ):
            raise self.mesh.make_end_error(what, sorted(ended | dead))

    # --- messages

    def _send(self, context: int, data: Memory, dest: int, tag: int) -> None:
        peer = self._peers[dest]
        if peer in self.mesh.ends:
            what = f"rank {self.rank}, sending to rank {dest}"
            self.wait(lambda: None, lambda: self._check_members([peer], what), None, what)
        self.mesh.send(peer, context, tag, data)

    def _post(
        self, context: int, into: Iterable[tuple[Memory | None, int | None]], tag: int | None
    ) -> list[PostedReceive]:
        """Post receives into memory, each from a rank of the group (None: any)."""
        receives = [PostedReceive(data, None if source is None else self._peers[source], tag) for data, source in into]
        with self.mesh.changed:
            self.mesh.check_usable()
            mailbox = self.mesh.mailbox(context)
            for one in receives:
                mailbox.post(one)
        return receives

    def withdraw(self, receives: Iterable[PostedReceive]) -> None:
        """Let the receives that have no message match no later one. The lock is held."""
        for context in self._contexts:
            for one in receives:
                self.mesh.mailbox(context).withdraw(one)

    def envelope_of(self, receive: PostedReceive) -> Envelope:
        """Return the envelope of the message of `receive`."""
        arrival = receive.arrival
        assert arrival is not None
        return Envelope(self._index[arrival.source], arrival.tag, arrival.nbytes)

    def copy_arrival(self, receive: PostedReceive, envelope: Envelope) -> None:
        """Copy the message to the memory of its receive, unless it was written there. Raises TruncationError."""
        target, arrival = receive.data, receive.arrival
        assert target is not None
        assert arrival is not None
        assert arrival.data is not None
        if arrival.nbytes > target.size:
            # MPI libraries fill the buffer on truncation, too.
            target[:] = arrival.data[: target.size]
            raise truncation_error(self.rank, envelope, target.size)
        if not receive.is_direct:
            target[: arrival.nbytes] = arrival.data

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        receives = self._begin_round(sends, recvs, tag)
        if receives:
            self._await_all(receives, _ROUND.format(self.rank))
        self._end_round(receives, recvs)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> TcpRound:
        receives, what = self._begin_round(sends, recvs, tag), _ROUND.format(self.rank)

        def withdraw() -> None:
            with self.mesh.changed:
                self.withdraw(receives)

        def step() -> bool:
            with self.mesh.changed:
                self.mesh.check_usable()
                if missing := _find_missing(receives):
                    self._check_members([one.source for one in missing if one.source is not None], what)
                    return False
            self._end_round(receives, recvs)
            return True

        return TcpRound(step, withdraw, self.timeout, what)

    def make_program(self, *arguments: Any) -> None:
        return None

    def _begin_round(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> list[PostedReceive]:
        """Post the receives of a round, and send its messages."""
        receives = self._post(self._collective, [(data, source) for source, data in recvs], tag)
        try:
            for dest, data in sends:
                self._send(self._collective, data, dest, tag)
        except BaseException:
            with self.mesh.changed:
                self.withdraw(receives)
            raise
        return receives

    def _end_round(self, receives: Sequence[PostedReceive], recvs: Sequence[Message]) -> None:
        """Copy the messages of a round that have not been written to their memory."""
        for receive, (source, data) in zip(receives, recvs, strict=True):
            envelope = self.envelope_of(receive)
            if envelope.nbytes != data.size:
                raise round_size_error(self.rank, source, data.size, envelope.nbytes)
            self.copy_arrival(receive, envelope)

    def send(self, data: Memory, dest: int, tag: int) -> None:
        self._send(self._p2p, data, dest, tag)

    def recv(self, data: Memory, source: int | None, tag: int | None) -> Envelope:
        return _wait_or_withdraw(self.irecv(data, source, tag))

    def sendrecv(
        self, data: Memory, dest: int, tag: int, into: Memory, source: int | None, recvtag: int | None
    ) -> Envelope:
        receiving = self.irecv(into, source, recvtag)
        try:
            self.send(data, dest, tag)
        except BaseException:
            receiving.withdraw()
            raise
        return _wait_or_withdraw(receiving)

    def isend(self, data: Memory, dest: int, tag: int) -> TcpPending:
        self._send(self._p2p, data, dest, tag)
        return TcpPending(self, None, Envelope(self.rank, tag, data.size))

    def irecv(self, data: Memory, source: int | None, tag: int | None) -> TcpPending:
        (receive,) = self._post(self._p2p, [(data, source)], tag)
        return TcpPending(self, receive, None)

    def bind_messages(self, *args: Any) -> None:
        """Return None: messages are carried out in Python."""

    def bind_started_message(self, *args: Any, **options: Any) -> None:
        """Return None: only Python can start messages."""

    def bind_line_end(self, *args: Any) -> None:
        """Return None: only Python can pass values."""

    def bind_background_messages(self, peers: Sequence[int]) -> None:
        """Return None: messages move by themselves."""

    def matches_own_message(self, tag: int) -> bool:
        return any(source in (None, self.rank) and wanted in (None, tag) for source, wanted in self._list_posted())

    def list_posted_receives(self) -> list[tuple[int | None, int | None]]:
        return self._list_posted()

    def _list_posted(self) -> list[tuple[int | None, int | None]]:
        with self.mesh.changed:
            posted = self.mesh.mailbox(self._p2p).posted
            return [(None if one.source is None else self._index[one.source], one.tag) for one in posted]

    def iprobe(self, source: int | None, tag: int | None) -> Envelope | None:
        if self.mesh.is_closed:
            return None
        with self.mesh.changed:
            return self._peek(source, tag)

    def _peek(self, source: int | None, tag: int | None) -> Envelope | None:
        arrival = self.mesh.mailbox(self._p2p).find(None if source is None else self._peers[source], tag)
        return None if arrival is None else Envelope(self._index[arrival.source], arrival.tag, arrival.nbytes)

    def probe(self, source: int | None, tag: int | None, timeout: float | None) -> Envelope:
        what = f"rank {self.rank} probes for a message from {'any rank' if source is None else source}, tag {tag}"
        wanted = PostedReceive(None, None if source is None else self._peers[source], tag)
        return self.wait(lambda: self._peek(source, tag), lambda: self.check_awaited(wanted, what), timeout, what)

    def _await_all(
        self,
        receives: list[PostedReceive],
        what: str,
        idle: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> list[bytes]:
        """Wait for all messages of a collective, and return the data of those whose receives have no memory."""

        def ready() -> bool | None:
            return not _find_missing(receives) or None

        def check() -> None:
            awaited = [one.source for one in _find_missing(receives) if one.source is not None]
            self._check_members(awaited, what)

        try:
            self.wait(ready, check, seconds, what, idle)
        except BaseException:
            with self.mesh.changed:
                self.withdraw(receives)
            raise
        return [_bytes_of(one) for one in receives if one.data is None]


def _find_missing(receives: Iterable[PostedReceive]) -> list[PostedReceive]:
    """Return the receives whose messages have not arrived."""
    return [one for one in receives if one.arrival is None or not one.arrival.is_complete]


def _name_context(key: str, kind: str) -> int:
    digest = blake2b(f"{key}/{kind}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1  # never that of a farewell


def _bytes_of(receive: PostedReceive) -> bytes:
    assert receive.arrival is not None
    assert receive.arrival.data is not None
    return receive.arrival.data.tobytes()


def _wait_or_withdraw(receiving: TcpPending) -> Envelope:
    try:
        return receiving.wait(None)
    except BaseException:
        receiving.withdraw()
        raise
