"""Collectives on device memory that ranks reach directly: against the oracle, with memory that comes and goes, and when
ranks fail. On the fake CUDA, in threads (which reach each other's memory as it is) and in processes (which open it)."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda
from support.data import expected, make_op, numbers, random
from support.ranks import Ranks

import mpicoll
from mpicoll.buffers import dtypes, ops
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import DeviceArray, Export, view
from mpicoll.buffers.recognise import recognise
from mpicoll.engine.executors import cuda_ipc, peer_memory, stream_order
from mpicoll.engine.executors.collective_spec import CollectiveSpec
from mpicoll.engine.executors.cuda_ipc import COLLECTIVES
from mpicoll.engine.executors.peer_memory import PeerMemory
from mpicoll.errors import CommunicationError, DeviceError

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.extension]

MOVES = ("bcast", "allgather", "gather", "scatter", "alltoall")
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")


SHARING: dict[str, Callable[[int], list[str]]] = {
    "nobody": lambda size: [str(rank) for rank in range(size)],
    "all": lambda size: ["one"] * size,
    "in turns": lambda size: [str(rank % 2) for rank in range(size)],
    "all, by streams": lambda size: ["one"] * size,
    "in turns, by streams": lambda size: [str(rank % 2) for rank in range(size)],
}
"""The names of the ranks' devices: ranks work for those that have the same one. Streams order some of them."""

SHARED = pytest.mark.parametrize("sharing", SHARING)


class Node:
    """This rank, its device, and what it needs of the others."""

    def __init__(self, coin: Any = None, devices: int = 1, sharing: str = "nobody") -> None:
        world = mpicoll.world()
        arena = world._core.arena()
        assert arena is not None
        self.transport, self.arena, self.rank, self.size = world._core.transport, arena, world.rank, world.size
        self.device: Any = Own(_device(world.rank % devices))
        self.peers = PeerMemory(world._core.transport, arena, self.device, SHARING[sharing](world.size))
        self._order: Any = None
        if sharing.endswith("by streams"):
            self._order = stream_order.create(world._core, arena, self.device, self.peers.workers)
            assert isinstance(self._order, stream_order.StreamOrder), self._order
        self._coin = coin

    def empty(self, count: int, dtype: Any) -> DeviceArray:
        """Memory that others can open, unless the coin says otherwise."""
        import cupy

        dtype = np.dtype(dtype)
        if self._coin is None or self._coin.random() < 0.5:
            array: DeviceArray = self.device.empty(count, dtype)
            return array
        with self.device.working():
            memory = cupy.cuda.malloc_async(max(count * dtype.itemsize, 1))
        return view(_device(0), memory.ptr, (count,), dtype, owner=memory)

    def put(self, values: np.ndarray) -> DeviceArray:
        array = self.empty(values.size, values.dtype)
        self.fill(array, values)
        return array

    def fill(self, array: DeviceArray, values: np.ndarray) -> None:
        with self.device.working():
            self.device.copy(array, values)

    def get(self, array: DeviceArray) -> np.ndarray:
        values = np.empty(array.size, array.dtype)
        with self.device.working():
            self.device.copy(values, array)
        return values

    def run(self, spec: CollectiveSpec, source: Any, target: Any, load: Callable[[], None] | None = None) -> None:
        order = self._order if spec.fold is None or spec.fold.fused is not None else None
        body, steps = cuda_ipc.bind(self.arena, self.peers, spec, order=order)
        if order is not None:
            order.carry_out((), self.arena.run, body, steps, source, target, load, spec.signature).wait()
            return
        with self.device.working():
            self.arena.run(body, steps, source, target, load, spec.signature, self.device.synchronize)


