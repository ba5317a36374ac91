"""Prove that an algorithm keeps the promise of its collective for a size, by running all ranks on symbols."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from mpicoll.errors import ScheduleError
from mpicoll.schedules.matching import Exchange, Match
from mpicoll.schedules.model import Algorithm, Chunks, Copy, Round, find
from mpicoll.schedules.specs import SPECS, Seat, Value, extent
from mpicoll.wording import number_list, rank_list, shorten


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify` for a correct algorithm.

    `rounds` is the maximum over the ranks and `messages` the number among all ranks. `ordered`: every reduction
    combined two neighbouring intervals of ranks, the lower one on the left, so the operation need not commute.

    Example:
        >>> report = mpicoll.schedules.verify("allreduce/ring", 4)
        >>> report.rounds, report.messages
        (6, 24)
    """

    collective: str
    algorithm: str
    size: int
    root: int
    segments: int
    rounds: int
    messages: int
    ordered: bool


def verify(algorithm: Algorithm | str, size: int, root: int = 0, segments: int | None = None) -> Report:
    """Run `algorithm` on symbols for `size` ranks and check each step and the result.

    Args:
        algorithm: an algorithm, or its name such as ``"allreduce/ring"``.
        size: the number of ranks.
        root: the root, for collectives that have one.
        segments: the number of pieces of the pipeline of a segmented algorithm; by default 3, enough to fill it.

    Raises:
        ScheduleError: the algorithm deadlocks when sends are synchronous, leaves a message without counterpart, pairs
            messages that differ in size, uses a chunk or a peer that it must not, counts a contribution twice, breaks
            the order it claims, or does not end with what the collective promises. The message names the rank, the
            round and the chunk.
        RankError: `root` is out of range.
        AlgorithmError: the name is unknown, or `segments` is below 1.

    Example:
        >>> mpicoll.schedules.verify("scan/recursive_doubling", 5).size
        5
    """
    algorithm = find(algorithm)
    segments = (3 if segments is None else segments) if algorithm.segmented else 1
    return _Run(algorithm, size, root, segments).result()


