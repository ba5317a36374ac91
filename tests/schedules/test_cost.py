from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from mpicoll.errors import AlgorithmError, RankError, ScheduleError
from mpicoll.schedules import Cost, Recv, Round, Send, closed_form, cost, get, price


def test_counts_of_a_ring() -> None:
    assert cost("allreduce/ring", 4) == Cost(
        rounds=6,
        messages=24,
        sent=Fraction(3, 2),
        received=Fraction(3, 2),
        reduced=Fraction(3, 4),
        total_sent=Fraction(6),
        total_reduced=Fraction(3),
    )


def test_counts_of_a_star() -> None:
    assert cost("allreduce/master_worker", 5) == Cost(
        rounds=5,
        messages=8,
        sent=Fraction(4),
        received=Fraction(4),
        reduced=Fraction(4),
        total_sent=Fraction(8),
        total_reduced=Fraction(4),
    )


def test_local_reductions_count() -> None:
    found = cost("exscan/linear", 4)
    assert (found.reduced, found.total_reduced) == (1, 2)


def test_blocks_are_counted_in_n_of_all_blocks() -> None:
    assert cost("gather/linear", 4, root=2).received == Fraction(3, 4)
    assert cost("alltoall/pairwise", 4).sent == Fraction(3, 4)
    assert cost("alltoall/bruck", 8).sent == Fraction(12, 8)


def test_barrier_moves_nothing() -> None:
    found = cost("barrier/dissemination", 5)
    assert (found.rounds, found.messages, found.total_sent) == (3, 15, 0)


def test_one_rank_costs_nothing() -> None:
    nothing = Fraction(0)
    for name in ("allreduce/ring", "allreduce/double_tree", "alltoall/bruck", "barrier/dissemination"):
        assert cost(name, 1) == Cost(0, 0, nothing, nothing, nothing, nothing, nothing)
        assert price(name, 1, 1e6, alpha=1, beta=1, gamma=1) == 0


@pytest.mark.parametrize(
    ("name", "size", "segments", "expected"),
    [
        ("allreduce/ring", 4, 1, (6, Fraction(3, 2))),
        ("allreduce/tree", 1000, 1, (20, Fraction(10))),
        ("allreduce/double_tree", 7, 4, (9, Fraction(2))),
        ("allreduce/halving_doubling", 8, 1, (6, Fraction(7, 4))),
        ("allreduce/halving_doubling", 9, 1, (8, Fraction(11, 4))),
        ("alltoall/bruck", 1024, 1, (10, Fraction(5))),
        ("bcast/chain", 5, 10, (13, Fraction(1))),
        ("barrier/dissemination", 1025, 1, (11, Fraction(0))),
    ],
)
def test_closed_forms(name: str, size: int, segments: int, expected: tuple[int, Fraction]) -> None:
    assert closed_form(name, size, segments) == expected


ALPHA, BETA, GAMMA, N = 3.0, 0.5, 0.25, 240


@pytest.mark.parametrize(
    ("name", "size", "segments", "by_hand"),
    [
        ("bcast/binomial", 4, 1, 2 * (ALPHA + BETA * N)),
        ("bcast/chain", 4, 3, 5 * (ALPHA + BETA * N / 3)),
        ("allreduce/ring", 4, 1, 6 * (ALPHA + BETA * N / 4) + 3 * GAMMA * N / 4),
        ("allreduce/halving_doubling", 8, 1, 6 * ALPHA + 2 * 7 / 8 * BETA * N + 7 / 8 * GAMMA * N),
        ("allreduce/recursive_doubling", 8, 1, 3 * (ALPHA + (BETA + GAMMA) * N)),
        ("allreduce/recursive_doubling", 3, 1, 3 * (ALPHA + BETA * N) + 2 * GAMMA * N),
        # The sends of the last round leave through one port, one after the other.
        ("allreduce/master_worker", 4, 1, 6 * (ALPHA + BETA * N) + 3 * GAMMA * N),
        # All blocks enter through one port.
        ("gather/linear", 5, 1, 4 * (ALPHA + BETA * N / 5)),
        ("reduce/linear", 4, 1, 3 * (ALPHA + (BETA + GAMMA) * N)),
        ("alltoall/pairwise", 6, 1, 5 * (ALPHA + BETA * N / 6)),
        ("barrier/dissemination", 8, 1, 3 * ALPHA),
        ("scan/recursive_doubling", 4, 1, 2 * (ALPHA + (BETA + GAMMA) * N)),
    ],
)
def test_price_by_hand(name: str, size: int, segments: int, by_hand: float) -> None:
    assert price(name, size, N, alpha=ALPHA, beta=BETA, gamma=GAMMA, segments=segments) == pytest.approx(by_hand)


