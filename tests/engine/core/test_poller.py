"""The thread that looks after transfers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core import poller as module
from mpicoll.engine.core.poller import Poller


class Transfer:
    """Complete when it was asked often enough."""

    def __init__(self, times: int) -> None:
        self.left = times

    def test(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.fixture
def poller() -> Iterator[Poller]:
    one = Poller()
    yield one
    one.stop()
    assert one._thread is None or not one._thread.is_alive()


def test_it_asks_until_all_are_complete(poller: Poller) -> None:
    ended = [threading.Event() for _ in range(5)]
    for number, event in enumerate(ended):
        poller.watch(Transfer(10 * number), event.set)
    assert all(event.wait(20) for event in ended)


def test_it_requests_states_that_no_rank_has_reported(poller: Poller) -> None:
    quiet = Transfer(3)
    poller.watch(quiet)
    deadline = time.monotonic() + 20
    while quiet.left > 0:
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_it_asks_as_often_as_the_most_urgent_transfer_needs(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    two = threading.Barrier(2)

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) < 3:
            two.wait(20)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    ended = threading.Event()
    poller.watch(Transfer(10**9), period=0.125)
    poller.watch(Transfer(2), ended.set, period=0.0625)
    two.wait(20)
    two.wait(20)
    assert ended.wait(20)
    poller.stop()
    # The thread may have begun when both were there.
    assert set(naps[:2]) == {0.125, 0.0625}


def test_an_idle_thread_ends_and_another_one_takes_over(poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE", 0.05)
    for _ in range(3):
        event = threading.Event()
        poller.watch(Transfer(2), event.set)
        assert event.wait(20)
        deadline = time.monotonic() + 20
        while poller._thread is not None:
            assert time.monotonic() < deadline
            time.sleep(1e-3)


def test_stop_does_not_wait_for_what_never_completes() -> None:
    poller = Poller()
    poller.watch(Transfer(10**9))
    begin = time.monotonic()
    poller.stop()
    assert time.monotonic() - begin < 60


def test_real_transfers(several: Ranks) -> None:
    def body() -> None:
        me, size = mpicoll.world().rank, mpicoll.world().size
        poller, ended = Poller(), threading.Event()
        x = np.full(1 << 18, me)
        y = np.empty_like(x)
        receiving = mpicoll.irecv(out=y, source=(me - 1) % size)
        sending = mpicoll.isend(x, (me + 1) % size)
        poller.watch(receiving, ended.set)
        poller.watch(sending)
        assert ended.wait(20)
        receiving.wait(20)
        sending.wait(20)
        assert (y == (me - 1) % size).all()
        poller.stop()

    several(body)
