"""Calls that learn: right results, one choice on all ranks, and none where results may differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll import config
from mpicoll.buffers.dtypes import of_numpy
from mpicoll.buffers.ops import reduction
from mpicoll.engine import dispatch, learning
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.candidates import keeps_results, list_candidates
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import SelectionQuery, selection_context
from mpicoll.engine.selection.rules import parse_rules
from mpicoll.engine.selection.selector import Choice, is_decided
from mpicoll.engine.world import core_of, world
from mpicoll.transport.local import Kill

Job = Callable[..., "CompletedProcess[str]"]

CALLS = 40


@pytest.fixture(autouse=True)
def small_calls_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as good for most of these tests."""
    monkeypatch.setattr(learning, "_MIN_BYTES", 1)


def learn(tune: str = "exact") -> Any:
    """Let calls of the world of this rank learn. Return the core of its communicator."""
    core = core_of(mpicoll.world())
    core.tune = tune  # type: ignore[assignment]
    return core


def taken(core: Any) -> dict[tuple[str, int], tuple[str, bool]]:
    return {(query.collective, query.nbytes): (trials.winner, trials.settled) for query, trials in core.trials.items()}


def run_nodes(function: Callable[[], Any], size: int = 4, per_node: int = 1) -> list[Any]:
    """Call `function` on ranks of several nodes, which share no memory."""
    return mpicoll.run_local(function, size, ranks_per_node=per_node, timeout=30)


@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (3, 1), (4, 2)])
def test_results_are_right_in_every_call_and_ranks_choose_alike(size: int, per_node: int) -> None:
    def body() -> Any:
        core, rank = learn(), mpicoll.world().rank
        for number in range(CALLS):
            x = np.arange(1500, dtype=np.int64) * (rank + 1) + number
            expected = sum(np.arange(1500, dtype=np.int64) * (one + 1) + number for one in range(size))
            given = x.copy()
            assert (mpicoll.allreduce(x) == expected).all()
            assert (mpicoll.iallreduce(x).wait() == expected).all()
            assert (x == given).all()
            root = np.full(700, number + 0.5) if rank == 1 else np.zeros(700)
            assert (mpicoll.bcast(root, root=1) == number + 0.5).all()
            assert (mpicoll.allgather(np.full(33, rank)) == np.repeat(np.arange(size), 33)).all()
            blocks = mpicoll.alltoall(np.arange(size) + 10 * rank)
            assert blocks.tolist() == [10 * one + rank for one in range(size)]
        return taken(core)

    first, *others = run_nodes(body, size, per_node)
    assert all(one == first for one in others)
    assert {collective for collective, _ in first} == {"allreduce", "bcast", "allgather", "alltoall"}
    assert all(settled for _, settled in first.values())


def test_sums_of_numbers_are_tried_only_if_that_is_allowed() -> None:
    def body() -> Any:
        results = []
        for tune in ("off", "exact", "any"):
            with mpicoll.world().duplicate() as comm:
                core = core_of(comm)
                core.tune = tune  # type: ignore[assignment]
                for number in range(CALLS):
                    x = np.arange(900.0) * (number + 1)
                    assert np.allclose(mpicoll.allreduce(x, comm=comm), 3 * x)
                results.append(len(core.trials))
        return results

    assert run_nodes(body, 3) == [[0, 0, 1]] * 3


def test_of_two_ranks_sums_of_numbers_keep_their_bits() -> None:
    def body() -> Any:
        core = learn()
        x = np.random.default_rng(mpicoll.world().rank).normal(size=5000).astype(np.float32)
        results = {mpicoll.allreduce(x).tobytes() for _ in range(CALLS)}
        (trials,) = core.trials.values()
        return len(results), len(trials.typical) > 1

    assert run_nodes(body, 2) == [(1, True)] * 2


