"""Every algorithm run on real data by a tiny interpreter that knows nothing of the verifier.

Operands are lists of texts and the operation is concatenation, which does not commute: the order shows in the result.
Sends are buffered here, where the verifier takes them as synchronous.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest

from mpicoll.collective_kinds import ROOTED
from mpicoll.schedules import Algorithm, Copy, Schedule, algorithms_of

Data = list[str]
Memory = dict[int, Data]


def combine(left: Data, right: Data) -> Data:
    assert len(left) == len(right)
    return [a + b for a, b in zip(left, right, strict=True)]


def execute(schedules: list[Schedule], memory: list[Memory]) -> None:
    wires: dict[tuple[int, int], deque[list[Data]]] = defaultdict(deque)
    ranks = [interpret(schedule, memory[schedule.rank], wires) for schedule in schedules]
    alive = dict(enumerate(ranks))
    for _ in range(10 * sum(len(schedule.rounds) + 1 for schedule in schedules)):
        for rank in list(alive):
            if next(alive[rank], "done") == "done":
                del alive[rank]
    assert not alive
    assert not any(wires.values())


def interpret(schedule: Schedule, mine: Memory, wires: dict[tuple[int, int], deque[list[Data]]]) -> Iterator[str]:
    me = schedule.rank
    for step in schedule.rounds:
        for send in step.sends:
            wires[me, send.to].append([list(mine[chunk]) for chunk in send.chunks])
        arrived = []
        for recv in step.recvs:
            while not wires[recv.source, me]:
                yield "waiting"
            arrived.append(wires[recv.source, me].popleft())
        for recv, parts in zip(step.recvs, arrived, strict=True):
            for chunk, part in zip(recv.chunks, parts, strict=True):
                if not recv.reduce:
                    assert chunk not in mine or len(mine[chunk]) == len(part)
                    mine[chunk] = part
                elif recv.source < me:
                    mine[chunk] = combine(part, mine[chunk])
                else:
                    mine[chunk] = combine(mine[chunk], part)
        for local in step.then:
            if isinstance(local, Copy):
                mine[local.dst] = list(mine[local.src])
            elif local.src_right:
                mine[local.dst] = combine(mine[local.dst], mine[local.src])
            else:
                mine[local.dst] = combine(mine[local.src], mine[local.dst])
        yield "done with a round"


def operand(rank: int, length: int) -> Data:
    return [f"{rank}:{element};" for element in range(length)]


def reduced(ranks: range, length: int) -> Data:
    return ["".join(f"{rank}:{element};" for rank in ranks) for element in range(length)]


def cut(data: Data, lengths: list[int]) -> list[Data]:
    ends = list(accumulate(lengths))
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def pieces(length: int, count: int) -> list[int]:
    return [length // count + (piece < length % count) for piece in range(count)]


def unordered(data: Data) -> list[list[str]]:
    return [sorted(re.findall(r"\d+:\d+;", text)) for text in data]


def cases(*names: str) -> pytest.MarkDecorator:
    found = [algorithm for name in names for algorithm in algorithms_of(name).values()]
    return pytest.mark.parametrize("algorithm", found, ids=lambda a: f"{a.collective}/{a.name}")


def setups(algorithm: Algorithm, sizes: range = range(1, 10)) -> Iterator[tuple[int, int, int]]:
    for size in sizes:
        for root in range(size if algorithm.collective in ROOTED else 1):
            for segments in (1, 2, 3) if algorithm.segmented else (1,):
                yield size, root, segments


def run(
    algorithm: Algorithm, size: int, root: int, segments: int, before: Callable[[Schedule], Memory]
) -> list[tuple[Schedule, Memory]]:
    schedules = [algorithm.schedule(rank, size, root, segments) for rank in range(size)]
    memory = [before(schedule) for schedule in schedules]
    execute(schedules, memory)
    return list(zip(schedules, memory, strict=True))


@cases("allreduce", "reduce", "scan", "exscan")
@pytest.mark.parametrize("length", [0, 1, 7, 40])
def test_reductions_of_a_vector(algorithm: Algorithm, length: int) -> None:
    for size, root, segments in setups(algorithm):

        def before(schedule: Schedule) -> Memory:
            return dict(enumerate(cut(operand(schedule.rank, length), pieces(length, schedule.chunks))))

        for schedule, memory in run(algorithm, size, root, segments, before):
            rank, first = schedule.rank, 0
            ranks = range(size)
            if algorithm.collective == "reduce" and rank != root:
                continue
            if algorithm.collective == "scan":
                ranks = range(rank + 1)
            if algorithm.collective == "exscan":
                if rank == 0:
                    continue
                ranks, first = range(rank), schedule.chunks
            result = [text for piece in range(schedule.chunks) for text in memory[first + piece]]
            if algorithm.keeps_order(root):
                assert result == reduced(ranks, length), (size, root, segments, rank)
            else:
                assert unordered(result) == unordered(reduced(ranks, length)), (size, root, segments, rank)


@cases("bcast")
def test_bcast(algorithm: Algorithm) -> None:
    for size, root, segments in setups(algorithm):

        def before(schedule: Schedule) -> Memory:
            if schedule.rank != schedule.root:
                return {}
            return dict(enumerate(cut(operand(schedule.root, 7), pieces(7, schedule.chunks))))

        for schedule, memory in run(algorithm, size, root, segments, before):
            assert [text for chunk in range(schedule.chunks) for text in memory[chunk]] == operand(root, 7)


def lengths(algorithm: Algorithm, size: int) -> list[int]:
    return [3 * rank % 5 if algorithm.uneven else 2 for rank in range(size)]


@cases("reduce_scatter")
def test_reduce_scatter(algorithm: Algorithm) -> None:
    for size, root, segments in setups(algorithm):
        blocks = lengths(algorithm, size)

        def before(schedule: Schedule, blocks: list[int] = blocks) -> Memory:
            return dict(enumerate(cut(operand(schedule.rank, sum(blocks)), blocks)))

        for schedule, memory in run(algorithm, size, root, segments, before):
            total = cut(reduced(range(size), sum(blocks)), blocks)[schedule.rank]
            assert unordered(memory[schedule.rank]) == unordered(total)


@cases("allgather", "gather")
def test_gathers(algorithm: Algorithm) -> None:
    for size, root, segments in setups(algorithm):
        blocks = lengths(algorithm, size)

        def before(schedule: Schedule, blocks: list[int] = blocks) -> Memory:
            return {schedule.rank: operand(schedule.rank, blocks[schedule.rank])}

        for schedule, memory in run(algorithm, size, root, segments, before):
            if algorithm.collective == "allgather" or schedule.rank == root:
                assert memory == {rank: operand(rank, blocks[rank]) for rank in range(size)}


@cases("scatter")
def test_scatter(algorithm: Algorithm) -> None:
    for size, root, segments in setups(algorithm):
        blocks = lengths(algorithm, size)

        def before(schedule: Schedule, blocks: list[int] = blocks) -> Memory:
            if schedule.rank != schedule.root:
                return {}
            return {rank: operand(rank, blocks[rank]) for rank in range(schedule.size)}

        for schedule, memory in run(algorithm, size, root, segments, before):
            assert memory[schedule.rank] == operand(schedule.rank, blocks[schedule.rank])


@cases("alltoall")
def test_alltoall(algorithm: Algorithm) -> None:
    def block(source: int, to: int) -> Data:
        return [f"{source}>{to}"] * ((source + 2 * to) % 4 if algorithm.uneven else 2)

    for size, root, segments in setups(algorithm, range(1, 18)):

        def before(schedule: Schedule) -> Memory:
            return {to: block(schedule.rank, to) for to in range(schedule.size)}

        for schedule, memory in run(algorithm, size, root, segments, before):
            assert [memory[to] for to in range(size)] == [block(schedule.rank, to) for to in range(size)]
            assert [memory[size + s] for s in range(size)] == [block(s, schedule.rank) for s in range(size)]


@cases("barrier")
def test_no_rank_leaves_a_barrier_before_all_have_arrived(algorithm: Algorithm) -> None:
    for size in range(2, 10):
        for late in range(size):
            schedules = [algorithm.schedule(rank, size) for rank in range(size)]
            wires: dict[tuple[int, int], deque[list[Data]]] = defaultdict(deque)
            others = [interpret(schedule, {}, wires) for schedule in schedules if schedule.rank != late]
            for _ in range(10 * size):
                assert not any(next(steps, "left") == "left" for steps in others)
