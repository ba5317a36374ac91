"""Seconds on a described cluster of any number of ranks: schedules are examined once and priced at any size.

The model. Ranks sit on nodes in blocks: rank r on node ``r // ranks_per_node``. A message takes ``alpha + beta *
bytes`` (Hockney 1994) with the alpha and beta of its link class: within a node, or between nodes. Time goes in
*levels*. A message belongs to level 1 + the level at which the later of its two ranks ended its round before (the
critical path that `cost` counts as rounds), and a level begins when the one before has ended everywhere. A level lasts
as long as its busiest port:

* a rank's port out or in: all messages of the rank on that level, one after the other, and then ``gamma`` for each byte
  that the rank reduces in the round that ends with this level;
* a node's links out or in: one alpha, and beta for all bytes that cross them on that level, divided by their number.
  So the ranks of a node that send at the same time share the links of the node.

A level costs the maximum of a few linear functions of the message size, and most levels are alike. A schedule is
therefore reduced to a :class:`Profile`: a few such functions with counts, which price any size, and any alpha, beta and
gamma, at once.

Against `price`, which follows each message: on one link class both are equal, except for three algorithms where `price`
lets a port begin a message of the next level while others are still on this one. On 2 to 32 ranks this model gives 0.8
to 1.34 times `price` for ``allreduce/double_tree``, at most 1.03 times for ``allgather/recursive_doubling``, and up to
5.7 times for ``reduce_scatter/linear``, whose bursts of sends overlap in part. With two link classes a level waits for
its slowest message: where the slow class costs 4 times the fast one, that is up to 1.34 times what following each
message gives, and up to 1.75 times for the pipeline ``bcast/chain``. tests/schedules/test_simulate.py checks this.

Reductions of the work for P in the hundred thousands (recorded in :attr:`Profile.seen`):

* ``one``: if ranks differ only by their place, so that peer = rank + d (mod P), or rank XOR d, with the same d, sizes
  and reductions in each round, all are in step, and one rank represents all. Its rounds are only counted by kind, so
  the 2(P-1) rounds of a ring are two kinds. The agreement of ranks is checked on several of them.
* ``all``: all ranks are followed through their rounds, which are built only when a rank enters them.
* ``sample``: as ``all``, but only for ranks near powers of two, from both ends and where ranks are folded to a power
  of two, for whole nodes there, and for the sources whose messages these ranks need before they can begin. Ranks
  outside are taken to be ready when one of them is needed. A sample counts only if its critical path and the bytes of
  its busiest rank are exactly those of the closed forms of the algorithm. On 1025 to 2048 ranks the times are 0.68 to
  1.39 times those of ``all``; where nodes and ranks are powers of two they are the same, except for ``double_tree``
  (0.83 to 1.04).

Barchet-Estefanel and Mounié 2004 and Thakur, Rabenseifner and Gropp 2005 price collectives by rounds in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpicoll.errors import AlgorithmError, ArgumentError
from mpicoll.schedules.load_profile import Cluster, Profile
from mpicoll.schedules.model import Algorithm, algorithms_of, collectives, find, get
from mpicoll.schedules.placement import Placement
from mpicoll.schedules.rank_walk import RankWalk, sample_ranks
from mpicoll.schedules.symmetry import profile_by_symmetry

BUDGET = 500_000
"""Maximum number of messages that `profile` follows, which takes some seconds."""

_EVERY = 1024
"""Number of ranks up to which no sample is taken."""


def profile(
    algorithm: Algorithm | str,
    nodes: int,
    ranks_per_node: int,
    *,
    segments: int = 1,
    links: int = 1,
    budget: int = BUDGET,
) -> Profile:
    """Profile `algorithm` on ``nodes * ranks_per_node`` ranks with root 0.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        nodes: the number of nodes.
        ranks_per_node: the number of ranks on each.
        segments: the number of pieces of the pipeline of a segmented algorithm.
        links: the number of network links of a node.
        budget: the maximum number of messages to follow.

    Raises:
        ArgumentError: `nodes`, `ranks_per_node` or `links` is below 1.
        AlgorithmError: the name is unknown, `segments` is below 1, or there are more messages to follow than `budget`.
        ScheduleError: the algorithm deadlocks.

    Example:
        >>> mpicoll.schedules.profile("allreduce/ring", nodes=2, ranks_per_node=4).crossing  # multiples of the vector
        Fraction(7, 4)
    """
    algorithm = find(algorithm)
    _check(nodes, ranks_per_node, links)
    segments = segments if algorithm.segmented else 1
    placement = Placement(algorithm, nodes, ranks_per_node, links, segments)
    found = profile_by_symmetry(placement, budget)
    if found is not None and placement.agrees(found):
        return found
    if placement.size > _EVERY:
        some = RankWalk(placement, sample_ranks(placement), budget).profile()
        if some.seen == "all" or placement.agrees(some):
            return some
    return RankWalk(placement, range(placement.size), budget).profile()


@dataclass(frozen=True, slots=True)
class Forecast:
    """The points of an algorithm in the order of the sizes; None for sizes without a point, for which see `reason`.

    Example:
        >>> cluster = mpicoll.schedules.Cluster(nodes=2, ranks_per_node=4)
        >>> (ring,) = mpicoll.schedules.simulate("allreduce", cluster, [8, 1 << 20], algorithms=["ring"])
        >>> [point.nbytes for point in ring.points]
        [8, 1048576]
    """

    algorithm: Algorithm
    points: tuple[ForecastPoint | None, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class ForecastPoint:
    """The costs of one size: seconds, bytes that the busiest rank sends, bytes on the busiest node's links."""

    nbytes: int
    seconds: float
    sent: float
    crossing: float
    profile: Profile


