"""Somebody between a rank and the hub, who has no token: what they change, repeat or leave out is not received."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from support.star import SOON, Make, Star, until

from mpicoll.transport.control import timing

Change = Callable[[list[bytes]], list[bytes]]


class Relay:
    """Passes on what two ranks send each other, and from :meth:`hold` on collects what one of them sends."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self._ends: list[socket.socket] = []
        self._held: int | None = None
        self._parts: list[bytes] = []
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._ends = [client, socket.create_connection(("127.0.0.1", self._target))]
            while True:
                for ready in select.select(self._ends, [], [], SOON)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    source = self._ends.index(ready)
                    if source == self._held:
                        self._parts.append(data)
                        self._arrived.set()
                    else:
                        self._ends[1 - source].sendall(data)

    def hold(self, source: int) -> None:
        """Collect what the rank sends from now on: 0 is the one that has connected, 1 the other."""
        self._held = source

    def take(self) -> bytes:
        """What has been sent since, and is not passed on."""
        assert self._arrived.wait(SOON)
        self._arrived.clear()
        return self._parts[-1]

    def send(self, data: bytes) -> None:
        """Send it in the name of the rank of which :meth:`hold` collects."""
        assert self._held is not None
        self._ends[1 - self._held].sendall(data)

    def cut(self) -> None:
        """End both connections in an orderly way."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        self._thread.join(SOON)
        for sock in (*self._ends, self._listener):
            sock.close()


@pytest.fixture
def relayed(star: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Star, Relay]]:
    """Three ranks; rank 1 reaches the hub through a relay."""
    monkeypatch.setattr(timing, "CRASH_WITHIN", 0.1, raising=False)
    job = star(3)
    relay = Relay(job.lines[0].address["port"])
    addresses = json.loads(json.dumps([line.address for line in job.lines]))
    for rank, line in enumerate(job.lines):
        seen = [
            address | {"port": relay.port} if rank == 1 and other == 0 else address
            for other, address in enumerate(addresses)
        ]
        line.connect(seen)
    for thread in job.threads:
        thread.start()
    try:
        yield job.meet(), relay
    finally:
        relay.end()


def forge(frame: bytes) -> bytes:
    """Another number of the same length."""
    return re.sub(rb'("number": )\d', rb"\g<1>7", frame)


CHANGES: dict[str, Change] = {
    "forged": lambda frames: [forge(frames[0])],
    "forged behind": lambda frames: [frames[0], forge(frames[0])],
    "replayed": lambda frames: [frames[0], frames[0]],
    "reordered": lambda frames: [frames[1], frames[0]],
    "dropped": lambda frames: [frames[1]],
    "truncated": lambda frames: [frames[0], frames[1][:-1]],
}


@pytest.mark.parametrize("source", [1, 0])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_relay_changes_is_not_received(relayed: tuple[Star, Relay], source: int, change: str) -> None:
    """The connection is closed instead, so that the ranks do not wait for what never arrives."""
    job, relay = relayed
    dest = 1 - source
    relay.hold(1 - source)
    frames = []
    for number in range(2):
        job.lines[source].send({"number": number}, dest)
        frames.append(relay.take())
    for data in CHANGES[change](frames):
        relay.send(data)
    if change == "truncated":
        relay.cut()
    until(lambda: (source, "closed") in job.gone(dest), lambda: job.heard)
    assert job.messages(dest, source) == [{"number": 0}][: len(job.messages(dest, source))]


def test_a_forged_rejection_does_not_count(star: Make) -> None:
    """Of a process at the port of a rank on another host, which knows the rank and not the token."""
    job = star(2)
    addresses = json.loads(json.dumps([line.address for line in job.lines]))
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(SOON)
        addresses[0] |= {"port": impostor.getsockname()[1], "place": "elsewhere", "addresses": ["127.0.0.1"]}
        with socket.create_connection(("127.0.0.1", job.lines[0].address["port"])) as hub:
            hub.settimeout(SOON)
            job.lines[0].connect(json.loads(json.dumps([line.address for line in job.lines])))
            until(lambda: job.drive(0) or select.select([hub], [], [], 0)[0])
            challenge = hub.recv(4096)
        job.lines[1].connect(addresses)
        job.drive(1)
        accepted, _ = impostor.accept()
        with accepted:
            accepted.settimeout(SOON)
            accepted.sendall(challenge)
            until(lambda: job.drive(1) or select.select([accepted], [], [], 0)[0])
            assert b'"proof"' in accepted.recv(4096)
            # The header of the challenge, of another kind and with an object without fields.
            start = challenge.index(b"{")
            header = bytearray(challenge[:start])
            header[8:12] = (2).to_bytes(4, "big")
            header[8 + 4 + 1 + 4 + 4] = ord("R")
            accepted.sendall(bytes(header) + b"{}")
            until(lambda: job.drive(1) or job.lines[1]._endpoint._links.attempts() == [])
        assert job.lines[1].hub == 0
        assert job.heard[1] == []