def test_price_of_two_halves_that_share_no_port() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        if rank < 2:
            yield Round((Send(rank + 2, range(1)),))
        else:
            yield Round((), (Recv(rank - 2, range(1)),))

    both = replace(get("allreduce", "tree"), generate=generate)
    assert price(both, 4, 10, alpha=1, beta=1) == 11


def test_a_free_port_takes_whatever_can_start() -> None:
    """Ranks 0 and 1 both have something for 2; one of them has to wait, and 0 also has something for 3."""

    def generate(rank: int, size: int) -> Iterator[Round]:
        if rank == 0:
            yield Round((Send(2), Send(3)))
        if rank == 1:
            yield Round((Send(2),))
        if rank == 2:
            yield Round((), (Recv(1), Recv(0)))
        if rank == 3:
            yield Round((), (Recv(0),))

    # The lower rank goes first. Its second message is under way while rank 2 receives the one from rank 1.
    assert price(replace(get("barrier", "dissemination"), generate=generate), 4, 0, alpha=1, beta=0) == 2

    def crossed(rank: int, size: int) -> Iterator[Round]:
        if rank < 2:
            yield Round((Send(2 + rank), Send(3 - rank)))
        else:
            yield Round((), (Recv(3 - rank), Recv(rank - 2)))

    # Each port would wait for another one for ever if it insisted on the order of its list.
    assert price(replace(get("barrier", "dissemination"), generate=crossed), 4, 0, alpha=1, beta=0) == 2


def test_price_is_never_below_the_critical_path_nor_the_busiest_port() -> None:
    for size in (2, 5, 8, 13):
        for name in ("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"):
            counted = cost(f"allreduce/{name}", size, segments=4)
            assert price(f"allreduce/{name}", size, 0, alpha=1, beta=0, segments=4) >= counted.rounds
            assert price(f"allreduce/{name}", size, 1, alpha=0, beta=1, segments=4) >= float(counted.sent) - 1e-12


def test_segments_pay_off_in_a_pipeline() -> None:
    whole, cut = (price("bcast/chain", 8, 1e6, alpha=1e-6, beta=1e-9, segments=s) for s in (1, 32))
    assert cut < whole / 4


def test_prices_large_sizes() -> None:
    assert price("allreduce/tree", 10_000, 0, alpha=1, beta=0) == 28


def test_deadlock_has_no_cost() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round(recvs=(Recv(1 - rank),))

    stuck = replace(get("barrier", "dissemination"), generate=generate)
    with pytest.raises(ScheduleError, match="2 ranks wait for ever; verify says where"):
        cost(stuck, 2)
    with pytest.raises(ScheduleError, match="2 ranks wait for ever; verify says where"):
        price(stuck, 2, 1, alpha=1, beta=1)


def test_wrong_arguments() -> None:
    with pytest.raises(AlgorithmError, match="no algorithm 'nope'"):
        cost("bcast/nope", 4)
    with pytest.raises(RankError, match="root 9"):
        cost("bcast/binomial", 4, root=9)
    with pytest.raises(AlgorithmError, match="segments must be at least 1"):
        price("bcast/chain", 4, 1, alpha=1, beta=1, segments=0)
    with pytest.raises(AlgorithmError, match="no collective 'nope'"):
        closed_form("nope/nope", 4)
