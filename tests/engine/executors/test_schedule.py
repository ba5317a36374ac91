"""Schedules bound to memory: packing, order of operands, repeated runs, and errors that say where they happened."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpicoll
from mpicoll import schedules
from mpicoll.engine.core.arrays import Region, displacements, even_displacements
from mpicoll.engine.executors import schedule as executor
from mpicoll.engine.executors.bound_schedule import BoundSchedule, bind
from mpicoll.schedules import Copy, Recv, Reduce, Round, Schedule, Send
from mpicoll.transport import local
from mpicoll.transport.base import Message


def schedule(*rounds: Round, chunks: int = 4, rank: int = 0, size: int = 1, extra: int = 0) -> Schedule:
    return Schedule("allreduce", "made_up", rank, size, 0, chunks, extra, rounds)


def region(*blocks: list[int]) -> Region:
    """Chunks with these elements."""
    return Region(np.array([x for block in blocks for x in block], np.int64), displacements(map(len, blocks)))


def after(a: Any, b: Any, out: Any) -> None:
    """An operation that shows the order of its operands in the digits of the result."""
    out[...] = a * 10 + b


def run(program: BoundSchedule) -> None:
    """On a rank that talks to itself."""
    (alone,) = local.transports(local.LocalJob(1, timeout=5))
    program.run(alone, 0)


class Recorder:
    """A transport that only looks."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[Message], list[Message], int]] = []

    def exchange(self, sends: list[Message], recvs: list[Message], tag: int) -> None:
        self.rounds.append(([(peer, data.copy()) for peer, data in sends], list(recvs), tag))


def looked_at(program: BoundSchedule) -> list[tuple[list[Message], list[Message], int]]:
    recorder = Recorder()
    program.run(recorder, 7)  # type: ignore[arg-type]
    return recorder.rounds


# --- cutting


def test_cut() -> None:
    assert even_displacements(10, 4) == [0, 3, 6, 8, 10]
    assert even_displacements(2, 4) == [0, 1, 2, 2, 2]
    assert even_displacements(0, 3) == [0, 0, 0, 0]


@given(count=st.integers(0, 2**40), pieces=st.integers(1, 50))
def test_cut_is_fair(count: int, pieces: int) -> None:
    offsets = even_displacements(count, pieces)
    sizes = np.diff(offsets)
    assert (len(sizes), offsets[0], offsets[-1]) == (pieces, 0, count)
    assert sizes.max() - sizes.min() <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


def test_displacements() -> None:
    assert displacements([]) == [0]
    assert displacements([3, 0, 2]) == [0, 3, 3, 5]


# --- memory


def test_consecutive_chunks_travel_from_and_to_their_own_memory() -> None:
    memory = region([1], [2, 3], [4], [5, 6])
    program = bind(schedule(Round((Send(0, range(2)),), (Recv(0, range(2, 4)),))), [memory], None)
    ((_, sent),), ((_, received),) = program.steps[0].sends, program.steps[0].recvs
    assert np.shares_memory(sent, memory.array[:3])
    assert np.shares_memory(received, memory.array[3:])
    assert (program.steps[0].before, program.steps[0].after) == ([], [])
    run(program)
    assert memory.array.tolist() == [1, 2, 3, 1, 2, 3]


def test_other_chunks_are_packed_in_their_order() -> None:
    memory = region([1], [2, 3], [4], [0, 0], [0], [0])
    program = bind(schedule(Round((Send(0, (2, 1, 0)),), (Recv(0, (5, 3, 4)),)), chunks=6), [memory], None)
    ((sends, recvs, tag),) = looked_at(program)
    assert tag == 7
    assert [(peer, data.view(np.int64).tolist()) for peer, data in sends] == [(0, [4, 2, 3, 1])]
    assert [(peer, data.size) for peer, data in recvs] == [(0, 32)]
    run(program)
    assert memory.array.tolist() == [1, 2, 3, 4, 2, 3, 1, 4]


def test_chunks_of_several_regions() -> None:
    first, second = region([1, 2], [3]), region([0, 0], [0])
    program = bind(schedule(Round((Send(0, (0, 1)),), (Recv(0, (2, 3)),))), [first, second], None)
    run(program)
    assert second.array.tolist() == [1, 2, 3]
    across = bind(schedule(Round((Send(0, (1, 2)),), (Recv(0, (0, 3)),))), [first, second], None)
    run(across)
    assert first.array.tolist() == [3, 1, 3]
    assert second.array.tolist() == [1, 2, 2]


def test_empty_chunks_are_not_sent() -> None:
    memory = region([], [1], [], [0])
    rounds = (
        Round((Send(0, (0,)), Send(0, (1,))), (Recv(0, (2,)), Recv(0, (3,)))),
        Round((Send(0, (0, 2)),), (Recv(0, (2, 0)),)),
        Round((Send(0, (0,)),), (Recv(0, (2,), reduce=True),)),
    )
    program = bind(schedule(*rounds), [memory], after)
    assert [(len(step.sends), len(step.recvs)) for step in program.steps] == [(1, 1)]
    run(program)
    assert memory.array.tolist() == [1, 1]


