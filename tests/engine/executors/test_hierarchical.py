"""Collectives of several nodes: in the nodes, then between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.data import DTYPES, LAYOUTS, LIBRARIES, NON_COMMUTATIVE, OPS, covering
from support.exercise import COUNTED, FORMS, OUTS, REDUCTIONS, ROOTED, allowed, exercise
from support.launch import ROOT

import mpicoll
from mpicoll.buffers.compression import BLOCK
from mpicoll.engine.executors import bound_schedule, compressed, hierarchical
from mpicoll.engine.executors.step_layout import lay_out
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.errors import CommunicationError
from mpicoll.transport.local import Delay, Drop, LocalJob
from mpicoll.transport.local.transport import LocalTransport

COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "gather", "scatter", "alltoall")
SHAPES = ((), (0,), (1,), (3, 0), (4, 3), (13, 2, 5), (130, 9), (2, 2), (1200,))
WORLDS = ((4, 2), (6, 3), (6, 2), (8, 2))
"""Ranks, and ranks per node."""

BY_NODES = "hierarchical"


def _orders(size: int, local: int) -> dict[str, list[int]]:
    """Ways to number the ranks: node after node, the nodes in turn, and neither."""
    nodes = size // local
    return {
        "block": list(range(size)),
        "cyclic": [node * local + rank for rank in range(local) for node in range(nodes)],
        "mixed": [0, *range(size - 1, 0, -1)],
    }


class Orders:
    """Communicators of all ranks, in different orders."""

    def __init__(self) -> None:
        world = mpicoll.world()
        orders = _orders(world.size, world.local_size)
        self._comms = {name: world.group(order) for name, order in orders.items() if name != "block"}

    def __getitem__(self, name: str) -> Any:
        return mpicoll.world() if name == "block" else self._comms[name]

    def free(self) -> None:
        for comm in self._comms.values():
            assert comm is not None
            comm.free()


def _rows(collective: str) -> list[dict[str, Any]]:
    axes: dict[str, Any] = {"dtype": ("float64", *(name for name in DTYPES if name != "float64"))}
    if collective in REDUCTIONS:
        axes["op"] = [op for op in OPS if op not in NON_COMMUTATIVE]
    axes |= {"library": LIBRARIES, "shape": SHAPES, "layout": LAYOUTS, "out": OUTS, "form": FORMS}
    axes["algorithm"] = (BY_NODES,)
    axes["comm"] = ("block", "cyclic", "mixed")
    if collective in ROOTED:
        axes["root"] = ("first", "last", "middle")
    if collective in COUNTED:
        axes["counts"] = ("none",) if collective == "alltoall" else ("none", "equal", "uneven", "zeros")
    return covering(axes, lambda row: allowed(collective, {**row, "algorithm": None}))


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("size", "local"), WORLDS)
def test_rows(collective: str, size: int, local: int) -> None:
    # Each of the worlds has its part of them.
    rows = _rows(collective)[WORLDS.index((size, local)) :: len(WORLDS)]

    def body() -> None:
        comms = Orders()
        for row in rows:
            exercise(collective, row, comms)  # type: ignore[arg-type]
        comms.free()

    mpicoll.run_local(body, size, ranks_per_node=local)


def _lengths(size: int) -> list[int]:
    """Around the numbers of ranks, a line, and the pieces that go through shared memory."""
    around = (0, size, 16 * size, 1 << 12, 1 << 17, 3 << 17)
    return sorted({max(0, n + d) for n in around for d in (-1, 0, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("order", ["block", "cyclic", "mixed"])
@pytest.mark.parametrize(("size", "local"), [*WORLDS[:-1], pytest.param(*WORLDS[-1], marks=pytest.mark.long)])
def test_every_length(size: int, local: int, order: str) -> None:
    """Whole numbers, so that sums are exact."""
    largest = np.arange(_lengths(size)[-1], dtype="float32") % 1000
    all_inputs = [largest * (peer + 1) for peer in range(size)]
    all_totals = sum(all_inputs)

    def body() -> None:
        comms = Orders()
        comm = comms[order]
        rank = comm.rank
        for n in _lengths(size):
            inputs, total = [one[:n] for one in all_inputs], all_totals[:n]
            root = n % size
            given = {"comm": comm, "algorithm": BY_NODES}
            np.testing.assert_array_equal(mpicoll.allreduce(inputs[rank], **given), total)
            reduced = mpicoll.reduce(inputs[rank], root=root, **given)
            assert (reduced is None) == (rank != root)
            assert reduced is None or (reduced == total).all()
            np.testing.assert_array_equal(mpicoll.bcast(inputs[rank], root, **given), inputs[root])
        comms.free()

    mpicoll.run_local(body, size, ranks_per_node=local)


@pytest.mark.parametrize("name", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("order", ["block", "cyclic"])
def test_the_same_bits_everywhere_and_always(name: str, order: str) -> None:
    def body() -> list[bytes]:
        comms = Orders()
        comm = comms[order]
        x = np.random.default_rng(comm.rank).standard_normal(70_001).astype(name)
        given = {"comm": comm, "algorithm": BY_NODES}
        every = [mpicoll.allreduce(x, op, **given).tobytes() for op in ("sum", "avg", "sum", "avg")]
        assert every[:2] == every[2:]
        parts = mpicoll.reduce_scatter(np.resize(x, 70_002), **given)
        assert parts.tobytes() == mpicoll.reduce_scatter(np.resize(x, 70_002), **given).tobytes()
        comms.free()
        return every

    first, *rest = mpicoll.run_local(body, 6, ranks_per_node=2)
    assert rest == [first] * 5


def test_half_precision_is_rounded_once() -> None:
    """A sum of which every part within a node would be rounded away."""

    def body() -> None:
        rank = mpicoll.world().rank
        x = np.full(5000, [2048.0, 1.0, -2048.0, 0.5][rank], np.float16)
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm=BY_NODES), np.full(5000, 1.5, np.float16))

    mpicoll.run_local(body, 4, ranks_per_node=2)


def test_places_of_extremes() -> None:
    def body() -> None:
        world = mpicoll.world()
        every = [np.random.default_rng(rank).integers(-5, 5, 999) for rank in range(world.size)]
        best, where = mpicoll.allreduce((every[world.rank], np.full(999, world.rank)), "minloc", algorithm=BY_NODES)
        np.testing.assert_array_equal(best, np.min(every, 0))
        np.testing.assert_array_equal(where, np.argmin(every, 0))

    mpicoll.run_local(body, 6, ranks_per_node=3)


# --- in pieces


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of a few elements."""
    monkeypatch.setattr(hierarchical, "PIECE", 40)
    monkeypatch.setattr(hierarchical, "_MAX_PIECES", 16)
    monkeypatch.setattr(bound_schedule, "PIECE", 24)
    lay_out.cache_clear()
    yield
    lay_out.cache_clear()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operations between nodes that all ranks have begun."""
    operations: list[Any] = []
    begin = hierarchical.HierarchicalPhases._begin

    def listing(self: Any, operation: Any) -> None:
        operations.append(operation)
        begin(self, operation)

    monkeypatch.setattr(hierarchical.HierarchicalPhases, "_begin", listing)
    return operations


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("order", ["block", "cyclic", "mixed"])
@pytest.mark.parametrize(("size", "local"), WORLDS[:2])
def test_pieces(size: int, local: int, order: str) -> None:
    """Every collective, with blocks that the pieces do not divide."""

    def body() -> None:
        comms = Orders()
        comm = comms[order]
        rank = comm.rank
        to: dict[str, Any] = {"comm": comm, "algorithm": BY_NODES}
        for n in (1, 13, 101):
            every = [np.arange(n * size, dtype="float32") % 91 * (peer + 1) for peer in range(size)]
            x, total, mine = every[rank], sum(every), slice(n * rank, n * (rank + 1))
            whole = np.concatenate([one[n * peer : n * (peer + 1)] for peer, one in enumerate(every)])
            plan = mpicoll.allreduce_init(x, **to)
            for _ in range(2):
                np.testing.assert_array_equal(plan(), total)
            np.testing.assert_array_equal(mpicoll.allreduce(x.astype("float16") * 0 + 1, **to), size)
            for root in (0, size - 1):
                np.testing.assert_array_equal(mpicoll.bcast(x, root, **to), every[root])
                reduced = mpicoll.reduce(x, root=root, **to)
                assert (reduced is None) == (rank != root)
                assert reduced is None or (reduced == total).all()
                gathered = mpicoll.gather(x[mine], root, **to)
                assert gathered is None or (gathered == whole).all()
                part = mpicoll.scatter(x if rank == root else x[mine], root, **to)
                np.testing.assert_array_equal(part, every[root][mine])
            np.testing.assert_array_equal(mpicoll.reduce_scatter(x, **to), total[mine])
            np.testing.assert_array_equal(mpicoll.allgather(x[mine], **to), whole)
            counts = [n + 2 * (peer == 1) for peer in range(size)]
            uneven = mpicoll.allgather(np.full(counts[rank], float(rank)), counts=counts, **to)
            np.testing.assert_array_equal(uneven, np.repeat(np.arange(size), counts))
            np.testing.assert_array_equal(mpicoll.alltoall(x, **to), np.concatenate([one[mine] for one in every]))
        comms.free()

    mpicoll.run_local(body, size, ranks_per_node=local, timeout=20)


@pytest.mark.usefixtures("tiny")
def test_several_pieces_travel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    begin = hierarchical.HierarchicalPhases._begin

    def counting(self: Any, operation: Any) -> None:
        begin(self, operation)
        most.append(len(self._travelling))

    monkeypatch.setattr(hierarchical.HierarchicalPhases, "_begin", counting)
    mpicoll.run_local(lambda: mpicoll.allreduce(np.ones(400), algorithm=BY_NODES), 4, ranks_per_node=2)
    assert len(most) == 4 * hierarchical._MAX_PIECES
    assert max(most) == hierarchical._IN_FLIGHT + 1


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("nodes", "name"), [(2, "recursive_doubling"), (3, "ring"), (4, "halving_doubling")])
def test_pieces_travel_in_as_few_rounds_as_links_allow(begun: list[Any], nodes: int, name: str) -> None:
    x = np.arange(2000.0)

    def body() -> None:
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm=BY_NODES), 2 * nodes * x)

    mpicoll.run_local(body, 2 * nodes, ranks_per_node=2)
    assert {one._schedule.algorithm for one in begun} == {name}


@pytest.mark.usefixtures("tiny")
def test_rules_of_a_block_hold_for_phases_that_another_thread_makes(begun: list[Any]) -> None:
    x = np.arange(400.0)

    def body() -> None:
        with mpicoll.algorithms(allreduce=f"0-inf:{BY_NODES},0-inf:ring"):
            request = mpicoll.iallreduce(x)
        np.testing.assert_array_equal(request.wait(20), 4 * x)

    mpicoll.run_local(body, 4, ranks_per_node=2)
    assert {one._schedule.algorithm for one in begun} == {"ring"}


def test_a_piece_of_a_broadcast_is_one_message_between_nodes(begun: list[Any]) -> None:
    """Not one in segments, of which only two could be under way."""
    x = np.arange(1 << 20)

    def body() -> None:
        np.testing.assert_array_equal(mpicoll.bcast(x.copy(), algorithm=BY_NODES), x)

    mpicoll.run_local(body, 4, ranks_per_node=2)
    assert [len(one._schedule.rounds) for one in begun] == [1] * 4 * (x.nbytes // 4 // hierarchical.PIECE)


@pytest.mark.usefixtures("tiny")
def test_a_failure_while_pieces_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan makes them again."""
    failed: set[int] = set()
    add = hierarchical._PHASES["allreduce"]

    def failing(phases: Any, piece: int) -> None:
        if piece == 3 and phases.comm.rank not in failed:
            failed.add(phases.comm.rank)
            raise MemoryError("no room for piece 3")
        add(phases, piece)

    monkeypatch.setitem(hierarchical._PHASES, "allreduce", failing)

    def body() -> None:
        plan = mpicoll.allreduce_init(np.arange(400.0), algorithm=BY_NODES)
        with pytest.raises(MemoryError, match="piece 3"):
            plan()
        for _ in range(2):
            np.testing.assert_array_equal(plan(), 4 * np.arange(400.0))

    mpicoll.run_local(body, 4, ranks_per_node=2)
    assert failed == {0, 1, 2, 3}


