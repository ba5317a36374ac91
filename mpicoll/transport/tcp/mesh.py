"""The connections of this process to the other ranks of its job, and the threads that read from them."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from weakref import WeakSet

import numpy as np

from mpicoll.errors import CommunicatorError, RankFailed, Timeout
from mpicoll.named_tuple import NamedTuple
from mpicoll.transport.base import Memory
from mpicoll.transport.tcp.mailbox import Arrival, Mailbox

_HEADER = struct.Struct("<QqQ")
"""Context, tag and number of bytes of a message."""

_INLINE = 16 * 1024 - _HEADER.size
"""Bytes of a message up to which it is in one frame with its header. Python writes so large a frame at once."""

_PIECE = 1 << 18
"""Bytes of the frames of a larger message, which stay in the caches on their way to the memory that receives them."""

_FAREWELL = 0
"""The context of the last message of a rank, which makes no more calls."""

_FAREWELL_TIME = 1.0
"""Seconds that a rank that leaves waits for a connection on which it is still sending, or whose peer is stopped."""

_MAX_SECONDS = 10**9
"""Most seconds of a time limit that every kernel accepts."""


class Peer(NamedTuple):
    """A rank of the job: its name in messages, its process and the name of its host."""

    name: int
    pid: int
    host: str


class End(NamedTuple):
    """The end of a rank: the time at which this process has noticed it, and whether the rank has announced it."""

    time: float
    is_announced: bool


class Mesh:
    """The connections of this process, which is `rank` of the job, to all other ranks.

    A thread reads from each connection, so that a rank that sends waits for no call of the receiver. A message that
    arrives before its receive is kept in memory. `changed` guards the mailboxes and the ends of ranks, and is notified
    of every change. `seconds` bounds the time in which a peer takes no bytes. `resources` live as long as the mesh.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        local_ranks: int,
        connections: dict[int, Connection],
        seconds: float,
        resources: Any = None,
    ) -> None:
        self.rank = rank
        self.peers = tuple(peers)
        self.local_ranks = local_ranks
        self.changed = threading.Condition()
        self.ends: dict[int, End] = {}
        self.is_closed = False
        self._connections = connections
        self._seconds = seconds
        self._resources = resources
        self._sending = {peer: threading.Lock() for peer in connections}
        self._mailboxes: dict[int, Mailbox] = {}
        self._dropped: set[int] = set()
        _open.add(self)
        for peer, connection in connections.items():
            name = f"mpicoll-tcp-{self.peers[peer].name}"
            threading.Thread(target=self._read, args=(peer, connection), name=name, daemon=True).start()

    def describe(self, peer: int) -> str:
        """Return the name of a rank in messages: "rank 1 (process 4711 on node7)"."""
        name, pid, host = self.peers[peer]
        return f"rank {name} (process {pid} on {host})"

    def describe_end(self, peer: int) -> str:
        """Return what has happened to a rank that has ended."""
        left = self.ends[peer].is_announced
        return (
            f"{self.describe(peer)} has {'left: it makes no more calls' if left else 'died: its connection has ended'}"
        )

    def make_end_error(self, what: str, peers: Sequence[int]) -> RankFailed:
        """Return the error for `what`, which can't complete because these ranks have ended."""
        ranks = sorted(peers)
        shown = "; ".join(map(self.describe_end, ranks))
        return RankFailed(f"{what}: {shown}", tuple(self.peers[peer].name for peer in ranks))

    def check_usable(self) -> None:
        """Raise CommunicatorError if this process can't send and receive any more."""
        if self.is_closed:
            raise CommunicatorError(
                f"rank {self.peers[self.rank].name}: the connections to the other ranks are closed: the process group"
                " that made them was destroyed, or this process was forked from the rank"
            )

    # --- messages

    def mailbox(self, context: int) -> Mailbox:
        """Return the mailbox of `context`. The lock is held."""
        found = self._mailboxes.get(context)
        if found is None:
            found = self._mailboxes[context] = Mailbox()
        return found

    def drop(self, context: int) -> None:
        """Discard the messages of a context that is not used any more."""
        with self.changed:
            self._mailboxes.pop(context, None)
            self._dropped.add(context)

    def send(self, peer: int, context: int, tag: int, data: Memory) -> None:
        """Send `data`, contiguous bytes, to the rank `peer` of the job; it may be this one. Return when the memory may
        be reused.

        Raises RankFailed if that rank has ended, Timeout if it takes no bytes.
        """
        self.check_usable()
        if peer == self.rank:
            with self.changed:
                arrival = Arrival(self.rank, tag, data.size)
                self.mailbox(context).begin(arrival)[:] = data
                arrival.is_complete = True
                self.changed.notify_all()
            return
        if peer in self.ends:
            raise self.make_end_error(f"rank {self.peers[self.rank].name}, sending", [peer])
        header = _HEADER.pack(context, tag, data.size)
        lock = self._sending[peer]
        if not lock.acquire(timeout=self._seconds):
            raise self._make_stall_error(peer)
        try:
            self._write(peer, header, data)
        except BlockingIOError as error:  # the time that the socket has for a write is over
            self._break(peer)
            raise self._make_stall_error(peer) from error
        except OSError as error:
            if self.is_closed:
                self.check_usable()
            self._break(peer)
            raise self.make_end_error(f"rank {self.peers[self.rank].name}, sending", [peer]) from error
        except BaseException:  # an interrupt, after which the rest of the message is missing
            self._break(peer)
            raise
        finally:
            lock.release()

    def _write(self, peer: int, header: bytes, data: Memory) -> None:
        connection = self._connections[peer]
        if data.size <= _INLINE:
            connection.send_bytes(header + data.tobytes())
            return
        connection.send_bytes(header)
        whole = data.data
        for start in range(0, data.size, _PIECE):
            connection.send_bytes(whole[start : start + _PIECE])

    def _make_stall_error(self, peer: int) -> Timeout:
        return Timeout(
            f"rank {self.peers[self.rank].name}: {self.describe(peer)} has taken no bytes for {self._seconds:g} s"
        )

    def _break(self, peer: int) -> None:
        """End a connection on which a part of a message may be missing, so that both ranks notice it."""
        self._mark_ended(peer, is_announced=False)
        _shut_down(self._connections[peer], socket.SHUT_RDWR)

    def _read(self, peer: int, connection: Connection) -> None:
        """Read all messages from a peer, until its connection ends."""
        is_announced = False
        try:
            with suppress(EOFError, OSError):
                while not is_announced:
                    frame = connection.recv_bytes()
                    context, tag, nbytes = _HEADER.unpack_from(frame)
                    if context == _FAREWELL:
                        is_announced = True
                    else:
                        self._receive(connection, context, Arrival(peer, tag, nbytes), frame)
        finally:  # no memory for a message, for example: nothing more can be read
            self._mark_ended(peer, is_announced=is_announced)

    def _receive(self, connection: Connection, context: int, arrival: Arrival, frame: bytes) -> None:
        with self.changed:
            mailbox = Mailbox() if self.is_closed or context in self._dropped else self.mailbox(context)
            data = mailbox.begin(arrival)
            if arrival.nbytes > _INLINE:
                self.changed.notify_all()  # for probes
        if arrival.nbytes <= _INLINE:
            data[:] = np.frombuffer(frame, np.uint8, arrival.nbytes, _HEADER.size)
        else:
            whole, at = data.data, 0
            while at < arrival.nbytes:
                at += connection.recv_bytes_into(whole, at)
        with self.changed:
            arrival.is_complete = True
            self.changed.notify_all()

    def _mark_ended(self, peer: int, *, is_announced: bool) -> None:
        with self.changed:
            self.ends.setdefault(peer, End(time.monotonic(), is_announced))
            self.changed.notify_all()

    # --- end

    def leave(self) -> None:
        """Announce to the other ranks that this one makes no more calls, and close the connections."""
        with self.changed:
            if self.is_closed:
                return
            self.is_closed = True
        farewell = _HEADER.pack(_FAREWELL, 0, 0)
        for peer, connection in self._connections.items():
            if peer not in self.ends and self._sending[peer].acquire(timeout=_FAREWELL_TIME):
                with suppress(OSError):  # the peer has ended, or is stopped
                    limit_writes(connection, _FAREWELL_TIME)
                    connection.send_bytes(farewell)
                self._sending[peer].release()
            # The thread that reads from it goes on, up to the peer's own end: a socket that is closed with bytes unread
            # resets the connection, so that the peer might lose the last bytes of this rank.
            _shut_down(connection, socket.SHUT_WR)
        self._close()

    def forget(self) -> None:
        """Close the connections in a forked child, without a message: its copies would hide the end of its parent from
        the other ranks."""
        self.changed = threading.Condition()
        self.is_closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.close()
        self._close()

    def _close(self) -> None:
        _open.discard(self)
        self._resources = None
        self._mailboxes.clear()


_open: WeakSet[Mesh] = WeakSet()


def _forget_all() -> None:
    for mesh in list(_open):
        mesh.forget()


os.register_at_fork(after_in_child=_forget_all)


def limit_writes(connection: Connection, seconds: float) -> None:
    """Let writes to a connection fail if the peer takes no bytes for so long."""
    limit = struct.pack("ll", int(min(seconds, _MAX_SECONDS)), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _shut_down(connection: Connection, how: int) -> None:
    """Shut a connection down, while its descriptor stays open for the thread that reads from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as sock:
        sock.shutdown(how)