@pytest.mark.parametrize(
    ("kind", "op", "ranks", "keeps"),
    [
        ("integer", "sum", 4, True),
        ("integer", "prod", 4, True),
        ("float", "max", 4, True),
        ("float", "sum", 4, False),
        ("float", "sum", 2, True),
        ("complex", "prod", 2, False),
        ("half", "sum", 3, False),
    ],
)
def test_which_reductions_keep_results(kind: str, op: str, ranks: int, keeps: bool) -> None:
    dtype = {"integer": np.int32, "complex": np.complex64}.get(kind, np.float32)
    query = SelectionQuery("allreduce", 64, selection_context(NodeLayout(ranks, ranks, 1)), kind)
    prepared = reduction("allreduce", op, of_numpy(np.dtype(dtype)), lambda array: array, (8,))
    assert keeps_results(query, prepared) is keeps
    assert keeps_results(query, None)


def test_candidates_begin_with_the_untried_choice_and_are_few() -> None:
    for collective in ("allreduce", "bcast", "allgather", "reduce_scatter", "alltoall", "gather"):
        for nbytes in (8, 64 << 10, 64 << 20):
            query = SelectionQuery(collective, nbytes, selection_context(NodeLayout(8, 4, 2)))
            names = list_candidates(query)
            assert names[0] == learning.choose(query, None).name
            assert {"native", "hierarchical"} <= set(names)
            assert len(set(names)) == len(names) <= 7


def test_forced_and_tuned_algorithms_are_not_tried() -> None:
    def body() -> int:
        core = learn()
        for _ in range(5):
            mpicoll.allreduce(np.ones(4, int), algorithm="ring")
            with mpicoll.algorithms(allreduce="ring"):
                mpicoll.allreduce(np.ones(4, int))
        return len(core.trials)

    assert run_nodes(body, 3) == [0] * 3


def test_a_rank_that_is_late_does_not_change_what_is_found() -> None:
    def body() -> Any:
        core = learn()
        for _ in range(30):
            if mpicoll.world().rank == 2:
                time.sleep(0.02)
            mpicoll.allreduce(np.ones(10, int))
        (trials,) = core.trials.values()
        return trials.winner, trials.typical

    first, *others = run_nodes(body, 3)
    assert others == [first] * 2
    # Trials begin together: none of them contains the time for which the others have waited.
    assert max(first[1].values()) < 0.02, first


def test_an_algorithm_that_fails_on_one_rank_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_failing(operation: Operation, choice: Choice, **more: Any) -> Callable[[], None]:
        run = bind(operation, choice, **more)

        def fail() -> None:
            run()
            raise ValueError("not by this one")

        return fail if choice.name == "ring" and operation.comm.rank == 1 else run

    bind = dispatch.bind
    monkeypatch.setattr(dispatch, "bind", bind_failing)

    def body() -> Any:
        core, failures = learn(), 0
        for number in range(CALLS):
            try:
                x = mpicoll.allgather(np.full(900, number))
            except ValueError:
                failures += 1
            else:
                assert (x == number).all()
                assert x.size == 2700
        (trials,) = core.trials.values()
        return trials.winner, trials.typical, failures

    results = run_nodes(body, 3)
    assert len({winner for winner, _, _ in results}) == 1
    for rank, (winner, best, failures) in enumerate(results):
        assert winner != "ring"
        assert best == results[0][1]
        assert best["ring"] == inf
        assert failures == (1 if rank == 1 else 0)


@pytest.mark.parametrize("after", [3, 14, 45])
def test_survivors_of_a_rank_that_dies_in_trials_learn_again(after: int) -> None:
    def body() -> Any:
        def repeat() -> None:
            for _ in range(1000):
                mpicoll.allreduce(np.full(20, 1))

        learn()
        with pytest.raises(mpicoll.RankFailed):
            repeat()
        # The calls that survivors had completed before may differ by one.
        assert mpicoll.world().shrink().size == 2
        for number in range(CALLS):
            assert mpicoll.allreduce(np.full(20, number)).tolist() == [2 * number] * 20
        (trials,) = core_of(mpicoll.world()).trials.values()
        return trials.winner, trials.typical

    everyone = mpicoll.run_local(body, 3, ranks_per_node=1, faults=[Kill(1, after)], timeout=20)
    results = [one for one in everyone if one is not None]
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(results[0][1]) > 1


def test_explain_shows_what_was_tried() -> None:
    def body() -> str:
        learn()
        x = np.ones(500, np.int32)
        for _ in range(CALLS):
            mpicoll.allreduce(x)
        return str(mpicoll.explain("allreduce", x.nbytes, dtype=np.int32)).splitlines()[0]

    first, second = run_nodes(body, 2)
    assert first == second
    assert "learned from" in first
    assert first.count("µs") > 1


