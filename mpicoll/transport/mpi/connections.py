"""Connections by TCP between ranks on different hosts, which carry the large messages of schedules where MPI's own
messages between hosts go by TCP too.

MPI libraries announce each large message, and move it only while a thread calls them. The extension has messages under
way without that, and threads that wait for them sleep: so they use the whole link, with half of the processor time.

Two ranks connect within the first schedule that may use their connection, and both go on with MPI if that fails. The
one that connects proves what rank it is by a secret that the other one has sent to it by MPI.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpicoll.logs import get_logger
from mpicoll.transport.control import timing
from mpicoll.transport.control.sockets import RESERVED_DESCRIPTORS, connecting_error, query_descriptor_limit
from mpicoll.transport.hashes import compare_digest
from mpicoll.transport.waiting import poll

if TYPE_CHECKING:
    from mpicoll._shm import Connection
    from mpicoll.transport.base import Message, PostedRound

_SECRET = 32
"""Bytes of a secret."""

_OFFER = struct.Struct(f"!H{_SECRET}s46s")
"""The offer of a rank to another one: the port at which it listens, or 0, a secret, and its address."""

_SPARE_BACKLOG = 64
"""Connections of strangers, beyond those of ranks, that the kernel keeps until they are accepted."""

_address: list[str] = []


def allow_connections(address: str) -> None:
    """Have communicators use connections. All ranks of the job call it, each with the `address` of its host at which
    the other hosts reach it, or none does."""
    _address[:] = [address]


def may_connect(members: Sequence[int]) -> bool:
    """Return True if a communicator of these ranks of the job uses connections. Those of other jobs, which are below 0,
    have not agreed on it."""
    return bool(_address) and min(members) >= 0


class _Endpoint(Protocol):
    """Part of the transport whose messages they carry."""

    rank: int
    nodes: tuple[int, ...]
    members: tuple[int, ...]

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> PostedRound: ...


class Connections:
    """The connections of a communicator with ranks on other hosts."""

    def __init__(self, endpoint: _Endpoint) -> None:
        self._endpoint = endpoint
        self._made: dict[int, Connection | None] = {}
        _all.add(self)

    def get(self, peers: Collection[int], tag: int) -> tuple[int | Connection, ...]:
        """Return those of `peers` with which this rank has connections, and the connections, by turns.

        Both ends call it, with the tag of the same collective, before they send messages with this tag to each other:
        so both have a connection, or none.
        """
        if not may_connect(self._endpoint.members):
            return ()
        own = self._endpoint.nodes[self._endpoint.rank]
        new = [peer for peer in peers if peer not in self._made and self._endpoint.nodes[peer] != own]
        if new:
            self._connect(new, tag)
        made = ((peer, self._made.get(peer)) for peer in peers)
        return tuple(one for peer, connection in made if connection is not None for one in (peer, connection))

    def close(self) -> None:
        """Close all. None is used any more."""
        for connection in list(self._made.values()):
            if connection is not None:
                connection.close()
        self._made = dict.fromkeys(self._made)

    def _connect(self, peers: Sequence[int], tag: int) -> None:
        """Connect to `peers`, each of which does the same: those of higher ranks to those of lower ranks.

        They wait for each other by MPI alone, so that no rank that comes late makes it fail.
        """
        from mpicoll._shm import Connection

        try:
            with ExitStack() as opened:
                made = _meet(self._endpoint, peers, tag, opened)
                for peer in peers:
                    self._made[peer] = Connection(made[peer].detach()) if peer in made else None
        except BaseException:
            # The other ends may have made it. So the next call fails at both, instead of one that connects again.
            for peer in peers:
                self._made[peer] = _make_closed()
            raise
        failed = [peer for peer in peers if self._made[peer] is None]
        if failed:
            get_logger().info(
                "rank %d can't connect with %s by TCP: MPI carries their messages", self._endpoint.rank, failed
            )


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_all() -> None:
    """In a forked child: the connections are those of its parent."""
    for one in list(_all):
        one.close()


os.register_at_fork(after_in_child=_close_all)


def _make_closed() -> Connection:
    """Return a connection that was lost."""
    from mpicoll._shm import Connection

    connection = Connection(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    connection.close()
    return connection


def _meet(endpoint: _Endpoint, peers: Sequence[int], tag: int, opened: ExitStack) -> dict[int, socket.socket]:
    """Return connections with those of `peers` for which both ends could make one."""
    listener = _listen(opened, len(peers))
    port = 0 if listener is None else listener.getsockname()[1]
    secrets = {peer: os.urandom(_SECRET) for peer in peers}
    offers = {peer: _OFFER.pack(port, secrets[peer], _address[0].encode()) for peer in peers}
    ends: dict[int, tuple[str, int, bytes]] = {}
    for peer, text in _exchange(endpoint, offers, tag).items():
        other_port, secret, address = _OFFER.unpack(text)
        if peer < endpoint.rank and port and other_port:
            ends[peer] = address.rstrip(b"\0").decode(), other_port, secret
    made = _dial(ends, opened)
    has_dialled = _exchange(endpoint, {peer: bytes([peer in made]) for peer in peers}, tag)
    if listener is not None:
        made |= _accept(listener, {secrets[one]: one for one in peers if has_dialled[one] == b"\1"}, opened)
    is_known = _exchange(endpoint, {peer: bytes([peer in made]) for peer in peers}, tag)
    return {peer: sock for peer, sock in made.items() if is_known[peer] == b"\1"}


def _exchange(endpoint: _Endpoint, texts: dict[int, bytes], tag: int) -> dict[int, bytes]:
    """Send a text to each of some ranks, and return as many bytes from each of them."""
    sends = [(peer, np.frombuffer(text, np.uint8)) for peer, text in texts.items()]
    recvs = [(peer, np.empty(len(text), np.uint8)) for peer, text in texts.items()]
    posted = endpoint.post(sends, recvs, tag)
    try:
        poll(posted.test, None, "connection")
    except BaseException:
        posted.discard()
        raise
    return {peer: data.tobytes() for peer, data in recvs}


def _listen(opened: ExitStack, count: int) -> socket.socket | None:
    """Return a socket at which `count` ranks can connect, or None if descriptors are scarce or the address has gone."""
    family = socket.AF_INET6 if ":" in _address[0] else socket.AF_INET
    try:
        backlog = count + _SPARE_BACKLOG
        listener = opened.enter_context(socket.create_server((_address[0], 0), family=family, backlog=backlog))
    except OSError as error:
        get_logger().info("no rank can connect to %s: %s", _address[0], error)
        return None
    listener.setblocking(False)
    return listener if listener.fileno() + count < query_descriptor_limit() - RESERVED_DESCRIPTORS else None


def _dial(ends: Mapping[int, tuple[str, int, bytes]], opened: ExitStack) -> dict[int, socket.socket]:
    """Connect to the addresses and ports of some ranks, send to each a text, and return the connections that could be
    made."""
    made: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for peer, (address, port, _) in ends.items():
            with suppress(OSError):  # no network leads there, or descriptors are scarce
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                _prepare(sock)
                if sock.connect_ex((address, port)) in (0, errno.EINPROGRESS):
                    selector.register(sock, selectors.EVENT_WRITE, peer)
        deadline = time.monotonic() + timing.CONNECT_WITHIN
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                if not connecting_error(key.fileobj):
                    with suppress(OSError):  # it has ended at once
                        key.fileobj.send(ends[key.data][2])  # the buffer of a new connection has room for it
                        made[key.data] = key.fileobj
    return made


def _accept(listener: socket.socket, expected: Mapping[bytes, int], opened: ExitStack) -> dict[int, socket.socket]:
    """Return the connections of the ranks that are `expected`, by the text that each has sent already."""
    made: dict[int, socket.socket] = {}
    received: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        deadline = time.monotonic() + timing.CONNECT_WITHIN
        while len(made) < len(expected) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is listener:
                    with suppress(OSError):  # it has ended at once
                        accepted = opened.enter_context(listener.accept()[0])
                        _prepare(accepted)
                        selector.register(accepted, selectors.EVENT_READ)
                        received[accepted] = b""
                    continue
                text = received[sock]
                with suppress(OSError):
                    received[sock] += sock.recv(_SECRET - len(text))
                if len(text) < len(received[sock]) < _SECRET:
                    continue
                selector.unregister(sock)
                peer = next((one for secret, one in expected.items() if compare_digest(received[sock], secret)), None)
                if peer is None or peer in made:
                    sock.close()
                else:
                    made[peer] = sock
    return made


def _prepare(sock: socket.socket) -> None:
    """Set the options of a connection. The control network detects the loss of a host. The kernel must not end a
    connection because the program at the other end is stopped, or computes, and does not read."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
