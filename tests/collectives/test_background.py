"""Background and blocking calls in one program, and plans."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from support.data import LAYOUTS, multiply_what_is_small
from support.exercise import COLLECTIVES, exercise
from support.ranks import Comms, Ranks

import mpicoll


def test_one_rank_waits_where_another_starts_in_the_background(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        total = sum(range(world.size))
        for turn in range(20):
            x = np.full(5 + turn, world.rank)
            if (turn + world.rank) % 2:
                request = mpicoll.iallreduce(x)
                mpicoll.barrier()
                got = request.wait()
            else:
                got = mpicoll.allreduce(x)
                mpicoll.ibarrier().wait()
            assert got.tolist() == [total] * (5 + turn)

    ranks(body)


def test_many_requests_waited_for_in_reverse(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        requests = []
        for turn in range(12):
            requests.append(mpicoll.iallreduce(np.full(3, turn)))
            requests.append(mpicoll.iallgather(turn, algorithm="ring"))
            requests.append(mpicoll.ibcast(np.full(2, world.rank + turn), world.size - 1))
        for turn in reversed(range(12)):
            summed, gathered, sent = requests[3 * turn : 3 * turn + 3]
            assert sent.wait().tolist() == [world.size - 1 + turn] * 2
            assert gathered.wait(20).tolist() == [turn] * world.size
            assert summed.wait().tolist() == [turn * world.size] * 3

    ranks(body)


def test_blocking_call_after_requests_that_no_rank_waited_for_yet(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        requests = [mpicoll.iallreduce(np.full(1000, n)) for n in range(5)]
        assert mpicoll.allreduce(1) == world.size
        assert all(one.test() for one in requests)
        for number, result in enumerate(mpicoll.waitall(requests)):
            assert (result == number * world.size).all()

    ranks(body)


def test_dropped_requests_still_happen(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        out = np.zeros(4)
        for _ in range(5):
            mpicoll.iallreduce(np.ones(4), out=out)
        mpicoll.barrier()
        assert out.tolist() == [world.size] * 4

    ranks(body)


def test_request_of_a_collective_that_times_out_completes_later(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        if world.rank == 0:
            request = mpicoll.iallreduce(np.ones(3))
            with pytest.raises(mpicoll.Timeout, match=r"allreduce.*pending"):
                request.wait(timeout=0.02)
            # only now may the others come
            for dest in range(1, world.size):
                mpicoll.send(0, dest)
            assert request.wait(timeout=20).tolist() == [world.size] * 3
        else:
            mpicoll.recv(0, 0)
            assert mpicoll.allreduce(np.ones(3)).tolist() == [world.size] * 3

    several(body)


def test_waitany_of_collectives(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        requests = [mpicoll.iallreduce(np.full(2, n)) for n in range(3)]
        got = dict(mpicoll.waitany(requests) for _ in range(3))
        assert {n: value.tolist() for n, value in got.items()} == {n: [n * world.size] * 2 for n in range(3)}

    ranks(body)


def test_other_communicators_are_free_meanwhile(several: Ranks) -> None:
    """An operation that waits on one communicator does not hold up another."""

    def body() -> None:
        world = mpicoll.world()
        other = world.split(0)
        assert other is not None
        request = mpicoll.iallreduce(world.rank, comm=other) if world.rank == 0 else None
        assert mpicoll.allreduce(1) == world.size
        value = request.wait() if request else mpicoll.allreduce(world.rank, comm=other)
        assert value == sum(range(world.size))
        other.free()

    several(body)


def test_barrier_is_passed_by_no_rank_before_all_have_arrived(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        names = [None, "dissemination", *(["native"] if world._core.transport.native else [])]
        for turn, name in enumerate(names):
            late = turn % world.size
            if world.rank != late:
                request = mpicoll.ibarrier(algorithm=name)
                assert not request.test()
                mpicoll.send(0, late, turn)
                request.wait()
            else:
                # all others have looked at their requests before this rank comes
                for source in range(world.size):
                    if source != late:
                        mpicoll.recv(0, source, turn)
                mpicoll.barrier(algorithm=name)

    several(body)


def test_plan_reads_its_input_anew(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.zeros(6)
        plans = [mpicoll.allreduce_init(x), mpicoll.allgather_init(x), mpicoll.alltoall_init(np.zeros(world.size))]
        for turn in range(4):
            x[...] = turn + world.rank
            total = turn * world.size + sum(range(world.size))
            results = [plan() for plan in plans]
            assert results[0].tolist() == [total] * 6
            assert results[1].reshape(-1, 6)[:, 0].tolist() == [turn + rank for rank in range(world.size)]
            assert plans[0]() is results[0]

    ranks(body)


def test_plan_that_runs_may_not_be_started_again(ranks: Ranks) -> None:
    def body() -> None:
        plan = mpicoll.allreduce_init(np.ones(2))
        for wrong in (plan.wait, plan.test):
            with pytest.raises(mpicoll.ArgumentError, match="without start"):
                wrong()
        plan.start()
        with pytest.raises(mpicoll.ArgumentError, match="start\\(\\) while a run is pending"):
            plan.start()
        with pytest.raises(mpicoll.ArgumentError, match="call\\(\\) while a run is pending"):
            plan()
        size = mpicoll.world().size
        assert plan.wait(20).tolist() == [size, size]
        assert plan().tolist() == [size, size]

    ranks(body)


def test_barrier_plan(ranks: Ranks) -> None:
    def body() -> None:
        plan = mpicoll.barrier_init()
        for _ in range(3):
            assert plan() is None
            plan.start()
            assert plan.wait() is None

    ranks(body)


def test_plan_says_what_it_chose(ranks: Ranks) -> None:
    def body() -> None:
        plan = mpicoll.allreduce_init(np.ones(2), algorithm="ring")
        assert plan.choice.name == "ring"
        assert "argument" in plan.choice.reason
        with mpicoll.algorithms(allreduce="tree"):
            plan = mpicoll.allreduce_init(np.ones(2))
        assert plan.choice.name == "tree"
        size = mpicoll.world().size
        assert plan().tolist() == [size, size]

    ranks(body)


def test_results_of_small_repeated_calls_are_independent(ranks: Ranks) -> None:
    """Small calls are prepared once: contents, forced algorithms and wrong calls in between must not stick."""

    def body() -> None:
        world = mpicoll.world()
        kept = []
        for turn in range(6):
            x = np.full(4, turn + world.rank)
            kept.append(mpicoll.allreduce(x))
            with mpicoll.algorithms(allreduce="ring"):
                kept.append(mpicoll.allreduce(x))
            kept.append(mpicoll.allreduce(x[::-1]))
            with pytest.raises(mpicoll.AlgorithmError):
                mpicoll.allreduce(x, algorithm="nonsense")
        base = sum(range(world.size))
        assert [one.tolist() for one in kept] == [[base + n * world.size] * 4 for n in range(6) for _ in range(3)]

    ranks(body)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_small_calls_that_were_prepared_before(ranks: Ranks, collective: str) -> None:
    """The same call again with other values: right, and the first result stays as it was."""

    def body() -> None:
        comms = Comms()
        for layout in LAYOUTS:
            for dtype in ("float64", "int16", "bfloat16", "complex64"):
                for shape in ((4, 3), (0, 2), (1,)):
                    for root in ("first", "last"):
                        row = {"dtype": dtype, "op": "sum", "library": "numpy", "shape": shape, "layout": layout}
                        row |= {"out": "none", "form": "call", "algorithm": None, "comm": "world"}
                        exercise(collective, {**row, "root": root, "counts": "none"}, comms)
        comms.free()

    ranks(body)


def test_a_root_that_can_change_is_read_at_each_call(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        root = torch.tensor(0)
        for number in (0, 1, 0):
            root.fill_(number)
            for _ in range(2):
                assert mpicoll.bcast(np.full(2, world.rank), root)[0] == number
        assert mpicoll.bcast(np.full(2, world.rank), np.array(1))[0] == 1
        with pytest.raises(mpicoll.RankError):
            mpicoll.bcast(np.full(2, world.rank), 1.0)

    several(body)


def test_an_operation_that_fails_on_one_rank_is_no_other_ones_partner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags of the ranks stay equal, so what rank 1 still waits for does not match what rank 0 does next."""
    multiply_what_is_small(monkeypatch)

    def body() -> None:
        first = mpicoll.world().rank == 0
        x = np.full(2, 1e300 if first else 1.0)
        if first:
            with pytest.raises(MemoryError):
                mpicoll.allreduce(x, mpicoll.premul_sum(2.0))
            with pytest.raises(mpicoll.CommunicationError):
                mpicoll.allreduce(x, "max")
        else:
            with pytest.raises(mpicoll.CommunicationError):
                mpicoll.allreduce(x, mpicoll.premul_sum(2.0))

    mpicoll.run_local(body, 2, timeout=0.3)


def test_a_receive_that_timed_out_swallows_nothing() -> None:
    late = threading.Event()

    def body() -> float:
        world = mpicoll.world()
        if world.rank == 0:
            late.wait(60)
            mpicoll.send(np.ones(1), 1)
            return 1.0
        world.timeout = 0.3
        with pytest.raises(mpicoll.Timeout):
            mpicoll.recv(np.zeros(1), 0)
        world.timeout = 60
        late.set()
        return float(mpicoll.recv(np.zeros(1), 0)[0])

    assert mpicoll.run_local(body, 2, timeout=60) == [1.0, 1.0]


def test_waitany_and_test_notice_a_rank_that_is_gone() -> None:
    def body() -> None:
        if mpicoll.world().rank == 1:
            pending = [mpicoll.irecv(np.zeros(1), 0, tag) for tag in (1, 2)]
            with pytest.raises(mpicoll.RankFailed):
                mpicoll.waitany(pending)
            assert pending[1].test()

    mpicoll.run_local(body, 2)
