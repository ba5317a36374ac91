"""Profiles of algorithms by following all ranks, or a sample of them, through their rounds."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpicoll.errors import ScheduleError
from mpicoll.schedules.cost import chunks_reduced
from mpicoll.schedules.load_profile import Load, Profile, total_load
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.model import Recv, Round, Send
from mpicoll.schedules.patterns import power_below
from mpicoll.schedules.placement import Placement


def sample_ranks(placement: Placement) -> list[int]:
    """Return the ranks at and near powers of two from both ends and from where folding ends, and whole nodes there."""
    size, per_node = placement.size, placement.per_node
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
    if placement.nodes > 1:
        for rank in anchors | {size // 2}:
            node = min(rank, size - 1) // per_node
            ranks.update(range(node * per_node, (node + 1) * per_node))
    ranks = {rank for rank in ranks if 0 <= rank < size}
    todo = list(ranks)
    while todo:
        for source in _first_sources(placement, todo.pop()):
            if source not in ranks:
                ranks.add(source)
                todo.append(source)
    return sorted(ranks)


def _first_sources(placement: Placement, rank: int) -> tuple[int, ...]:
    """Return the sources of the first round of `rank` if it consists of one receive only, else nothing."""
    first = next(placement.steps(rank), Round())
    return () if first.sends or len(first.recvs) > 1 else tuple(recv.source for recv in first.recvs)


class _Subset:
    """The ranks `ranks` of an algorithm, as an algorithm with that number of ranks.

    Messages to and from other ranks are left out; `outside_messages` returns those of the current round of a rank.
    """

    def __init__(self, placement: Placement, ranks: Sequence[int]) -> None:
        self.placement, self.ranks = placement, ranks
        self.index = {rank: index for index, rank in enumerate(ranks)}
        self.full = [Round()] * len(ranks)
        self.everyone = len(ranks) == placement.size
        self.algorithm = placement.algorithm if self.everyone else replace(placement.algorithm, generate=self.generate)

    def generate(self, index: int, *_: int, **__: int) -> Iterator[Round]:
        inside = self.index
        for now in self.placement.steps(self.ranks[index]):
            self.full[index] = now
            yield Round(
                tuple([Send(inside[send.to], send.chunks) for send in now.sends if send.to in inside]),
                tuple([Recv(inside[r.source], r.chunks, r.reduce) for r in now.recvs if r.source in inside]),
                now.then,
            )

    def round(self, exchange: Exchange, index: int) -> Round:
        """Return the whole current round of the rank at `index`."""
        return exchange.round[index] if self.everyone else self.full[index]

    def outside_messages(self, index: int) -> tuple[list[Send], list[Recv]]:
        """Return the messages of the current round of the rank at `index` with ranks left out."""
        if self.everyone:
            return [], []
        now = self.full[index]
        sends = [send for send in now.sends if send.to not in self.index]
        return sends, [recv for recv in now.recvs if recv.source not in self.index]


_OUT, _IN = 0, 1


class _PortLoads:
    """The loads of all ports by level."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.fronts: defaultdict[int, set[Load]] = defaultdict(set)
        self.crossing: tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]] = (Counter(), Counter())
        self.sent: Counter[int] = Counter()

    def end_round(self, messages: list[tuple[int, int, bool, int]], last: int, reduced: int) -> None:
        """Record the end of a round on level `last`; messages are level, port, True between nodes, and chunks."""
        ports: defaultdict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        for level, port, far, n in messages:
            ports[level, port].append((far, n))
        for (level, _), carried in ports.items():
            self.fronts[level].add(total_load(carried, reduced if level == last else 0))
        if reduced and not messages:
            self.fronts[last].add(Load(reduced=reduced))

    def add_message(self, rank: int, port: int, level: int, far: bool, n: int) -> None:
        """Record a message of `n` chunks on a port of `rank`, and if it is `far` on the links of its node."""
        if port == _OUT:
            self.sent[rank] += n
        if far and n:
            self.crossing[port][level, rank // self.placement.per_node] += n

    def profile(self, rounds: int, seen: str) -> Profile:
        busiest: Counter[int] = Counter()
        nodes: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        for port, crossing in enumerate(self.crossing):
            for (level, node), n in crossing.items():
                busiest[level] = max(busiest[level], n)
                nodes[port][node] += n
        for level, n in busiest.items():
            self.fronts[level].add(Load(net_messages=1, net_chunks=n / self.placement.links))
        return self.placement.profile(
            Counter(frozenset(loads) for loads in self.fronts.values()),
            rounds,
            max(self.sent.values(), default=0),
            max((n for port in nodes for n in port.values()), default=0),
            seen,
        )


class RankWalk:
    """Advances `ranks` through their rounds; all other ranks are ready whenever one of these needs them."""

    def __init__(self, placement: Placement, ranks: Sequence[int], budget: int) -> None:
        self.placement, self.ranks, self.budget = placement, ranks, budget
        self.subset = _Subset(placement, ranks)
        self.exchange = Exchange(self.subset.algorithm, len(ranks), 0, placement.segments)
        self.loads = _PortLoads(placement)
        self.clock, self.latest = [0] * len(ranks), [0] * len(ranks)
        self.messages: list[list[tuple[int, int, bool, int]]] = [[] for _ in ranks]
        self.followed = 0
        self.todo = deque(range(len(ranks)))

    def profile(self) -> Profile:
        """Return the profile of the ranks. Raises AlgorithmError beyond the budget, ScheduleError after a deadlock."""
        finished = 0
        while self.todo:
            index = self.todo.popleft()
            if not self.exchange.enter(index):
                finished += 1
                continue
            self.add_outside(index)
            if not self.exchange.open[index]:
                self.end_round(index)
            for match in self.exchange.post(index):
                self.count_match(match)
            if self.followed > self.budget:
                raise self.placement.budget_error(self.budget)
        if finished < len(self.ranks):
            raise ScheduleError(
                f"{self.placement.algorithm.collective}/{self.placement.algorithm.name}, size {self.placement.size}:"
                f" {len(self.ranks) - finished} ranks wait for ever; verify says where"
            )
        return self.loads.profile(max(self.clock), "all" if self.subset.everyone else "sample")

    def add_outside(self, index: int) -> None:
        """Record the messages of this round from and to ranks left out."""
        sends, recvs = self.subset.outside_messages(index)
        level = self.clock[index] + 1
        for send in sends:
            self.add_message(index, _OUT, level, send.to, len(send.chunks))
        for recv in recvs:
            self.add_message(index, _IN, level, recv.source, len(recv.chunks))
        self.followed += len(sends) + len(recvs)

    def count_match(self, match: Match) -> None:
        source, to = match.source, match.to
        n = len(self.exchange.round[source].sends[match.i].chunks)
        level = max(self.clock[source], self.clock[to]) + 1
        self.add_message(source, _OUT, level, self.ranks[to], n)
        self.add_message(to, _IN, level, self.ranks[source], n)
        self.followed += 1
        for over in self.exchange.close(match):
            self.end_round(over)

    def add_message(self, index: int, port: int, level: int, peer: int, n: int) -> None:
        """Record a message of `n` chunks on a port of the rank at `index`."""
        rank, per_node = self.ranks[index], self.placement.per_node
        far = rank // per_node != peer // per_node
        self.messages[index].append((level, port, far, n))
        self.latest[index] = max(self.latest[index], level)
        self.loads.add_message(rank, port, level, far, n)

    def end_round(self, index: int) -> None:
        self.clock[index] = self.latest[index]
        self.loads.end_round(
            self.messages[index], self.clock[index], chunks_reduced(self.subset.round(self.exchange, index))
        )
        self.messages[index] = []
        self.todo.append(index)
