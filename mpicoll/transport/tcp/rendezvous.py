"""Rendezvous: the ranks of a job find each other by a store, and connect."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.config import config
from mpicoll.errors import MpicollError, SetupError, Timeout
from mpicoll.transport.control.address_choice import AddressChoice, describe_host
from mpicoll.transport.control.interfaces import LOOPBACK, InterfaceAddress, find_addresses, select_addresses
from mpicoll.transport.group_facts import find_facts
from mpicoll.transport.hashes import blake2b
from mpicoll.transport.tcp.mesh import Mesh, Peer, limit_writes
from mpicoll.transport.tcp.transport import TcpTransport
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from typing_extensions import Self

_PROVE_WITHIN = 20.0
"""Seconds in which the peer of a new connection has to prove that it has the job's secret."""

_CONNECT_WITHIN = 60.0
"""Seconds in which all connections are made, once each rank has published its address."""

_RANK = struct.Struct("<q")

_MAX_PROBES = 127
"""Most probes of TCP_KEEPCNT that Linux accepts."""

_NO_LIMIT = struct.pack("ll", 0, 0)


class Store(Protocol):
    """A store of torch.distributed, or another with these methods."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes:
        """Return the value of `key`, after it was set. Raises an exception after the store's own timeout."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0, and return its value."""


def connect(store: Store, rank: int, size: int, names: Sequence[int] | None = None) -> TcpTransport:
    """Return the transport of the `size` processes that call this with one `store`, each with another `rank`.
    Collective.

    A store may serve several meetings of the same number of ranks, one after the other. The store is referenced as long
    as the connections exist: other ranks may need it. `names` are the ranks in messages, by default those in [0, size).

    Raises:
        Timeout: A rank has not come within the store's timeout, or can't be connected.
        SetupError: Two processes have the same rank, or one process has two; or MPICOLL_INTERFACE selects nothing.
    """
    meeting = _Meeting(store, rank, size)
    addresses: list[InterfaceAddress] = []
    problem = ""
    if config().interface:
        try:
            addresses = select_addresses(config().interface)
        except ValueError as error:
            problem = str(error)
    mine = describe_host(addresses or find_addresses()) | {
        "pid": os.getpid(),
        "problem": problem,
        "secret": os.urandom(16).hex(),
        "thread": threading.get_ident(),
    }
    offers = meeting.exchange(mine)
    _check_offers(offers, rank)
    secret, places = bytes.fromhex(offers[0]["secret"]), [one["place"] for one in offers]
    with ExitStack() as opened:
        # Without an address that all ranks reach it listens at all that MPICOLL_INTERFACE selects.
        listen_at = AddressChoice(rank, offers, meeting.exchange).choose()
        if addresses and not listen_at:
            listen_at = [LOOPBACK, *(one.address for one in addresses)]
        ends, sockets = _listen(listen_at, size, opened)
        all_ends = meeting.exchange(ends)
        acceptor = _Acceptor(sockets, secret, expected=set(range(rank + 1, size)))
        connections: dict[int, Connection] = {}
        for peer in range(rank):
            connections[peer] = _reach(all_ends[peer], places[peer] == places[rank], secret, rank, peer)
        connections |= acceptor.wait(time.monotonic() + _CONNECT_WITHIN)
    names = range(size) if names is None else names
    peers = [Peer(name, one["pid"], one["host"]) for name, one in zip(names, offers, strict=True)]
    mesh = Mesh(rank, peers, places.count(places[rank]), connections, config().timeout, store)
    key = blake2b(secret, digest_size=8).hexdigest()
    transport = TcpTransport(mesh, range(size), key, None, root=True)
    node = [peer for peer in range(size) if places[peer] == places[rank]]
    try:
        transport.set_facts(find_facts(transport.allgather, rank, node, lambda: key, (rank, size), {}))
    except BaseException:
        mesh.leave()
        raise
    return transport


class _Meeting:
    """One meeting of all ranks at a store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        # All ranks of a meeting have come before the first one can go on to the next.
        self.number = (store.add("mpicoll/arrivals", 1) - 1) // size
        self._exchanges = 0
        if store.add(f"mpicoll/{self.number}/rank/{rank}", 1) > 1:
            raise SetupError(
                f"several processes are rank {rank} of {size}: each process needs another rank (RANK, or rank= of"
                " init_process_group), and a process that a rank starts can't communicate as that rank"
            )

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, as JSON has them. Collective."""
        prefix = f"mpicoll/{self.number}/{self._exchanges}"
        self._exchanges += 1
        self._store.set(f"{prefix}/{self._rank}", json.dumps(value))
        values = []
        for peer in range(self._size):
            try:
                values.append(json.loads(self._store.get(f"{prefix}/{peer}")))
            except Exception as error:
                if isinstance(error, MpicollError):
                    raise
                raise Timeout(
                    f"rank {self._rank} of {self._size}: rank {peer} has not come to the rendezvous"
                    f" ({str(error).splitlines()[0] if str(error) else type(error).__name__}); are all"
                    f" {self._size} processes started, with this store and ranks from 0 to {self._size - 1}?"
                ) from error
        return values


