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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, zip_longest
from typing import NamedTuple, TypeAlias

from mpicoll.errors import AlgorithmError, ArgumentError, ScheduleError
from mpicoll.schedules.cost import chunks_in_n, chunks_reduced, closed_form
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.model import Algorithm, Recv, Round, Send, algorithms_of, collectives, find, get
from mpicoll.schedules.patterns import power_below

BUDGET = 500_000
"""Maximum number of messages that `profile` follows, which takes some seconds."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` times `ranks_per_node` ranks, and the costs of messages: seconds per message and per byte.

    `gamma` is the seconds per byte reduced; `links` the number of network links, each of `net_beta`, that the ranks of
    a node share. A rank uses one link at a time.
    """

    nodes: int
    ranks_per_node: int
    node_alpha: float = 0.5e-6
    node_beta: float = 0.1e-9
    net_alpha: float = 2e-6
    net_beta: float = 0.04e-9
    gamma: float = 0.05e-9
    links: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node


class Load(NamedTuple):
    """The load of a port on one level: messages and chunks per link class, and chunks to reduce at the end."""

    node_messages: float = 0
    node_chunks: float = 0
    net_messages: float = 0
    net_chunks: float = 0
    reduced: float = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """The summary of an algorithm on a given number of ranks: loads by level, which price any size.

    `levels` pairs sets of loads, of which the heaviest determines the duration of a level, with the number of levels
    that have exactly these loads. `sent` (by the busiest rank) and `crossing` (in one direction through the links of
    the busiest node, on all levels together) are multiples of n, the bytes of the vector or of all P blocks of one
    buffer; `chunks` is the number of chunks of n. `seen` names the ranks examined: ``one``, ``all`` or ``sample``.
    """

    algorithm: Algorithm
    size: int
    segments: int
    chunks: int
    rounds: int
    levels: tuple[tuple[tuple[Load, ...], int], ...]
    sent: Fraction
    crossing: Fraction
    seen: str

    def seconds(self, nbytes: float, cluster: Cluster) -> float:
        """Return the time for `nbytes` = n. The cluster must have the shape that the profile was made for."""
        weights = self._weights(nbytes, cluster)
        return sum(count * max(_dot(load, weights) for load in loads) for loads, count in self.levels)

    def decisive(self, nbytes: float, cluster: Cluster) -> Load:
        """Return the sum of the loads that determined the levels, in bytes instead of chunks; its product with the
        cluster's costs is :meth:`seconds`."""
        weights = self._weights(nbytes, cluster)
        total = [0.0] * 5
        for loads, count in self.levels:
            heaviest = max(loads, key=lambda load: _dot(load, weights))
            total = [old + count * new for old, new in zip(total, heaviest, strict=True)]
        chunk = nbytes / self.chunks
        return Load(total[0], total[1] * chunk, total[2], total[3] * chunk, total[4] * chunk)

    def _weights(self, nbytes: float, cluster: Cluster) -> Load:
        chunk = nbytes / self.chunks
        return Load(
            cluster.node_alpha,
            cluster.node_beta * chunk,
            cluster.net_alpha,
            cluster.net_beta * chunk,
            cluster.gamma * chunk,
        )


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
    """
    algorithm = find(algorithm)
    _check(nodes, ranks_per_node, links)
    segments = segments if algorithm.segmented else 1
    place = _RankLayout(algorithm, nodes, ranks_per_node, links, segments)
    found = _uniform(place, budget)
    if found is not None and place.agrees(found):
        return found
    if place.size > _EVERY:
        some = _follow(place, _sample(place), budget)
        if some.seen == "all" or place.agrees(some):
            return some
    return _follow(place, range(place.size), budget)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The points of an algorithm in the order of the sizes; None for sizes without a point, for which see `reason`."""

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


_EVERY = 1024
"""Number of ranks up to which no sample is taken."""


class _RankLayout(NamedTuple):
    """The arguments of `profile`."""

    algorithm: Algorithm
    nodes: int
    per_node: int
    links: int
    segments: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def steps(self, rank: int) -> Iterator[Round]:
        return self.algorithm.steps(rank, self.size, 0, self.segments)

    def agrees(self, found: Profile) -> bool:
        """Return True if the closed forms agree with the profile of a sample of the ranks."""
        return (found.rounds, found.sent) == closed_form(self.algorithm, self.size, self.segments)

    def too_much(self, budget: int) -> AlgorithmError:
        name = f"{self.algorithm.collective}/{self.algorithm.name}"
        pieces = f" in {self.segments} segments" if self.algorithm.segmented else ""
        less = ", or fewer segments" if self.algorithm.segmented else ""
        return AlgorithmError(
            f"{name} on {self.size} ranks{pieces} has more than {budget} messages to follow; give a larger budget{less}"
        )

    def profile(self, levels: Counter[frozenset[Load]], rounds: int, sent: int, crossing: int, seen: str) -> Profile:
        chunks = chunks_in_n(self.algorithm, self.size, self.segments)
        fronts: Counter[tuple[Load, ...]] = Counter()
        for loads, count in levels.items():
            fronts[_front(loads)] += count
        return Profile(
            algorithm=self.algorithm,
            size=self.size,
            segments=self.segments,
            chunks=chunks,
            rounds=rounds,
            levels=tuple(fronts.items()),
            sent=Fraction(sent, chunks),
            crossing=Fraction(crossing, chunks),
            seen=seen,
        )