@pytest.mark.usefixtures("tiny")
def test_a_lost_piece_is_no_hang() -> None:
    """The error says in which piece and which round; the next call is not disturbed."""
    together = threading.Barrier(4)

    def body() -> tuple[str, float]:
        text = ""
        try:
            mpicoll.allreduce(np.ones(200), algorithm=BY_NODES)
        except CommunicationError as error:
            text = str(error)
        together.wait(20)
        return text, float(mpicoll.allreduce(np.ones(200), algorithm=BY_NODES).sum())

    ends = mpicoll.run_local(body, 4, ranks_per_node=2, faults=[Drop(0, 2, 9, 1)], timeout=3)
    assert any("allreduce/recursive_doubling on rank" in text for text, _ in ends)
    assert [total for _, total in ends] == [800.0] * 4


@pytest.mark.usefixtures("tiny")
@pytest.mark.extension
def test_the_piece_is_part_of_the_position() -> None:
    seen: list[str] = []

    def body() -> None:
        world = mpicoll.world()
        executing = world._core.queue.executing

        def add(a: Any, b: Any) -> Any:
            seen.append(executing.position(world._core.members).where)
            return a + b

        op = mpicoll.Op(add, commutative=True, elementwise=True)
        mpicoll.allreduce(np.ones(400), op, algorithm=BY_NODES)

    mpicoll.run_local(body, 4, ranks_per_node=2)
    assert any(text.startswith("piece 3 of 16, phase 1 within the node") for text in seen), seen
    assert any(text.startswith("piece 2 of 16, phase 2, between the nodes") for text in seen), seen