def _check_offers(offers: Sequence[dict[str, Any]], rank: int) -> None:
    processes: dict[tuple[str, int], int] = {}
    for other, one in enumerate(offers):
        first = processes.setdefault((one["place"], one["pid"]), other)
        if first != other:
            raise SetupError(
                f"ranks {first} and {other} are threads of one process, which can be one rank only; mpicoll.run_local"
                " has ranks that are threads"
            )
    problems = [f"rank {other}: {one['problem']}" for other, one in enumerate(offers) if one["problem"]]
    if problems and len({one["place"] for one in offers}) > 1:
        raise SetupError("; ".join(problems))


def _listen(
    addresses: Sequence[str], size: int, opened: ExitStack
) -> tuple[list[tuple[str, int]], list[socket.socket]]:
    """Return addresses and ports at which this process listens until `opened` is closed, and the sockets. Without
    `addresses` it listens at all of this host's."""
    sockets = []
    for address in addresses or [LOOPBACK, *(one.address for one in find_addresses())]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):
            sock = opened.enter_context(socket.create_server((address, 0), family=family, backlog=size + 16))
            sockets.append(sock)
            opened.callback(_wake, sock)
    return [sock.getsockname()[:2] for sock in sockets], sockets


def _wake(listening: socket.socket) -> None:
    """End the wait of the thread that accepts connections, which a close alone would not."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _reach(ends: Sequence[Sequence[Any]], is_local: bool, secret: bytes, rank: int, peer: int) -> Connection:
    """Connect to `peer`, which listens at `ends`. Raises Timeout if none of them answers with the job's secret."""
    problems = []
    for address, port in ends:
        if (address == LOOPBACK) != is_local:
            continue
        try:
            sock = socket.create_connection((address, port), timeout=_PROVE_WITHIN)
            with _Prover(sock) as prover:
                answer_challenge(prover.connection, secret)
                deliver_challenge(prover.connection, secret)
                prover.connection.send_bytes(_RANK.pack(rank))
                return prover.keep()
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            problems.append(f"{address}:{port}: {str(error) or type(error).__name__}")
    raise Timeout(
        f"rank {rank} can't connect to rank {peer}: {'; '.join(problems) or 'it listens at no address that is reached'}"
        "; MPICOLL_INTERFACE selects the network interface"
    )


class _Prover:
    """A new connection, whose reads and writes have a time limit until it is kept; otherwise it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        seconds = struct.pack("ll", int(_PROVE_WITHIN), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket | None = sock
        self.connection = Connection(os.dup(sock.fileno()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self._socket is not None:
            self._socket.close()
            self.connection.close()

    def keep(self) -> Connection:
        """Return the connection for good: its reads have no limit, its writes that of MPICOLL_TIMEOUT, and a host that
        does not respond any more ends it."""
        sock, self._socket = self._socket, None
        assert sock is not None
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LIMIT)
            limit_writes(self.connection, config().timeout)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # Not TCP_USER_TIMEOUT, which would also end a connection to a process that does not read for so long.
            for name, value in (
                ("KEEPIDLE", 2),
                ("KEEPINTVL", 1),
                ("KEEPCNT", min(_MAX_PROBES, max(1, int(config().outage)))),
            ):
                if (option := getattr(socket, f"TCP_{name}", None)) is not None:
                    sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return self.connection


class _Acceptor:
    """Threads that accept the connections of the ranks `expected`; a stranger occupies only its own."""

    def __init__(self, sockets: Sequence[socket.socket], secret: bytes, expected: set[int]) -> None:
        self._secret, self._expected = secret, expected
        self._changed = threading.Condition()
        self._found: dict[int, Connection] = {}
        for sock in sockets:
            _start(partial(self._accept, sock))

    def wait(self, deadline: float) -> dict[int, Connection]:
        """Return the connections by rank. Raises Timeout at the `deadline`."""
        with self._changed:
            while missing := self._expected - self._found.keys():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise Timeout(f"{rank_list(missing)} did not connect within {_CONNECT_WITHIN:g} s")
            return self._found

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it is closed when all have connected
            while True:
                sock, _ = listening.accept()
                _start(partial(self._admit, sock))

    def _admit(self, sock: socket.socket) -> None:
        with suppress(OSError, EOFError, ValueError, AuthenticationError), _Prover(sock) as prover:
            deliver_challenge(prover.connection, self._secret)
            answer_challenge(prover.connection, self._secret)
            (rank,) = _RANK.unpack(prover.connection.recv_bytes(_RANK.size))
            with self._changed:
                if rank in self._expected and rank not in self._found:
                    self._found[rank] = prover.keep()
                    self._changed.notify_all()


def _start(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="mpicoll-rendezvous", daemon=True).start()