# One rank for all


class _RankClass(NamedTuple):
    """A round without its chunks: distance and size of each message out and in, and the amount that is reduced."""

    outs: tuple[tuple[int, int], ...]
    ins: tuple[tuple[int, int], ...]
    reduced: int


def _uniform(place: _RankLayout, budget: int) -> Profile | None:
    """Return the profile if ranks differ only by their place, else None."""
    symmetries = [_shift] if place.size != power_below(place.size) else [_shift, _flip]
    for distance in symmetries:
        if _alike(place, distance):
            return _price_kinds(place, distance, budget)
    return None


def _shift(rank: int, peer: int, size: int) -> int:
    """Return the distance of `peer`, counted upwards from `rank` on a ring."""
    return (peer - rank) % size


def _flip(rank: int, peer: int, size: int) -> int:
    """Return the distance of `peer`, as the bits in which it differs from `rank`."""
    return rank ^ peer


_Distance: TypeAlias = Callable[[int, int, int], int]


def _kinds(place: _RankLayout, rank: int, distance: _Distance) -> Iterator[_RankClass]:
    size = place.size
    for now in place.steps(rank):
        yield _RankClass(
            tuple([(distance(rank, send.to, size), len(send.chunks)) for send in now.sends]),
            tuple([(distance(rank, recv.source, size), len(recv.chunks)) for recv in now.recvs]),
            chunks_reduced(now),
        )


