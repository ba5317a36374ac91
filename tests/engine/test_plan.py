"""Plans: bound once, run often."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.ranks import Ranks

import mpicoll
from mpicoll.transport import local


@pytest.mark.parametrize("algorithm", ["native", "ring", "tree"])
def test_each_run_reads_anew_and_fills_the_same_array(ranks: Ranks, algorithm: str) -> None:
    if algorithm == "native" and ranks.local:
        algorithm = "recursive_doubling"

    def main() -> None:
        size = mpicoll.world().size
        x = np.zeros(100)
        plan = mpicoll.allreduce_init(x, algorithm=algorithm)
        results = []
        for number in range(6):
            x[...] = number
            if number % 2:
                results.append(plan())
            else:
                plan.start()
                results.append(plan.wait())
            assert results[-1].tolist() == [number * size] * 100
        assert all(result is results[0] for result in results)
        assert x.tolist() == [5.0] * 100
        assert plan.choice.name == algorithm

    ranks(main)


def test_plans_and_calls_take_turns(several: Ranks) -> None:
    def main() -> None:
        size = mpicoll.world().size
        plans = [mpicoll.allreduce_init(np.full(10, number), algorithm="ring") for number in range(3)]
        for _ in range(5):
            for plan in plans:
                plan.start()
            assert mpicoll.allreduce(np.ones(3))[0] == size
            assert [plan.wait()[0] for plan in reversed(plans)] == [2 * size, size, 0]

    several(main)


def test_a_started_plan_tests_true_by_itself(several: Ranks) -> None:
    def main() -> None:
        plan = mpicoll.barrier_init()
        plan.start()
        while not plan.test():
            pass
        assert plan.wait() is None

    several(main)


MISUSE: dict[str, tuple[Callable[[mpicoll.Plan], object], str]] = {
    "test": (lambda plan: plan.test(), r"allreduce_init: test\(\) without start\(\)"),
    "wait": (lambda plan: plan.wait(), r"allreduce_init: wait\(\) without start\(\)"),
    "wait twice": (lambda plan: (plan.start(), plan.wait(), plan.wait()), r"wait\(\) without start\(\)"),
    "start twice": (
        lambda plan: (plan.start(), plan.start()),
        r"start\(\) while a run is pending; wait\(\) for it first",
    ),
    "call": (lambda plan: (plan.start(), plan()), r"call\(\) while a run is pending; wait\(\) for it first"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name: str) -> None:
    use, message = MISUSE[name]
    plan = mpicoll.allreduce_init(np.ones(2))
    with pytest.raises(mpicoll.ArgumentError, match=message):
        use(plan)
    if "pending" in message:
        assert plan.wait().tolist() == [1.0, 1.0]
    assert plan().tolist() == [1.0, 1.0]


def test_a_timeout_leaves_the_run_pending(several: Ranks) -> None:
    def main() -> None:
        world = mpicoll.world()
        plan = mpicoll.allreduce_init(np.ones(2))
        if world.rank == 0:
            plan.start()
            with pytest.raises(mpicoll.Timeout):
                plan.wait(0.1)
            with pytest.raises(mpicoll.ArgumentError, match="pending"):
                plan.start()
            for peer in range(1, world.size):
                mpicoll.send(np.ones(1), peer)
            assert plan.wait(20)[0] == world.size
        else:
            mpicoll.recv(np.zeros(1), 0)
            assert plan()[0] == world.size

    several(main)


def test_a_plan_can_be_started_again_after_a_failed_run() -> None:
    def main() -> None:
        plan = mpicoll.allreduce_init(np.ones(2), algorithm="recursive_doubling")
        plan.start()
        with pytest.raises((mpicoll.Timeout, mpicoll.RankFailed)):
            plan.wait()
        # The other rank is in the same state, and the next messages arrive.
        plan.start()
        assert plan.wait()[0] == 2

    mpicoll.run_local(main, 2, faults=[local.Drop()], timeout=2)


def test_the_algorithm_is_chosen_when_the_plan_is_made() -> None:
    def main() -> None:
        with mpicoll.algorithms(allreduce="ring"):
            plan = mpicoll.allreduce_init(np.ones(2))
        with mpicoll.algorithms(allreduce="tree"):
            assert plan()[0] == 3
        assert str(plan.choice) == "ring: forced by `with algorithms`"

    mpicoll.run_local(main, 3)


def test_arguments_are_checked_when_the_plan_is_made() -> None:
    with pytest.raises(mpicoll.ShapeError):
        mpicoll.allreduce_init(np.ones(2), out=np.ones(3))
    with pytest.raises(mpicoll.AlgorithmError):
        mpicoll.allreduce_init(np.ones(2), algorithm="rong")


def test_ranks_may_differ_in_the_layout_of_their_arrays(several: Ranks) -> None:
    """MPI can work on one rank's arrays as they are, and not on the other's: they must still meet."""

    def body() -> None:
        world = mpicoll.world()
        x = np.full(8, 1.0) if world.rank == 0 else np.full(16, 1.0)[::2]
        plan = mpicoll.allreduce_init(x)
        assert plan()[0] == plan()[7] == world.size
        counts = [10] + [50] * (world.size - 1)
        gathered = mpicoll.allgather_init(np.full(counts[world.rank], world.rank), counts=counts)
        assert gathered().tolist() == np.repeat(np.arange(world.size), counts).tolist()
        sent = np.full(4, world.rank)
        assert mpicoll.bcast_init(sent, 1, out=sent if world.rank else None)().tolist() == [1] * 4

    several(body)
