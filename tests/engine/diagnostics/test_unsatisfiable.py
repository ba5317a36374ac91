"""Operations that can never complete. Whole jobs: test_stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.rank_states import State, crossed
from support.watchdogs import FakeQueue, WatchedRank, entry, until

import mpicoll
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.engine.diagnostics.local_waits import LocalWaits
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.engine.diagnostics.unsatisfiable import Cause, UnsatisfiableWaits


class KnownPeers(Peers):
    """A coordinator to which all ranks reply with states that the test has set, and the messages that it sends."""

    def __init__(self, states: Sequence[State]) -> None:
        super().__init__(LocalWaits())
        self.size, self.states, self.sent = len(states), states, []
        self.network = ()

    def coordinator(self) -> int:
        return 0

    def collect_states(self, seconds: float, **options: Any) -> dict[int, dict[str, Any] | None]:
        return dict(enumerate(self.states))

    def send(self, kind: str, to: int | None = None, **fields: Any) -> None:
        self.sent.append(kind)


class RecordedAbort:
    """The causes for which the job would have been aborted."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def request(self, why: str) -> None:
        self.causes.append(why)


@pytest.mark.parametrize("failing", [False, True])
def test_an_operation_that_is_about_to_raise_blocks_no_other(failing: bool) -> None:
    states = crossed()
    states[1]["pending"][0]["failing"] = failing
    peers = KnownPeers(states)
    unsatisfiable = UnsatisfiableWaits(LocalWaits(), peers, RecordedAbort())
    for examination in (1, 2):
        unsatisfiable.request_examination()
        unsatisfiable.update([], time.monotonic() + 1000 * examination)
    assert peers.sent == ([] if failing else ["unsatisfiable"])


class Raising:
    """An executor that polls until the test says that it raises."""

    polls = True

    def position(self, members: Sequence[int]) -> Position:
        return Position(polls=self.polls)


def test_an_operation_that_stops_polling_has_time_to_raise() -> None:
    queue, executor, waits, abort = FakeQueue(entry("allreduce", 60.0)), Raising(), LocalWaits(), RecordedAbort()
    queue.executing = Executing()
    queue.executing.executor = executor
    waits.add(queue)
    [waiting] = waits.entries()
    unsatisfiable = UnsatisfiableWaits(waits, Peers(waits), abort)
    unsatisfiable.mark([(0, waiting.group.key, waiting.number, waiting.begin)], Cause("never", mismatch=False))
    assert waits.state(0, 2, full=False)["pending"][0]["failing"]
    unsatisfiable.check(None)  # between two operations
    for now in (1000.0, 1010.0):
        unsatisfiable.update([waiting], now)
    executor.polls = False
    unsatisfiable.update([waiting], 1010.3)
    assert not abort.causes
    unsatisfiable.update([waiting], 1011.0)
    assert abort.causes == ["never"]


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