class Own:
    """A device as one rank sees it, which may share it with ranks in other threads: what is set here is its alone."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def _device(index: int) -> Any:
    from mpicoll.buffers.cuda.device import cuda_device

    return cuda_device(index)


class Case:
    """A collective on blocks of `counts` elements (the vector alone: counts[0])."""

    def __init__(self, node: Node, collective: str, counts: Sequence[int], root: int = 0) -> None:
        self.node, self.collective, self.counts, self.root = node, collective, tuple(counts), root
        self.ends = [0, *accumulate(counts)]

    def source_size(self, rank: int) -> int | None:
        if self.collective in ("allgather", "gather"):
            return self.counts[rank]
        if self.collective in ("bcast", "scatter") and rank != self.root:
            return None
        return self.counts[0] if self.collective in ("allreduce", "reduce", "bcast") else self.ends[-1]

    def target_size(self) -> int | None:
        if self.collective in ("reduce", "gather") and self.node.rank != self.root:
            return None
        if self.collective in ("allgather", "gather", "alltoall"):
            return self.ends[-1]
        return self.counts[0 if self.collective in ("allreduce", "reduce", "bcast") else self.node.rank]

    def block(self) -> tuple[int, int]:
        """The elements of a combined vector that this rank gets."""
        rank = self.node.rank
        return self.ends[rank : rank + 2] if self.collective == "reduce_scatter" else (0, self.counts[0])

    def moved(self, inputs: Sequence[np.ndarray | None]) -> np.ndarray:
        low, high = self.ends[self.node.rank : self.node.rank + 2]
        given = [one for one in inputs if one is not None]
        if self.collective == "bcast":
            return given[0]
        if self.collective == "scatter":
            return given[0][low:high]
        if self.collective == "alltoall":
            return np.concatenate([one[low:high] for one in given])
        return np.concatenate(given)

    def spec(self, dtype: np.dtype[Any], fold: ops.Fold | None = None) -> CollectiveSpec:
        return CollectiveSpec(self.collective, "ipc", dtype, self.counts, self.root, fold)


def _fold(op: Any, array: np.ndarray, name: str = "", wrap: Callable[[Any], Any] = lambda array: array) -> ops.Fold:
    dtype = dtypes.BFLOAT16_WORDS if name == "bfloat16" else dtypes.of_numpy(array.dtype)
    reduction = ops.reduction("test", op, dtype, wrap, array.shape)
    return ops.Fold(reduction, Buffer(array, array, dtype, recognise("test", np.ones(1)).library))


def _counts(n: int, size: int, kind: str) -> list[int]:
    if kind == "even":
        return [n] * size
    return [(n, 0, 2 * n + 1, n // 2)[(rank + n) % 4] for rank in range(size)]


def _kinds(collective: str) -> tuple[str, ...]:
    return ("even", "uneven") if collective in ("reduce_scatter", "allgather", "gather", "scatter") else ("even",)


def _try_moves(node: Node, collective: str, n: int, kind: str, root: int, turns: int = 2) -> None:
    case = Case(node, collective, _counts(n, node.size, kind), root)
    size, target_size = case.source_size(node.rank), case.target_size()
    source = None if size is None else node.empty(size, np.int32)
    target = None if target_size is None else node.empty(target_size, np.int32)
    spec = case.spec(np.dtype(np.int32))
    for turn in range(turns):
        inputs = [
            None if (size := case.source_size(rank)) is None else random(turn, n, rank).integers(0, 99, size, np.int32)
            for rank in range(node.size)
        ]
        if source is not None:
            node.fill(source, inputs[node.rank])
        node.run(spec, source, target)
        if target is not None:
            np.testing.assert_array_equal(node.get(target), case.moved(inputs), str((collective, n, kind, root, turn)))
        if source is not None:
            np.testing.assert_array_equal(node.get(source), inputs[node.rank])


@pytest.mark.parametrize("collective", MOVES)
@SHARED
def test_moves(several: Ranks, collective: str, sharing: str) -> None:
    def body() -> None:
        node = Node(sharing=sharing)
        for n in (0, 1, 5, 64, 1000):
            for kind in _kinds(collective):
                _try_moves(node, collective, n, kind, n % node.size)

    several(body)


def _operands(case: Case, name: str, op: str, *seed: object) -> list[np.ndarray]:
    sizes = [case.source_size(rank) or 0 for rank in range(case.node.size)]
    return [numbers(random(name, op, rank, *seed), name, (size,), op) for rank, size in enumerate(sizes)]


def _stored(values: np.ndarray) -> np.ndarray:
    """bfloat16 as numpy sees that of libraries which it doesn't know."""
    return values.view(np.uint16) if values.dtype == ml_dtypes.bfloat16 else values


