"""Operations that can never complete. Whole jobs: test_stuck."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.watchdogs import WatchedRank, until

import mpicoll
from mpicoll.engine.core.queue import OperationQueue, QueuedOperation
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.engine.diagnostics.unsatisfiable import Cause


def test_a_wait_with_a_bound_of_its_own_is_left_to_it() -> None:
    """It raises Timeout, and the operation stays pending, though it can never complete; without a bound that ends the
    job."""
    watched, release = WatchedRank(), threading.Event()
    group = Group("0.0", "world", (0, 1), 0, 60.0)
    progress = OperationQueue(group, watched.watchdog, background=True, explain=lambda error: error)

    def find_stuck() -> None:
        assert progress.current is not None
        _, number, _, begin, _ = progress.current
        watched.watchdog.unsatisfiable.mark([(0, "0.0", number, begin)], Cause("it can never complete", mismatch=False))
        watched.watchdog.check(progress.current)

    def begin(name: str) -> QueuedOperation:
        job = progress.submit(release.wait, Call(name, 0))
        until(lambda: progress.current is not None and progress.current[2] is job.call)
        return job

    job = begin("barrier")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.wait, 0.4)
        until(lambda: bool(watched.watchdog.waits.bounded or waiting.done()))
        find_stuck()
        with pytest.raises(mpicoll.Timeout, match="barrier"):
            waiting.result(20)
    find_stuck()  # who has got Timeout decides what is to be done
    assert not watched.watchdog.waits.bounded
    assert not watched.ended.wait(0.2)
    release.set()
    job.wait(20)
    release.clear()
    begin("allreduce")
    with pytest.raises(mpicoll.CommunicationError, match="it can never complete"):
        find_stuck()
    assert watched.ended.wait(20)
    release.set()
