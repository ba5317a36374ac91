"""Watchdogs without other ranks, and queues whose operations are set by a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpicoll.engine.diagnostics.flight_recorder import Call, EntryTuple, Group
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.watchdog import Watchdog


def entry(name: str, timeout: float, number: int = 1) -> EntryTuple:
    """An operation that begins now."""
    return Group("0.0", "world", (0, 1), 1, timeout), number, Call(name, 8), time.monotonic(), None


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


class FakeQueue:
    """A queue whose current operation is set by the test."""

    number, queued, thread, background = 1, 0, 0, True
    executing = Executing()

    def __init__(self, current: EntryTuple | None = None) -> None:
        self.current = current
        self.group = Group("0.0", "world", (0, 1), 1, 60.0)

    def drain(self, timeout: float) -> bool:
        return True

    def refuse(self) -> None:
        pass

    def unreported_failures(self) -> list[Any]:
        return []

    def waiting_threads(self) -> set[int]:
        return set()


class WatchedRank:
    """A watchdog, the event that it has aborted the job, and the exit statuses."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.codes: list[int] = []
        self.watchdog = Watchdog(0.05, self._abort)

    def _abort(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()
        threading.Event().wait()  # as MPI's abort never returns