def _try_reduction(node: Node, case: Case, name: str, op: str, *, in_place: bool = False, seed: object = 0) -> None:
    operands = _operands(case, name, op, seed)
    stored = _stored(operands[node.rank])
    user = mpicoll.Op(_first, elementwise=True) if op == "user_first" else make_op(op, node.rank, name)
    fold = _fold(user, stored, name, _as_cupy)
    source = node.put(stored)
    size = case.target_size()
    target = source if in_place and size is not None else None if size is None else node.empty(size, stored.dtype)
    node.run(case.spec(stored.dtype, fold), source, target)
    where = (case.collective, case.counts, case.root, name, op, in_place)
    if target is not None:
        got = node.get(target).view(operands[0].dtype)
        expected(op, operands, name).rows(*case.block()).check(got, where)
    if target is not source:
        assert node.get(source).tobytes() == stored.tobytes(), where


def _as_cupy(array: Any) -> Any:
    from mpicoll.buffers.cuda.recognise import CupyLibrary

    return CupyLibrary().wrap(array)


def _first(a: Any, b: Any) -> Any:
    """Of each pair the first that is not zero, on the device."""
    import cupy

    taken = cupy.empty(a.shape, a.dtype)
    cupy.not_equal(a, 0, out=taken, casting="unsafe")
    return a + b - taken * b


KINDS = (
    ("float32", "sum"),
    ("float64", "prod"),
    ("int8", "min"),
    ("int64", "bxor"),
    ("bool", "lor"),
    ("float16", "sum"),
    ("bfloat16", "avg"),
    ("complex64", "sum"),
)
"""Not all that there is: kernels have tests of their own."""


@pytest.mark.parametrize("collective", REDUCTIONS)
@SHARED
def test_reductions(several: Ranks, collective: str, sharing: str) -> None:
    def body() -> None:
        node = Node(sharing=sharing)
        for number, (name, op) in enumerate(KINDS):
            n = (1000, 37, 0, 1, 64)[number % 5]
            for kind in _kinds(collective):
                case = Case(node, collective, _counts(n, node.size, kind), number % node.size)
                _try_reduction(node, case, name, op)

    several(body)


@pytest.mark.parametrize("collective", REDUCTIONS)
@SHARED
def test_functions_of_the_caller(several: Ranks, collective: str, sharing: str) -> None:
    """In the order of ranks: what is tried does not commute."""

    def body() -> None:
        node = Node(sharing=sharing)
        for n in (0, 1, 50, 1000):
            for kind in _kinds(collective):
                case = Case(node, collective, _counts(n, node.size, kind), n % node.size)
                _try_reduction(node, case, "int32", "user_first")

    several(body)


@pytest.mark.parametrize("op", ["sum", "user_first"])
@SHARED
def test_in_place(several: Ranks, op: str, sharing: str) -> None:
    """Where the result goes to the input's own memory, on all ranks or on some of them."""

    def body() -> None:
        node = Node(sharing=sharing)
        for who in range(2**node.size):
            in_place = bool(who >> node.rank & 1)
            for collective in ("allreduce", "reduce"):
                case = Case(node, collective, [333] * node.size, who % node.size)
                _try_reduction(node, case, "int32", op, in_place=in_place)

    several(body)


@SHARED
def test_results_have_the_same_bits_on_all_ranks(several: Ranks, sharing: str) -> None:
    def body() -> None:
        node = Node(sharing=sharing)
        for name in ("float32", "bfloat16"):
            case = Case(node, "allreduce", [1003] * node.size)
            values = _stored(_operands(case, name, "sum")[node.rank])
            target = node.device.empty(values.size, values.dtype)
            node.run(case.spec(values.dtype, _fold("sum", values, name)), node.put(values), target)
            assert len(set(node.transport.allgather_text(node.get(target).tobytes().hex()))) == 1

    several(body)


# --- memory that comes and goes


