"""Schedules with large messages, in pieces: the same bits as without, what overlaps, and errors that say where."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.schedule_pairs import PAIRS

import mpicoll
from mpicoll import schedules
from mpicoll.engine.core.arrays import Region, displacements
from mpicoll.engine.executors import bound_schedule as executor
from mpicoll.engine.executors import streamed
from mpicoll.engine.executors.bound_schedule import BoundRound
from mpicoll.engine.executors.step_layout import INCOMING_STEPS, REUSING, Step, count_incoming, lay_out
from mpicoll.engine.executors.streamed import StreamedSchedule, has_large_messages
from mpicoll.schedules import Copy, Recv, Reduce, Round, Schedule, Send
from mpicoll.transport import local, waiting
from mpicoll.transport.base import Message

TINY = 24
"""Bytes of a piece: three float64."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Cut into tiny pieces; count the schedules that are."""
    cut: list[int] = []
    monkeypatch.setattr(executor, "PIECE", TINY)
    monkeypatch.setattr(streamed, "FIRST_SENDS", 2)
    monkeypatch.setattr(streamed, "NAP_SHARE", 1 / 4)
    run = StreamedSchedule.start

    def counting(self: StreamedSchedule, *args: Any) -> None:
        cut.append(len(self.steps))
        run(self, *args)

    monkeypatch.setattr(StreamedSchedule, "start", counting)
    lay_out.cache_clear()
    yield cut
    lay_out.cache_clear()


# --- results


def _call(collective: str, algorithm: str, n: int) -> Any:
    world = mpicoll.world()
    rank, size = world.rank, world.size
    x = np.random.default_rng(rank).standard_normal(n)
    root = size - 1
    call = getattr(mpicoll, collective)
    if collective in ("allreduce", "scan", "exscan"):
        return call(x, algorithm=algorithm)
    if collective in ("bcast", "reduce", "gather"):
        return call(x, root=root, algorithm=algorithm)
    if collective == "scatter":
        return call(np.resize(x, n * size) if rank == root else np.empty(n), root, algorithm=algorithm)
    if collective == "reduce_scatter":
        whole = np.random.default_rng(rank).standard_normal(n * size + 1)
        try:
            return call(whole, counts=[n + 1, *[n] * (size - 1)], algorithm=algorithm)
        except mpicoll.AlgorithmError:
            return call(whole[1:], algorithm=algorithm)
    if collective == "alltoall":
        return call(np.random.default_rng(rank).standard_normal(n * size), algorithm=algorithm)
    assert collective == "allgather"
    return call(x, algorithm=algorithm)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_pieces_change_no_bit(tiny: list[int], collective: str, algorithm: str) -> None:
    lengths = (0, 1, 7, 64, 101)

    def body() -> list[Any]:
        return [_call(collective, algorithm, n) for n in lengths]

    for size in (2, 3, 4):
        delays = [local.Delay(2e-4)] if size == 3 else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "PIECE", 1 << 20)
            whole = mpicoll.run_local(body, size, ranks_per_node=1)
        assert not tiny
        pieces = mpicoll.run_local(body, size, ranks_per_node=1, faults=delays)
        for one, other in zip(whole, pieces, strict=True):
            for a, b in zip(one, other, strict=True):
                assert (a is None) == (b is None)
                assert a is None or a.tobytes() == b.tobytes()
        assert max(tiny, default=0) > 1
        tiny.clear()


@pytest.mark.parametrize("dtype", ["uint8", "float32", "complex128", "float16"])
@pytest.mark.usefixtures("tiny")
def test_any_itemsize(dtype: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = (np.arange(999) % 7 + world.rank).astype(dtype)
        total = sum((np.arange(999) % 7 + rank).astype(dtype) for rank in range(world.size))
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm="ring"), total)
        np.testing.assert_array_equal(mpicoll.bcast(x, 1, algorithm="chain/3"), x - world.rank + 1)

    mpicoll.run_local(body, 3, ranks_per_node=1)


