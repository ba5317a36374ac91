"""Sends of workers and servers, which take turns on a link."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import mpicoll
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker, transfers
from mpicoll.parallel.parameter_server.transfers import IN_FLIGHT, Pace


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