def test_a_token_is_sent() -> None:
    program = bind(schedule(Round((Send(0),), (Recv(0),)), chunks=0), [], None)
    ((sends, recvs, _),) = looked_at(program)
    assert [data.size for _, data in (*sends, *recvs)] == [0, 0]
    run(program)


def test_any_itemsize_travels_as_bytes() -> None:
    array = np.array([1 + 2j, 3j, 4, 0, 0, 0], np.complex128)
    memory = Region(array, [0, 1, 3, 4, 6])
    run(bind(schedule(Round((Send(0, (0, 1)),), (Recv(0, (3, 2)),))), [memory], None))
    assert array.tolist() == [1 + 2j, 3j, 4, 4, 1 + 2j, 3j]


# --- operands


@pytest.mark.parametrize(("source", "expected"), [(0, [[1, 2], [53, 64]]), (2, [[1, 2], [35, 46]])])
def test_the_part_of_the_lower_rank_is_the_left_operand(source: int, expected: list[list[int]]) -> None:
    memory = region([1, 2], [3, 4])
    one = schedule(Round((), (Recv(source, (1,), reduce=True),)), rank=1, size=3, chunks=2)
    program = bind(one, [memory], after)

    class Sender:
        def exchange(self, sends: list[Message], recvs: list[Message], tag: int) -> None:
            assert [peer for peer, _ in recvs] == [source]
            recvs[0][1][...] = np.array([5, 6]).view(np.uint8)

    program.run(Sender(), 0)  # type: ignore[arg-type]
    assert memory.array.reshape(2, 2).tolist() == expected


def test_several_parts_are_combined_in_the_order_of_the_list() -> None:
    memory = region([1], [2], [3], [4])
    round_ = Round(
        (Send(0, (1,)), Send(0, (2,))),
        (Recv(0, (0,), reduce=True), Recv(0, (0,), reduce=True)),
    )
    program = bind(schedule(round_), [memory], lambda a, b, out: np.copyto(out, a * 10 + b))
    run(program)
    # From itself: a source that isn't lower is the right operand.
    assert memory.array.tolist() == [123, 2, 3, 4]


def test_sends_read_what_was_there_when_the_round_began() -> None:
    memory = region([1], [2])
    swap = Round((Send(0, (0,)), Send(0, (1,))), (Recv(0, (1,)), Recv(0, (0,))))
    run(bind(schedule(swap, chunks=2), [memory], None))
    assert memory.array.tolist() == [2, 1]


def test_local_steps() -> None:
    memory = region([1, 2], [3, 4], [5, 6])
    steps = Round((), (), (Copy(0, 2), Reduce(1, 0), Reduce(0, 1, src_right=True)))
    run(bind(schedule(steps, chunks=3), [memory], after))
    # chunk 2 = chunk 0; then chunk 0 = 1 . 0; then chunk 1 = 1 . 0
    assert memory.array.reshape(3, 2).tolist() == [[31, 42], [61, 82], [1, 2]]


def test_local_steps_on_nothing() -> None:
    program = bind(schedule(Round((), (), (Copy(0, 1), Reduce(0, 1))), chunks=2), [region([], [])], after)
    assert program.steps == []


# --- runs


def test_a_program_reads_and_writes_its_memory_at_each_run() -> None:
    memory = region([1], [2], [0], [0])
    program = bind(schedule(Round((Send(0, (1, 0)),), (Recv(0, (2, 3)),))), [memory], None)
    for first in range(5):
        memory.array[:2] = first, first + 10
        run(program)
        assert memory.array.tolist() == [first, first + 10, first + 10, first]


