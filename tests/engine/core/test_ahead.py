"""Ranks that only send, which may be some repeated calls ahead of the others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.transport.local.transport import LocalTransport

pytestmark = pytest.mark.extension

AHEAD = 128
"""Calls that a rank may begin after the last one that all ranks have begun, as in csrc/steps.h."""


def test_ranks_that_only_send_may_be_ahead() -> None:
    """By a number of calls that is bounded, whose data stays until the other ranks have it."""
    ahead, last = threading.Event(), threading.Event()
    calls: list[int] = []

    def body() -> list[float]:
        comm, x = mpicoll.world(), np.zeros(100)
        plan = mpicoll.bcast_init(x, comm=comm)
        for _ in range(4):
            plan()
        mpicoll.barrier()
        got = []
        for number in range(2 * AHEAD):
            if comm.rank == 0:
                x[:] = number
                if number == AHEAD:
                    ahead.set()
            elif number == 0:
                assert ahead.wait(20)
                assert not last.wait(0.05)
            got.append(float(plan()[-1]))
            if comm.rank == 0:
                calls.append(number)
                if number == AHEAD:
                    last.set()
        return got

    assert mpicoll.run_local(body, 2, timeout=30) == [list(range(2 * AHEAD))] * 2


def test_a_failure_after_a_rank_has_gone_on_ends_all_ranks() -> None:
    def body() -> str:
        comm, x = mpicoll.world(), np.zeros(4)
        for _ in range(4):
            mpicoll.bcast(x, out=x)
        mpicoll.barrier()
        arena = comm._core.arena()
        assert arena is not None
        failed = ""
        if comm.rank:
            arena.step_failed()
        else:
            mpicoll.bcast(x, out=x)
            with pytest.raises(mpicoll.CommunicationError) as caught:
                mpicoll.barrier()
            failed = str(caught.value)
        with pytest.raises(mpicoll.CommunicationError, match="not synchronised"):
            mpicoll.barrier()
        return failed

    assert "rank 1 failed in this operation" in mpicoll.run_local(body, 2)[0]


def _bind(comm: mpicoll.Communicator) -> None:
    """Repeat calls until ranks may be ahead in them."""
    for _ in range(3):
        for root in range(comm.size):
            mpicoll.bcast(np.zeros(4), root, comm=comm)
    mpicoll.barrier(comm=comm)


def test_a_call_keeps_its_description_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that adds a call like it replaces the description of the collective."""
    from mpicoll.engine.core.arena import Arena

    x, y = np.zeros(4), np.zeros(8)
    adds: list[Callable[[], None]] = []
    texts: list[bytes] = []
    references: list[int] = []
    is_ahead, is_replaced = threading.Event(), threading.Event()
    add_call, wait = OperationQueue.add_call, Arena.wait_for_late_ranks

    def record_add(self: OperationQueue, *args: Any, **options: Any) -> None:
        if self.group.rank == 0 and args[1] is x:
            adds.append(partial(add_call, self, *args, **options))
        add_call(self, *args, **options)

    def describe(self: OperationQueue, call: Call) -> bytes:
        text = f"{call} {len(texts)}".encode()
        if self.group.rank == 0 and call.nbytes == x.nbytes:
            texts.append(text)
        return text

    def wait_after_add(self: Arena) -> None:
        if self.rank == 0 and is_ahead.is_set() and not is_replaced.is_set():
            before = len(texts)
            adds[-1]()
            assert len(texts) == before + 1
            references.append(sys.getrefcount(texts[-2]))
            is_replaced.set()
        wait(self)

    monkeypatch.setattr(OperationQueue, "add_call", record_add)
    monkeypatch.setattr(OperationQueue, "describe_repeated", describe)
    monkeypatch.setattr(Arena, "wait_for_late_ranks", wait_after_add)

    def body() -> None:
        rank = mpicoll.world().rank
        own, other = (x, y) if rank == 0 else (x.copy(), y.copy())
        for _ in range(3):
            mpicoll.bcast(own, out=own)
        # The calls of the last steps, whose descriptions are kept too, are others.
        for _ in range(2 * AHEAD + 8):
            mpicoll.bcast(other, out=other)
        mpicoll.barrier()
        assert rank == 0 or is_replaced.wait(20)
        for _ in range(AHEAD):
            mpicoll.bcast(other, out=other)
        is_ahead.set()
        mpicoll.bcast(own, out=own)
        mpicoll.barrier()

    mpicoll.run_local(body, 2, timeout=30)
    assert references == [3]  # of `texts`, of the argument, and of the call that runs


def test_ranks_may_catch_up_with_more_calls_than_a_rank_waits_for() -> None:
    """A thread that holds the interpreter lock ends all calls that another one has begun, and does so between two looks
    of that one."""

    def body() -> None:
        comm, x = mpicoll.world(), np.zeros(4)
        _bind(comm)
        for _ in range(5):
            if comm.rank:
                time.sleep(0.01)
            for _ in range(2 * AHEAD):
                mpicoll.bcast(x, out=x)

    mpicoll.run_local(body, 2, timeout=30)


