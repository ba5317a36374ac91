"""Schedules with large messages in the extension: what they do is that of the executor in Python, bit by bit."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.schedule_pairs import PAIRS

import mpicoll
from mpicoll.buffers.ops import _get_named_reduction
from mpicoll.buffers.recognise import recognise
from mpicoll.engine.core.arrays import CollectiveArrays, Region, displacements
from mpicoll.engine.executors import bound_schedule, compiled_schedule, streamed
from mpicoll.engine.executors.compiled_schedule import CompiledSchedule, compile_schedule
from mpicoll.engine.executors.step_layout import lay_out
from mpicoll.engine.executors.streamed import StreamedSchedule
from mpicoll.schedules import Copy, Recv, Reduce, Round, Schedule, Send

pytestmark = [pytest.mark.extension, pytest.mark.mpi]

TINY = 24
"""Bytes of a piece: three float64."""


@pytest.fixture(params=["by_mpi", "by_connections"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have MPI carry all messages, or connections those that may go over them: as if each rank were on its own host."""
    if request.param == "by_connections":
        from mpicoll.transport.mpi import connections  # not before, since it initialises MPI

        transport = mpicoll.world()._core.transport
        monkeypatch.setattr(transport, "nodes", tuple(range(transport.size)))
        connections.allow_connections("127.0.0.1")
        yield request.param
        connections._address.clear()
        if transport._connections is not None:
            transport._connections.close()
        transport._connections = None
    else:
        yield request.param


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[type]]:
    """Cut into tiny pieces; list the types of the schedules that are carried out."""
    started: list[type] = []

    def list_starts(kind: type[CompiledSchedule | StreamedSchedule]) -> None:
        start = kind.start

        def listing(self: Any, tag: int) -> None:
            started.append(kind)
            start(self, tag)

        monkeypatch.setattr(kind, "start", listing)

    list_starts(CompiledSchedule)
    list_starts(StreamedSchedule)
    monkeypatch.setattr(bound_schedule, "PIECE", TINY)
    monkeypatch.setattr(streamed, "FIRST_SENDS", 2)
    lay_out.cache_clear()
    compiled_schedule.make_numbers.cache_clear()
    yield started
    lay_out.cache_clear()
    compiled_schedule.make_numbers.cache_clear()


def _call(collective: str, algorithm: str, n: int, dtype: str, op: str) -> Any:
    world = mpicoll.world()
    rank, size = world.rank, world.size
    rng, root = np.random.default_rng(rank), size - 1
    whole = rng.integers(1, 9, n * size).astype(dtype)
    if dtype.startswith("float"):
        whole += rng.standard_normal(n * size).astype(dtype)
    x = whole[:n]
    call = getattr(mpicoll, collective)
    if collective in ("allreduce", "scan", "exscan"):
        return call(x, op, algorithm=algorithm)
    if collective == "reduce":
        return call(x, op, root=root, algorithm=algorithm)
    if collective in ("bcast", "gather"):
        return call(x, root=root, algorithm=algorithm)
    if collective == "scatter":
        return call(whole if rank == root else x, root, algorithm=algorithm)
    if collective == "reduce_scatter":
        return call(whole, op, algorithm=algorithm)
    return call(whole if collective == "alltoall" else x, algorithm=algorithm)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_the_same_bits_as_in_python(
    tiny: list[type], carrier: str, monkeypatch: pytest.MonkeyPatch, collective: str, algorithm: str
) -> None:
    reduces = collective in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
    kinds = [("float64", "sum"), ("int16", "max"), ("float16", "sum")] if reduces else []
    if reduces and "scan" not in collective:
        kinds.append(("float32", "avg"))
    # Repeated calls keep what the first ones were bound to.
    lengths = (1, 7, 64, 1001) if carrier == "by_mpi" else (2, 6, 65, 1003)
    for dtype, op in [*kinds, ("uint8", "sum")]:
        for n in lengths:
            try:
                compiled = _call(collective, algorithm, n, dtype, op)
            except mpicoll.AlgorithmError:
                pytest.skip("not for this number of ranks")
            with monkeypatch.context() as patch:
                patch.setattr(compiled_schedule, "compile_schedule", lambda *_, **__: None)
                in_python = _call(collective, algorithm, n, dtype, op)
            assert (compiled is None) == (in_python is None)
            assert compiled is None or compiled.tobytes() == in_python.tobytes()
    if mpicoll.world().size > 1:
        made = mpicoll.world()._core.transport._connections
        connected = made is not None and any(made._made.values())
        assert any(mpicoll.allgather_object(connected)) == (carrier == "by_connections")
        assert tiny.count(CompiledSchedule) == tiny.count(StreamedSchedule) > 0