# --- what crosses the links

NBYTES = 12_000


def _calls(comm: Any) -> dict[str, tuple[Callable[[], Any], str, float]]:
    """For 3 nodes of 2 ranks: a call, the algorithm that moves least between nodes, and the bytes that all links
    together must carry then, in parts of the vector or of all blocks."""
    x, root = np.zeros(NBYTES, np.uint8), 1
    part = x[: NBYTES // 6]
    to: dict[str, Any] = {"comm": comm, "algorithm": BY_NODES}
    return {
        "allreduce": (lambda: mpicoll.allreduce(x, "bor", **to), "ring", 4),
        "reduce": (lambda: mpicoll.reduce(x, "bor", root, **to), "linear", 2),
        "bcast": (lambda: mpicoll.bcast(x, root, **to), "binomial", 2),
        "reduce_scatter": (lambda: mpicoll.reduce_scatter(x, "bor", **to), "pairwise", 2),
        "allgather": (lambda: mpicoll.allgather(part, **to), "ring", 2),
        "gather": (lambda: mpicoll.gather(part, root, **to), "linear", 2 / 3),
        "scatter": (lambda: mpicoll.scatter(x if comm.rank == root else part, root, **to), "linear", 2 / 3),
        "alltoall": (lambda: mpicoll.alltoall(x, **to), "pairwise", 4),
    }


@pytest.mark.parametrize("order", ["block", "cyclic", "mixed"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.extension
def test_no_byte_crosses_more_often_than_it_has_to(
    monkeypatch: pytest.MonkeyPatch, collective: str, order: str
) -> None:
    sent: list[tuple[bool, int]] = []
    deliver = LocalJob.deliver

    def counting(self: LocalJob, context: int, source: int, dest: int, message: Any) -> None:
        sent.append((source // 2 != dest // 2, len(message.data)))
        deliver(self, context, source, dest, message)

    monkeypatch.setattr(LocalJob, "deliver", counting)

    def body() -> float:
        comms = Orders()
        call, between, least = _calls(comms[order])[collective]
        # Shared memory is refused between nodes.
        rules = dict.fromkeys(COLLECTIVES, "shm_pipelined") | {collective: f"0-inf:shm_pipelined,0-inf:{between}"}
        with mpicoll.algorithms(**rules):
            call()
        comms.free()
        return least

    least = mpicoll.run_local(body, 6, ranks_per_node=2)[0]
    assert all(crosses for crosses, _ in sent)
    assert sum(nbytes for _, nbytes in sent) == least * NBYTES


# --- who takes it


def test_forced_for_a_block_it_leaves_the_phases_their_own_choice() -> None:
    def body() -> None:
        x = np.full(3000, mpicoll.world().rank + 1.0)
        with mpicoll.algorithms(allreduce=BY_NODES):
            assert mpicoll.explain("allreduce", x.nbytes).name == BY_NODES
            np.testing.assert_array_equal(mpicoll.allreduce(x), np.full(3000, 10.0))
            np.testing.assert_array_equal(mpicoll.iallreduce(x).wait(), np.full(3000, 10.0))

    mpicoll.run_local(body, 4, ranks_per_node=2)


@pytest.mark.parametrize(
    ("size", "local", "why"),
    [
        (4, 4, "the ranks are on one node"),
        (4, 1, "each node has a single rank"),
        (5, 2, "the nodes differ in their number of ranks"),
        (1, 1, "the ranks are on one node"),
    ],
)
def test_shapes_that_it_refuses(size: int, local: int, why: str) -> None:
    def body() -> None:
        for collective in ("allreduce", "allgather"):
            with pytest.raises(mpicoll.AlgorithmError, match=why):
                getattr(mpicoll, collective)(np.ones(3), algorithm=BY_NODES)

    mpicoll.run_local(body, size, ranks_per_node=local)


def test_requests_that_it_refuses() -> None:
    def body() -> None:
        world = mpicoll.world()
        x, counts = np.ones(4), [1] * world.size
        with pytest.raises(mpicoll.AlgorithmError, match="does not commute"):
            mpicoll.allreduce(x, mpicoll.Op(lambda a, b: a, elementwise=True), algorithm=BY_NODES)
        with pytest.raises(mpicoll.AlgorithmError, match="not elementwise"):
            mpicoll.allreduce(x, mpicoll.Op(lambda a, b: a + b, commutative=True), algorithm=BY_NODES)
        with pytest.raises(mpicoll.AlgorithmError, match="sizes of each other's blocks"):
            mpicoll.alltoall(x, counts=(counts, counts), algorithm=BY_NODES)
        with pytest.raises(mpicoll.AlgorithmError, match="barrier has no algorithm"):
            mpicoll.barrier(algorithm=BY_NODES)
        with pytest.raises(mpicoll.AlgorithmError, match="'hierarchical/2': hierarchical has no pieces"):
            mpicoll.allreduce(x, algorithm=f"{BY_NODES}/2")
        # In a block, the next best is taken.
        with mpicoll.algorithms(allreduce=BY_NODES):
            first = mpicoll.allreduce(x + world.rank, lambda a, b: a)
        np.testing.assert_array_equal(first, x)

    mpicoll.run_local(body, 4, ranks_per_node=2)


@pytest.mark.parametrize(
    ("executor", "count", "options"),
    [(hierarchical, 101, {"algorithm": BY_NODES}), (compressed, 2 * BLOCK + 1, {"compression": "int8"})],
    ids=["hierarchical", "compressed"],
)
def test_phases_know_of_defects_of_unequal_blocks(
    monkeypatch: pytest.MonkeyPatch, executor: ModuleType, count: int, options: dict[str, Any]
) -> None:
    """MPI may have one that the collective itself does not have."""
    queries: list[SelectionQuery] = []

    def find_defect(transport: Any, collective: str, op: str = "", dtype: Any = None, *, uneven: bool = False) -> Any:
        return "unequal" if uneven and collective == "allgather" else None

    def keep(*args: Any, **facts: Any) -> SelectionQuery:
        queries.append(SelectionQuery(*args, **facts))
        return queries[-1]

    monkeypatch.setattr(LocalTransport, "find_native_defect", find_defect)
    monkeypatch.setattr(executor, "SelectionQuery", keep)
    mpicoll.run_local(lambda: mpicoll.allreduce(np.ones(count, np.float32), **options), 4, ranks_per_node=2)
    assert any(one.collective == "allgather" and one.uneven for one in queries)
    for one in queries:
        assert (one.native == "unequal") == (one.collective == "allgather" and one.uneven)


def test_communicators_are_made_once_and_freed() -> None:
    def body() -> None:
        comm = mpicoll.world().duplicate()
        mpicoll.allreduce(np.ones(9), comm=comm, algorithm=BY_NODES)
        levels = comm._core._levels
        assert levels is not None
        mpicoll.bcast(np.ones(9), comm=comm, algorithm=BY_NODES)
        assert comm._core._levels is levels
        assert [level.size for level in levels] == [3, 2]
        comm.free()
        assert all(level.freed for level in levels)

    mpicoll.run_local(body, 6, ranks_per_node=3)


# --- when something is amiss


@pytest.mark.slow
def test_without_shared_memory_messages_do_it_all() -> None:
    """With faults in messages, the ranks of this transport share no memory; these only come late."""

    def body() -> None:
        comms = Orders()
        for collective in COLLECTIVES:
            for row in _rows(collective)[::7]:
                exercise(collective, row, comms)  # type: ignore[arg-type]
        comms.free()

    mpicoll.run_local(body, 4, ranks_per_node=2, faults=[Delay(1e-4)])


def test_a_lost_message_is_no_hang() -> None:
    def body() -> None:
        mpicoll.allreduce(np.ones(5), algorithm=BY_NODES)

    with pytest.raises(CommunicationError):
        mpicoll.run_local(body, 4, ranks_per_node=2, faults=[Drop(0, 2, 0, 99)], timeout=1)


@pytest.mark.extension
def test_after_a_failure_on_one_rank_all_are_in_step() -> None:
    """Its node learns of it through the memory that it shares, the other one by messages without data."""

    def body() -> tuple[str, float]:
        world = mpicoll.world()

        def add(a: Any, b: Any) -> Any:
            if failing and world.rank == 1:
                raise ValueError("no sum today")
            return a + b

        failing = True
        raised = ""
        plan = mpicoll.allreduce_init(
            np.ones(1000), mpicoll.Op(add, commutative=True, elementwise=True), algorithm=BY_NODES
        )
        try:
            plan()
        except (CommunicationError, ValueError) as error:
            raised = type(error).__name__
        together.wait(20)
        failing = False
        return raised, float(plan().sum()) + float(mpicoll.allreduce(np.ones(1000), algorithm=BY_NODES).sum())

    together = threading.Barrier(4)
    ends = mpicoll.run_local(body, 4, ranks_per_node=2, timeout=20)
    error = "CommunicationError"
    assert [raised for raised, _ in ends] == [error, "ValueError", error, error]
    assert [total for _, total in ends] == [8000.0] * 4


# --- with an MPI library, on hosts that this machine plays

_PROGRAM = """
import numpy as np, mpicoll
world = mpicoll.world()
rank, size = world.rank, world.size
assert world.nodes == (0, 0, 1, 1), world.nodes
to = {"algorithm": "hierarchical"}
cyclic = world.group([0, 2, 1, 3])
for comm in (world, cyclic):
    to["comm"] = comm
    for n in (0, 1, 10, 70_000):
        every = [np.arange(n * size, dtype="float32") % 977 * (peer + 1) for peer in range(size)]
        x, total = every[comm.rank], sum(every)
        mine = slice(n * comm.rank, n * (comm.rank + 1))
        for op, name, want in (("sum", "float32", total), ("max", "float64", every[-1]), ("sum", "float16", None)):
            values = x.astype(name) if want is not None else np.ones(len(x), name)
            want = np.full(len(x), size) if want is None else want
            assert (mpicoll.allreduce(values, op, **to) == want).all()
            assert (mpicoll.reduce_scatter(values, op, **to) == want[mine]).all()
            reduced = mpicoll.reduce(values, op, 2, **to)
            assert comm.rank != 2 or (reduced == want).all()
        assert (mpicoll.bcast(x, 3, **to) == every[3]).all()
        part = x[mine]
        whole = np.concatenate([one[n * peer : n * (peer + 1)] for peer, one in enumerate(every)])
        assert (mpicoll.allgather(part, **to) == whole).all()
        gathered = mpicoll.gather(part, 1, **to)
        assert comm.rank != 1 or (gathered == whole).all()
        assert (mpicoll.scatter(x if comm.rank == 1 else part, 1, **to) == every[1][mine]).all()
        assert (mpicoll.alltoall(x, **to) == np.concatenate([one[mine] for one in every])).all()
cyclic.free()
print("rank done")
"""


def _no_hosts() -> str:
    """Why this machine can't play hosts."""
    if os.getuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if not (Path(sys.executable).parent / "mpirun").exists():
        return "needs the mpirun of this environment"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True, check=False)
    return f"can't make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.slow
def test_on_two_hosts(tmp_path: Path) -> None:
    if why := _no_hosts():
        pytest.skip(why)
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "PMI_", "OMPI_COMM_"))}
    done = subprocess.run(
        [
            "timeout",
            "--kill-after=5",
            "60",
            sys.executable,
            ROOT / "ci" / "hosts.py",
            "2",
            "2",
            sys.executable,
            program,
        ],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("rank done") == 4, done.stdout