class Memory:
    """Allocations of the device that are made and freed at once, so that their addresses come again. Each shares its
    block of the system with no other one, which is then freed with it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._made: list[int] = []
        self.addresses: list[int] = []

    def make(self, values: np.ndarray) -> DeviceArray:
        import cupy

        with self._node.device.working():
            address = cupy.cuda.runtime.malloc(max(values.nbytes, 1 << 20))
        self._made.append(address)
        self.addresses.append(address)
        array = view(self._node.device, address, values.shape, values.dtype)
        self._node.fill(array, values)
        return array

    def free(self) -> None:
        import cupy

        with self._node.device.working():
            for address in self._made:
                cupy.cuda.runtime.free(address)
        self._made.clear()


def _sum(node: Node, source: DeviceArray, target: DeviceArray, values: Sequence[np.ndarray]) -> None:
    """All-reduce, and compare."""
    case = Case(node, "allreduce", [source.size] * node.size)
    node.run(case.spec(source.dtype, _fold("sum", values[node.rank])), source, target)
    np.testing.assert_array_equal(node.get(target), np.sum(values, 0, values[0].dtype))


def _values(size: int, count: int, *seed: object) -> list[np.ndarray]:
    return [random(*seed, rank).integers(-99, 99, count, np.int32) for rank in range(size)]


def test_memory_that_is_freed_is_not_taken_for_what_comes_after_it(several: Ranks) -> None:
    """New memory at the same address: what others have opened there is closed first."""

    def body() -> None:
        node = Node()
        memory = Memory(node)
        for turn in range(12):
            # Not all ranks have new memory in each turn.
            if turn % (node.rank + 1) == 0:
                memory.free()
                values = _values(node.size, 700, turn)
                source, target = memory.make(values[node.rank]), memory.make(np.zeros(700, np.int32))
            values = _values(node.size, 700, turn)
            node.fill(source, values[node.rank])
            _sum(node, source, target, values)
        assert "True" in node.transport.allgather_text(str(len(set(memory.addresses)) < len(memory.addresses)))
        memory.free()

    several(body)


def test_what_another_communicator_has_opened_gives_way(several: Ranks) -> None:
    """Each communicator learns of allocations by itself, but a process can't keep open what has been freed."""

    def body() -> None:
        one, other = Node(), Node()
        memory = Memory(one)
        for turn in range(6):
            node = (one, other)[turn % 2]
            values = _values(node.size, 900, turn)
            source, target = memory.make(values[node.rank]), memory.make(np.zeros(900, np.int32))
            _sum(node, source, target, values)
            memory.free()
        assert "True" in one.transport.allgather_text(str(len(set(memory.addresses)) < len(memory.addresses)))

    several(body)


def test_communicators_keep_the_same_memory_open(several: Ranks) -> None:
    def body() -> None:
        nodes = Node(), Node()
        opened: list[int] = []
        for node in nodes:
            reach = node.device.reach
            node.device.reach = lambda export, reach=reach: opened.append(export.number) or reach(export)
        whole = nodes[0].put(np.zeros(300, np.int32))
        for turn in range(6):
            values = _values(nodes[0].size, 300, turn)
            nodes[0].fill(whole, values[nodes[0].rank])
            _sum(nodes[turn % 2], whole, whole, values)
        assert len(opened) == 2 * (nodes[0].size - 1)

    several(body)


def test_what_cannot_be_opened_beside_something_else_is_opened_without_it(several: Ranks) -> None:
    """The system opens more than an allocation, so it may refuse where no other one is in the way."""

    def body() -> None:
        node = Node()
        memory, reach = Memory(node), node.device.reach
        refused: list[int] = []

        def alone(export: Export) -> DeviceArray:
            opened = [one for known in node.peers._others for one in known.values() if one.memory is not None]
            if any(one.export.process == export.process for one in opened):
                refused.append(export.number)
                raise DeviceError("what lay at this address before is still open")
            return reach(export)

        node.device.reach = alone
        for turn in range(4):
            # As the second of an operation, it meets the first one of the same rank: so there is only one.
            values = _values(node.size, 300, turn)
            source = memory.make(values[node.rank])
            _sum(node, source, source, values)
        # Threads share what is open, so one of them may meet it for all.
        assert "True" in node.transport.allgather_text(str(bool(refused)))
        memory.free()

    several(body)


