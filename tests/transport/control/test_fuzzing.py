"""Random connections to the ports of a job: garbage, cut handshakes, replays and floods, while its ranks send messages.

The seed of a run that has failed is printed; FUZZING_SEED repeats its choices.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from random import Random

import pytest
from support.relay import start_with_relay
from support.star import SOON, Make, Star, until

from mpicoll.transport.control import connection
from mpicoll.transport.control.connection import WINDOW
from mpicoll.transport.control.endpoint import _MAX_STRANGERS
from mpicoll.transport.control.frame_tags import TAG_SIZE

KINDS = b"CHWJRMLBGTAZ\0"
KEPT = 150
"""Connections that stay open at most: more than a rank keeps."""


class Fuzzer:
    """Random connections to `ports`. `streams` are what ranks have sent on genuine connections."""

    def __init__(self, random: Random, ports: list[int], streams: list[bytes]) -> None:
        self.random = random
        self.ports = ports
        self.streams = streams
        self.kept: list[socket.socket] = []
        self.count = 0

    def step(self) -> None:
        """Make one connection, or a flood of them."""
        choices: list[Callable[[socket.socket], None]] = [
            self.send_garbage,
            self.send_frames,
            self.send_replay,
            self.answer_challenge,
        ]
        port = self.random.choice(self.ports)
        if self.random.random() < 0.03:
            for _ in range(self.random.randrange(100)):
                self.connect(port, lambda _: None)
        self.connect(port, self.random.choice(choices))
        while len(self.kept) > KEPT or (self.kept and self.random.random() < 0.7):
            self.finish(self.kept.pop(self.random.randrange(len(self.kept))))

    def connect(self, port: int, talk: Callable[[socket.socket], None]) -> None:
        sock = socket.socket()
        sock.settimeout(0.05)  # the port may accept no connection at the moment
        self.kept.append(sock)
        self.count += 1
        with contextlib.suppress(OSError):
            sock.connect(("127.0.0.1", port))
            talk(sock)

    def finish(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self.random.random() < 0.3:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            elif self.random.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
        sock.close()

    def close(self) -> None:
        for sock in self.kept:
            sock.close()

    def send(self, sock: socket.socket, data: bytes) -> None:
        """Send `data` in random parts."""
        while data:
            size = self.random.choice([1, 10, 100, len(data)])
            sock.sendall(data[:size])
            data = data[size:]

    def send_garbage(self, sock: socket.socket) -> None:
        self.send(sock, self.random.randbytes(self.random.choice([1, 20, 300])))

    def frame(self, kind: int, payload: bytes) -> bytes:
        length = self.random.choice([len(payload)] * 4 + [0, 2**32 - 1, self.random.randrange(WINDOW)])
        ranks = [self.random.choice([0, 1, 2, -1, 3, 2**31 - 1]) for _ in range(2)]
        last = self.random.choice([1, 1, 1, 0, 255])
        header = connection._HEADER.pack(connection._MAGIC, length, last, *ranks, bytes([kind]))
        tag = self.random.choice([bytes(TAG_SIZE), self.random.randbytes(TAG_SIZE)])
        return header + tag + payload

    def send_frames(self, sock: socket.socket) -> None:
        bodies = [
            b"{}",
            b"[]",
            b"{",
            b'{"evil": 1}',
            b'{"rank": 1, "why": "closed", "crash_output": "", "pid": 0, "host": ""}',
            b'{"rank": 1, "nonce": "0123456789abcdef0123456789abcdef", "proof": "00"}',
            b"[" * 900,
            self.random.randbytes(self.random.randrange(1500)),
        ]
        for _ in range(self.random.randrange(1, 4)):
            self.send(sock, self.frame(self.random.choice(KINDS), self.random.choice(bodies)))

    def send_replay(self, sock: socket.socket) -> None:
        """A genuine stream, or a part of it, perhaps with changes."""
        data = bytearray(self.random.choice(self.streams))
        if self.random.random() < 0.5:
            del data[self.random.randrange(len(data)) :]
        for _ in range(self.random.choice([0, 0, 1, 3])):
            if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.send(sock, bytes(data))

    def answer_challenge(self, sock: socket.socket) -> None:
        """The answer of a process that knows everything but the token, cut or with more behind it."""
        challenge = json.loads(sock.recv(4096)[connection._PREFIX :])
        rank = self.random.choice([0, 1, 2, 3, challenge["rank"]])
        nonce = self.random.choice([challenge["nonce"], f"{self.random.getrandbits(128):032x}"])
        hello = json.dumps({"rank": rank, "nonce": nonce, "proof": f"{self.random.getrandbits(256):064x}"}).encode()
        header = connection._HEADER.pack(connection._MAGIC, len(hello), 1, rank, challenge["rank"], b"H")
        data = header + bytes(TAG_SIZE) + hello
        if self.random.random() < 0.3:
            data = data[: self.random.randrange(len(data))]
        self.send(sock, data + self.random.choice([b"", self.frame(ord("J"), b"{}"), self.frame(ord("M"), b"{}")]))


def send_messages(job: Star, sent: list[int], interval: float, over: threading.Event) -> None:
    """Send numbered messages from every rank to all others, one each `interval` seconds, until it is over."""
    while not over.wait(interval):
        for line in job.lines:
            line.send({"number": sent[line.rank], "text": "x" * (sent[line.rank] % 50 * 100)})
            sent[line.rank] += 1


@pytest.mark.parametrize("seconds", [2.0, pytest.param(300.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_random_connections_change_nothing(star: Make, seconds: float) -> None:
    """All messages arrive, none of others, no rank seems dead, and the number of connections has its limit."""
    seed = int(os.environ.get("FUZZING_SEED", secrets.randbits(32)))
    print(f"FUZZING_SEED={seed}")
    job = star(3)
    over = threading.Event()
    sent = [0] * 3
    sender = threading.Thread(target=send_messages, args=(job, sent, seconds / 200, over))
    with contextlib.ExitStack() as stack:
        relay = start_with_relay(job)
        stack.callback(relay.end)
        job.meet()
        fuzzer = Fuzzer(
            Random(seed), [line.address["port"] for line in job.lines], [bytes(one) for one in relay.passed]
        )
        stack.callback(fuzzer.close)
        sender.start()
        stack.callback(sender.join, SOON)
        stack.callback(over.set)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            fuzzer.step()
            for line in job.lines:
                # The thread of a rank may be about to drop one.
                assert len(line._endpoint._links.unproven()) <= 3 + _MAX_STRANGERS + 1
        over.set()
        sender.join(SOON)
        assert not sender.is_alive()
        for rank in range(3):
            until(lambda rank=rank: len(job.heard[rank]) >= sum(sent) - sent[rank], lambda rank=rank: job.gone(rank))
            assert job.gone(rank) == []
            for source in {0, 1, 2} - {rank}:
                assert [one["number"] for one in job.messages(rank, source)] == list(range(sent[source]))
        print(f"{fuzzer.count} connections, {sum(sent)} messages")