def test_a_rank_that_cannot_bind_its_memory_stays_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of the call that has failed is not taken for that of the next one."""
    calls = []

    def failing(plan: Schedule, *args: Any) -> BoundSchedule:
        if plan.rank == 1 and not calls:
            calls.append(plan)
            raise MemoryError("no room")
        return bind(plan, *args)

    def body() -> int:
        x = np.zeros(3, np.int64)
        for number in (1, 2):
            if mpicoll.world().rank == 0:
                x[:] = number
            with contextlib.suppress(MemoryError):
                mpicoll.bcast(x, 0, out=x, algorithm="binomial")
        return int(x[0])

    monkeypatch.setattr(executor, "bind", failing)
    assert mpicoll.run_local(body, 2, timeout=10) == [2, 2]
    assert calls


def test_the_tag_is_that_of_the_run() -> None:
    program = bind(schedule(Round((Send(0),), (Recv(0),)), Round((Send(0),), (Recv(0),)), chunks=0), [], None)
    assert [tag for *_, tag in looked_at(program)] == [7, 7]


# --- errors


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("algorithm", mpicoll.schedules.algorithms_of("allreduce"))
def test_ranks_that_disagree_about_the_size(algorithm: str) -> None:
    """The rank that notices raises sizes, round, algorithm and rank; none returns a result of mixed sizes."""

    def main() -> None:
        world = mpicoll.world()
        try:
            mpicoll.allreduce(np.ones(30 + 20 * world.rank), algorithm=algorithm)
        except mpicoll.TruncationError as error:
            text = str(error)
            assert text.startswith(
                f"allreduce(float64[{30 + 20 * world.rank}], op=sum) by {algorithm} number 1 on world, "
            )
            assert f"allreduce/{algorithm} on rank {world.rank} of 2, round " in text
            assert "bytes from rank" in text
            assert any(str(size) in text for size in (240, 400, 120, 200))
            raise

    with pytest.raises(mpicoll.TruncationError):
        mpicoll.run_local(main, 2, ranks_per_node=1, timeout=20)


@pytest.mark.usefixtures("uncompared")
@pytest.mark.parametrize("collective", ["bcast", "reduce", "allgather", "scan", "exscan", "gather"])
def test_other_collectives_whose_ranks_disagree(collective: str) -> None:
    def main() -> None:
        with mpicoll.algorithms(**{collective: next(iter(schedules.algorithms_of(collective)))}):
            getattr(mpicoll, collective)(np.ones(4 + 4 * mpicoll.world().rank))

    with pytest.raises(mpicoll.TruncationError, match=rf"{collective}/\w+ on rank \d of 2, round \d of \d: .* bytes"):
        mpicoll.run_local(main, 2, ranks_per_node=1, timeout=20)


@pytest.mark.usefixtures("uncompared")
def test_a_smaller_message_is_an_error_as_well() -> None:
    def main() -> None:
        mpicoll.bcast(np.ones(4 + 4 * mpicoll.world().rank), algorithm="binomial")

    with pytest.raises(mpicoll.TruncationError, match="rank 1 expected 64 bytes from rank 0, got 32"):
        mpicoll.run_local(main, 2, ranks_per_node=1, timeout=20)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        (collective, name)
        for collective in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
        for name in schedules.algorithms_of(collective)
    ],
)
@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.long)])
def test_no_rank_waits_for_one_whose_function_fails(collective: str, algorithm: str, size: int) -> None:
    def body() -> tuple[str, str, int]:
        rank = mpicoll.world().rank

        def add(a: Any, b: Any) -> Any:
            if rank == wrong:
                called.append(rank)
                raise ValueError("bad data")
            return a + b

        kind = text = ""
        op = mpicoll.Op(add, commutative=True, elementwise=True)
        try:
            getattr(mpicoll, collective)(np.ones((4 * size, 2)), op, algorithm=algorithm)
        except (ValueError, mpicoll.CommunicationError) as error:
            kind, text = type(error).__name__, str(error)
        return kind, text, mpicoll.allreduce(1)

    for wrong in range(size):
        called: list[int] = []
        ends = mpicoll.run_local(body, size, ranks_per_node=1, timeout=20)
        assert [total for *_, total in ends] == [size] * size
        kinds = [kind for kind, *_ in ends]
        if called:
            assert kinds.pop(wrong) == "ValueError"
        # Those that need no data of that rank, or have it already, get their results.
        assert set(kinds) <= {"", "CommunicationError"}
        for kind, text, _ in ends:
            if kind == "CommunicationError":
                assert text.startswith(f"{collective}/{algorithm} on rank "), text
                assert "failed in this operation, as its own error explains" in text


def test_the_round_is_named() -> None:
    def main() -> str:
        try:
            mpicoll.allreduce(np.ones(8), algorithm="ring")
        except mpicoll.CommunicationError as error:
            return str(error)
        return ""

    lost = [local.Drop(source=1, dest=2, nth=2, count=10)]
    texts = mpicoll.run_local(main, 4, faults=lost, timeout=0.3)
    assert "allreduce/ring on rank 2 of 4, round 3 of 6: rank 2 waits for a message from" in texts[2]


def test_the_dead_are_still_named_after_context_was_added() -> None:
    def main() -> None:
        with pytest.raises(mpicoll.RankFailed, match=r"^barrier/dissemination on rank ") as caught:
            mpicoll.barrier()
        # One sees the death itself, the other perhaps that of whoever saw it.
        assert set(caught.value.ranks) < {0, 1, 2}
        assert caught.value.ranks

    mpicoll.run_local(main, 3, faults=[local.Kill(1)], timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "larger"), [("recursive_doubling", 0), ("recursive_doubling", 1), ("ring", 0), ("tree", 1)]
)
def test_ranks_that_disagree_under_mpi(job: Any, algorithm: str, larger: int) -> None:
    done = job(
        2,
        f"""
rank = mpicoll.world().rank
print(mpicoll.allreduce(np.ones(30 if rank == {larger} else 20), algorithm="{algorithm}"), "is garbage")
""",
        MPICOLL_TIMEOUT="20",
        MPICOLL_SHARED_MEMORY="off",
        MPICOLL_CHECK="off",
        seconds=15,
    )
    assert done.returncode not in (0, 124), done.stdout
    assert f"mpicoll.errors.TruncationError: allreduce/{algorithm} on rank " in done.stdout
