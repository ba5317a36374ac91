"""Somebody between a rank and the hub, who has no token: what they change, repeat or leave out is not received."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator

import pytest
from support.relay import Relay, start_with_relay
from support.sockets import wait_readable
from support.star import SOON, Make, Star, until

from mpicoll.transport.control import timing

Change = Callable[[list[bytes]], list[bytes]]


@pytest.fixture
def relayed(star: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Star, Relay]]:
    """Three ranks; rank 1 reaches the hub through a relay."""
    monkeypatch.setattr(timing, "CRASH_WITHIN", 0.1, raising=False)
    job = star(3)
    relay = start_with_relay(job)
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


@pytest.mark.parametrize("source", [1, pytest.param(0, marks=pytest.mark.long)])
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
            until(lambda: job.drive(0) or wait_readable([hub], 0))
            challenge = hub.recv(4096)
        job.lines[1].connect(addresses)
        job.drive(1)
        accepted, _ = impostor.accept()
        with accepted:
            accepted.settimeout(SOON)
            accepted.sendall(challenge)
            until(lambda: job.drive(1) or wait_readable([accepted], 0))
            assert b'"proof"' in accepted.recv(4096)
            # The header of the challenge, of another kind and with an object without fields.
            start = challenge.index(b"{")
            header = bytearray(challenge[:start])
            header[8:12] = (2).to_bytes(4, "big")
            header[8 + 4 + 1 + 4 + 4] = ord("R")
            accepted.sendall(bytes(header) + b"{}")
            until(lambda: job.drive(1) or job.lines[1]._endpoint._links.attempts == {})
        assert job.lines[1].hub == 0
        assert job.heard[1] == []