def test_what_an_operation_uses_is_not_closed_meanwhile(several: Ranks) -> None:
    """Another thread may close anything, to open something else, while the device works with it."""

    def body() -> None:
        node = Node()
        values = _values(node.size, 300)
        source, target = node.put(values[node.rank]), node.put(np.zeros(300, np.int32))
        bind_copy, synchronize = node.device.bind_copy, node.device.synchronize
        used: list[weakref.ref[Any]] = []
        alive: list[bool] = []

        def closing(into: Any, what: Any) -> Callable[[], None]:
            copy = bind_copy(into, what)
            used.append(weakref.ref(what))

            def run() -> None:
                copy()
                for known in node.peers._others:
                    for one in list(known.values()):
                        node.peers.close(one.export.process, lambda export: True)

            return run

        def looking() -> None:
            alive[:] = [one() is not None for one in used]
            synchronize()

        node.device.bind_copy, node.device.synchronize = closing, looking
        node.run(Case(node, "bcast", [300]).spec(source.dtype), source if node.rank == 0 else None, target)
        assert alive == [True]
        assert all(one() is None for one in used)
        node.device.bind_copy, node.device.synchronize = bind_copy, synchronize
        np.testing.assert_array_equal(node.get(target), values[0])

    several(body)


def test_what_is_bound_is_bound_again_when_allocations_are_closed(several: Ranks) -> None:
    """A collective that is repeated keeps its work on the device, and allocations open by it, until they close."""

    def body() -> None:
        node = Node()
        spec = Case(node, "allreduce", [300] * node.size).spec(np.dtype(np.int32), _fold("sum", np.zeros(1, np.int32)))
        program = cuda_ipc.bind(node.arena, node.peers, spec, repeated=True)
        bind_fold, bound = node.device.bind_fold, Counter[str]()

        def counting(*arguments: Any) -> Any:
            bound["folds"] += 1
            return bind_fold(*arguments)

        node.device.bind_fold = counting
        source, target = (node.put(np.zeros(300, np.int32)) for _ in range(2))
        for turn in range(6):
            if turn == 3:
                node.transport.allgather_text("")
                for known in node.peers._others:
                    for one in list(known.values()):
                        node.peers.close(one.export.process, lambda export: True)
                        assert one.memory is None
            values = _values(node.size, 300, turn)
            node.fill(source, values[node.rank])
            with node.device.working():
                node.arena.run(*program, source, target, None, spec.signature, node.device.synchronize)
            np.testing.assert_array_equal(node.get(target), np.sum(values, 0, np.int32))
        assert bound["folds"] == 2

    several(body)


