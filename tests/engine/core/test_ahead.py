"""Ranks that only send, which may be some repeated calls ahead of the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpicoll

pytestmark = pytest.mark.extension


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
        for number in range(20):
            if comm.rank == 0:
                x[:] = number
                if number == 8:
                    ahead.set()
            elif number == 0:
                assert ahead.wait(20)
                assert not last.wait(0.05)
            got.append(float(plan()[-1]))
            if comm.rank == 0:
                calls.append(number)
                if number == 8:
                    last.set()
        return got

    assert mpicoll.run_local(body, 2, timeout=30) == [list(range(20))] * 2


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