@pytest.mark.usefixtures("tiny")
def test_blocks_of_uneven_sizes() -> None:
    """Ranks that see only their own messages cut these as the others do."""
    counts = [[0, 40, 3], [7, 1, 90], [5, 0, 64]]

    def body() -> None:
        rank = mpicoll.world().rank
        arrivals = [row[rank] for row in counts]
        x = np.concatenate([np.full(count, 10.0 * rank + to) for to, count in enumerate(counts[rank])])
        got = mpicoll.alltoall(x, counts=(counts[rank], arrivals), algorithm="pairwise")
        np.testing.assert_array_equal(
            got, np.concatenate([np.full(count, 10.0 * source + rank) for source, count in enumerate(arrivals)])
        )
        mine = np.full(counts[0][rank], float(rank))
        whole = np.concatenate([np.full(count, float(source)) for source, count in enumerate(counts[0])])
        np.testing.assert_array_equal(mpicoll.allgather(mine, counts=counts[0], algorithm="ring"), whole)

    mpicoll.run_local(body, 3, ranks_per_node=1)


def test_a_plan_may_run_again(tiny: list[int]) -> None:
    def body() -> None:
        x = np.arange(50.0)
        plan = mpicoll.allreduce_init(x, algorithm="halving_doubling")
        for factor in (1, 2, 3):
            x[:] = np.arange(50.0) * factor
            np.testing.assert_array_equal(plan(), np.arange(50.0) * factor * 3)

    mpicoll.run_local(body, 3, ranks_per_node=1)
    assert len(tiny) == 9


# --- steps


def _bind(*rounds: Round, blocks: tuple[int, ...], combine: Any = None) -> tuple[StreamedSchedule, np.ndarray]:
    array = np.arange(sum(blocks), dtype=np.float64)
    schedule = Schedule("allreduce", "made_up", 0, 2, 0, len(blocks), 0, rounds)
    return StreamedSchedule(schedule, [Region(array, displacements(blocks))], combine, Wire()), array


def _bind_steps(program: StreamedSchedule) -> list[BoundRound]:
    return [program.bind_step(number) for number in range(len(program.steps))]


def _needs(program: StreamedSchedule) -> list[tuple[int, int]]:
    return [(step.round, step.needs) for step in program.steps]


@pytest.mark.usefixtures("tiny")
def test_a_piece_needs_only_those_that_use_its_memory() -> None:
    program, _ = _bind(Round((), (Recv(1, (0,)),)), Round((Send(1, (0,)),)), Round((Send(1, (1,)),)), blocks=(9, 6))
    # Chunk 1 need not wait for the sends of chunk 0; but only two rounds are in progress at once.
    assert _needs(program) == [(0, 0)] * 3 + [(1, 1), (1, 2), (1, 3)] + [(2, 3)] * 2


@pytest.mark.usefixtures("tiny")
def test_pieces_that_write_what_others_read_go_together() -> None:
    """Half of the memory that is sent is received into: with pieces side by side, it would be lost."""
    program, _ = _bind(
        Round((Send(1, (0, 1)),), (Recv(1, (1,), reduce=True),)), blocks=(6, 6), combine=lambda a, b, out: None
    )
    assert [(len(step.sends), len(step.recvs), len(step.after)) for step in _bind_steps(program)] == [(4, 2, 2)]
    apart, _ = _bind(
        Round((Send(1, (0,)),), (Recv(1, (0,), reduce=True),)), blocks=(6, 6), combine=lambda a, b, out: None
    )
    assert [(len(step.sends), len(step.recvs), len(step.after)) for step in _bind_steps(apart)] == [(1, 1, 1)] * 2


@pytest.mark.usefixtures("tiny")
def test_tokens_wait_for_all() -> None:
    program, _ = _bind(
        Round((Send(1, (2,)),)),
        Round((Send(1),)),
        Round((), (Recv(1, (2,)),)),
        blocks=(6, 6, 6),
    )
    assert _needs(program) == [(0, 0), (0, 0), (1, 2), (2, 3), (2, 3)]


def _find_local_parts(program: StreamedSchedule) -> list[list[tuple[int, int, int, int]]]:
    return [[(*part.src[1:], *part.dst[1:]) for part in step.then] for step in program.steps]


@pytest.mark.usefixtures("tiny")
def test_local_steps_are_cut_like_what_they_read() -> None:
    program, _ = _bind(
        Round((), (Recv(1, (0,)),), (Copy(0, 1), Reduce(0, 2))),
        Round((Send(1, (1,)),)),
        blocks=(7, 7, 7),
        combine=lambda a, b, out: None,
    )
    assert _find_local_parts(program) == [
        [(0, 3, 7, 10), (0, 3, 14, 17)],
        [(3, 6, 10, 13), (3, 6, 17, 20)],
        [(6, 7, 13, 14), (6, 7, 20, 21)],
        *[[]] * 3,
    ]
    # What is copied can be sent before the rest has arrived.
    assert _needs(program) == [(0, 0)] * 3 + [(1, 1), (1, 2), (1, 3)]