def simulate(
    collective: str,
    cluster: Cluster,
    sizes: Sequence[int],
    *,
    algorithms: Sequence[str] | None = None,
    segments: int | None = None,
    budget: int = BUDGET,
) -> list[Forecast]:
    """Price algorithms of `collective` on `cluster` at each of `sizes`.

    Args:
        collective: such as ``"allreduce"``.
        cluster: the cluster.
        sizes: n in bytes: the vector, or all P blocks of one buffer.
        algorithms: their names; all of the collective if None.
        segments: pieces of a pipeline; if None, as many as are 128 KiB long, from 1 to 64, as calls have by default.
        budget: the maximum number of messages to follow for each algorithm and number of segments.

    Raises:
        ArgumentError: the cluster has no nodes, ranks or links.
        AlgorithmError: a name is unknown, or `segments` is below 1.
        ScheduleError: an algorithm deadlocks.

    Example:
        >>> cluster = mpicoll.schedules.Cluster(nodes=4, ranks_per_node=8)
        >>> forecasts = mpicoll.schedules.simulate("allreduce", cluster, [1 << 20])
        >>> "ring" in [one.algorithm.name for one in forecasts]
        True
    """
    if algorithms is None and collective in collectives():
        algorithms = tuple(algorithms_of(collective))
    chosen = [get(collective, name) for name in algorithms or ("",)]
    if segments is not None and segments < 1:
        raise AlgorithmError(f"{collective}: segments must be at least 1, got {segments}")
    _check(cluster.nodes, cluster.ranks_per_node, cluster.links)
    return [_forecast(algorithm, cluster, sizes, segments, budget) for algorithm in chosen]


def _forecast(
    algorithm: Algorithm, cluster: Cluster, sizes: Sequence[int], segments: int | None, budget: int
) -> Forecast:
    pieces = [segments or max(1, min(64, n >> 17)) if algorithm.segmented else 1 for n in sizes]
    profiles: dict[int, Profile] = {}
    reason = None
    for count in sorted(set(pieces)):
        try:
            profiles[count] = profile(
                algorithm,
                cluster.nodes,
                cluster.ranks_per_node,
                segments=count,
                links=cluster.links,
                budget=budget,
            )
        except AlgorithmError as error:
            reason = str(error)
            break  # more segments are more messages
    points: list[ForecastPoint | None] = []
    for n, count in zip(sizes, pieces, strict=True):
        seen = profiles.get(count)
        if seen is None:
            points.append(None)
        else:
            points.append(
                ForecastPoint(n, seen.seconds(n, cluster), float(seen.sent * n), float(seen.crossing * n), seen)
            )
    return Forecast(algorithm, tuple(points), reason)


def _check(nodes: int, ranks_per_node: int, links: int) -> None:
    for name, value in (("nodes", nodes), ("ranks_per_node", ranks_per_node), ("links", links)):
        if value < 1:
            raise ArgumentError(f"simulate: {name} must be at least 1, got {value}")
