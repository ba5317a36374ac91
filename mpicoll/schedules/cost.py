"""Costs of algorithms: exact counts, their closed forms, and seconds under the alpha-beta-gamma model."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import count

from mpicoll.collective_kinds import BLOCKS
from mpicoll.errors import ScheduleError
from mpicoll.schedules.formula import evaluate
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.model import Algorithm, Reduce, Round, find
from mpicoll.schedules.patterns import ceil_log2, power_below


@dataclass(frozen=True, slots=True)
class Cost:
    """Exact costs. Amounts of data are multiples of n, the bytes of the vector or of all P blocks of one buffer.

    `rounds` is the longest chain of messages each of which depends on the one before, directly or because a rank
    finishes a round before the next. `sent`, `received` and `reduced` are the maximum over the ranks of each amount;
    `messages`, `total_sent` (equal to the total received) and `total_reduced` are over all ranks.

    Example:
        >>> cost = mpicoll.schedules.cost("allreduce/ring", 4)
        >>> cost.rounds, cost.messages, cost.sent
        (6, 24, Fraction(3, 2))
    """

    rounds: int
    messages: int
    sent: Fraction
    received: Fraction
    reduced: Fraction
    total_sent: Fraction
    total_reduced: Fraction


def cost(algorithm: Algorithm | str, size: int, root: int = 0, segments: int = 1) -> Cost:
    """Count the messages and amounts of `algorithm` on `size` ranks with equal pieces or blocks.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm.

    Raises:
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.
        ScheduleError: the algorithm deadlocks.

    Example:
        >>> mpicoll.schedules.cost("bcast/chain", 4).rounds
        3
    """
    algorithm = find(algorithm)
    exchange = Exchange(algorithm, size, root, segments)
    clock, latest = [0] * size, [0] * size
    sent, received, reduced = [0] * size, [0] * size, [0] * size
    messages = finished = 0
    todo = deque(range(size))
    while todo:
        rank = todo.popleft()
        if not exchange.enter(rank):
            finished += 1
            continue
        reduced[rank] += chunks_reduced(exchange.round[rank])
        if not exchange.open[rank]:
            todo.append(rank)
        for match in exchange.post(rank):
            source, to = match.source, match.to
            messages += 1
            volume = _volume(exchange, match)
            sent[source] += volume
            received[to] += volume
            end = max(clock[source], clock[to]) + 1
            latest[source], latest[to] = max(latest[source], end), max(latest[to], end)
            for over in exchange.close(match):
                clock[over] = latest[over]
                todo.append(over)
    _check_finished(algorithm, finished, size)
    chunk = Fraction(1, chunks_in_n(algorithm, size, segments))
    return Cost(
        rounds=max(clock),
        messages=messages,
        sent=max(sent) * chunk,
        received=max(received) * chunk,
        reduced=max(reduced) * chunk,
        total_sent=sum(sent) * chunk,
        total_reduced=sum(reduced) * chunk,
    )


def traffic(algorithm: Algorithm | str, size: int, root: int = 0, segments: int = 1) -> list[tuple[Fraction, Fraction]]:
    """Count what each rank sends and receives, by rank, as multiples of n (see :class:`Cost`).

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm.

    Raises:
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.

    Example:
        >>> sent, received = mpicoll.schedules.traffic("bcast/chain", 3)[1]
        >>> int(sent), int(received)
        (1, 1)
    """
    algorithm = find(algorithm)
    chunk = Fraction(1, chunks_in_n(algorithm, size, segments))
    found = []
    for rank in range(size):
        sent = received = 0
        for now in algorithm.steps(rank, size, root, segments):
            sent += sum(len(send.chunks) for send in now.sends)
            received += sum(len(recv.chunks) for recv in now.recvs)
        found.append((sent * chunk, received * chunk))
    return found


def closed_form(algorithm: Algorithm | str, size: int, segments: int = 1) -> tuple[int, Fraction]:
    """Return the closed forms of `algorithm` for root 0: rounds and bytes that the busiest rank sends, as in `Cost`.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks.
        segments: the number of pieces of the pipeline of a segmented algorithm.

    Raises:
        AlgorithmError: the name is unknown.

    Example:
        >>> mpicoll.schedules.closed_form("allreduce/ring", 4)  # rounds, and multiples of the vector
        (6, Fraction(3, 2))
    """
    algorithm = find(algorithm)
    quantities: dict[str, int | Fraction] = {
        "P": Fraction(size),
        "S": Fraction(segments),
        "lg": ceil_log2(size),
        "p2": Fraction(power_below(size)),
        "r": Fraction(size - power_below(size)),
    }
    return int(evaluate(algorithm.rounds, quantities)), evaluate(algorithm.sent, quantities)


def price(
    algorithm: Algorithm | str,
    size: int,
    nbytes: float,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    root: int = 0,
    segments: int = 1,
) -> float:
    """Return the seconds until the last rank is done, by simulation of the messages.

    Every rank has one port out and one port in. A message starts when both ranks are in the round that holds it and the
    sender's port out and the receiver's port in are free; it keeps both for ``alpha + beta * bytes`` and needs nothing
    else, so messages between different pairs of ranks never slow each other down. A free port takes the message that
    has been ready longest, in the order of the lists if they became ready together, among those whose other port is
    free; at one and the same moment ports out choose before ports in, and lower ranks before higher ones. A rank ends a
    round when its last message has ended and ``gamma`` for each byte that it reduces has passed, and then enters the
    next; all enter the first at time 0. Copies cost nothing.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks.
        nbytes: the bytes of the vector, or of all P blocks of one buffer; pieces and blocks are taken as equal.
        alpha: seconds per message.
        beta: seconds per byte sent.
        gamma: seconds per byte reduced.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm.

    Raises:
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.
        ScheduleError: the algorithm deadlocks.

    Example:
        >>> seconds = mpicoll.schedules.price("allreduce/ring", 4, 8000, alpha=1e-6, beta=1e-9)
        >>> round(seconds * 1e6, 1)  # 6 messages of 2000 bytes, one after the other
        18.0
    """
    algorithm = find(algorithm)
    chunk = nbytes / chunks_in_n(algorithm, size, segments)
    simulation = _Simulation(Exchange(algorithm, size, root, segments), size, alpha, beta * chunk, gamma * chunk)
    simulation.run()
    _check_finished(algorithm, simulation.finished, size)
    return simulation.end


class _Simulation:
    """The discrete-event run behind `price`; `beta` and `gamma` are per chunk here."""

    def __init__(self, exchange: Exchange, size: int, alpha: float, beta: float, gamma: float) -> None:
        self.exchange, self.alpha, self.beta, self.gamma = exchange, alpha, beta, gamma
        # Messages that only a busy port delays; in OrderedDicts, where removing the first is cheap.
        self.ready_out: list[OrderedDict[Match, None]] = [OrderedDict() for _ in range(size)]
        self.ready_in: list[OrderedDict[Match, None]] = [OrderedDict() for _ in range(size)]
        self.busy_out, self.busy_in = [False] * size, [False] * size
        self.order = count()
        # Events in order of time: a rank enters its next round, or a message ends.
        self.events: list[tuple[float, int, int | Match]] = [(0.0, next(self.order), rank) for rank in range(size)]
        self.now = self.end = 0.0
        self.finished = 0

    def run(self) -> None:
        while self.events:
            self.now = self.events[0][0]
            outs: set[int] = set()
            ins: set[int] = set()
            # Process all events of this moment before a port chooses.
            while self.events and self.events[0][0] == self.now:
                what = heappop(self.events)[2]
                for match in self.enter(what) if isinstance(what, int) else self.finish(what):
                    outs.add(match.source)
                    ins.add(match.to)
            for rank in sorted(outs):
                if not self.busy_out[rank]:
                    self.start(next((match for match in self.ready_out[rank] if not self.busy_in[match.to]), None))
            for rank in sorted(ins):
                if not self.busy_in[rank]:
                    self.start(next((match for match in self.ready_in[rank] if not self.busy_out[match.source]), None))

    def enter(self, rank: int) -> list[Match]:
        """Advance `rank` to its next round; return the messages that could start now."""
        if not self.exchange.enter(rank):
            self.finished, self.end = self.finished + 1, max(self.end, self.now)
            return []
        if not self.exchange.open[rank]:
            self.leave(rank)
        ready = self.exchange.post(rank)
        for match in ready:
            self.ready_out[match.source][match] = self.ready_in[match.to][match] = None
        return ready

    def leave(self, rank: int) -> None:
        self.schedule(self.gamma * chunks_reduced(self.exchange.round[rank]), rank)

    def start(self, match: Match | None) -> None:
        if match is None:
            return
        self.busy_out[match.source] = self.busy_in[match.to] = True
        del self.ready_out[match.source][match], self.ready_in[match.to][match]
        self.schedule(self.alpha + self.beta * _volume(self.exchange, match), match)

    def finish(self, match: Match) -> list[Match]:
        """End `match`; return it, because its ports are free again."""
        self.busy_out[match.source] = self.busy_in[match.to] = False
        for over in self.exchange.close(match):
            self.leave(over)
        return [match]

    def schedule(self, delay: float, what: int | Match) -> None:
        heappush(self.events, (self.now + delay, next(self.order), what))


def chunks_in_n(algorithm: Algorithm, size: int, segments: int) -> int:
    """Return the number of chunks that make up the vector, or all blocks."""
    if algorithm.collective in BLOCKS:
        return size
    return max(1, algorithm.slots(size, segments)[0])  # a barrier has no chunks


def _volume(exchange: Exchange, match: Match) -> int:
    """Return the number of chunks that `match` carries."""
    return len(exchange.round[match.source].sends[match.i].chunks)


def chunks_reduced(now: Round) -> int:
    """Return the number of chunks that are reduced into others in a round."""
    received = sum(len(recv.chunks) for recv in now.recvs if recv.reduce)
    return received + sum(isinstance(step, Reduce) for step in now.then)


def _check_finished(algorithm: Algorithm, finished: int, size: int) -> None:
    if finished < size:
        raise ScheduleError(
            f"{algorithm.collective}/{algorithm.name}, size {size}: {size - finished} ranks wait for ever; "
            "verify says where"
        )
