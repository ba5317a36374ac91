"""Ranks of a control network that are threads of this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.network import ControlNetwork

TOKEN = b"the secret of this job"
SOON = 20.0
"""Seconds after which something that should have happened has not."""


def until(what: Callable[[], Any], why: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(0.005)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Star:
    """The ranks of a job, each with a thread that drives it."""

    def __init__(self, size: int, tokens: dict[int, bytes], clock: Callable[[], float], shape: str = "star") -> None:
        self.lines = [
            ControlNetwork(rank, size, tokens.get(rank, TOKEN), clock=clock, shape=shape) for rank in range(size)
        ]
        self.heard: list[list[Message | PeerExit]] = [[] for _ in range(size)]
        self.over = [False] * size
        self.threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(size)]

    def start(self) -> Star:
        addresses = json.loads(json.dumps([line.address for line in self.lines]))
        for line in self.lines:
            line.connect(addresses)
        for thread in self.threads:
            thread.start()
        return self

    def meet(self) -> Star:
        """Until all have heard of all; this is then forgotten."""
        for line in self.lines:
            line.send({"here": line.rank})
        for heard in self.heard:
            until(lambda heard=heard: len(heard) == len(self.lines) - 1, lambda heard=heard: heard)
            heard.clear()
        return self

    def _run(self, rank: int) -> None:
        while not self.over[rank]:
            self.heard[rank] += self.lines[rank].poll(1.0)

    def drive(self, *ranks: int) -> None:
        """One turn of each of these, without their threads."""
        for rank in ranks:
            self.heard[rank] += self.lines[rank].poll(0.0)

    def end(self, rank: int) -> None:
        self.over[rank] = True
        self.lines[rank].close()

    def messages(self, rank: int, source: int | None = None) -> list[dict[str, Any]]:
        heard = [one for one in self.heard[rank] if isinstance(one, Message)]
        return [one.body for one in heard if source in (None, one.source)]

    def gone(self, rank: int) -> list[tuple[int, str]]:
        return sorted((one.rank, one.why) for one in self.heard[rank] if isinstance(one, PeerExit))


Make = Callable[..., Star]