@pytest.mark.usefixtures("tiny")
def test_local_steps_follow_what_uses_their_memory() -> None:
    # Chunk 1 is sent, and chunk 2 arrives, as it was before. The second local step reads what the first one writes.
    program, _ = _bind(
        Round((Send(1, (1,)),), (Recv(1, (2,)),), (Copy(0, 1), Copy(1, 0), Copy(2, 0))),
        Round((), (Recv(1, (0,)),)),
        blocks=(6, 6, 6),
    )
    assert _find_local_parts(program) == [
        [],
        [(0, 6, 6, 12), (6, 12, 0, 6), (12, 15, 0, 3), (15, 18, 3, 6)],
        *[[]] * 2,
    ]
    assert _needs(program) == [(0, 0), (0, 0), (1, 2), (1, 2)]


@pytest.mark.usefixtures("tiny")
def test_local_steps_need_chunks_of_one_size() -> None:
    with pytest.raises(mpicoll.AlgorithmError, match=r"Copy\(src=0, dst=1\): chunk 0 has 7 .* chunk 1 has 8;"):
        _bind(Round((), (Recv(1, (0,)),), (Copy(0, 1),)), blocks=(7, 8))
    with pytest.raises(mpicoll.AlgorithmError, match="chunks of one size"):
        executor.bind(
            Schedule("allreduce", "made_up", 0, 1, 0, 2, 0, (Round((), (), (Copy(0, 1),)),)),
            [Region(np.empty(3), [0, 1, 3])],
            None,
        )