def test_a_plan_takes_what_was_learned() -> None:
    def body() -> tuple[str, str]:
        core = learn()
        x = np.arange(2000)
        for _ in range(CALLS):
            mpicoll.allreduce(x)
        (trials,) = core.trials.values()
        trials.winner = trials.names[-1]  # on all ranks
        plan = mpicoll.allreduce_init(x)
        assert (plan() == 3 * x).all()
        return plan.choice.name, trials.names[-1]

    for name, last in run_nodes(body, 3):
        assert name == last


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_small_calls_are_bound_to_what_was_learned(nbytes: int) -> None:
    """Calls of large arrays are prepared each time, to be timed now and then."""

    def body() -> bool:
        core = learn()
        x = np.ones(nbytes // 8, int)
        for _ in range(CALLS):
            assert (mpicoll.allreduce(x) == 2).all()
        return any(type(one) is tuple for one in core.call_cache.values())

    assert run_nodes(body, 2) == [nbytes == 64] * 2


@pytest.mark.mpi
def test_ranks_of_mpi_learn() -> None:
    core = core_of(world())
    if core.size == 1:
        pytest.skip("there is nothing to choose")
    with mpicoll.world().duplicate() as comm:
        inner = core_of(comm)
        inner.tune = "exact"
        inner.no_shm_reason = inner.no_cma_reason = "this is a test"
        for number in range(CALLS):
            for count in (1, 3000):
                assert (mpicoll.allreduce(np.full(count, number), comm=comm) == comm.size * number).all()
        found = taken(inner)
        assert all(settled for _, settled in found.values())
        assert len(found) == 2
        assert mpicoll.allgather_object(found, comm=comm) == [found] * comm.size
        assert "learned" in mpicoll.explain("allreduce", 8, dtype=int, comm=comm).reason


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The default path of the tuned table, where there is none yet; nothing was learned before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPICOLL_TUNED", raising=False)
    monkeypatch.setattr(learning, "results", {})
    config.config.cache_clear()
    tuned_table._read.cache_clear()
    yield tmp_path / "cache" / "mpicoll" / "tuned.json"
    monkeypatch.undo()
    config.config.cache_clear()
    tuned_table._read.cache_clear()


def learn_some(tune: str = "exact") -> None:
    learn(tune)
    for _ in range(CALLS):
        mpicoll.allgather(np.ones(100))
        mpicoll.allreduce(np.ones(1000, int))
        mpicoll.allreduce(np.ones(1000))


def test_later_jobs_take_what_was_learned(place: Path) -> None:
    run_nodes(partial(learn_some, "any"), 3)
    assert {key[1:] for key in learning.results} == {("moved", "allgather", 2048.0), ("integer", "allreduce", 4096.0)}
    names = set(learning.results.values())
    learning.write_results("a library")
    (entry,) = tuned_table.load(place)
    assert (entry["ranks"], entry["nodes"], entry["mpi"]) == (3, 3, "a library")
    assert {key: text.partition(":")[0] for key, text in entry["rules"].items()} == {
        "moved": "allgather",
        "integer": "allreduce",
    }
    table = tuned_table.share(0, lambda text: [text], "a library")
    context = selection_context(NodeLayout(3, 3, 1), table)
    for query, decided in (
        (SelectionQuery("allgather", 2400, context), True),
        (SelectionQuery("allgather", 4096, context), False),
        (SelectionQuery("allreduce", 8000, context, "integer"), True),
        (SelectionQuery("allreduce", 8000, context, "float"), False),
    ):
        assert is_decided(query) is decided
        if decided:
            assert learning.choose(query, None).name in names
            assert str(place) in learning.choose(query, None).reason

    def body() -> int:
        core = learn()
        core.context = context
        for _ in range(3):
            mpicoll.allgather(np.ones(100))
        return len(core.trials)

    assert run_nodes(body, 3) == [0] * 3


def test_what_was_tuned_before_stays(place: Path) -> None:
    shape = NodeLayout(3, 3, 1)
    rules = {
        "moved": parse_rules("allgather:0-2k:ring,2k-8k:bruck;bcast:chain"),
        "float": parse_rules("allreduce:ring"),
    }
    tuned_table.write(place, tuned_table.make_entry("a library", shape, rules, None, "before"))
    learning.results[shape, "moved", "allgather", 4096.0] = "native"
    learning.write_results("a library")
    (entry,) = tuned_table.load(place)
    assert entry["rules"] == {
        "moved": "allgather:0-2k:ring,2k-4k:bruck,4k-8k:native;bcast:0-inf:chain",
        "float": "allreduce:0-inf:ring",
    }


def test_of_one_node_nothing_is_kept(place: Path) -> None:
    def body() -> None:
        core = learn()
        core.no_shm_reason = "this is a test"
        for _ in range(CALLS):
            mpicoll.allgather(np.ones(100))
        assert core.trials

    run_nodes(body, 2, 2)
    assert learning.results == {}


@pytest.mark.parametrize(
    ("setting", "value"), [("TUNED", "off"), ("TUNED", "mine.json"), ("SHARED_MEMORY", "off"), ("SOCKETS", "off")]
)
def test_settings_with_which_nothing_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    monkeypatch.chdir(place.parents[2])
    monkeypatch.setenv(f"MPICOLL_{setting}", value)
    config.config.cache_clear()
    learning.results[NodeLayout(3, 3, 1), "moved", "allgather", 4096.0] = "native"
    learning.write_results("a library")
    assert list(place.parents[2].iterdir()) == []


def test_a_table_that_cannot_be_written_is_logged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("other things")
    learning.results[NodeLayout(3, 3, 1), "moved", "allgather", 4096.0] = "native"
    learning.write_results("a library")
    assert "is not kept" in caplog.text
    assert place.read_text() == "other things"


@pytest.mark.slow
def test_one_rank_writes_at_exit(job: Job, tmp_path: Path) -> None:
    program = """
from mpicoll.engine import dispatch, learning
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.selection.layout import NodeLayout
rank = mpicoll.world().rank
learning.results[NodeLayout(2, 2, 1), "moved", "allgather", 4096.0] = ("native", "ring")[rank]
"""
    done = job(2, program, XDG_CACHE_HOME=str(tmp_path / "cache"), MPICOLL_TUNED="", MPICOLL_TUNE="exact")
    assert done.returncode == 0, done.stderr
    (entry,) = tuned_table.load(tmp_path / "cache" / "mpicoll" / "tuned.json")
    assert entry["rules"] == {"moved": "allgather:4k-8k:native"}


def test_small_calls_keep_the_untried_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def body() -> list[int]:
        core = learn()
        for nbytes in ((1 << 20) - 8, 1 << 20):
            for _ in range(5):
                mpicoll.allreduce(np.ones(nbytes // 8, int))
        return [query.nbytes for query in core.trials]

    assert run_nodes(body, 2) == [[1 << 20]] * 2


LEARNS = """
import os
from mpi4py import MPI
os.environ["MPICOLL_TUNE"] = ("VALUE", "off", "any")[MPI.COMM_WORLD.rank]
comm = mpicoll.world()
for number in range(45):
    assert mpicoll.allreduce(np.full(140_000, number)).tolist() == [3 * number] * 140_000
    assert mpicoll.allreduce(np.full(140_000, number / 2)).tolist() == [1.5 * number] * 140_000
with comm.duplicate() as same:
    for _ in range(45):
        mpicoll.allreduce(np.ones(150_000, int), comm=same)
    inherited = "learned" in mpicoll.explain("allreduce", 1_200_000, dtype=int, comm=same).reason
seen = ["learned" in mpicoll.explain("allreduce", 1_120_000, dtype=kind).reason for kind in (int, float)]
if comm.rank == 0:
    print(*seen, inherited)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("exact", "True False True"),
        pytest.param("any", "True True True", marks=pytest.mark.long),
        ("off", "False " * 3),
    ],
)
def test_the_setting_of_rank_0_applies(job: Job, value: str, seen: str) -> None:
    done = job(3, LEARNS.replace("VALUE", value), MPICOLL_SHARED_MEMORY="off")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == seen.strip()
