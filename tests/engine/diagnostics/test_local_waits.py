"""The waits of a rank."""

from __future__ import annotations

import time

import pytest
from support.watchdogs import FakeQueue, WatchedRank, entry

from mpicoll.engine.diagnostics import watchdog


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
