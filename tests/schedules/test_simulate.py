from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction

import pytest

from mpicoll.errors import AlgorithmError, ArgumentError, ScheduleError
from mpicoll.schedules import (
    Algorithm,
    Cluster,
    Profile,
    Recv,
    Round,
    Send,
    algorithms_of,
    closed_form,
    collectives,
    cost,
    get,
    price,
    profile,
    simulate,
)
from mpicoll.schedules.cost import _Simulation, chunks_in_n
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.placement import Placement
from mpicoll.schedules.rank_walk import RankWalk, sample_ranks

EVERYTHING = [algorithm for collective in collectives() for algorithm in algorithms_of(collective).values()]
EXACT = pytest.approx(1, rel=1e-9)

# What price lets overlap, and levels do not: the least and the most that this model gives in times of price.
LOOSE = {
    "allreduce/double_tree": (0.8, 1.34),
    "allgather/recursive_doubling": (1, 1.03),
    "reduce_scatter/linear": (1, 5.7),
}


def full(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}/{algorithm.name}"


def segments(algorithm: Algorithm) -> tuple[int, ...]:
    return (1, 3, 8) if algorithm.segmented else (1,)


def flat(size: int, alpha: float, beta: float, gamma: float) -> Cluster:
    return Cluster(1, size, node_alpha=alpha, node_beta=beta, net_alpha=0, net_beta=0, gamma=gamma)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERYTHING, ids=full)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((*range(1, 18), 31, 32), id="some"),
        pytest.param(range(18, 31), id="more", marks=pytest.mark.long),
    ],
)
def test_equals_price_on_one_link_class(algorithm: Algorithm, sizes: Iterable[int]) -> None:
    for size in sizes:
        for count in segments(algorithm):
            seen = profile(algorithm, 1, size, segments=count)
            for n, alpha, beta, gamma in ((1, 1, 0, 0), (240 * size, 3, 0.5, 0.25), (1e6, 0, 1, 1)):
                priced = price(algorithm, size, n, alpha=alpha, beta=beta, gamma=gamma, segments=count)
                found = seen.seconds(n, flat(size, alpha, beta, gamma))
                if priced == 0:
                    assert found == 0
                elif full(algorithm) in LOOSE:
                    low, high = LOOSE[full(algorithm)]
                    assert low <= found / priced <= high, (size, count, n)
                else:
                    assert found / priced == EXACT, (size, count, n)


class _TwoClasses(_Simulation):
    """`price` with two link classes, where every rank has its own link to the network."""

    def __init__(self, algorithm: Algorithm, cluster: Cluster, n: float, count: int) -> None:
        chunk = n / chunks_in_n(algorithm, cluster.size, count)
        exchange = Exchange(algorithm, cluster.size, 0, count)
        super().__init__(exchange, cluster.size, 0, 0, cluster.gamma * chunk)
        self.per_node = cluster.ranks_per_node
        self.classes = (
            (cluster.node_alpha, cluster.node_beta * chunk),
            (cluster.net_alpha, cluster.net_beta * chunk),
        )

    def start(self, match: Match | None) -> None:
        if match is not None:
            far = match.source // self.per_node != match.to // self.per_node
            self.alpha, self.beta = self.classes[far]
        super().start(match)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERYTHING, ids=full)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 3, 6, 8, 12, 15, 16), id="small"),
        pytest.param((21, 30, 32), id="large", marks=pytest.mark.long),
    ],
)
def test_is_near_price_with_two_link_classes(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    low, high = LOOSE.get(full(algorithm), (1 - 1e-9, 1.76 if full(algorithm) == "bcast/chain" else 1.34))
    for size in sizes:
        for per_node in (k for k in range(1, 9) if size % k == 0):
            for count in segments(algorithm):
                seen = profile(algorithm, size // per_node, per_node, segments=count, links=per_node)
                for n, alpha, beta, gamma in ((1.0, 1, 0, 0), (240.0 * size, 3, 0.5, 0.25), (1e6, 0, 1, 0)):
                    cluster = Cluster(
                        size // per_node, per_node, alpha, beta, 4 * alpha, 4 * beta, gamma, links=per_node
                    )
                    exact = _TwoClasses(algorithm, cluster, n, count)
                    exact.run()
                    found = seen.seconds(n, cluster)
                    assert low * exact.end <= found <= max(high, 1.34) * exact.end, (size, per_node, count, n)


@pytest.mark.parametrize("algorithm", EVERYTHING, ids=full)
def test_counts_are_those_of_cost(algorithm: Algorithm) -> None:
    for size in (1, 2, 5, 8, 13):
        for count in segments(algorithm):
            seen, counted = profile(algorithm, size, 1, segments=count), cost(algorithm, size, segments=count)
            assert (seen.rounds, seen.sent) == (counted.rounds, counted.sent)
            # With one rank on each node, what crosses the links of a node is what its rank sends or receives.
            assert seen.crossing == max(counted.sent, counted.received)


def test_ranks_that_do_alike_are_seen_through_one() -> None:
    seen = {full(algorithm) for algorithm in EVERYTHING if profile(algorithm, 4, 4).seen == "one"}
    assert seen == {
        "allgather/bruck",
        "allgather/recursive_doubling",
        "allgather/ring",
        "allreduce/halving_doubling",
        "allreduce/recursive_doubling",
        "allreduce/ring",
        "alltoall/bruck",
        "alltoall/pairwise",
        "barrier/dissemination",
        "reduce_scatter/pairwise",
        "reduce_scatter/recursive_halving",
        "reduce_scatter/ring",
    }


def priced(seen: Profile, cluster: Cluster) -> list[float]:
    return [seen.seconds(n, cluster) for n in (0, 8, 1 << 12, 1 << 20, 1 << 30)]


@pytest.mark.parametrize("algorithm", EVERYTHING, ids=full)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 12), (2, 7), (5, 3), (8, 4), (3, 8), (16, 2), (70, 1)])
def test_one_rank_speaks_for_all(algorithm: Algorithm, nodes: int, per_node: int) -> None:
    found = profile(algorithm, nodes, per_node)
    if found.seen == "one":
        cluster = Cluster(nodes, per_node)
        every = RankWalk(Placement(algorithm, nodes, per_node, 1, 1), range(cluster.size), 10**6).profile()
        assert priced(found, cluster) == pytest.approx(priced(every, cluster), rel=1e-12)
        assert (found.rounds, found.sent, found.crossing) == (every.rounds, every.sent, every.crossing)


