"""Every algorithm of every collective: proved for many sizes, and its claims compared with what it does."""

from __future__ import annotations

import pytest

from mpicoll.collective_kinds import ROOTED
from mpicoll.schedules import Algorithm, algorithms_of, closed_form, collectives, cost, get, verify
from mpicoll.schedules.model import Schedule

SIZES = (*range(1, 34), 64)
LARGE_SIZES = (100, 127, 128)
REDUCING = ("allreduce", "exscan", "reduce", "reduce_scatter", "scan")
ALL = [algorithm for name in collectives() for algorithm in algorithms_of(name).values()]


def label(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}/{algorithm.name}"


def segment_counts(algorithm: Algorithm) -> tuple[int, ...]:
    return (1, 2, 3, 7) if algorithm.segmented else (1,)


every = pytest.mark.parametrize("algorithm", ALL, ids=label)
sizes = pytest.mark.parametrize(
    "sizes", [pytest.param(SIZES, id="small"), pytest.param(LARGE_SIZES, id="large", marks=pytest.mark.long)]
)
rooted = pytest.mark.parametrize("algorithm", [a for a in ALL if a.collective in ROOTED], ids=label)


def test_names() -> None:
    assert {name: tuple(algorithms_of(name)) for name in collectives()} == {
        "allgather": ("ring", "bruck", "recursive_doubling"),
        "allreduce": ("master_worker", "ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"),
        "alltoall": ("pairwise", "bruck"),
        "barrier": ("dissemination",),
        "bcast": ("binomial", "chain", "scatter_allgather"),
        "exscan": ("linear", "recursive_doubling"),
        "gather": ("linear", "binomial"),
        "reduce": ("linear", "chain", "binomial", "reduce_scatter_gather"),
        "reduce_scatter": ("ring", "pairwise", "recursive_halving", "linear"),
        "scan": ("linear", "recursive_doubling"),
        "scatter": ("linear", "binomial"),
    }


@pytest.mark.slow
@every
@sizes
def test_correct_for_every_size(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        assert verify(algorithm, size).size == size


@every
def test_correct_for_every_number_of_segments(algorithm: Algorithm) -> None:
    for size in (1, 2, 3, 4, 5, 8, 13):
        for segments in (1, 2, 3, 7, 16):
            assert verify(algorithm, size, segments=segments).segments == (segments if algorithm.segmented else 1)


@rooted
def test_correct_for_every_root(algorithm: Algorithm) -> None:
    for size in (*range(1, 10), 16, 17):
        for root in range(size):
            assert verify(algorithm, size, root).root == root
    for root in (1, 31, 50, 99):
        assert verify(algorithm, 100, root).root == root


@every
@sizes
def test_closed_forms_are_exact(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        for segments in segment_counts(algorithm):
            counted = cost(algorithm, size, segments=segments)
            assert closed_form(algorithm, size, segments) == (counted.rounds, counted.sent), (size, segments)


@rooted
def test_cost_does_not_depend_on_the_root(algorithm: Algorithm) -> None:
    for size in (2, 5, 8):
        assert len({cost(algorithm, size, root) for root in range(size)}) == 1


@pytest.mark.parametrize("algorithm", [a for a in ALL if a.collective in REDUCING], ids=label)
def test_claimed_order_is_the_real_one(algorithm: Algorithm) -> None:
    sizes = range(1, 18)
    assert algorithm.ordered == all(verify(algorithm, size).ordered for size in sizes)
    every_root = all(verify(algorithm, size, root).ordered for size in sizes for root in range(size))
    assert algorithm.any_root == (algorithm.collective in ROOTED and every_root)


@every
def test_describes_itself(algorithm: Algorithm) -> None:
    first, blank, *rest = algorithm.doc.splitlines()
    assert first.endswith((".", "…"))
    assert blank == ""
    assert "round" in " ".join(rest)


@every
def test_builds_the_same_schedule_again(algorithm: Algorithm) -> None:
    for size in (1, 2, 7, 8):
        for rank in range(size):
            built = algorithm.schedule(rank, size, segments=2)
            assert tuple(algorithm.steps(rank, size, segments=2)) == built.rounds
            assert hash(built) == hash(algorithm.schedule(rank, size, segments=2))


@every
def test_no_round_is_empty(algorithm: Algorithm) -> None:
    for size in (1, 2, 5, 8):
        for rank in range(size):
            assert all(step.sends or step.recvs or step.then for step in algorithm.steps(rank, size, segments=3))


def named(schedule: Schedule) -> set[int]:
    """The chunks that a schedule mentions, which are those it needs memory for."""
    chunks: set[int] = set()
    for step in schedule.rounds:
        chunks.update(*(send.chunks for send in step.sends), *(recv.chunks for recv in step.recvs))
        chunks.update(chunk for local in step.then for chunk in (local.src, local.dst))
    return chunks


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_leaves_touch_only_their_own_block(collective: str) -> None:
    assert named(get(collective, "binomial").schedule(5, 8, root=0)) == {5}
    assert named(get(collective, "binomial").schedule(6, 8, root=0)) == {6, 7}
    assert named(get(collective, "binomial").schedule(7, 8, root=3)) == {7, 0, 1, 2}
    assert named(get(collective, "linear").schedule(4, 8, root=3)) == {4}


def test_pairwise_reduce_scatter_writes_only_its_own_block() -> None:
    for step in get("reduce_scatter", "pairwise").schedule(2, 6).rounds:
        assert [tuple(recv.chunks) for recv in step.recvs] == [(2,)]


def test_master_receives_one_vector_at_a_time() -> None:
    rounds = get("allreduce", "master_worker").schedule(0, 5).rounds
    assert [[recv.source for recv in step.recvs] for step in rounds] == [[1], [2], [3], [4], []]
    assert [send.to for send in rounds[-1].sends] == [1, 2, 3, 4]


def test_linear_reduce_starts_at_the_root_and_goes_outwards() -> None:
    rounds = get("reduce", "linear").schedule(2, 6, root=2).rounds
    assert [step.recvs[0].source for step in rounds] == [3, 4, 5, 1, 0]


def test_ring_neighbours_only() -> None:
    for collective in ("allgather", "allreduce", "reduce_scatter"):
        for step in get(collective, "ring").schedule(0, 6).rounds:
            assert [send.to for send in step.sends] == [1]
            assert [recv.source for recv in step.recvs] == [5]


@pytest.mark.slow
def test_large_sizes_verify_quickly() -> None:
    assert verify("allreduce/tree", 16384).messages == 2 * 16383
    assert verify("reduce/binomial", 5000, root=4321).messages == 4999