@pytest.mark.usefixtures("tiny", "carrier")
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [pair for pair in PAIRS if pair[0] in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")],
)
def test_the_input_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch, collective: str, algorithm: str) -> None:
    """It does not change, and what no message concerns reaches the output."""
    placed: list[str] = []
    place = CollectiveArrays.place

    def listing(arrays: CollectiveArrays) -> None:
        placed.append(arrays.collective)
        place(arrays)

    monkeypatch.setattr(CollectiveArrays, "place", listing)
    world = mpicoll.world()
    rank, size = world.rank, world.size
    inputs = [np.random.default_rng(one).integers(0, 99, 501 * size).astype(np.float64) for one in range(size)]
    x = inputs[rank].copy()
    root = {"root": size - 1} if collective == "reduce" else {}
    out = np.full(501 if collective == "reduce_scatter" else x.size, -1.0)
    if root and rank != size - 1:
        out = None  # type: ignore[assignment]
    try:
        got = getattr(mpicoll, collective)(x, "sum", algorithm=algorithm, out=out, **root)
    except mpicoll.AlgorithmError:
        pytest.skip("not for this number of ranks")
    np.testing.assert_array_equal(x, inputs[rank])
    number = {"scan": rank + 1, "exscan": rank}.get(collective, size)
    total = np.sum(inputs[:number], axis=0, initial=0)
    if collective == "reduce_scatter":
        total = total[501 * rank : 501 * (rank + 1)]
    if out is not None:
        np.testing.assert_array_equal(got, total)
        assert got is out
    if size > 1:
        assert not placed


@pytest.mark.usefixtures("tiny")
def test_blocks_of_uneven_sizes() -> None:
    world = mpicoll.world()
    counts = [17 * rank for rank in range(world.size)]
    x = np.arange(sum(counts), dtype=np.float64) * (world.rank + 1)
    own = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
    got = mpicoll.reduce_scatter(x, counts=counts, algorithm="ring")
    factor = world.size * (world.size + 1) / 2
    np.testing.assert_array_equal(got, (np.arange(sum(counts)) * factor)[own])


@pytest.mark.usefixtures("tiny")
def test_functions_of_python_are_carried_out_in_python() -> None:
    def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return left * right

    x = np.full(99, float(mpicoll.world().rank + 1))
    op = mpicoll.Op(product, commutative=True, elementwise=True)
    want = np.prod(np.arange(1.0, mpicoll.world().size + 1))
    np.testing.assert_array_equal(mpicoll.allreduce(x, op, algorithm="ring"), np.full(99, want))


# --- programs


def _exchange(rank: int, *, then: tuple[Copy | Reduce, ...] = ()) -> Schedule:
    """Return a schedule of two ranks that adds the other rank's chunk 0 to one's own."""
    one = Round((Send(1 - rank, (0,)),), (Recv(1 - rank, (0,), reduce=True),), then)
    return Schedule("allreduce", "made_up", rank, 2, 0, 2, 0, (one,))


