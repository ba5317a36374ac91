"""Connections of processes that do not belong to the job."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
from pathlib import Path

import pytest
from support.sockets import wait_readable
from support.star import SOON, TOKEN, Clock, Make, until

from mpicoll.transport.control import connection, endpoint, listener, sockets, timing
from mpicoll.transport.control.events import Message
from mpicoll.transport.control.frame_tags import NO_TAG
from mpicoll.transport.control.network import ControlNetwork


def _connect(line: ControlNetwork) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", line.address["port"]), timeout=SOON)
    sock.settimeout(SOON)
    return sock


def _frame(kind: bytes, body: bytes, source: int = 1, dest: int = 0) -> bytes:
    return connection._HEADER.pack(connection._MAGIC, len(body), 1, source, dest, kind) + NO_TAG + body


_GARBAGE = {
    "scan": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "magic only": b"\0mpicoll",
    "no json": _frame(b"H", b"\xff{"),
    "no object": _frame(b"H", b"[1, 2]"),
    "no proof": _frame(b"H", b'{"rank": 1}'),
    "wrong types": _frame(b"H", b'{"rank": [], "nonce": {}, "proof": 3}'),
    "wrong nonce": _frame(b"H", b'{"rank": 1, "nonce": "1", "proof": "2"}'),
    "wrong proof": _frame(b"H", b'{"rank": 1, "nonce": "0123456789abcdef0123456789abcdef", "proof": "2"}'),
    "strange proof": _frame(b"H", b'{"rank": 1, "nonce": "0123456789abcdef0123456789abcdef", "proof": "\\u00e4"}'),
    "own rank": _frame(b"H", b'{"rank": 0, "nonce": "0123456789abcdef0123456789abcdef", "proof": "2"}'),
    "deep": _frame(b"H", b"[" * 900),
    "uninvited": _frame(b"J", b"{}"),
    "message": _frame(b"M", b'{"evil": 1}'),
    "obituary": _frame(b"G", b'{"rank": 1, "why": "closed", "words": "", "pid": 0, "host": ""}'),
    "acknowledgement": connection._HEADER.pack(connection._MAGIC, 30_000, 1, 1, 0, b"A") + NO_TAG,
    "too long": _frame(b"H", b" " * 2000),
    "far too long": connection._HEADER.pack(connection._MAGIC, 2**32 - 1, 1, 1, 0, b"H"),
}


def test_strangers_change_nothing(star: Make) -> None:
    job = star(3).start()
    socks = []
    for line in job.lines:
        for garbage in _GARBAGE.values():
            for reset in (False, True):
                sock = _connect(line)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(garbage)
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
                else:
                    socks.append(sock)
    for rank, line in enumerate(job.lines):
        line.send({"from": rank})
    for rank in range(3):
        until(lambda rank=rank: len(job.heard[rank]) == 2, lambda rank=rank: job.heard[rank])
        assert all(isinstance(one, Message) and one.body == {"from": one.source} for one in job.heard[rank])
    for sock in socks:
        sock.close()


def test_connections_without_proof_are_closed(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PROVE_WITHIN", 0.3)
    job = star(2).start()
    socks = [_connect(job.lines[0]) for _ in _GARBAGE]
    for sock, garbage in zip(socks, _GARBAGE.values(), strict=True):
        with contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
    for sock in socks:
        with sock, contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                pass  # a challenge, then the end


def test_strangers_take_a_limited_number_of_descriptors(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connections without a proof make room for new ones, long before their time is over."""
    monkeypatch.setattr(timing, "PROVE_WITHIN", 3 * SOON)
    job = star(2).start()
    limit = endpoint._MAX_STRANGERS + 2
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_connect(job.lines[0])) for _ in range(limit + 20)]
        for sock in socks[:20]:
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass  # a challenge, then the end
        job.meet()
        assert len(job.lines[0]._endpoint._links.unproven()) <= limit


def test_connections_that_no_rank_needs_are_accepted_at_a_limited_rate(star: Make) -> None:
    """While all ranks are connected. When the hub is gone, the others connect to the next one at once."""
    clock = Clock()
    job = star(3, clock=clock)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"here": line.rank})
    until(lambda: job.drive(0, 1, 2) or all(len(heard) == 2 for heard in job.heard))
    burst = 3 + listener._UNEXPECTED
    with contextlib.ExitStack() as stack:
        socks: list[socket.socket] = []

        def flood(number: int) -> int:
            """Connections that rank 1 has accepted, some of which it has closed again."""
            for _ in range(number):
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", addresses[1]["port"]))
                socks.append(sock)
            for _ in range(20):
                job.drive(1)
            return len(wait_readable(socks, 0))  # these have a challenge

        assert flood(60) == 60
        assert flood(20) == burst
        clock.now += 1.0
        assert flood(60) == burst + listener._UNEXPECTED_RATE
        job.end(0)
        before = clock.now

        def step(*ranks: int) -> None:
            clock.now += 0.001
            job.drive(*ranks)

        until(lambda: step(1, 2) or job.lines[2].hub == 1)
        job.lines[2].send({"after": 2})
        until(lambda: step(1, 2) or {"after": 2} in job.messages(1), lambda: job.heard)
        assert job.lines[1].hub == 1
        assert clock.now - before < 1.0


def test_strangers_do_not_raise_the_limit_of_descriptors(star: Make) -> None:
    """Of a program that may use select(2), for which the descriptors of its job are few enough."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    try:
        job = star(2)
        # More than the ranks need, and less than a process with so many strangers had.
        soft = used + 20 + 2 + endpoint._MAX_STRANGERS + 4 * sockets.RESERVED_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        job.start().meet()
        with contextlib.ExitStack() as stack:
            for _ in range(endpoint._MAX_STRANGERS + 10):
                stack.enter_context(_connect(job.lines[0]))
            until(lambda: len(job.lines[0]._endpoint._links.unproven()) >= endpoint._MAX_STRANGERS)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, before[1])
            job.meet()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_acknowledgement_of_more_than_was_sent(star: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "PROVE_WITHIN", 3 * SOON)
    job = star(2).start()
    with _connect(job.lines[0]) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(connection._HEADER.pack(connection._MAGIC, 30_000, 1, 1, 0, b"A") + NO_TAG)
        while sock.recv(4096):
            pass  # a challenge, then the end, without waiting for a proof


def test_a_job_of_one_host_listens_on_the_loopback_interface_only() -> None:
    line = ControlNetwork(0, 2, TOKEN, listen_at=["127.0.0.1"])
    try:
        assert [one.getsockname()[0] for one in line._endpoint.listener._sockets] == ["127.0.0.1"]
        _connect(line).close()
    finally:
        line.close()


def test_another_token(star: Make) -> None:
    clock = Clock()
    job = star(3, {2: b"another secret"}, clock)
    addresses = [line.address for line in job.lines]
    for line in job.lines:
        line.connect(addresses)
        line.send({"secret": line.rank})
    for _ in range(200):
        job.drive(0, 1, 2)
        clock.now += 0.05
    assert job.heard[0] == [Message(1, {"secret": 1})]
    assert job.heard[1] == [Message(0, {"secret": 0})]
    assert job.heard[2] == []