@pytest.mark.usefixtures("tiny")
def test_two_messages_to_one_rank_keep_their_order() -> None:
    """The other end may receive them in one round or in two."""
    program, _ = _bind(Round((Send(1, (0,)), Send(1, (1,)))), blocks=(6, 3))
    apart, _ = _bind(Round((Send(1, (0,)),)), Round((Send(1, (1,)),)), blocks=(6, 3))
    for one in (program, apart):
        sent = [data.view(np.float64).tolist() for step in _bind_steps(one) for _, data in step.sends]
        assert sent == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_what_is_small_is_not_cut() -> None:
    schedule = schedules.get("allreduce", "ring").schedule(0, 4)
    for nbytes, cut in ((executor.PIECE * 4, False), (executor.PIECE * 4 + 32, True)):
        offsets = [nbytes // 8 * i // 4 for i in range(5)]
        assert has_large_messages(schedule, [Region(np.empty(nbytes // 8), offsets)]) == cut


def test_large_messages_have_larger_pieces() -> None:
    piece = executor.PIECE
    assert [executor.get_piece_size(n) for n in (1, piece, 64 * piece, 64 * piece + 1, 10**9)] == [
        piece,
        piece,
        piece,
        2 * piece,
        60 * piece,
    ]


@pytest.mark.parametrize(
    ("collective", "name"), [("allreduce", "ring"), ("allreduce", "recursive_doubling"), ("reduce", "chain")]
)
def test_memory_for_what_is_received_is_used_again(collective: str, name: str) -> None:
    """Of 64 MiB, that for 16 pieces."""
    schedule = schedules.get(collective, name).schedule(0, 2)
    chunks = schedule.chunks
    offsets = tuple((8 << 20) * i // chunks for i in range(chunks + 1))
    steps = lay_out(schedule, (offsets,), 8)
    piece = executor.get_piece_size((64 << 20) // chunks)
    assert max(step.pieces for step in steps) > 2 * INCOMING_STEPS
    assert count_incoming(steps) * 8 == INCOMING_STEPS * piece


def test_memory_is_not_used_again_where_a_later_round_would_wait_for_it() -> None:
    """In a chain, each rank passes the first pieces on before the last ones have arrived."""
    schedule = schedules.get("reduce", "chain").schedule(1, 3)
    steps = lay_out(schedule, ((0, 8 << 20),), 8)
    (received, sent) = [[step for step in steps if step.round == one] for one in sorted({one.round for one in steps})]
    assert [step.needs for step in received] == [0] * len(received)
    assert [step.needs for step in sent] == list(range(1, len(sent) + 1))


def _complete(steps: list[tuple[Step, ...]]) -> bool:
    """Return True if all ranks complete their steps, where a message is passed when both ends have posted it."""
    ended, begun = [0] * len(steps), [0] * len(steps)
    missing = [[len(step.parts) for step in own] for own in steps]
    posted: dict[tuple[int, int, bool], deque[tuple[int, int]]] = defaultdict(deque)
    moves = True
    while moves:
        moves = False
        for rank, own in enumerate(steps):
            while begun[rank] < len(own) and own[begun[rank]].needs <= ended[rank]:
                for part in own[begun[rank]].parts:
                    ends = (rank, part.peer) if part.sends else (part.peer, rank)
                    posted[(*ends, part.sends)].append((rank, begun[rank]))
                begun[rank] += 1
                moves = True
        for source, dest, sends in list(posted):
            send, recv = posted[source, dest, True], posted[source, dest, False]
            while sends and send and recv:
                for rank, number in (send.popleft(), recv.popleft()):
                    missing[rank][number] -= 1
                moves = True
        for rank in range(len(steps)):
            while ended[rank] < begun[rank] and not missing[rank][ended[rank]]:
                ended[rank] += 1
                moves = True
    return ended == [len(own) for own in steps]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", sorted(REUSING))
def test_schedules_whose_memory_is_used_again_complete(name: str) -> None:
    algorithm = schedules.find(name)
    for size in range(2, 10):
        ranks = [algorithm.schedule(rank, size) for rank in range(size)]
        count = size * 3 * 3 * INCOMING_STEPS
        offsets = tuple(count * i // ranks[0].chunks for i in range(ranks[0].chunks + 1))
        steps = [lay_out(one, (offsets,), 8) for one in ranks]
        assert max(step.pieces for own in steps for step in own) > INCOMING_STEPS
        assert _complete(steps)


@pytest.mark.usefixtures("tiny")
def test_a_rank_that_replies_after_the_whole_message() -> None:
    """The other rank posts its sends and receives in one round, and must not wait with some for others."""
    reduces = Reduce(1, 0), Copy(0, 2)
    replies = (Round(recvs=(Recv(1, (1,)),), then=reduces), Round(sends=(Send(1, (2,)),)))
    requests = (Round(sends=(Send(0, (0,)),), recvs=(Recv(0, (0,), reduce=True),)),)
    count = 3 * 3 * INCOMING_STEPS
    assert _complete(
        [
            lay_out(Schedule("allreduce", "own", rank, 2, 0, 1, 2, rounds), ((0, count),) * 3, 8)
            for rank, rounds in enumerate((replies, requests))
        ]
    )


# --- overlap


class Wire:
    """A transport on which the test completes the messages."""

    def __init__(self) -> None:
        self.recvs: list[Posted] = []
        self.sends: list[Posted] = []

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> Posted:
        posted = Posted()
        posted.peer = (*sends, *recvs)[0][0]
        (self.sends if sends else self.recvs).append(posted)
        return posted


class Posted:
    peer: int

    def __init__(self) -> None:
        self.done = self.discarded = False

    def test(self) -> bool:
        return self.done

    def discard(self) -> None:
        self.discarded = True


@pytest.mark.usefixtures("tiny")
def test_the_next_round_begins_before_the_end_of_this_one() -> None:
    wire = Wire()
    schedule = schedules.get("allreduce", "ring").schedule(0, 3)
    program = StreamedSchedule(schedule, [Region(np.zeros(27), [0, 9, 18, 27])], lambda a, b, out: None, wire)
    program.start(0)
    assert (len(wire.sends), len(wire.recvs)) == (2, 3)  # few sends at a time, so that they arrive one by one
    wire.sends[0].done = True
    assert not program.advance()
    assert (len(wire.sends), len(wire.recvs)) == (3, 3)
    wire.recvs[0].done = True
    assert not program.advance()
    assert (len(wire.sends), len(wire.recvs)) == (4, 4)
    assert program.position((4, 5, 6)).where.startswith("round 1 of 4 of allreduce/ring, piece 2 of 3: ")
    assert program.position((4, 5, 6)).waits_for == (6,)
    wire.recvs[2].done = True  # the one before it has not arrived
    assert not program.advance()
    assert len(wire.recvs) == 4
    program.discard()
    assert [one.discarded for one in wire.recvs] == [False, True, True, True]
    assert [one.discarded for one in wire.sends] == [False, True, True, True]


@pytest.mark.usefixtures("tiny")
def test_no_rank_waits_for_what_is_sent_to_another() -> None:
    wire = Wire()
    schedule = Schedule("allreduce", "made_up", 0, 3, 0, 1, 0, (Round((Send(1, (0,)), Send(2, (0,)))),))
    program = StreamedSchedule(schedule, [Region(np.zeros(12), [0, 12])], None, wire)
    program.start(0)
    assert [one.peer for one in wire.sends] == [1, 2, 1, 2]
    for _ in range(2):
        for one in wire.sends:
            one.done = one.peer == 1
        assert not program.advance()
    assert [one.peer for one in wire.sends] == [1, 2, 1, 2, 1, 1]


@pytest.mark.usefixtures("tiny")
def test_more_sends_are_posted_when_earlier_ones_have_completed() -> None:
    """The first pieces arrive one by one; later the link has more to do than a thread that gets no core can delay."""
    wire = Wire()
    schedule = Schedule("allreduce", "made_up", 0, 2, 0, 1, 0, (Round((Send(1, (0,)),)),))
    program = StreamedSchedule(schedule, [Region(np.zeros(90), [0, 90])], None, wire)
    program.start(0)
    posted = []
    for one in range(30):
        posted.append(len(wire.sends) - one)
        wire.sends[one].done = True
        assert program.advance() == (one == 29)
    assert posted == [2, 3, 4, 5, 6, 7, *[8] * 17, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.usefixtures("tiny")
def test_a_wait_sleeps_where_steps_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it leaves the core to those that compute: for a part of a step, so that it is not late."""
    now, naps = [0.0], []
    wire = Wire()
    schedule = Schedule("allreduce", "made_up", 0, 2, 0, 1, 0, (Round((Send(1, (0,)),)),))
    program = StreamedSchedule(schedule, [Region(np.zeros(12), [0, 12])], None, wire)
    arrivals = iter([0.002, 0.004, 0.00401, 0.006])

    def complete_next() -> None:
        now[0] = next(arrivals)
        next(one for one in wire.sends if not one.done).done = True

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        complete_next()

    # Other threads of this process, such as the watch of a communicator, sleep too.
    monkeypatch.setattr(streamed, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    program.start(0)
    complete_next()
    assert not program.advance()
    program.wait()
    assert naps == pytest.approx([0.0005, 0.0005, 0.00401 / 3 / 4])


# --- failures


@pytest.mark.usefixtures("tiny")
def test_a_lost_piece_is_named() -> None:
    def main() -> str:
        try:
            mpicoll.allreduce(np.ones(72), algorithm="ring")
        except mpicoll.CommunicationError as error:
            return str(error)
        return ""

    lost = [local.Drop(source=1, dest=2, nth=8, count=100)]  # 6 pieces in each of 6 rounds
    texts = mpicoll.run_local(main, 4, faults=lost, timeout=0.5)
    assert "allreduce/ring on rank 2 of 4, round 2 of 6: rank 2 waits for a message from" in texts[2]


@pytest.mark.usefixtures("tiny")
def test_after_a_failure_nothing_is_received_any_more() -> None:
    """The messages of a failed call are not taken for those of the next one."""

    together = threading.Barrier(3)

    def main() -> float:
        rank = mpicoll.world().rank

        def add(a: Any, b: Any) -> Any:
            if failing and rank == 1:
                raise ValueError("no sum today")
            return a + b

        op = mpicoll.Op(add, commutative=True, elementwise=True)
        failing = True
        with pytest.raises((ValueError, mpicoll.CommunicationError)):
            mpicoll.allreduce(np.ones(60), op, algorithm="ring")
        together.wait(20)
        failing = False
        return float(mpicoll.allreduce(np.full(60, 2.0), op, algorithm="ring").sum())

    assert mpicoll.run_local(main, 3, ranks_per_node=1, timeout=3) == [360.0] * 3


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "recursive_doubling"])
def test_no_rank_waits_for_one_whose_function_fails(algorithm: str) -> None:
    def main() -> tuple[str, float]:
        rank, calls, raised = mpicoll.world().rank, [], ""

        def add(a: Any, b: Any) -> Any:
            calls.append(a.size)
            if rank == 0 and len(calls) == 2:
                raise ValueError("no sum today")
            return a + b

        op = mpicoll.Op(add, commutative=True, elementwise=True)
        try:
            mpicoll.allreduce(np.ones(60), op, algorithm=algorithm)
        except (ValueError, mpicoll.CommunicationError) as error:
            raised = f"{type(error).__name__}: {error}"
        return raised, float(mpicoll.allreduce(np.full(60, 2.0), algorithm=algorithm).sum())

    ends = mpicoll.run_local(main, 4, ranks_per_node=1, timeout=20)
    assert [total for _, total in ends] == [480.0] * 4
    raised = [text for text, _ in ends]
    assert raised.pop(0) == "ValueError: no sum today"
    for text in raised:
        assert text.startswith(f"CommunicationError: allreduce/{algorithm} on rank "), text
        assert "failed in this operation, as its own error explains" in text


@pytest.mark.usefixtures("tiny")
def test_a_death_within_the_pieces_is_named() -> None:
    def main() -> None:
        with pytest.raises(mpicoll.RankFailed, match=r"allreduce/ring on rank ") as caught:
            mpicoll.allreduce(np.ones(72), algorithm="ring")
        assert caught.value.ranks

    mpicoll.run_local(main, 3, ranks_per_node=1, faults=[local.Kill(1, nth=5)], timeout=20)


@pytest.mark.usefixtures("tiny", "uncompared")
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_ranks_that_disagree_about_the_size(algorithm: str) -> None:
    def main() -> None:
        mpicoll.allreduce(np.ones(30 + 20 * mpicoll.world().rank), algorithm=algorithm)

    with pytest.raises(mpicoll.CommunicationError):
        mpicoll.run_local(main, 2, ranks_per_node=1, timeout=2)


# --- with an MPI library


@pytest.mark.slow
def test_under_mpi(job: Any) -> None:
    """Right with every algorithm; ranks that disagree get an error."""
    done = job(
        3,
        """
from mpicoll import schedules
from mpicoll.engine.executors import bound_schedule
world = mpicoll.world()
rank, size = world.rank, world.size
every = [np.random.default_rng(peer).standard_normal(333) for peer in range(size)]
x = every[rank]
def call(collective, name):
    given = {"algorithm": name} | ({"root": 1} if collective in ("bcast", "reduce", "gather", "scatter") else {})
    own = x[:111] if collective == "scatter" and rank != 1 else x
    return getattr(mpicoll, collective)(own, **given)
for collective in schedules.collectives():
    for name in schedules.algorithms_of(collective):
        if collective == "barrier":
            continue
        results = []
        for bound_schedule.PIECE in (1 << 20, 24):
            results.append(call(collective, name))
        assert (results[0] is None) == (results[1] is None)
        assert results[0] is None or results[0].tobytes() == results[1].tobytes(), (collective, name)
print("all right")
try:
    mpicoll.allreduce(np.ones(300 if rank else 200), algorithm="ring")
except mpicoll.TruncationError as error:
    print("caught:", error, flush=True)
    raise
""",
        MPICOLL_SHARED_MEMORY="off",
        MPICOLL_CHECK="off",
        MPICOLL_TIMEOUT="20",
        seconds=40,
    )
    assert done.stdout.count("all right") == 3, done.stdout
    assert "caught: allreduce(float64[" in done.stdout
    assert "allreduce/ring on rank" in done.stdout


def test_functions_that_are_not_elementwise_receive_whole_arrays() -> None:
    sizes: list[int] = []

    def combine(left: Any, right: Any) -> Any:
        sizes.append(left.size)
        return left * 0 + left.max() + right.max()

    count = executor.PIECE // 8 * 2
    mpicoll.run_local(
        lambda: mpicoll.allreduce(np.ones(count), mpicoll.Op(combine), algorithm="tree"), 3, ranks_per_node=1
    )
    assert set(sizes) == {count}


@pytest.mark.parametrize(("sent", "expected"), [(2, 1), (1, 2), (4, 2)])
def test_sizes_that_differ_by_whole_pieces_are_an_error(sent: int, expected: int) -> None:
    count = executor.PIECE // 8

    def body() -> None:
        first = mpicoll.world().rank == 0
        counts = ([0, sent * count], [0, 0]) if first else ([0, 0], [expected * count, 0])
        with nullcontext() if first else pytest.raises(mpicoll.TruncationError):
            mpicoll.alltoall(np.ones(sum(counts[0])), counts=counts, algorithm="pairwise", timeout=20)

    mpicoll.run_local(body, 2, ranks_per_node=1)