def _alike(place: _RankLayout, distance: _Distance) -> bool:
    """Return True if ranks have the same messages at the same distances. Small numbers of ranks are checked completely,
    otherwise some ranks, for their first rounds.

    Receives must mirror sends, so that ranks stay in step.
    """
    size = place.size
    few = size <= 64
    others = range(1, size) if few else (1, 2, size // 3, size // 2, size - 2, size - 1)
    rounds = None if few else 64
    first = list(islice(_kinds(place, 0, distance), rounds))
    if any(sorted((distance(far, 0, size), n) for far, n in kind.outs) != sorted(kind.ins) for kind in first):
        return False
    return all(
        mine == theirs
        for rank in others
        for mine, theirs in zip_longest(first, islice(_kinds(place, rank, distance), rounds))
    )


def _price_kinds(place: _RankLayout, distance: _Distance, budget: int) -> Profile | None:
    kinds: Counter[_RankClass] = Counter()
    sent = messages = 0
    for kind in _kinds(place, 0, distance):
        sent += sum(n for _, n in kind.outs)
        messages += len(kind.outs)
        if messages > budget:
            raise place.too_much(budget)
        kinds[
            _RankClass(
                tuple([(_hop(place, distance, far), n) for far, n in kind.outs]),
                tuple([(_hop(place, distance, far), n) for far, n in kind.ins]),
                kind.reduced,
            )
        ] += 1
    levels: Counter[frozenset[Load]] = Counter()
    rounds = crossing = 0
    for kind, count in kinds.items():
        if not kind.outs and not kind.reduced:
            continue
        rounds += count if kind.outs else 0
        out_of_node = sum(min(abs(hop), place.per_node) * n for hop, n in kind.outs)
        crossing += count * out_of_node
        levels[frozenset(_loads(place, kind, out_of_node))] += count
    return place.profile(levels, rounds, sent, crossing, "one")


def _hop(place: _RankLayout, distance: _Distance, far: int) -> int:
    """Return `far` as steps along the ranks if it may stay in a node, 0 if it always does, else the ranks of a node."""
    per_node = place.per_node
    if place.nodes == 1:
        return 0
    if distance is _flip:
        return 0 if far < per_node else per_node
    if far < per_node:
        return far
    return far - place.size if far > place.size - per_node else per_node


def _loads(place: _RankLayout, kind: _RankClass, out_of_node: int) -> Iterator[Load]:
    """Yield the loads of all ranks of a node in a round of this kind, and of its links."""
    per_node = place.per_node
    # A message of hop h > 0 leaves the node from its last h places, one of h < 0 from its first |h|.
    hops = {hop for hop, _ in (*kind.outs, *kind.ins)}
    turns = {0} | {per_node - hop if hop > 0 else -hop for hop in hops}
    for seat in turns:
        if seat < per_node:
            for messages in (kind.outs, kind.ins):
                yield _total([(not 0 <= seat + hop < per_node, n) for hop, n in messages], kind.reduced)
    if out_of_node:
        yield Load(net_messages=1, net_chunks=out_of_node / place.links)


def _total(messages: Iterable[tuple[bool, int]], reduced: int) -> Load:
    """Return the load of one port; each message is a pair: True if it leaves the node, and its chunks."""
    near = near_chunks = far = far_chunks = 0
    for leaves, n in messages:
        if leaves:
            far, far_chunks = far + 1, far_chunks + n
        else:
            near, near_chunks = near + 1, near_chunks + n
    return Load(near, near_chunks, far, far_chunks, reduced)


# Many ranks


def _sample(place: _RankLayout) -> list[int]:
    """Return the ranks at and near powers of two from both ends and from where folding ends, and whole nodes there."""
    size, per_node = place.size, place.per_node
    low = power_below(size)
    anchors = {0, size, low, 2 * (size - low)}  # the last is where folding to a power of two ends
    ranks = {
        anchor + sign * (1 << k) + near
        for anchor in anchors
        for sign in (-1, 1)
        for k in range(size.bit_length())
        for near in (-2, -1, 0, 1, 2)
    }
    ranks |= {low // 2 + near for near in (-2, -1, 0, 1, 2)}
    if place.nodes > 1:
        for rank in anchors | {size // 2}:
            node = min(rank, size - 1) // per_node
            ranks.update(range(node * per_node, (node + 1) * per_node))
    ranks = {rank for rank in ranks if 0 <= rank < size}
    todo = list(ranks)
    while todo:
        for source in _first_sources(place, todo.pop()):
            if source not in ranks:
                ranks.add(source)
                todo.append(source)
    return sorted(ranks)


def _first_sources(place: _RankLayout, rank: int) -> tuple[int, ...]:
    """Return the sources of the first round of `rank` if it consists of one receive only, else nothing."""
    first = next(place.steps(rank), Round())
    return () if first.sends or len(first.recvs) > 1 else tuple(recv.source for recv in first.recvs)


class _Part:
    """The ranks `ranks` of an algorithm, as an algorithm with that number of ranks.

    Messages to and from other ranks are left out; `outside` returns those of the current round of a rank.
    """

    def __init__(self, place: _RankLayout, ranks: Sequence[int]) -> None:
        self.place, self.ranks = place, ranks
        self.index = {rank: index for index, rank in enumerate(ranks)}
        self.full = [Round()] * len(ranks)
        self.everyone = len(ranks) == place.size
        self.algorithm = place.algorithm if self.everyone else replace(place.algorithm, generate=self.generate)

    def generate(self, index: int, *_: int, **__: int) -> Iterator[Round]:
        inside = self.index
        for now in self.place.steps(self.ranks[index]):
            self.full[index] = now
            yield Round(
                tuple([Send(inside[send.to], send.chunks) for send in now.sends if send.to in inside]),
                tuple([Recv(inside[r.source], r.chunks, r.reduce) for r in now.recvs if r.source in inside]),
                now.then,
            )

    def round(self, exchange: Exchange, index: int) -> Round:
        """Return the whole current round of the rank at `index`."""
        return exchange.round[index] if self.everyone else self.full[index]

    def outside(self, index: int) -> tuple[list[Send], list[Recv]]:
        """Return the messages of the current round of the rank at `index` with ranks left out."""
        if self.everyone:
            return [], []
        now = self.full[index]
        sends = [send for send in now.sends if send.to not in self.index]
        return sends, [recv for recv in now.recvs if recv.source not in self.index]


_OUT, _IN = 0, 1


class _Ledger:
    """The loads of all ports by level."""

    def __init__(self, place: _RankLayout) -> None:
        self.place = place
        self.fronts: defaultdict[int, set[Load]] = defaultdict(set)
        self.crossing: tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]] = (Counter(), Counter())
        self.sent: Counter[int] = Counter()

    def leave(self, messages: list[tuple[int, int, bool, int]], last: int, reduced: int) -> None:
        """Record the end of a round on level `last`; messages are level, port, True between nodes, and chunks."""
        ports: defaultdict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        for level, port, far, n in messages:
            ports[level, port].append((far, n))
        for (level, _), carried in ports.items():
            self.fronts[level].add(_total(carried, reduced if level == last else 0))
        if reduced and not messages:
            self.fronts[last].add(Load(reduced=reduced))

    def carry(self, rank: int, port: int, level: int, far: bool, n: int) -> None:
        """Record a message of `n` chunks on a port of `rank`, and if it is `far` on the links of its node."""
        if port == _OUT:
            self.sent[rank] += n
        if far and n:
            self.crossing[port][level, rank // self.place.per_node] += n

    def profile(self, rounds: int, seen: str) -> Profile:
        busiest: Counter[int] = Counter()
        nodes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        for port, crossing in enumerate(self.crossing):
            for (level, node), n in crossing.items():
                busiest[level] = max(busiest[level], n)
                nodes[port][node] += n
        for level, n in busiest.items():
            self.fronts[level].add(Load(net_messages=1, net_chunks=n / self.place.links))
        return self.place.profile(
            Counter(frozenset(loads) for loads in self.fronts.values()),
            rounds,
            max(self.sent.values(), default=0),
            max((n for port in nodes for n in port.values()), default=0),
            seen,
        )


def _follow(place: _RankLayout, ranks: Sequence[int], budget: int) -> Profile:
    return _Walk(place, ranks, budget).profile()


class _Walk:
    """Advances `ranks` through their rounds; all other ranks are ready whenever one of these needs them."""

    def __init__(self, place: _RankLayout, ranks: Sequence[int], budget: int) -> None:
        self.place, self.ranks, self.budget = place, ranks, budget
        self.part = _Part(place, ranks)
        self.exchange = Exchange(self.part.algorithm, len(ranks), 0, place.segments)
        self.ledger = _Ledger(place)
        self.clock, self.latest = [0] * len(ranks), [0] * len(ranks)
        self.messages: list[list[tuple[int, int, bool, int]]] = [[] for _ in ranks]
        self.followed = 0
        self.todo = deque(range(len(ranks)))

    def profile(self) -> Profile:
        finished = 0
        while self.todo:
            index = self.todo.popleft()
            if not self.exchange.enter(index):
                finished += 1
                continue
            self.outside(index)
            if not self.exchange.open[index]:
                self.leave(index)
            for match in self.exchange.post(index):
                self.meet(match)
            if self.followed > self.budget:
                raise self.place.too_much(self.budget)
        if finished < len(self.ranks):
            raise ScheduleError(
                f"{self.place.algorithm.collective}/{self.place.algorithm.name}, size {self.place.size}:"
                f" {len(self.ranks) - finished} ranks wait for ever; verify says where"
            )
        return self.ledger.profile(max(self.clock), "all" if self.part.everyone else "sample")

    def outside(self, index: int) -> None:
        """Record the messages of this round from and to ranks left out."""
        sends, recvs = self.part.outside(index)
        level = self.clock[index] + 1
        for send in sends:
            self.carry(index, _OUT, level, send.to, len(send.chunks))
        for recv in recvs:
            self.carry(index, _IN, level, recv.source, len(recv.chunks))
        self.followed += len(sends) + len(recvs)

    def meet(self, match: Match) -> None:
        source, to = match.source, match.to
        n = len(self.exchange.round[source].sends[match.i].chunks)
        level = max(self.clock[source], self.clock[to]) + 1
        self.carry(source, _OUT, level, self.ranks[to], n)
        self.carry(to, _IN, level, self.ranks[source], n)
        self.followed += 1
        for over in self.exchange.close(match):
            self.leave(over)

    def carry(self, index: int, port: int, level: int, peer: int, n: int) -> None:
        """Record a message of `n` chunks on a port of the rank at `index`."""
        rank, per_node = self.ranks[index], self.place.per_node
        far = rank // per_node != peer // per_node
        self.messages[index].append((level, port, far, n))
        self.latest[index] = max(self.latest[index], level)
        self.ledger.carry(rank, port, level, far, n)

    def leave(self, index: int) -> None:
        self.clock[index] = self.latest[index]
        self.ledger.leave(
            self.messages[index], self.clock[index], chunks_reduced(self.part.round(self.exchange, index))
        )
        self.messages[index] = []
        self.todo.append(index)


# Arithmetic on loads


def _dot(load: Load, weights: Load) -> float:
    a, b, c, d, e = load
    v, w, x, y, z = weights
    return a * v + b * w + c * x + d * y + e * z


def _front(loads: Iterable[Load]) -> tuple[Load, ...]:
    """Return the loads that are the heaviest for some costs: those that no other load dominates in all components."""
    front: list[Load] = []
    for load in sorted(loads, reverse=True):
        if not any(all(a >= b for a, b in zip(other, load, strict=True)) for other in front):
            front.append(load)
    return tuple(front)
