"""Sends of workers and servers, which take turns on a link."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker, links, transfers
from mpicoll.parallel.parameter_server.links import Links
from mpicoll.parallel.parameter_server.transfers import IN_FLIGHT, Pace, PolledTransfers


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of this module alone: other threads of the process need theirs."""
    now = [100.0]
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_messages_do_not_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stop_clock(monkeypatch)
    pace = Pace()
    assert [pace.may_start() for _ in range(IN_FLIGHT)] == [True] * IN_FLIGHT, "how long they take is not known"
    now[0] += 0.008
    for _ in range(IN_FLIGHT):
        pace.end(100.0, 1 << 19)
    assert pace.may_start()
    assert not pace.may_start(), "it would arrive together with the other one"
    now[0] += 0.75 * 0.008 / IN_FLIGHT + 1e-6
    assert pace.may_start()


def test_a_message_that_was_received_late_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stop_clock(monkeypatch)
    pace = Pace()
    now[0] += 60.0
    pace.end(100.0, 1 << 19)
    assert pace.may_start()
    now[0] += 0.011
    assert pace.may_start()


def test_messages_wait_only_for_large_ones_and_where_they_are_started_again() -> None:
    for pace, nbytes in ((Pace(), 4096), (Pace(enabled=False), 1 << 19)):
        pace.end(0.0, nbytes)
        assert [pace.may_start() for _ in range(4)] == [True] * 4


def test_all_gradients_are_sent_by_a_push_between_threads() -> None:
    """A send that had to wait there would start only at the next call of the worker, which waits for the server."""

    def program() -> None:
        if mpicoll.world().rank == 0:
            server = ParameterServer(SGD(lr=1.0), mode="sync", bucket_bytes=4096)
            while server.update_model():
                mpicoll.send(np.zeros(1), 1)
            return
        with Worker({"w": np.zeros(20000, np.float32)}) as worker:
            for _ in range(2):
                worker.pull_weights()
                worker.push_gradients({"w": np.ones(20000, np.float32)})
                mpicoll.recv(np.zeros(1), 0)

    mpicoll.run_local(program, 2, timeout=30)


def test_waits_look_without_a_pause_after_a_short_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages take milliseconds, most of these looks would have no effect, and take a core from other ranks."""
    now, looks, sleeps = [0.0], [0], [0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        sleeps[0] += 1

    for module in (links, transfers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def wait_for(waiting: Any, seconds: float) -> tuple[int, int]:
        end, looks[0], sleeps[0] = now[0] + seconds, 0, 0

        def ready() -> bool:
            looks[0] += 1
            return looks[0] > 1 and now[0] >= end

        waiting.wait("pull_weights", ready, lambda: [0], 10.0, any_of=True)
        return looks[0], sleeps[0]

    def program() -> None:
        waiting: Any = object.__new__(Links)
        waiting._core, waiting._job = core_of(mpicoll.world()), SimpleNamespace(survives_deaths=True)
        waiting._last_wait, waiting.servers = 0.0, None
        waiting.transfers = PolledTransfers([], driven=False)
        assert wait_for(waiting, 0.0) == (2, 0)
        spun, slept = wait_for(waiting, 4e-3)
        assert spun > 20 + slept
        for seconds, naps in ((4e-3, 21), (1e-3, 6), (1e-3, 17), (1e-4, 3)):
            looked, slept = wait_for(waiting, seconds)
            assert looked == slept + 2
            assert slept <= naps
        spun, slept = wait_for(waiting, 4e-3)
        assert spun > 20 + slept, "the last one was short"

    mpicoll.run_local(program, 1)


def test_a_server_does_nothing_where_nothing_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, searches = [0], [0]
    advance, search = ParameterServer._advance, ParameterServer._apply_synchronously

    def count_looks(self: ParameterServer) -> bool:
        looks[0] += 1
        return advance(self)

    def count_searches(self: ParameterServer) -> bool:
        searches[0] += 1
        return search(self)

    monkeypatch.setattr(ParameterServer, "_advance", count_looks)
    monkeypatch.setattr(ParameterServer, "_apply_synchronously", count_searches)

    def program() -> None:
        if mpicoll.world().rank == 0:
            ParameterServer(SGD(lr=1.0)).run()
            return
        with Worker({"w": np.zeros(10)}) as worker:
            before = looks[0]
            while looks[0] < before + 100:
                time.sleep(1e-3)
            assert searches[0] < 10
            worker.push_gradients({"w": np.ones(10)})
            worker.pull_weights()

    mpicoll.run_local(program, 2, timeout=30)