def _compile(schedule: Schedule, array: np.ndarray[Any, Any]) -> CompiledSchedule:
    transport = mpicoll.world()._core.transport
    blocks = [array.size // schedule.chunks] * schedule.chunks
    total = _get_named_reduction("allreduce", "sum", recognise("allreduce", array, "x").dtype)
    made = compile_schedule(transport, schedule, [Region(array, displacements(blocks))], total)
    assert made is not None
    return made


def _is_idle() -> bool:
    """Return True on ranks that have nothing to do, since the schedule is one of the first two."""
    return mpicoll.world().rank > 1 or mpicoll.world().size < 2


@pytest.mark.usefixtures("tiny", "carrier")
def test_steps_of_a_rank_alone() -> None:
    rank = mpicoll.world().rank
    if _is_idle():
        return
    x = np.concatenate([np.arange(10.0) + rank, np.zeros(10)])
    program = _compile(_exchange(rank, then=(Copy(0, 1), Reduce(0, 1))), x)
    program.start(3)
    program.wait()
    total = 2 * np.arange(10.0) + 1
    np.testing.assert_array_equal(x, [*total, *(2 * total)])


@pytest.mark.usefixtures("tiny", "carrier")
def test_others_advance_meanwhile() -> None:
    rank = mpicoll.world().rank
    if _is_idle():
        return
    x, y = np.full(20, rank + 1.0), np.full(20, rank + 10.0)
    first, second = (_compile(_exchange(rank), one) for one in (x, y))
    first.start(3)
    second.start(4)
    if rank == 0:
        # The second has to advance on rank 1 too, where only the first is waited for.
        second.wait([first])
        first.wait()
    else:
        first.wait([second])
        second.wait()
    assert x[0] == 3.0
    assert y[9] == 21.0


@pytest.mark.usefixtures("tiny", "carrier")
def test_messages_of_another_size() -> None:
    """The error names the round, and later messages are not affected."""
    rank = mpicoll.world().rank
    if _is_idle():
        return
    x = np.ones(8 + 4 * rank)
    program = _compile(_exchange(rank), x)
    program.start(5)
    with pytest.raises(mpicoll.TruncationError, match=f"allreduce/made_up on rank {rank} of 2, round 1 of 1: .* bytes"):
        program.wait()
    again = _compile(_exchange(rank), np.ones(8))
    for one in (program, again):
        one.discard()
    again.start(6)
    again.wait()
    program.discard()


@pytest.mark.usefixtures("tiny", "carrier")
def test_a_run_is_limited_and_can_be_abandoned() -> None:
    rank = mpicoll.world().rank
    if _is_idle():
        return
    x = np.full(40, rank + 1.0)
    schedule = _exchange(rank)
    program = _compile(schedule, x)
    program.start(6)  # both ranks, which connect
    program.wait()
    x[:] = rank + 1.0
    if rank == 0:
        program.start(7)
        begin = time.monotonic()
        assert not program.program.run(0.05, ())
        assert time.monotonic() - begin < 5
        assert "waits for" in program.position((0, 1)).where
        program.discard()
        assert not program.program.usable
    x[:] = rank + 1.0
    program.start(8)
    program.wait()
    assert (x[:20] == 3.0).all()
    assert program.at == len(lay_out(schedule, ((0, 20, 40),), 8))


def test_invalid_plans() -> None:
    from mpicoll._shm import StreamedProgram
    from mpicoll.transport.mpi.direct_messages import find_functions  # not before, since it initialises MPI

    assert find_functions()
    x = np.zeros(8)

    def make(*numbers: int, op: str = "", itemsize: int = 8) -> StreamedProgram:
        return StreamedProgram(
            0, (), (x.ctypes.data, x.nbytes), array("q", numbers), op, "float64", itemsize, 1, 0, 0.1
        )

    assert make(0, 0, 0).at == 0
    assert make(1, 0, 0, 0, 1, 0, 0, 1, -1, 1, 0, 0, 0, 64, 0).failure is None
    invalid = [
        (),
        (1, 0, 0),
        (1, 0, 0, 1, 0, 0),  # a step that needs itself
        (1, 0, 0, 0, 1, 0, 0, 1, -1, 1, 0, 1, 0, 8, 1),  # no such region
        (1, 0, 0, 0, 1, 0, 0, 1, -1, 1, 0, 0, 0, 8, 1),  # nor for the operand
        (1, 0, 0, 0, 1, 0, 0, 1, -1, 1, 0, 0, 0, 72, 0),  # past its end
        (1, 0, 0, 0, 1, 0, 0, 1, -1, 1, 0, 0, 8, 0, 0),
        (1, 0, 0, 0, 1, 0, -1, 1, -1, 1, 0, 0, 0, 8, 0),  # no rank
        (1, 8, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0),  # to be reduced without a reduction
        (1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0),  # a copy between places of different sizes
        (0, 0, 1, 0, 0, 72, 0),  # a copy before all steps, past the end
        (0, 0, 0, 0),  # more than the plan
    ]
    for numbers in invalid:
        with pytest.raises(ValueError, match="plan"):
            make(*numbers)
    with pytest.raises(ValueError, match="plan"):
        make(1, 8, 0, 0, 1, 0, 0, 0, 8, 1, 0, 0, 0, 8, 0, op="sum")  # past the memory for what arrives
    with pytest.raises(ValueError, match="invalid arguments"):
        make(0, 0, 0, op="unknown")
    with pytest.raises(ValueError, match="invalid arguments"):
        make(0, 0, 0, itemsize=0)


@pytest.mark.parametrize(
    ("collective", "name", "rank", "copied"),
    [
        ("reduce_scatter", "pairwise", 1, []),
        ("exscan", "linear", 1, []),
        ("reduce", "chain", 2, []),
        ("scan", "linear", 0, [(0, 12)]),
        ("scan", "linear", 1, []),
        ("allreduce", "ring", 1, []),
    ],
)
def test_what_no_step_writes_is_copied_if_it_is_a_result(
    collective: str, name: str, rank: int, copied: list[tuple[int, int]]
) -> None:
    schedule = mpicoll.schedules.get(collective, name).schedule(rank, 3)
    offsets = tuple(12 * i // schedule.chunks for i in range(schedule.chunks + 1))
    _, (_, _, count, *rest) = compiled_schedule.make_numbers(schedule, (offsets, offsets), 8, True, (0,))
    assert [(start // 8, stop // 8) for _, start, stop, _ in zip(*[iter(rest[: 4 * count])] * 4, strict=True)] == copied


def test_a_local_step_reads_the_input_until_it_is_written() -> None:
    rounds = (Round(recvs=(Recv(1, (1,)),)), Round(then=(Reduce(0, 2), Copy(2, 3))))
    schedule = Schedule("exscan", "made_up", 0, 2, 0, 1, 3, rounds)
    offsets = ((0, 2, 4), (0, 2, 4))
    _, numbers = compiled_schedule.make_numbers(schedule, offsets, 8, True, (0,))
    *_, reduce, copy = zip(*[iter(numbers[3 + 3 + 5 + 4 + 3 :])] * 10, strict=True)
    assert reduce == (1, 1, 0, 0, 16, 2, 1, 0, 16, 1)  # from region 2, the input of region 0
    assert copy == (0, 0, 1, 0, 16, 1, 1, 16, 32, 1)
