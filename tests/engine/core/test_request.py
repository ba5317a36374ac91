"""Requests: wait, test, waitall, waitany."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call, Group


class Handle:
    """Completes when it is told to, or raises."""

    def __init__(self, *, done: bool = True, error: Exception | None = None) -> None:
        self.done = done
        self.error = error
        self.waits: list[float | None] = []
        self.bounds: list[float | None] = []
        self.limit = 0.1
        group = Group("0.0", "world", (0,), 0, 60.0)
        call = Call("irecv", peer=0, tag=1, collective=False)
        self.awaited = OperationQueue(group, None, background=False, explain=lambda error: error), call

    def test(self) -> bool:
        return self.done

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        self.waits.append(timeout)
        self.bounds.append(bound)
        if not self.done:
            raise mpicoll.Timeout("not yet")
        if self.error is not None:
            raise self.error


def request(value: Any = None, **options: Any) -> Request:
    return Request(Handle(**options), lambda: value)


# --- one


def test_wait_gives_the_same_result_again() -> None:
    made: list[object] = []

    def finish() -> object:
        made.append(object())
        return made[-1]

    handle = Handle()
    one = Request(handle, finish)
    assert not one.waited
    assert one.wait() is one.wait(0) is made[0]
    assert one.waited
    assert one.test()
    assert len(made) == len(handle.waits) == 1


def test_wait_raises_again() -> None:
    one = request(error=mpicoll.RankFailed("gone", (1,)))
    for _ in range(2):
        with pytest.raises(mpicoll.RankFailed, match="gone"):
            one.wait()
    assert not one.waited


def test_timeout_leaves_it_pending() -> None:
    handle = Handle(done=False)
    one = Request(handle, lambda: 5)
    with pytest.raises(mpicoll.Timeout):
        one.wait(0.1)
    assert not one.test()
    handle.done = True
    assert one.test()
    assert one.wait(0.1) == 5
    assert handle.waits == [0.1, 0.1]


# --- all


def test_waitall() -> None:
    assert mpicoll.waitall([]) == []
    assert mpicoll.waitall([request(number) for number in range(3)]) == [0, 1, 2]


def test_waitall_shares_the_time() -> None:
    handles = [Handle() for _ in range(3)]
    mpicoll.waitall([Request(handle, lambda: None) for handle in handles], timeout=30)
    waits = [handle.waits[0] for handle in handles]
    assert all(0 < wait <= 30 for wait in waits if wait is not None)
    assert waits == sorted(waits, reverse=True)  # type: ignore[type-var]
    assert [handle.bounds for handle in handles] == [[30]] * 3
    last = Handle()
    mpicoll.waitall([request(), Request(last, lambda: None)], timeout=-1)
    assert last.waits == [0.0]


def test_waitall_raises_the_first_exception() -> None:
    three = [request(1), request(error=ValueError("second")), request(error=ValueError("third"))]
    with pytest.raises(ValueError, match="second"):
        mpicoll.waitall(three)
    assert three[0].waited


# --- any


def test_waitany_takes_each_once() -> None:
    handles = [Handle(done=False) for _ in range(3)]
    requests = [Request(handle, lambda number=number: number * 10) for number, handle in enumerate(handles)]
    for number in (1, 2, 0):
        handles[number].done = True
        assert mpicoll.waitany(requests, timeout=20) == (number, number * 10)
    with pytest.raises(mpicoll.ArgumentError, match="none of the 3 requests is pending"):
        mpicoll.waitany(requests)


def test_waitany_of_nothing() -> None:
    with pytest.raises(mpicoll.ArgumentError, match="none of the 0 requests"):
        mpicoll.waitany([])


def test_waitany_raises_what_the_operation_raised() -> None:
    pending = request(done=False)
    with pytest.raises(ValueError, match="of the second"):
        mpicoll.waitany([pending, request(error=ValueError("of the second"))])


def test_waitany_timeout() -> None:
    begin = time.monotonic()
    words = r"^waitany on 2 requests: not complete within the timeout of 0\.1 s; the first of them: not yet$"
    for timeout in (0.1, None):  # without one, what their communicator gives them
        with pytest.raises(mpicoll.Timeout, match=words):
            mpicoll.waitany([request(done=False), request(done=False)], timeout=timeout)
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("wrong", ["1", timedelta(seconds=1), float("nan")])
def test_a_timeout_that_is_none(wrong: Any) -> None:
    for wait in (request().wait, partial(mpicoll.waitall, [request()]), partial(mpicoll.waitany, [request()])):
        with pytest.raises(mpicoll.ArgumentError, match="timeout must be a number of seconds or None, got"):
            wait(timeout=wrong)


def test_waitany_mixes_kinds(ranks: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        requests = [
            mpicoll.irecv(np.zeros(2), left, tag=3),
            mpicoll.iallreduce(np.ones(2)),
            mpicoll.ibarrier(),
        ]
        requests.append(mpicoll.isend(np.full(2, float(world.rank)), right, tag=3))
        done = dict(mpicoll.waitany(requests) for _ in requests)
        assert sorted(done) == [0, 1, 2, 3]
        assert done[0].tolist() == [left, left]
        assert done[1].tolist() == [world.size, world.size]
        assert done[2] is done[3] is None

    ranks(main)


# --- a peer that is late


@pytest.mark.parametrize("waiter", ["wait", "waitall", "waitany"])
def test_a_late_peer_in_a_collective(several: Ranks, waiter: str) -> None:
    """Rank 0 gives up after a while, then lets the others join, and gets its result after all."""
    give_up: dict[str, Callable[[Request], Any]] = {
        "wait": lambda one: one.wait(0.15),
        "waitall": lambda one: mpicoll.waitall([request(), one], 0.15),
        "waitany": lambda one: mpicoll.waitany([one, one], 0.15),
    }

    def main() -> None:
        world = mpicoll.world()
        if world.rank == 0:
            pending = mpicoll.iallreduce(np.ones(3))
            begin = time.monotonic()
            with pytest.raises(mpicoll.Timeout):
                give_up[waiter](pending)
            assert time.monotonic() - begin < 25
            for peer in range(1, world.size):
                mpicoll.send(np.ones(1), peer)
            assert pending.wait(20).tolist() == [world.size] * 3
        else:
            mpicoll.recv(np.zeros(1), 0)
            assert mpicoll.allreduce(np.ones(3)).tolist() == [world.size] * 3

    several(main)


def test_a_late_peer_in_a_message(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        if world.rank == 0:
            target = np.zeros(3)
            pending = mpicoll.irecv(out=target, source=1, tag=1)
            begin = time.monotonic()
            with pytest.raises(mpicoll.Timeout):
                pending.wait(0.15)
            assert time.monotonic() - begin < 25
            assert not pending.test()
            mpicoll.send(np.ones(1), 1, tag=2)
            assert pending.wait(20) is target
            assert target.tolist() == [4.0] * 3
        elif world.rank == 1:
            mpicoll.recv(np.zeros(1), 0, tag=2)
            mpicoll.send(np.full(3, 4.0), 0, tag=1)
        mpicoll.barrier()

    several(main)


def test_a_late_peer_in_a_probe(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        if world.rank == 0:
            begin = time.monotonic()
            with pytest.raises(mpicoll.Timeout):
                mpicoll.probe(1, timeout=0.15)
            assert time.monotonic() - begin < 25
        mpicoll.barrier()
        if world.rank == 1:
            mpicoll.send(np.ones(2), 0, tag=9)
        if world.rank == 0:
            assert mpicoll.probe(1, timeout=20) == mpicoll.Status(1, 9, 16)
            assert mpicoll.recv(np.zeros(2), 1).tolist() == [1.0, 1.0]

    several(main)


def test_a_failed_receive(several: Ranks) -> None:
    """It has completed, and each wait tells how."""

    def main() -> None:
        world = mpicoll.world()
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        pending = mpicoll.irecv(np.zeros(2), left)
        mpicoll.isend(np.ones(3), right).wait(20)
        deadline = time.monotonic() + 20
        while not pending.test():
            assert time.monotonic() < deadline
        for wait in (pending.wait, lambda: mpicoll.waitany([pending, pending]), lambda: mpicoll.waitall([pending])):
            with pytest.raises(mpicoll.TruncationError):
                wait()

    several(main)