def test_others_let_go_of_what_was_freed(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        memory, kept = Memory(node), node.put(np.zeros(50, np.int32))
        for turn in range(5):
            values = _values(node.size, 50, turn)
            _sum(node, memory.make(values[node.rank]), kept, values)
            memory.free()
        # What is kept; and of what was freed the last, of which nobody has said yet that it has gone.
        assert all(len(known) <= 2 for rank, known in enumerate(node.peers._others) if rank != node.rank)
        assert len(node.peers._published) <= 2

    several(body)


@pytest.mark.mpi
def test_what_was_opened_is_closed_with_the_communicator(cuda: ModuleType) -> None:
    if not fake_cuda.is_fake(cuda) or mpicoll.world().size < 2:
        pytest.skip("of the fake CUDA, and two ranks")
    node = Node()
    values = _values(node.size, 200)
    for _ in range(3):
        _sum(node, node.put(values[node.rank]), node.put(values[0]), values)
    opened = fake_cuda.fakecuda.memory._opened
    assert opened
    node.transport.allgather_text("")
    del node
    gc.collect()
    assert not opened


@pytest.mark.mpi
def test_what_is_open_is_not_opened_again(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another communicator, or for another part of the allocation."""
    if not fake_cuda.is_fake(cuda) or mpicoll.world().size < 2:
        pytest.skip("of the fake CUDA, and two ranks")
    monkeypatch.setenv("FAKECUDA_OPEN_ONCE", "1")
    nodes = Node(), Node()
    assert [node.peers.check() for node in nodes] == [None, None]
    whole = nodes[0].put(np.zeros(1000, np.int32))
    for turn in range(4):
        values = _values(nodes[0].size, 300, turn)
        source, target = whole[100 * turn : 100 * turn + 300], whole[650:950]
        nodes[0].fill(source, values[nodes[0].rank])
        _sum(nodes[turn % 2], source, target, values)
        nodes[0].transport.allgather_text("")
    del nodes
    gc.collect()


def test_few_allocations_are_kept_open(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not used for longest give way, and are opened again when they are used again."""
    monkeypatch.setattr(peer_memory, "MAX_OPEN", 2)

    def body() -> None:
        node = Node()
        memory = Memory(node)
        made = [memory.make(np.zeros(100, np.int32)) for _ in range(5)]
        for turn in range(20):
            values = _values(node.size, 100, turn)
            own = random(turn, "which", node.rank)
            source, target = (made[i] for i in own.choice(5, 2, replace=False))
            node.fill(source, values[node.rank])
            _sum(node, source, target, values)
            assert all(len(known) <= 2 for known in node.peers._others)
        memory.free()

    several(body)


def test_announced_once(several: Ranks) -> None:
    """Handles are exchanged when memory is used first, not when it is used again or another part of it is."""

    def body() -> None:
        node = Node()
        announced: list[int] = []
        original = node.peers.publish_exports
        node.peers.publish_exports = lambda: announced.append(turn) or original()  # type: ignore[method-assign]
        whole = node.put(np.zeros(1000, np.int32))
        for turn in range(4):
            values = _values(node.size, 100, turn)
            part = whole[turn * 200 : turn * 200 + 100]
            node.fill(part, values[node.rank])
            _sum(node, part, part, values)
        assert announced == [0]

    several(body)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_memory_that_others_cannot_open(several: Ranks, collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory stands in for it, whatever the other ranks have."""
    monkeypatch.setattr(peer_memory, "MAX_SUBSTITUTE_BYTES", 4096)

    def body() -> None:
        node = Node(random(collective, mpicoll.world().rank))
        for turn in range(12):
            n, root = (100, 1, 2000)[turn % 3], turn % node.size
            if collective in MOVES:
                _try_moves(node, collective, n, "even", root)
                continue
            case = Case(node, collective, [n] * node.size, root)
            for op in ("sum", "user_first"):
                _try_reduction(node, case, "int32", op, in_place=turn % 2 == 0 and collective != "reduce_scatter")
        assert all(memory.nbytes <= 4096 for memory in node.peers._substitutes.values())
        assert "True" in node.transport.allgather_text(str(bool(node.peers._substitutes)))

    several(body)


def test_in_place_one_memory_stands_in_for_both(several: Ranks) -> None:
    class Tails:
        def random(self) -> float:
            return 1.0

    def body() -> None:
        node = Node(Tails())
        for op in ("sum", "user_first"):
            _try_reduction(node, Case(node, "allreduce", [300] * node.size), "int32", op, in_place=True)
        assert list(node.peers._substitutes) == [0]

    several(body)


def test_memory_that_no_rank_can_open_any_more(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        values = _values(node.size, 10)
        source, target = node.put(values[node.rank]), node.put(values[node.rank])
        if node.rank == 1:
            node.device.export = lambda memory: None
        with pytest.raises(DeviceError if node.rank == 1 else CommunicationError, match=r"can no longer|failed in"):
            _sum(node, source, target, values)
        if node.rank == 1:
            del node.device.export
        _sum(node, source, target, values)

    several(body)


@SHARED
def test_any_order_of_calls(several: Ranks, monkeypatch: pytest.MonkeyPatch, sharing: str) -> None:
    """Collectives, sizes, dtypes, new and old memory as they come."""
    monkeypatch.setattr(peer_memory, "_VIEWS", 5)

    def body() -> None:
        node = Node(random("coin", mpicoll.world().rank), sharing=sharing)
        memory = Memory(node)
        same = random("any order")
        for turn in range(60):
            collective, n = str(same.choice(COLLECTIVES)), int(same.choice([0, 1, 20, 300, 5000]))
            kind, root = str(same.choice(_kinds(collective))), int(same.integers(node.size))
            if same.random() < 0.3:
                values = _values(node.size, n, turn)
                source = memory.make(values[node.rank])
                _sum(node, source, source if node.rank % 2 else memory.make(values[node.rank]), values)
                if same.random() < 0.7:
                    memory.free()
            elif collective in MOVES:
                _try_moves(node, collective, n, kind, root)
            else:
                name, op = KINDS[same.integers(len(KINDS))]
                case = Case(node, collective, _counts(n, node.size, kind), root)
                _try_reduction(node, case, name, op, in_place=collective == "allreduce" and turn % 2 == 0, seed=turn)
            assert len(node.peers._views) <= 5
        memory.free()

    several(body)


# --- several devices


@pytest.fixture
def two_devices(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fake_cuda.is_fake(cuda):
        pytest.skip("of the fake CUDA")
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")


@pytest.mark.usefixtures("two_devices")
def test_ranks_on_several_devices(several: Ranks) -> None:
    def body() -> None:
        node = Node(devices=2)
        assert _verdict(node) is None
        for collective in COLLECTIVES:
            if collective in MOVES:
                _try_moves(node, collective, 100, "even", 1)
            else:
                for op in ("sum", "user_first"):
                    _try_reduction(node, Case(node, collective, [100] * node.size, 1), "int32", op)

    several(body)


@pytest.mark.usefixtures("two_devices")
def test_functions_of_the_caller_see_memory_of_one_device(several: Ranks) -> None:
    """What lies on another device is brought to this one, whatever its library could do with it."""

    def body() -> None:
        import cupy

        node = Node(devices=2)
        seen: set[int] = set()

        def first(a: Any, b: Any) -> Any:
            seen.update(cupy.cuda.runtime.pointerGetAttributes(one.data.ptr).device for one in (a, b))
            return _first(a, b)

        values = _values(node.size, 200)
        source, target = node.put(values[node.rank]), node.put(values[node.rank])
        fold = _fold(mpicoll.Op(first, elementwise=True), values[node.rank], "", _as_cupy)
        node.run(Case(node, "allreduce", [200] * node.size).spec(source.dtype, fold), source, target)
        expected("user_first", values, "int32").check(node.get(target))
        assert seen == {node.rank % 2}

    several(body)


@pytest.mark.usefixtures("two_devices")
def test_devices_that_do_not_reach_each_other(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_PEERS", "0")

    def body() -> None:
        verdict = _verdict(Node(devices=2))
        assert verdict is not None
        assert re.search(r"rank \d .*cuda:[01]\) can't read memory of rank \d", verdict), verdict

    several(body)


# --- synchronisation


@pytest.mark.parametrize("synchronizes", [True, False])
def test_a_missing_synchronisation_is_seen(several: Ranks, cuda: ModuleType, synchronizes: bool) -> None:
    """Without the one before the others are told, they read what was there before."""
    if not synchronizes and not fake_cuda.is_fake(cuda):
        pytest.skip("a real device may have done its work by chance")

    def body() -> None:
        node = Node()
        values = _values(node.size, 1000)
        source, target = node.put(np.zeros(1000, np.int32)), node.put(np.zeros(1000, np.int32))
        news = node.device.allocate_pinned(4000).view(np.int32)
        news[:] = values[node.rank]
        spec = Case(node, "allreduce", [1000] * node.size).spec(source.dtype, _fold("sum", news))
        body, steps = cuda_ipc.bind(node.arena, node.peers, spec)

        def load() -> None:
            node.device.copy(source, news)

        synchronize = node.device.synchronize if synchronizes else lambda: None
        with node.device.working():
            node.arena.run(body, steps, source, target, load, spec.signature, synchronize)
            if node.rank == 0:
                node.transport.allgather_text("")
        if node.rank != 0:
            # Rank 0's work is done only now, unless it has waited for it.
            node.transport.allgather_text("")
        node.transport.allgather_text("")
        assert (node.get(target) == np.sum(values, 0, np.int32)).all() == synchronizes

    several(body)


# --- failures


def test_a_rank_that_fails_lets_the_others_through(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        values = _values(node.size, 500)
        source, target = node.put(values[node.rank]), node.put(values[node.rank])

        def refuse(*arguments: Any) -> None:
            raise MemoryError("no kernel")

        for _ in range(3):
            if node.rank == node.size - 1:
                node.device.bind_fold = refuse
            with pytest.raises(MemoryError if node.rank == node.size - 1 else CommunicationError):
                _sum(node, source, target, values)
            if node.rank == node.size - 1:
                del node.device.bind_fold
            _sum(node, source, target, values)

    several(body)


def test_memory_that_cannot_be_opened_fails_where_it_is_needed(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        values = _values(node.size, 500)
        source, target = node.put(values[node.rank]), node.put(values[node.rank])

        def refuse(export: Export) -> DeviceArray:
            raise DeviceError("can't be opened")

        if node.rank == 0:
            node.device.reach = refuse
        with pytest.raises(DeviceError if node.rank == 0 else CommunicationError):
            _sum(node, source, target, values)
        if node.rank == 0:
            del node.device.reach
        _sum(node, source, target, values)

    several(body)


def test_who_fails_has_done_its_work_by_then(several: Ranks) -> None:
    """What it has given to the device in the memory of others is done before they are let go, and may free theirs."""

    def body() -> None:
        node = Node()
        source, target = node.put(np.full(100, node.rank, np.int32)), node.put(np.full(100, -1, np.int32))
        done: list[int] = []
        bind_fold, synchronize = node.device.bind_fold, node.device.synchronize

        def bind_broken(*arguments: Any) -> Callable[[], None]:
            fold = bind_fold(*arguments)

            def broken() -> None:
                fold()
                done.clear()
                raise MemoryError

            return broken

        node.device.bind_fold = bind_broken
        node.device.synchronize = lambda: done.append(1) or synchronize()
        with pytest.raises(MemoryError):
            _sum(node, source, target, [np.zeros(100, np.int32)] * node.size)
        assert done

    several(body)


def test_ranks_that_call_different_collectives(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        for _ in range(3):
            count = 10 + (node.rank == 0)
            values = [np.ones(count, np.int32)] * node.size
            source = node.put(values[0])
            with pytest.raises(CommunicationError):
                _sum(node, source, source, values)
            values = _values(node.size, 20)
            _sum(node, node.put(values[node.rank]), node.put(values[0]), values)

    several(body)


def test_others_that_call_something_else_do_not_come_to_an_exchange(several: Ranks) -> None:
    """A rank that has new memory waits for nobody who does not know of it."""

    def body() -> None:
        node = Node()
        values = _values(node.size, 10)
        source = node.put(values[node.rank])

        def other() -> None:
            node.arena.run(lambda source, target: node.arena.sync(), 1)

        call = other if node.rank == 0 else lambda: _sum(node, source, source, values)
        with pytest.raises(CommunicationError):
            call()
        _sum(node, source, source, values)

    several(body)


# --- finding out


def _verdict(node: Node) -> str | None:
    verdict = node.peers.check()
    told = set(node.transport.allgather_text(str(verdict)))
    assert told == {str(verdict)}
    return verdict


def test_ranks_that_reach_each_other(several: Ranks) -> None:
    def body() -> None:
        node = Node()
        assert _verdict(node) is None
        assert _verdict(node) is None

    several(body)


def test_why_ranks_do_not_reach_each_other(several: Ranks) -> None:
    """The same text on all ranks, whichever of them it is that can't."""

    def body() -> None:
        node = Node()
        device, last = node.device, node.size - 1

        def refuse(*arguments: Any) -> Any:
            raise RuntimeError("no such thing here")

        def wrong(export: Export) -> DeviceArray:
            return device.empty(export.nbytes, np.dtype(np.uint8))

        faults: tuple[tuple[str, Callable[..., Any], str], ...] = (
            ("export", lambda memory: None, f"rank {last} .* can't be opened by other processes"),
            ("export", refuse, f"rank {last} .* can't use memory of cuda:0: no such thing here"),
            ("empty", refuse, f"rank {last} .* can't use memory of cuda:0: no such thing here"),
            ("reach", refuse, f"rank {last} .* can't read memory of rank 0 .*: no such thing here"),
            ("reach", wrong, f"rank {last} .* can't read memory of rank 0 .*: it reads other data"),
            ("fold", refuse, f"rank {last} .* can't read memory of rank 0 .*: no such thing here"),
            ("fold", lambda *arguments: None, f"rank {last} .* can't read memory of rank 0 .*: it reads other data"),
        )
        for name, fault, text in faults:
            if node.rank == last:
                setattr(device, name, fault)
            verdict = _verdict(node)
            assert verdict is not None
            assert re.search(text, verdict), verdict
            if node.rank == last:
                delattr(device, name)
        assert _verdict(node) is None

    several(body)