def test_ranks_that_each_take_themselves_for_the_root_of_the_last_call() -> None:
    errors: list[str] = []

    def body() -> None:
        comm = mpicoll.world()
        _bind(comm)
        mpicoll.bcast(np.zeros(4), comm.rank)

    with pytest.raises(mpicoll.MismatchError) as caught:
        mpicoll.run_local(body, 2)
    assert caught.value.fields == ("root",)

    def freed() -> None:
        comm = mpicoll.world().duplicate()
        _bind(comm)
        mpicoll.bcast(np.zeros(4), comm.rank, comm=comm)
        with pytest.raises(mpicoll.MismatchError) as caught:
            comm.free()
        errors.append(str(caught.value))
        comm.free()

    mpicoll.run_local(freed, 3)
    assert len(errors) == 3
    assert len(set(errors)) == 1


def test_the_other_ranks_need_no_further_call_of_one_that_is_ahead() -> None:
    raised = threading.Event()

    def body() -> None:
        comm = mpicoll.world()
        _bind(comm)
        if comm.rank == 0:
            mpicoll.bcast(np.zeros(4))
            assert raised.wait(20)
            return
        try:
            mpicoll.allreduce(np.zeros(4))
        finally:
            raised.set()

    with pytest.raises(mpicoll.MismatchError, match="rank 0 calls bcast"):
        mpicoll.run_local(body, 2)


def test_a_rank_that_is_slow_is_no_error_at_the_end() -> None:
    ended = threading.Event()

    def body() -> list[float]:
        comm, x = mpicoll.world(), np.zeros(4)
        _bind(comm)
        queue = comm._core.queue
        if comm.rank == 0:
            mpicoll.bcast(x + 7)
            comm.timeout = 0.1
            queue.compare_unseen_calls()
            assert queue.has_unseen_calls()
            comm.timeout = 60
            ended.set()
        else:
            assert ended.wait(20)
            mpicoll.bcast(x, out=x)
        queue.compare_unseen_calls()
        assert not queue.has_unseen_calls()
        return x.tolist()

    assert mpicoll.run_local(body, 2) == [[0.0] * 4, [7.0] * 4]


def test_a_rank_may_make_its_last_calls_and_exit_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it has exited is no error then."""
    looks = threading.Event()
    is_ahead: list[bool] = []
    check_peers = LocalTransport.check_peers

    def check_later(self: LocalTransport, waited: float, peers: Sequence[int]) -> None:
        if self.rank == 0 and is_ahead:
            looks.set()
            deadline = time.monotonic() + 20
            while 1 not in self.job.dead:
                assert time.monotonic() < deadline
                time.sleep(1e-3)
        check_peers(self, waited, peers)

    monkeypatch.setattr(LocalTransport, "check_peers", check_later)

    def body() -> None:
        comm, x = mpicoll.world(), np.zeros(4)
        _bind(comm)
        assert comm.rank == 0 or looks.wait(20)
        mpicoll.bcast(x, out=x)
        if comm.rank == 0:
            is_ahead.append(True)

    mpicoll.run_local(body, 2, timeout=30)


def test_a_last_call_that_a_rank_misses_is_an_error() -> None:
    def body() -> None:
        comm = mpicoll.world()
        _bind(comm)
        if comm.rank == 0:
            mpicoll.bcast(np.zeros(4))

    with pytest.raises(mpicoll.RankFailed):
        mpicoll.run_local(body, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [pytest.param("pass", marks=pytest.mark.long), "del comm"])
def test_a_last_call_that_a_late_rank_misses_ends_the_job(job: Callable[..., CompletedProcess[str]], ends: str) -> None:
    """Though the late rank has called others, which it had not when the rank that is ahead began to wait at its end.
    Also after the program has dropped the communicator."""
    done = job(
        2,
        f"""
import time
comm = mpicoll.world().duplicate()
x = np.zeros(4)
for _ in range(4):
    mpicoll.bcast(x, comm=comm)
mpicoll.barrier(comm=comm)
if comm.rank:
    time.sleep(0.3)
    mpicoll.bcast(x, comm=comm)
else:
    for _ in range(2):
        mpicoll.bcast(x, comm=comm)
{ends}
""",
        30,
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "rank 0 waits in bcast(float64[4], root=0)" in done.stdout
    assert "for rank 1, which has exited" in done.stdout


def test_the_error_names_the_call_that_has_ended_not_the_running_one() -> None:
    def post() -> None:
        mpicoll.alltoall(np.zeros(2), counts=([1, 1], [1, 1]))  # which writes to slots in its first step

    def body() -> str:
        comm = mpicoll.world()
        _bind(comm)
        number = comm._core.queue.number + 1
        if comm.rank == 0:
            mpicoll.bcast(np.zeros(4))
        with pytest.raises(mpicoll.MismatchError) as caught:
            mpicoll.barrier() if comm.rank else post()
        assert caught.value.number == number
        return str(caught.value).partition("\n")[0]

    first, second = mpicoll.run_local(body, 2)
    assert "rank 1 calls barrier" in first
    assert "rank 0 calls bcast" in first
    assert first == second