def test_a_rank_that_differs_is_noticed() -> None:
    ring = get("allreduce", "ring")

    def generate(rank: int, size: int) -> Iterator[Round]:
        for step, now in enumerate(ring.generate(rank, size)):
            yield replace(now, recvs=(replace(now.recvs[0], reduce=False),)) if rank == 5 and step == 3 else now

    assert profile(ring, 8, 1).seen == "one"
    assert profile(replace(ring, generate=generate), 8, 1).seen == "all"


def test_messages_that_are_not_met_in_step_are_no_symmetry() -> None:
    def generate(rank: int, size: int) -> Iterator[Round]:
        yield Round((Send((rank + 1) % size, range(1)),), (Recv((rank + 1) % size, range(1)),))

    with pytest.raises(ScheduleError, match="4 ranks wait for ever; verify says where"):
        profile(replace(get("allreduce", "ring"), generate=generate), 1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "allreduce/double_tree",
        "allreduce/halving_doubling",
        "bcast/binomial",
        "gather/binomial",
        "scan/recursive_doubling",
        "scatter/linear",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "allreduce/recursive_doubling",
                "allreduce/tree",
                "reduce/reduce_scatter_gather",
                "reduce_scatter/recursive_halving",
            )
        ),
    ],
)
def test_a_sample_is_near_every_rank(name: str) -> None:
    for nodes, per_node in ((64, 32), (1025, 1), (37, 40)):
        algorithm = get(*name.split("/"))
        placement = Placement(algorithm, nodes, per_node, 1, 4 if algorithm.segmented else 1)
        every = RankWalk(placement, range(placement.size), 10**6).profile()
        some = RankWalk(placement, sample_ranks(placement), 10**6).profile()
        assert (every.seen, some.seen) == ("all", "sample")
        assert placement.agrees(some)
        cluster = Cluster(nodes, per_node)
        for exact, found in zip(priced(every, cluster), priced(some, cluster), strict=True):
            if (nodes, per_node) == (64, 32) and not algorithm.segmented:
                assert found == pytest.approx(exact)
            else:
                assert 0.68 * exact <= found <= 1.4 * exact


def test_a_sample_without_the_critical_path_does_not_count() -> None:
    """A chain has its rounds spread over all ranks."""
    assert profile("bcast/chain", 300, 4, segments=2).seen == "all"
    assert profile("bcast/chain", 300, 4, segments=2).rounds == 1200


def test_more_bytes_ranks_and_latency_cost_more() -> None:
    for algorithm in EVERYTHING:
        seen = profile(algorithm, 4, 4)
        times = [seen.seconds(n, Cluster(4, 4)) for n in (0, 8, 1000, 10**6, 10**9)]
        assert times == sorted(times)
        assert seen.seconds(1000, Cluster(4, 4, net_alpha=1)) > seen.seconds(1000, Cluster(4, 4))
        longer = profile(algorithm, 8, 4)
        assert longer.seconds(0, Cluster(8, 4)) >= seen.seconds(0, Cluster(4, 4))


