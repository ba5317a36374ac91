"""Failures and deaths of servers and workers."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.parameter_server_arrays import STEPS, make_model, raises, serve_or_work, train

import mpicoll
from mpicoll.errors import CommunicationError, RankFailed, Timeout
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker
from mpicoll.transport.local import Kill


def test_the_failure_of_a_server_is_raised_by_all() -> None:
    def rule(weights: Any, gradient: Any, state: Any, step: int) -> None:
        if mpicoll.world().rank == 0 and step == 3:
            raise ZeroDivisionError("in the rule")

    def body() -> str:
        rank = mpicoll.world().rank
        expected = ZeroDivisionError if rank == 0 else CommunicationError
        return raises(expected, "", lambda: serve_or_work(2, rule, train))()

    messages = mpicoll.run_local(body, 4, timeout=20)
    assert messages[0] == "in the rule"
    assert "has left because of an error" in messages[1]
    # The worker that leaves second may receive the failure of the other server, which misses the first one.
    texts = ("a server has failed: ZeroDivisionError: in the rule", "worker rank {} has left because of an error")
    for worker, other in ((2, 3), (3, 2)):
        assert any(text.format(other) in messages[worker] for text in texts), messages[worker]
    assert any(texts[0] in message for message in messages[2:])


def test_the_death_of_a_server_is_raised_by_all() -> None:
    found: dict[int, BaseException] = {}

    def body() -> None:
        try:
            serve_or_work(2, SGD(0.01), train)
        except RankFailed as error:
            found[mpicoll.world().rank] = error
            raise

    begin = time.monotonic()
    with pytest.raises(RankFailed):
        mpicoll.run_local(body, 4, faults=[Kill(rank=1, nth=40)], timeout=20)
    assert time.monotonic() - begin < 15
    assert {2, 3} <= set(found)
    assert "server rank 1 has died, and with it its part of the model" in str(found[2])
    assert 0 in found


def test_the_death_of_a_worker_does_not_stop_the_asynchronous_mode() -> None:
    found: dict[int, Any] = {}

    def body() -> None:
        found[mpicoll.world().rank] = serve_or_work(1, SGD(0.01), train, mode="async")

    mpicoll.run_local(body, 3, faults=[Kill(rank=2, nth=20)], timeout=20)
    assert STEPS < found[0].updates < 2 * STEPS
    assert set(found) == {0, 1}


def test_the_death_of_a_worker_ends_the_synchronous_mode() -> None:
    found: dict[int, str] = {}

    def body() -> None:
        try:
            serve_or_work(1, SGD(0.01), train)
        except RankFailed as error:
            found[mpicoll.world().rank] = str(error)
            raise

    with pytest.raises(RankFailed):
        mpicoll.run_local(body, 3, faults=[Kill(rank=2, nth=20)], timeout=20)
    assert "worker rank 2 has died" in found[0]
    assert "worker rank 2 has died" in found[1]


def test_a_server_without_messages_raises_timeout() -> None:
    failed = threading.Event()

    def body() -> None:
        if mpicoll.world().rank == 0:
            with pytest.raises(Timeout, match=r"server rank 0 of 2 has received nothing from rank 1 for 0\.1 s"):
                ParameterServer(SGD(0.1), timeout=0.1).run()
            failed.set()
        else:
            worker = Worker(make_model())
            assert failed.wait(20)
            with pytest.raises(Timeout, match="a server has failed"):
                worker.close()

    mpicoll.run_local(body, 2, timeout=20)
