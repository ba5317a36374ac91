"""The waits of a rank."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.garbage import collect_during, make_garbage
from support.watchdogs import FakeQueue, WatchedRank, entry

from mpicoll.engine.diagnostics import stacks, watchdog
from mpicoll.engine.diagnostics.local_waits import LocalWaits


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch gives no time to calls that raise by themselves: there are none."""
    monkeypatch.setattr(watchdog, "_TIMEOUT_MARGIN", 0.0)


@pytest.mark.usefixtures("strict")
def test_queues_may_come_while_the_watch_looks() -> None:
    """The set of queues is walked on the watch's thread, and grows and shrinks on others."""
    watched = WatchedRank()
    others: list[FakeQueue] = []

    class Growing(FakeQueue):
        @property
        def current(self) -> None:  # type: ignore[override]
            if len(others) < 50:
                others.append(FakeQueue())
                watched.watchdog.waits.add(others[-1])

        @current.setter
        def current(self, value: object) -> None:
            pass

    growing = Growing()
    watched.watchdog.waits.add(growing)
    while len(others) < 50:
        time.sleep(1e-3)
    stuck = FakeQueue(entry("the last one", 0.1))
    watched.watchdog.waits.add(stuck)
    assert watched.ended.wait(20)


@pytest.mark.usefixtures("strict")
def test_dropped_queues_are_not_watched() -> None:
    watched = WatchedRank()
    watched.watchdog.waits.add(FakeQueue(entry("gone", 0.1)))
    assert watched.watchdog.waits.queues() == []
    assert not watched.ended.wait(0.6)


def test_waits_may_end_while_they_are_listed() -> None:
    """A collection, which lets other threads run, may begin within the function of Python that copies the dict."""
    waits = LocalWaits()
    counts: list[int] = []

    def prepare() -> None:
        waits.active.update({thread: (entry("a call", 1.0), False, False) for thread in range(20)})
        make_garbage(lambda: [waits.active.pop(thread, None) for thread in range(5)])

    collect_during(lambda: counts.append(len(waits.entries())), prepare)
    assert set(counts) == {15, 20}


def test_threads_may_end_while_their_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, Any] = {}
    monkeypatch.setattr(threading, "_active", threads)

    def prepare() -> None:
        threads.update({number: SimpleNamespace(name=f"thread {number}") for number in range(20)})
        make_garbage(lambda: [threads.pop(number, None) for number in range(5)])

    counts: list[int] = []
    collect_during(lambda: counts.append(len(stacks.thread_names())), prepare)
    assert set(counts) == {15, 20}