def test_never_faster_than_the_node_links() -> None:
    cluster = Cluster(8, 4, net_alpha=0, net_beta=1, node_alpha=0, node_beta=0, gamma=0)
    for algorithm in EVERYTHING:
        seen = profile(algorithm, 8, 4)
        assert seen.seconds(1, cluster) >= float(seen.crossing) - 1e-9


def test_ranks_of_a_node_share_its_links() -> None:
    """Recursive doubling from distance 4 on: all four ranks of a node send at once."""
    cluster = Cluster(4, 4, node_alpha=1, node_beta=1, net_alpha=10, net_beta=2, gamma=0)
    for links, share in ((1, 4), (2, 2), (4, 1), (8, 1)):
        seen = profile("allreduce/recursive_doubling", 4, 4, links=links)
        assert seen.seconds(100, cluster) == pytest.approx(2 * (1 + 100) + 2 * (10 + 2 * 100 * share))
        assert seen.crossing == 8


def test_known_optima() -> None:
    """Doubling is best for small vectors; for large ones it moves too much, and nothing beats what a node must move."""
    cluster = Cluster(16, 4)
    small, large = (
        {f.algorithm.name: f.points[0].seconds for f in simulate("allreduce", cluster, [n]) if f.points[0]}
        for n in (8, 1 << 28)
    )
    assert min(small, key=lambda name: small[name]) == "recursive_doubling"
    assert large["ring"] < large["recursive_doubling"] / 3
    assert min(large.values()) >= 2 * 15 / 16 * (1 << 28) * cluster.net_beta


def test_segments_follow_the_size() -> None:
    forecast = simulate("bcast", Cluster(4, 2), [8, 1 << 18, 1 << 30], algorithms=["chain"])[0]
    assert [point.profile.segments for point in forecast.points if point] == [1, 2, 64]
    forced = simulate("bcast", Cluster(4, 2), [8, 1 << 30], algorithms=["chain"], segments=5)[0]
    assert [point.profile.segments for point in forced.points if point] == [5, 5]


def test_what_is_beyond_the_budget_says_so() -> None:
    small, large = simulate("bcast", Cluster(500, 4), [8, 1 << 30], algorithms=["chain"], budget=5000)[0].points
    assert small is not None
    assert small.profile.rounds == 1999
    assert large is None
    forecast = simulate("bcast", Cluster(500, 4), [8, 1 << 30], algorithms=["chain"], budget=5000)[0]
    assert forecast.reason == (
        "bcast/chain on 2000 ranks in 64 segments has more than 5000 messages to follow; give a larger budget, or"
        " fewer segments"
    )
    with pytest.raises(AlgorithmError, match="allreduce/ring on 64 ranks has more than 10 messages"):
        profile("allreduce/ring", 64, 1, budget=10)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [32, pytest.param(1024, marks=pytest.mark.long)])
def test_every_allreduce_on_large_clusters(nodes: int) -> None:
    size = nodes * 128
    forecasts = simulate("allreduce", Cluster(nodes, 128), [8, 1 << 20, 1 << 30])
    assert {f.algorithm.name for f in forecasts} == set(algorithms_of("allreduce"))
    for forecast in forecasts:
        assert forecast.reason is None
        for point in forecast.points:
            assert point is not None
            exact = closed_form(forecast.algorithm, size, point.profile.segments)
            assert (point.profile.rounds, point.profile.sent) == exact
    ring = next(f.points[0] for f in forecasts if f.algorithm.name == "ring")
    assert ring is not None
    assert ring.seconds == pytest.approx(2 * (size - 1) * 2e-6, rel=1e-3)
    assert ring.profile.crossing == Fraction(2 * (size - 1), size)


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="nodes must be at least 1, got 0"):
        profile("allreduce/ring", 0, 4)
    with pytest.raises(ArgumentError, match="links must be at least 1, got 0"):
        simulate("allreduce", Cluster(1, 4, links=0), [8])
    with pytest.raises(AlgorithmError, match="allreduce has no algorithm 'nope'"):
        simulate("allreduce", Cluster(1, 4), [8], algorithms=["nope"])
    with pytest.raises(AlgorithmError, match="no collective 'nope'"):
        simulate("nope", Cluster(1, 4), [8])
    with pytest.raises(AlgorithmError, match="segments must be at least 1, got 0"):
        simulate("bcast", Cluster(1, 4), [8], segments=0)