class _Run:
    def __init__(self, algorithm: Algorithm, size: int, root: int, segments: int) -> None:
        self.algorithm, self.size, self.root, self.segments = algorithm, size, root, segments
        self.spec = SPECS[algorithm.collective]
        chunks, scratch = algorithm.slots(size, segments)
        self.count = chunks // 2 if algorithm.collective == "alltoall" else chunks
        self.slots = chunks + scratch
        self.exchange = Exchange(algorithm, size, root, segments)
        seats = [self.seat(rank) for rank in range(size)]
        self.values = [self.spec.before(seat) for seat in seats]
        self.readonly = [self.spec.readonly(seat) for seat in seats]
        self.reached = [1 << rank for rank in range(size)]
        self.outbox: list[list[list[Value]]] = [[] for _ in range(size)]
        self.inbox: list[dict[int, list[Value]]] = [{} for _ in range(size)]
        self.news: list[int] = [0] * size
        self.messages = 0
        self.disorder: tuple[int, int, int] | None = None

    def seat(self, rank: int) -> Seat:
        return Seat(rank, self.size, self.root, self.count)

    def result(self) -> Report:
        todo = deque(range(self.size))
        while todo:
            rank = todo.popleft()
            if not self.exchange.enter(rank):
                continue
            now = self.exchange.round[rank]
            self.check(rank, now)
            self.outbox[rank] = [self.read(rank, send.chunks, f"sends to rank {send.to}") for send in now.sends]
            if not self.exchange.open[rank]:
                self.finish(rank)
                todo.append(rank)
            for match in self.exchange.post(rank):
                self.deliver(match)
                for over in self.exchange.close(match):
                    self.finish(over)
                    todo.append(over)
        self.check_all_done()
        self.check_promise()
        if self.disorder and self.algorithm.keeps_order(self.root):
            rank, number, chunk = self.disorder
            self.fail(
                "the algorithm claims to keep the order of ranks, but here combines what is not adjacent",
                rank,
                chunk,
                number,
            )
        return Report(
            collective=self.algorithm.collective,
            algorithm=self.algorithm.name,
            size=self.size,
            root=self.root,
            segments=self.segments,
            rounds=max(self.exchange.index) + 1,
            messages=self.messages,
            ordered=self.disorder is None,
        )

    def fail(self, what: str, rank: int, chunk: int | None = None, number: int | None = None) -> NoReturn:
        number = self.exchange.index[rank] if number is None else number
        where = f"rank {rank}"
        if number >= 0:  # a rank may have no rounds at all
            where += f", round {number}"
        if chunk is not None:
            where += f", chunk {chunk}"
        raise ScheduleError(f"{self}: {where}: {what}")

    def __str__(self) -> str:
        text = f"{self.algorithm.collective}/{self.algorithm.name}, size {self.size}, root {self.root}"
        return f"{text}, segments {self.segments}" if self.algorithm.segmented else text

    def check(self, rank: int, now: Round) -> None:
        """Check the requirements on a round by itself: peers, indices, read-only chunks and conflicts."""
        for peer in (*(send.to for send in now.sends), *(recv.source for recv in now.recvs)):
            if not 0 <= peer < self.size:
                self.fail(f"rank {peer} does not exist", rank)
            if peer == rank:
                self.fail("sends to or receives from itself", rank)
        sent: set[int] = set()
        for send in now.sends:
            self.check_indices(rank, send.chunks)
            sent.update(send.chunks)
        written: dict[int, bool] = {}
        for recv in now.recvs:
            self.check_indices(rank, recv.chunks)
            self.check_writable(rank, recv.chunks)
            for chunk in recv.chunks:
                if not recv.reduce and chunk in sent:
                    self.fail(f"is sent and replaced by rank {recv.source} in one round", rank, chunk)
                if chunk in written and not (recv.reduce and written[chunk]):
                    self.fail("is received twice in one round, and not to be reduced both times", rank, chunk)
                written[chunk] = recv.reduce
        for step in now.then:
            self.check_indices(rank, (step.src, step.dst))
            self.check_writable(rank, (step.dst,))
            if step.src == step.dst:
                self.fail("is copied or reduced into itself", rank, step.dst)
            self.check_extent(rank, step.src, rank, step.dst)

    def check_indices(self, rank: int, chunks: Chunks) -> None:
        if chunks and (min(chunks) < 0 or max(chunks) >= self.slots):
            chunk = next(chunk for chunk in chunks if not 0 <= chunk < self.slots)
            self.fail(f"is out of range, there are {self.slots}", rank, chunk)

    def check_writable(self, rank: int, chunks: Chunks) -> None:
        if self.readonly[rank]:
            for chunk in chunks:
                if chunk in self.readonly[rank]:
                    self.fail("is read-only, but written", rank, chunk)

    def check_extent(self, source: int, src: int, to: int, dst: int) -> None:
        name, uneven = self.algorithm.collective, self.algorithm.uneven
        if extent(name, uneven, self.seat(source), src) != extent(name, uneven, self.seat(to), dst):
            self.fail(f"differs in extent from chunk {src} of rank {source}, which goes there", to, dst)

    def read(self, rank: int, chunks: Iterable[int], purpose: str) -> list[Value]:
        values = self.values[rank]
        try:
            return [values[chunk] for chunk in chunks]
        except KeyError as missing:
            self.fail(f"holds nothing yet, but {purpose}", rank, missing.args[0])

    def deliver(self, match: Match) -> None:
        source, i, to, j = match
        sent = self.exchange.round[source].sends[i].chunks
        received = self.exchange.round[to].recvs[j].chunks
        if len(sent) != len(received):
            self.fail(
                f"receives {len(received)} chunks from rank {source}, which sends {len(sent)} "
                f"in round {self.exchange.index[source]}",
                to,
                received[0] if received else None,
            )
        for src, dst in zip(sent, received, strict=True):
            self.check_extent(source, src, to, dst)
        self.messages += 1
        self.inbox[to][j] = self.outbox[source][i]
        self.news[to] |= self.reached[source]

    def finish(self, rank: int) -> None:
        """Complete the round of `rank`, whose messages have all arrived: reductions, then local steps."""
        now = self.exchange.round[rank]
        for j, recv in enumerate(now.recvs):
            for chunk, value in zip(recv.chunks, self.inbox[rank][j], strict=True):
                if recv.reduce:
                    self.reduce(rank, chunk, value, on_left=recv.source < rank)
                else:
                    self.values[rank][chunk] = value
        for step in now.then:
            (value,) = self.read(rank, (step.src,), f"goes into chunk {step.dst}")
            if isinstance(step, Copy):
                self.values[rank][step.dst] = value
            else:
                self.reduce(rank, step.dst, value, on_left=not step.src_right)
        self.inbox[rank].clear()
        self.reached[rank] |= self.news[rank]
        self.news[rank] = 0

    def reduce(self, rank: int, chunk: int, value: Value, on_left: bool) -> None:
        (own,) = self.read(rank, (chunk,), "something is to be reduced into it")
        if own.piece != value.piece:
            self.fail(f"holds piece {own.piece}, but piece {value.piece} is reduced into it", rank, chunk)
        if own.ranks & value.ranks:
            self.fail(f"counts {_ranks(own.ranks & value.ranks)} twice", rank, chunk)
        left, right = (value, own) if on_left else (own, value)
        low, high = left.low, right.high
        if left.high < 0 or right.low < 0 or left.high + 1 != right.low:
            low = high = -1
            self.disorder = self.disorder or (rank, self.exchange.index[rank], chunk)
        self.values[rank][chunk] = Value(own.piece, own.ranks | value.ranks, low, high)

    def check_all_done(self) -> None:
        sends, recvs = self.exchange.waiting()
        waits = []
        for rank, i in sends:
            send = self.exchange.round[rank].sends[i]
            waits.append((rank, send.to, f"waits to send {_chunks(send.chunks)} to"))
        for rank, j in recvs:
            recv = self.exchange.round[rank].recvs[j]
            waits.append((rank, recv.source, f"waits for {_chunks(recv.chunks)} from"))
        lonely, stuck = [], []
        for rank, peer, what in sorted(waits):
            text = f"rank {rank} in round {self.exchange.index[rank]} {what} rank {peer}"
            if self.exchange.done[peer]:
                lonely.append(f"{text}, which is done")
            else:
                stuck.append(text)
        if lonely:
            raise ScheduleError(f"{self}: a message without counterpart: {'; '.join(shorten(lonely))}")
        if stuck:
            raise ScheduleError(f"{self}: deadlock when sends are synchronous: {'; '.join(shorten(stuck))}")

    def check_promise(self) -> None:
        all_ranks = (1 << self.size) - 1
        for rank in range(self.size):
            for chunk, want in self.spec.after(self.seat(rank)).items():
                got = self.values[rank].get(chunk)
                if got is None:
                    self.fail("holds nothing in the end", rank, chunk)
                if got.piece != want.piece:
                    self.fail(f"holds piece {got.piece} in the end instead of {want.piece}", rank, chunk)
                if missing := want.ranks & ~got.ranks:
                    self.fail(f"lacks the contribution of {_ranks(missing)} in the end", rank, chunk)
                if excess := got.ranks & ~want.ranks:
                    self.fail(f"has the contribution of {_ranks(excess)} too much in the end", rank, chunk)
            if self.spec.reached and self.reached[rank] != all_ranks:
                self.fail(f"leaves before a chain of messages from {_ranks(all_ranks & ~self.reached[rank])}", rank)


def _ranks(mask: int) -> str:
    return rank_list(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def _chunks(chunks: Chunks) -> str:
    return number_list("chunk", chunks) if chunks else "a token"
