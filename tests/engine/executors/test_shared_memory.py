"""Collectives through the memory of a node: every method against the oracle, in step, and after failures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support import tiers
from support.data import (
    DTYPES,
    HALVES,
    LAYOUTS,
    LIBRARIES,
    OPS,
    covering,
    dtype_of,
    factor,
    multiply_what_is_small,
    numbers,
    random,
    user_first,
)
from support.exercise import COUNTED, FORMS, OUTS, REDUCTIONS, ROOTED, allowed, exercise
from support.ranks import Comms, Ranks

import mpicoll
from mpicoll.engine.selection.catalogue import MAX_FLAT_BYTES, SHARED_MEMORY

pytestmark = pytest.mark.extension

COLLECTIVES = tuple(name for name in SHARED_MEMORY if name != "barrier")
PREFIXES = ("scan", "exscan")
VECTORS = ("allreduce", "reduce", "bcast", *PREFIXES)
SHAPES = ((), (0,), (1,), (3, 0), (4, 3), (13, 2, 5), (130, 9), (2, 2), (3, 2, 2), (1200,))
SEGMENTS = ("", "/4k", "/64k")


def methods(collective: str, *segments: str, kernel: bool = True) -> list[str]:
    """The methods of a collective, those that cut with each size of piece; some take only reductions with a kernel."""
    return [
        f"{name}{segment}"
        for name in SHARED_MEMORY[collective]
        if kernel or "cma" not in name
        for segment in (("",) if name == "shm_flat" else segments or ("", "/4k"))
    ]


# --- everything that a call may be


def _rows(collective: str, size: int) -> list[dict[str, Any]]:
    axes: dict[str, Any] = {"dtype": ("float64", *(name for name in DTYPES if name != "float64"))}
    if collective in REDUCTIONS:
        axes["op"] = [op for op in OPS if op != "user_matmul" or collective != "reduce_scatter"]
    axes |= {"library": LIBRARIES, "shape": SHAPES, "layout": LAYOUTS, "out": OUTS, "form": FORMS}
    axes["algorithm"] = methods(collective, *SEGMENTS)
    # Parts of a single rank have nobody to share memory with.
    axes["comm"] = {2: ("world",), 3: ("world", "group")}.get(size, ("world", "split", "group"))
    if collective in ROOTED:
        axes["root"] = ("first", "last", "middle")
    if collective in COUNTED:
        axes["counts"] = ("none", "equal", "uneven", "zeros")
    return covering(axes, lambda row: _fits(collective, row))


def _fits(collective: str, row: dict[str, Any]) -> bool:
    method = str(row.get("algorithm", "shm_flat")).partition("/")[0]
    if row.get("op") == "user_matmul" and method != "shm_flat":
        return False
    if collective in PREFIXES and str(row.get("op")).startswith(("user_", "avg")):
        return False
    if "cma" in method and str(row.get("op")).startswith("user_"):
        return False
    return allowed(collective, {**row, "algorithm": None})


@pytest.mark.every_size
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rows(several: Ranks, collective: str) -> None:
    """Outside of the long tier, the worlds of threads share the rows, and so do two and four processes of mpirun."""
    shared = several.local and not tiers.takes_all()

    def body() -> None:
        comms = Comms()
        rows = _rows(collective, mpicoll.world().size)
        for row in rows[several.local % 3 :: 3] if shared else tiers.take_share(rows, several.size):
            exercise(collective, row, comms)
        comms.free()

    several(body)


# --- values to the last bit, with every size


class Case:
    """One collective on blocks of ``counts`` elements (the vector alone: counts[0]), with exact expectations."""

    def __init__(self, collective: str, counts: list[int], root: int, rank: int, size: int) -> None:
        self.collective, self.counts, self.root, self.rank, self.size = collective, counts, root, rank, size
        self.ends = [0, *accumulate(counts)]

    def length(self, rank: int) -> int:
        """Elements of a rank's input."""
        if self.collective in ("gather", "allgather"):
            return self.counts[rank]
        if self.collective in VECTORS:
            return self.counts[0]
        if self.collective == "scatter" and rank != self.root:
            return self.counts[rank]
        return self.ends[-1]

    def result_length(self) -> int | None:
        """Elements of this rank's result; None if it has none."""
        if self.collective in ("reduce", "gather") and self.rank != self.root:
            return None
        if self.collective in ("gather", "allgather", "alltoall"):
            return self.ends[-1]
        return self.counts[0 if self.collective in VECTORS else self.rank]

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.collective in ROOTED:
            options["root"] = self.root
        if self.collective in COUNTED and self.collective != "alltoall":
            options["counts"] = self.counts
        return options

    def expect(self, inputs: list[np.ndarray], combine: Callable[[list[np.ndarray]], np.ndarray]) -> np.ndarray | None:
        if self.result_length() is None:
            return None
        low, high = self.ends[self.rank : self.rank + 2]
        if self.collective in ("allreduce", "reduce"):
            return combine(inputs)
        if self.collective == "reduce_scatter":
            return combine(inputs)[low:high]
        if self.collective in PREFIXES:
            lower = inputs[: self.rank + (self.collective == "scan")]
            return combine(lower) if lower else np.zeros_like(inputs[0])
        if self.collective == "bcast":
            return inputs[self.root]
        if self.collective == "scatter":
            return inputs[self.root][low:high]
        if self.collective == "alltoall":
            return np.concatenate([one[low:high] for one in inputs])
        return np.concatenate(inputs)


def in_order(op: str, name: str) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Operands combined from rank 0 on, one after another, in the dtype of the policy, and rounded once."""
    ufunc = {"min": np.minimum, "max": np.maximum, "prod": np.multiply, "land": np.logical_and, "band": np.bitwise_and}
    work = np.dtype(np.float32) if name in HALVES else dtype_of(name).newbyteorder("=")

    def combine(inputs: list[np.ndarray]) -> np.ndarray:
        if op == "first":
            total = inputs[0]
            for one in inputs[1:]:
                total = user_first(total, one)
            return total
        wide = [one.astype(work) for one in inputs]
        if op == "premul_sum":
            wide = [one * np.asarray(factor(rank, name)).astype(work) for rank, one in enumerate(wide)]
        total = wide[0].copy()
        for one in wide[1:]:
            ufunc.get(op, np.add)(total, one, out=total, casting="unsafe")
        if op == "avg":
            total /= work.type(len(inputs))
        return total.astype(inputs[0].dtype)

    return combine


def operator(op: str, name: str, rank: int) -> Any:
    if op == "first":
        return mpicoll.Op(user_first, elementwise=True)
    return mpicoll.premul_sum(factor(rank, name)) if op == "premul_sum" else op


def _counts(n: int, size: int, kind: str) -> list[int]:
    if kind == "even":
        return [n] * size
    return [(n, 0, 2 * n + 1, n // 2)[(rank + n) % 4] for rank in range(size)]


def _lengths(size: int, itemsize: int) -> list[int]:
    """Around every boundary: none, ranks, a cache line, a piece (of 4 KiB), a rank's part of one, several pieces."""
    line, piece, part = 64 // itemsize, 4096 // itemsize, 4096 // size // itemsize
    around = (0, size, line, size * line, part, piece, 2 * piece, 5 * piece)
    return sorted({max(0, n + d) for n in around for d in (-1, 0, 1)})


def _check(case: Case, op: str, name: str, algorithm: str, seed: object, make: Callable[..., np.ndarray]) -> None:
    inputs = [
        numbers(random(seed, case.collective, rank), name, (case.length(rank),), "prod" if op == "prod" else "sum")
        for rank in range(case.size)
    ]
    x = make(inputs[case.rank])
    reduces = case.collective in REDUCTIONS
    arguments = (x, operator(op, name, case.rank)) if reduces else (x,)
    length = case.result_length()
    out = None if length is None else make(np.zeros(length, x.dtype))
    got = getattr(mpicoll, case.collective)(*arguments, out=out, algorithm=algorithm, **case.options())
    want = case.expect(inputs, in_order(op, name))
    where = (case.collective, algorithm, op, name, case.counts, case.root)
    assert (got is None) == (want is None), where
    if want is not None:
        assert got.tobytes() == want.astype(x.dtype).tobytes(), where
    assert x.tobytes() == inputs[case.rank].tobytes(), f"{where}: the input was changed"


def _sweep(collective: str, kinds: tuple[tuple[str, str], ...], make: Callable[..., np.ndarray]) -> None:
    world = mpicoll.world()
    for number, (name, op) in enumerate(kinds):
        # Processes that share cores try one of each three, another third for each dtype, and threads one of each two,
        # another half for each dtype and size, or all of them.
        step = 3 if world._core.transport.native is not None else 1 if tiers.takes_all() else 2
        for n in _lengths(world.size, dtype_of(name).itemsize)[(number + world.size) % step :: step]:
            uneven = collective in COUNTED and collective != "alltoall"
            if collective in PREFIXES and op in ("avg", "first"):
                continue
            for kind in ("even", "uneven") if uneven and number == 0 else ("even",):
                case = Case(collective, _counts(n, world.size, kind), (n + number) % world.size, world.rank, world.size)
                for algorithm in methods(collective, "/4k", kernel=op != "first"):
                    _check(case, op, name, algorithm, (name, op, n), make)


@pytest.mark.every_size
@pytest.mark.parametrize("largest", [0, 1, 3, 40, 700, 9000, 70_000])
def test_alltoall_with_random_counts(several: Ranks, largest: int) -> None:
    """Blocks beside the flags, in one piece, in several; some ranks send nothing, and one rank may send the most."""

    def body() -> None:
        comms = Comms()
        for number, algorithm in enumerate([None, *methods("alltoall", "", "/4k", "/64k")]):
            comm = comms[("world", "split", "group")[number % 3]]
            if comm is None or comm.size == 1:
                continue
            rank, size, rng = comm.rank, comm.size, random("rows", largest, number)
            rows = rng.integers(0, largest + 1, (size, size)) * rng.integers(0, 2, (size, size))
            dtype = np.dtype(("int8", "float64", "int16")[number % 3])
            blocks = [[np.arange(rows[i, j], dtype=dtype) + 5 * i + j for j in range(size)] for i in range(size)]
            x = np.concatenate(blocks[rank]).astype(dtype)
            want = np.concatenate([row[rank] for row in blocks]).astype(dtype)
            out = (None, np.empty_like(want), np.empty(2 * want.size, dtype)[::2])[number % 3 - 1]
            counts = rows[rank].tolist(), rows[:, rank].tolist()
            for _ in range(4):  # the last ones are repeated by the extension
                got = mpicoll.alltoall(x, counts=counts, out=out, algorithm=algorithm, comm=comm)
                np.testing.assert_array_equal(got, want)
                if out is not None:
                    assert got is out
                    out[...] = -1
        comms.free()

    several(body)


@pytest.mark.parametrize("algorithm", [None, "shm_pipelined", "cma"])
def test_alltoall_reads_large_blocks(several: Ranks, algorithm: str | None) -> None:
    """One pair of ranks has a block that is read from the memory of its rank, the others have small ones or none."""

    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        rows = np.fromfunction(lambda i, j: (i * 3 + j) % 5, (size, size), dtype=int)
        rows[0, size - 1] = (1 << 21) + 100_003
        counts = rows[rank].tolist(), rows[:, rank].tolist()
        values = [random("large", i).integers(0, 100, rows[i].sum(), np.uint8) for i in range(size)]
        ends = np.hstack([np.zeros((size, 1), int), np.cumsum(rows, 1)])
        want = np.concatenate([values[i][ends[i, rank] : ends[i, rank + 1]] for i in range(size)])
        for _ in range(3):
            got = mpicoll.alltoall(values[rank], counts=counts, algorithm=algorithm)
            np.testing.assert_array_equal(got, want)
        counts[1][0] += rank == size - 1  # what other ranks can't know
        with pytest.raises(mpicoll.MismatchError, match="rank 0 sends"):
            mpicoll.alltoall(values[rank], counts=counts, algorithm=algorithm)
        assert mpicoll.allreduce(1) == size

    several(body)


KINDS = (("float32", "sum"), ("bfloat16", "sum"), ("complex64", "sum"), (">f8", "avg"), ("int8", "first"))
MOVED = (("float32", ""), ("int8", ""))


@pytest.mark.every_size
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_length(several: Ranks, collective: str) -> None:
    """The order of ranks is the order of operands, so every method gives the same bits, on every rank."""

    def body() -> None:
        _sweep(collective, KINDS if collective in REDUCTIONS else MOVED, np.copy)

    several(body)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_length_in_memory_for_all(several: Ranks, collective: str) -> None:
    """Buffers of ``empty``, input and output in one piece of memory and at odd places."""

    def body() -> None:
        world = mpicoll.world()
        memory = mpicoll.empty(1 << 20, "uint8")
        used = 0

        def make(values: np.ndarray) -> np.ndarray:
            nonlocal used
            # A place that differs from rank to rank, aligned to the dtype or not
            at = used + 8 * world.rank + (3 if values.dtype.itemsize == 1 else 0)
            used += values.nbytes + 64
            if used > memory.size - (1 << 17):
                used = 0
            view = memory[at : at + values.nbytes].view(values.dtype)
            view[...] = values
            return view

        _sweep(collective, KINDS[:3] if collective in REDUCTIONS else MOVED, make)

    several(body)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint64", "float16", "float64", "complex128"])
def test_bits_of_each_dtype(several: Ranks, name: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        kind = dtype_of(name).kind
        # numpy's product of complex numbers differs in the last bit between the middle and the end of an array.
        ops = {"i": ("sum", "min", "band", "premul_sum"), "u": ("sum", "max", "band"), "c": ("sum", "avg")}.get(
            kind, ("sum", "prod", "avg")
        )
        for op in (*ops, "first"):
            for collective in ("allreduce", "reduce", "reduce_scatter", *PREFIXES):
                if collective in PREFIXES and op in ("avg", "first", "prod", "min", "max", "band"):
                    continue  # no such call, no kernel, or another neutral element than 0
                case = Case(collective, [700] * world.size, world.size - 1, world.rank, world.size)
                for algorithm in methods(collective, kernel=op != "first"):
                    _check(case, op, name, algorithm, (name, op), np.copy)

    several(body)


def _torch_words(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def test_bfloat16_of_torch_has_the_bits_of_ml_dtypes(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        inputs = [numbers(random("torch", rank), "bfloat16", (5000,)) for rank in range(world.size)]
        want = in_order("sum", "bfloat16")(inputs)
        for algorithm in methods("allreduce"):
            # Some ranks pass a tensor, others an array of numpy.
            mine = inputs[world.rank]
            got = mpicoll.allreduce(_torch_words(mine) if world.rank % 2 else mine, algorithm=algorithm)
            words = got.view(torch.int16).numpy() if isinstance(got, torch.Tensor) else got
            assert words.tobytes() == want.tobytes(), algorithm

    several(body)


@pytest.mark.parametrize("dtype", ["M8[ns]", "S7", "V3", "i4,f8", "float8_e4m3fn"])
def test_dtypes_that_only_move(several: Ranks, dtype: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        made = np.dtype(getattr(ml_dtypes, dtype, dtype))
        inputs = [
            random(dtype, rank).integers(1, 100, (world.size * 300, made.itemsize), np.uint8).view(made).reshape(-1)
            for rank in range(world.size)
        ]
        for collective in ("bcast", "allgather", "gather", "scatter", "alltoall"):
            case = Case(collective, [300] * world.size, 1, world.rank, world.size)
            x = inputs[world.rank][: case.length(world.rank)]
            want = case.expect([one[: case.length(rank)] for rank, one in enumerate(inputs)], lambda every: every[0])
            for algorithm in methods(collective, "/4k"):
                got = getattr(mpicoll, collective)(x, algorithm=algorithm, **case.options())
                assert (got is None) == (want is None)
                assert got is None or got.tobytes() == want.tobytes(), (collective, algorithm)

    several(body)


def test_a_function_on_a_dtype_that_only_moves(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        days = np.arange(3000).astype("M8[D]") + world.rank
        for algorithm in methods("allreduce", kernel=False):
            latest = mpicoll.allreduce(days, mpicoll.Op(np.maximum, elementwise=True), algorithm=algorithm)
            np.testing.assert_array_equal(latest, days - world.rank + world.size - 1)

    several(body)


@pytest.mark.parametrize("values", ["int8", "float32", "float64"])
def test_places_of_extremes(several: Ranks, values: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        # Up to as many pairs as slots hold
        for count in (0, 1, 1000, MAX_FLAT_BYTES // (np.dtype(values).itemsize + 8)):
            every = [random(values, rank).integers(-5, 5, count).astype(values) for rank in range(world.size)]
            stacked = np.stack(every)
            for algorithm in methods("allreduce", kernel=False):
                pair = (every[world.rank].copy(), np.full(count, world.rank))
                best, where = mpicoll.allreduce(pair, "minloc", algorithm=algorithm)
                np.testing.assert_array_equal(best, stacked.min(0))
                np.testing.assert_array_equal(where, stacked.argmin(0))

    several(body)


def test_in_place(several: Ranks) -> None:
    """Also where the output is the input of a rank that is neither the first nor the second."""

    def body() -> None:
        world = mpicoll.world()
        for make in (np.empty, mpicoll.empty):
            x = make(3000, "float64")
            for algorithm in methods("allreduce"):
                x[...] = 10.0**world.rank
                assert mpicoll.allreduce(x, out=x, algorithm=algorithm) is x
                assert (x == (10**world.size - 1) // 9).all(), algorithm
            for root in range(world.size):
                for algorithm in methods("reduce"):
                    x[...] = 10.0**world.rank
                    mpicoll.reduce(x, out=x if root == world.rank else None, root=root, algorithm=algorithm)
                    want = (10**world.size - 1) // 9 if root == world.rank else 10**world.rank
                    assert (x == want).all(), ("reduce", make, root, algorithm)
                counts = [3000 if rank == root else 0 for rank in range(world.size)]
                for algorithm in methods("reduce_scatter"):
                    x[...] = 10.0**world.rank
                    out = x if root == world.rank else None
                    mpicoll.reduce_scatter(x, out=out, counts=counts, algorithm=algorithm)
                    want = (10**world.size - 1) // 9 if root == world.rank else 10**world.rank
                    assert (x == want).all(), ("reduce_scatter", make, root, algorithm)
                for algorithm in methods("bcast"):
                    x[...] = world.rank
                    mpicoll.bcast(x, root, out=x, algorithm=algorithm)
                    assert (x == root).all(), ("bcast", make, root, algorithm)

    several(body)


@pytest.mark.parametrize("collective", PREFIXES)
def test_prefixes_in_place(several: Ranks, collective: str) -> None:
    """Also through plans and repeated calls; rank 0 of exscan gets the neutral element."""

    def body() -> None:
        world = mpicoll.world()
        x, call = np.empty(3000), getattr(mpicoll, collective)
        plan = getattr(mpicoll, f"{collective}_init")(x, out=x, algorithm="shm_pipelined/4k")
        for turn in range(5):
            x[...] = 10.0**world.rank
            assert (plan() if turn % 2 else call(x, out=x, algorithm="shm_pipelined/4k")) is x
            assert (x == (10 ** (world.rank + (collective == "scan")) - 1) // 9).all()
        for name in ("float16", "bfloat16", ">f8", "int8", "bool"):
            values = numbers(random(name, world.rank), name, (3000,))
            for op in ("max", "min", *(("sum", "prod") if name != "bool" else ("land",))):
                got = call(values, op, algorithm="shm_pipelined")
                np.testing.assert_array_equal(got, call(values, op, algorithm="linear"), err_msg=f"{name} {op}")

    several(body)


def test_reductions_without_kernels_are_refused(several: Ranks) -> None:
    def body() -> None:
        for collective, algorithm in (("scan", "shm_pipelined"), ("exscan", "shm_pipelined"), ("allreduce", "cma")):
            call = getattr(mpicoll, collective)
            function = mpicoll.Op(np.maximum, elementwise=True)
            for x, op in ((np.ones(3), function), ((np.ones(3), np.ones(3, int)), "minloc")):
                with pytest.raises(mpicoll.AlgorithmError, match="function of Python, minloc or maxloc"):
                    call(x, op, algorithm=algorithm)
                call(x, op)

    several(body)


def test_runs_give_the_same_bits(several: Ranks) -> None:
    """However late the ranks are, and through whichever method: sums that depend on the order of operands."""

    def body() -> None:
        world = mpicoll.world()
        x = numbers(random("runs", world.rank), "float32", (20_000,)) * np.float32(10) ** (7 * (world.rank % 2))
        seen = set()
        for turn in range(4):
            for algorithm in methods("allreduce", "", "/4k", "/64k"):
                time.sleep(random("late", turn, world.rank, algorithm).random() * 2e-3)
                seen.add(mpicoll.allreduce(x, algorithm=algorithm).tobytes())
        assert len(seen) == 1
        mine = np.frombuffer(seen.pop(), np.uint8)
        everyone = mpicoll.allgather(mine).reshape(world.size, -1)
        assert (everyone == everyone[0]).all()

    several(body)


def test_zero_dimensions(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for algorithm in methods("allreduce"):
            got = mpicoll.allreduce(np.array(2.5), algorithm=algorithm)
            assert got.shape == ()
            assert got == 2.5 * world.size
        for algorithm in methods("bcast"):
            assert mpicoll.bcast(np.array(world.rank), 1, algorithm=algorithm) == 1

    several(body)


def test_plans_of_numbers(several: Ranks) -> None:
    """Each run gives a new number; some are the same object each time they are made."""

    def body() -> None:
        world = mpicoll.world()
        for algorithm in methods("allreduce"):
            for number in (1, 1.5, np.int8(1), np.float32(2), np.int64(0)):
                plan = mpicoll.allreduce_init(number, algorithm=algorithm)
                for _ in range(2):
                    assert plan() == number * world.size, (algorithm, number)
        for algorithm in methods("bcast"):
            for value in (True, False):
                for number in (value, np.bool_(value)):
                    mine = number if world.rank == 0 else type(number)(not number)
                    assert mpicoll.bcast_init(mine, 0, algorithm=algorithm)() == value

    several(body)


# --- who may


def test_a_single_rank_is_refused() -> None:
    for collective, names in SHARED_MEMORY.items():
        for name in names:
            call = getattr(mpicoll, collective)
            arguments = () if collective == "barrier" else (np.ones(3),)
            with pytest.raises(mpicoll.AlgorithmError, match=rf"{collective}.*'{name}'.*there is a single rank"):
                call(*arguments, algorithm=name)


def test_several_nodes_are_refused() -> None:
    def body() -> str:
        with pytest.raises(mpicoll.AlgorithmError, match="the ranks are on several nodes"):
            mpicoll.allreduce(np.ones(3), algorithm="shm_pipelined")
        with mpicoll.algorithms(allreduce="shm_pipelined"):
            assert "several nodes" in mpicoll.explain("allreduce", 100).reason
            return str(mpicoll.allreduce(np.ones(1))[0])

    assert mpicoll.run_local(body, 4, ranks_per_node=2) == ["4.0"] * 4


def test_an_operation_on_whole_arrays_is_not_split(several: Ranks) -> None:
    def body() -> None:
        size = mpicoll.world().size
        buffer = mpicoll.empty((2, 2), "float64")
        buffer[:] = 1
        got = mpicoll.allreduce(buffer, np.matmul, out=buffer, algorithm="shm_flat")
        np.testing.assert_array_equal(got, np.ones((2, 2)) * 2.0 ** (size - 1))

    several(body)


def test_what_methods_can_not_serve(several: Ranks) -> None:
    def body() -> None:
        x = np.ones((2, 2))
        for name in ("shm_pipelined", "cma"):
            with pytest.raises(mpicoll.AlgorithmError, match="not elementwise"):
                mpicoll.allreduce(x, np.matmul, algorithm=name)
        with pytest.raises(mpicoll.AlgorithmError, match=f"more than the {MAX_FLAT_BYTES} that shm_flat accepts"):
            mpicoll.allreduce(np.ones(MAX_FLAT_BYTES // 8 + 1), algorithm="shm_flat")
        for wrong in (
            "shm_pipelined/2k",
            "shm_pipelined/4m",
            "shm_flat/4k",
            "shm_pipelined/x",
            "shm_pipelined/",
            "piece",
        ):
            with pytest.raises(mpicoll.AlgorithmError, match=wrong):
                mpicoll.allreduce(x, algorithm=wrong)
        got = mpicoll.allreduce(x, np.matmul, algorithm="shm_flat")
        np.testing.assert_array_equal(got, x * 2.0 ** (mpicoll.world().size - 1))

    several(body)


def test_former_names_are_the_same_algorithms(several: Ranks) -> None:
    """Also where the ranks use different ones, which is no mismatch."""

    def body() -> None:
        world = mpicoll.world()
        first = world.rank == 0
        with mpicoll.debug():
            for former, name in (("slots", "shm_flat"), ("pieces/4k", "shm_pipelined/4k")):
                got = mpicoll.allreduce(np.ones(3000), algorithm=former if first else name)
                assert (got == world.size).all()
            plan = mpicoll.allreduce_init(np.ones(3), algorithm="pieces" if first else "shm_pipelined")
            assert plan.choice.name == "shm_pipelined"

    several(body)


def test_the_largest_vectors_of_slots(several: Ranks) -> None:
    """Whatever the dtype in which they are reduced, there is room."""

    def body() -> None:
        world = mpicoll.world()
        for name, op in (("float16", "premul_sum"), ("int8", "land"), ("float32", "sum"), ("complex128", "avg")):
            count = MAX_FLAT_BYTES // dtype_of(name).itemsize
            inputs = [numbers(random(name, rank), name, (count,)) for rank in range(world.size)]
            got = mpicoll.allreduce(inputs[world.rank], operator(op, name, world.rank), algorithm="shm_flat")
            want = in_order(op, name)([one != 0 for one in inputs] if op == "land" else inputs)
            assert got.tobytes() == want.astype(got.dtype).tobytes(), name

    several(body)


# --- a kernel that forbids what it allowed at the start


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter", "alltoall"])
def test_reading_is_forbidden_within_an_operation(collective: str) -> None:
    """All ranks report it; later operations go another way."""

    def body() -> str:
        world, x = mpicoll.world(), np.arange(3000.0)
        total = mpicoll.allreduce(x, algorithm="cma")
        arena = world._core.arena()
        assert arena is not None
        if world.rank == 1:
            arena.set_processes([1 << 30] * world.size)  # more than the kernel's largest number of a process
        with pytest.raises(mpicoll.CommunicationError) as caught:
            getattr(mpicoll, collective)(x, algorithm="cma")
        for algorithm in ("shm_pipelined", "cma"):
            np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm=algorithm), total)
        assert arena.cma_failed_reason is not None
        assert "rank 1" in arena.cma_failed_reason
        arena.set_processes([0] * world.size)
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm="cma"), total)
        assert arena.cma_failed_reason is None
        return str(caught.value)

    first, second, third = mpicoll.run_local(body, 3)
    access = "write to" if collective == "alltoall" else "read"
    assert f"rank 1 of 3 (of this node) can't {access} the memory of rank" in second
    assert "any more (No such process)" in second
    # A rank that sees the failure of another one fails as well.
    assert re.search("rank [12] failed in this operation", first)
    assert re.search("rank [01] failed in this operation", third)


# --- one operation after another


def _stream(rng: np.random.Generator, size: int) -> Iterator[tuple[str, str, int, int, str]]:
    """The same on all ranks: collective, algorithm, elements of a block, root, form."""
    kinds = [
        (collective, algorithm)
        for collective in COLLECTIVES
        for algorithm in (*methods(collective, "/4k"), *methods(collective, "/64k"))
    ]
    while True:
        collective, algorithm = kinds[rng.integers(len(kinds))]
        count = int(rng.choice([0, 1, 7, 64, 1000, 4096, 20_000]))
        yield collective, algorithm, count, int(rng.integers(size)), str(rng.choice(["call", "background", "plan"]))


class _Stress:
    """Operations of all kinds on several communicators, with nothing between them but chance."""

    def __init__(self, seed: int) -> None:
        world = mpicoll.world()
        self.seed = seed
        self.common = random("common", seed)
        self.own = random("own", seed, world.rank)
        turned = world.split(0, -world.rank)
        assert turned is not None
        self.comms = [world, turned, world.group(range(world.size))]
        self.registered = [(comm, mpicoll.empty(1 << 17, "int64", comm=comm)) for comm in self.comms]
        self.pending: list[tuple[Any, np.ndarray | None, object]] = []
        self.plans: dict[tuple[Any, ...], tuple[Any, np.ndarray]] = {}

    def late(self) -> None:
        """Sleep or not; now and then for long, so that others run as far ahead as they can."""
        chance = self.own.random()
        if chance < 0.15:
            time.sleep(self.own.random() * 1e-3)
        elif chance > 0.99:
            time.sleep(0.01)

    def run(self, operations: int) -> None:
        stream = _stream(self.common, self.comms[0].size)
        for number in range(operations):
            which = int(self.common.integers(len(self.comms)))
            shared = bool(self.common.integers(2))
            self.one(number, which, next(stream), shared=shared)
            if self.common.random() < 0.05 or len(self.pending) > 10:
                self.drain()
            if self.common.random() < 0.1:
                mpicoll.barrier(comm=self.comms[which], algorithm="shm_flat")
        self.drain()
        for comm in self.comms[1:]:
            comm.free()

    def one(self, number: int, which: int, what: tuple[str, str, int, int, str], *, shared: bool) -> None:
        collective, algorithm, count, root, form = what
        comm = self.comms[which]
        case = Case(collective, [count] * comm.size, root, comm.rank, comm.size)
        inputs = [self.values(number, rank, case.length(rank)) for rank in range(comm.size)]
        mine, length = inputs[comm.rank], case.result_length()
        want = case.expect(inputs, lambda every: np.sum(every, 0))
        key = (which, *what[:4]) if form == "plan" else None
        options = {"algorithm": algorithm, "comm": comm, **case.options()}
        if key is not None:
            if key not in self.plans:
                x = np.empty_like(mine)
                self.plans[key] = getattr(mpicoll, f"{collective}_init")(x, **options), x
            plan, x = self.plans[key]
            x[...] = mine
            self.late()
            self.check(plan(), want, (number, what, which))
            return
        x, out = mine, None
        if shared and not self.pending:
            # Room for input and output; the one before it has ended here, but perhaps not elsewhere.
            x = self.place(which, mine)
            out = None if length is None else self.place(which, np.zeros(length, np.int64), upper=True)
        self.late()
        call = getattr(mpicoll, f"i{collective}" if form == "background" else collective)
        made = call(x, out=out, **options)
        if form == "background":
            self.pending.append((made, want, (number, what, which, shared)))
        else:
            self.check(made, want, (number, what, which, shared))
            # What was passed is the caller's again: others must have read it.
            x[...] = -1

    def place(self, which: int, values: np.ndarray, *, upper: bool = False) -> np.ndarray:
        """`values` in one half of the memory for all, anywhere, perhaps where those of the operation before lay."""
        half = self.registered[which][1][1 << 16 :] if upper else self.registered[which][1][: 1 << 16]
        if values.size > half.size:
            return values.copy()
        at = int(self.own.integers(half.size - values.size + 1))
        view = half[at : at + values.size]
        view[...] = values
        return view

    def values(self, number: int, rank: int, count: int) -> np.ndarray:
        return np.arange(count) * (rank + 1) + 1000 * number + rank

    def check(self, got: np.ndarray | None, want: np.ndarray | None, where: object) -> None:
        assert (got is None) == (want is None), where
        if got is not None:
            np.testing.assert_array_equal(got, want, err_msg=f"seed {self.seed}: {where}")

    def drain(self) -> None:
        for request, want, where in self.pending:
            self.check(request.wait(), want, where)
        self.pending.clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_operations_of_all_kinds_follow_each_other(several: Ranks, seed: int) -> None:
    """Nothing is written while it is still read, however far ahead or behind a rank is."""

    def body() -> None:
        _Stress(seed).run(300 if mpicoll.world()._core.transport.native is None else 120)

    several(body)


@pytest.mark.parametrize("algorithm", ["shm_flat", "shm_pipelined/4k", "cma"])
def test_no_message_overtakes_another(several: Ranks, algorithm: str) -> None:
    """The same operation again and again, one rank slow and then another."""

    def body() -> None:
        world = mpicoll.world()
        rng = random("overtake", world.rank)
        want = sum(range(world.size))
        for turn in range(200):
            if turn // 20 % world.size == world.rank and rng.random() < 0.3:
                time.sleep(2e-4)
            got = mpicoll.allreduce(np.full(2000, turn * 10.0 + world.rank), algorithm=algorithm)
            assert (got == turn * 10.0 * world.size + want).all(), turn

    several(body)


def test_the_root_may_run_ahead(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for turn in range(60):
            if world.rank != turn // 20 % world.size:
                time.sleep(3e-4)
            root = turn // 20 % world.size
            x = np.full(5000, turn if world.rank == root else -1)
            assert (mpicoll.bcast(x, root, out=x, algorithm="shm_pipelined/4k") == turn).all()
            x[...] = -2
            sums = mpicoll.reduce(np.full(5000, turn), root=root, algorithm="shm_pipelined/4k")
            assert sums is None or (sums == turn * world.size).all()

    several(body)


# --- failures


class _Fault(Exception):
    """What a rank's own function raises."""


def _faulty(rng: np.random.Generator, failing: set[int], rank: int) -> mpicoll.Op:
    """Adds; on ranks of `failing` it raises in one of its calls, or in none if there are not that many."""
    calls = int(rng.integers(1, 12))
    made = 0

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        nonlocal made
        made += 1
        if rank in failing and made == calls:
            raise _Fault
        return a + b

    return mpicoll.Op(add, commutative=True, elementwise=True)


@pytest.mark.parametrize("seed", range(2))
def test_failures_end_the_operation_and_nothing_else(several: Ranks, seed: int) -> None:
    """The rank that fails gets its own error, others CommunicationError or their result; then all goes on."""

    def body() -> None:
        world = mpicoll.world()
        common = random("failures", seed)
        registered = mpicoll.empty(6000, "float64")
        for turn in range(60):
            failing = {rank for rank in range(world.size) if common.random() < 0.3}
            collective = str(common.choice(["allreduce", "reduce", "reduce_scatter"]))
            algorithm = str(common.choice(methods(collective, "/4k", kernel=False)))
            memory = bool(common.integers(2))
            count = int(common.choice([world.size, 3000]))
            background = bool(common.integers(2))
            x = registered[:count] if memory else np.empty(count)
            x[...] = world.rank + 1
            case = Case(collective, [count] * world.size, int(common.integers(world.size)), world.rank, world.size)
            options = {"root": case.root} if collective == "reduce" else {}
            out = None
            if collective == "reduce_scatter":
                x = x[: count - count % world.size]
            elif case.result_length() is not None and memory:
                out = registered[3000 : 3000 + count]
            op = _faulty(random("op", seed, turn, world.rank), failing, world.rank)
            where = (turn, collective, algorithm, failing, memory, count)
            call = getattr(mpicoll, f"i{collective}" if background else collective)
            try:
                got = call(x, op, out=out, algorithm=algorithm, **options)
                if background:
                    got = got.wait()
            except _Fault:
                assert world.rank in failing, where
            except mpicoll.CommunicationError:
                assert failing, where
            else:
                # Who has a result has the right one, whatever has become of others.
                assert got is None or (got == world.size * (world.size + 1) / 2).all(), where
            after = mpicoll.allreduce(np.full(3000, turn + world.rank), algorithm="shm_pipelined/4k")
            assert (after == turn * world.size + sum(range(world.size))).all(), where

    several(body)


@pytest.mark.parametrize("algorithm", ["shm_flat", "shm_pipelined/4k"])
def test_all_ranks_fail(several: Ranks, algorithm: str) -> None:
    def refuse(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        raise _Fault

    def body() -> None:
        world = mpicoll.world()
        for count in (3000, 1):
            for _ in range(3):
                # With one element to reduce not all ranks may come by the function.
                with pytest.raises((_Fault, mpicoll.CommunicationError)):
                    mpicoll.allreduce(np.ones(count), mpicoll.Op(refuse, elementwise=True), algorithm=algorithm)
                got = mpicoll.allreduce(np.ones(count), algorithm=algorithm)
                assert (got == world.size).all()

    several(body)


def test_an_operand_that_can_not_be_prepared(several: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails before the first step fails on the other ranks, too, instead of meeting their next operation."""
    multiply_what_is_small(monkeypatch)

    def body() -> None:
        world = mpicoll.world()
        for algorithm in methods("allreduce"):
            x = np.full(5000, 3e38 if world.rank == 1 else 1, np.float32)
            with pytest.raises(MemoryError if world.rank == 1 else mpicoll.CommunicationError):
                mpicoll.allreduce(x, mpicoll.premul_sum(10.0), algorithm=algorithm)
            after = mpicoll.allreduce(np.full(5000, world.rank + 1.0), algorithm=algorithm)
            assert (after == world.size * (world.size + 1) / 2).all(), algorithm

    several(body)


def test_a_rank_keeps_its_own_error_when_others_have_left() -> None:
    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        rank = mpicoll.world().rank
        if rank == 1:
            time.sleep(0.2)  # rank 0 has ended by then, and is gone
            raise _Fault
        if rank == 2:
            time.sleep(0.6)
        return a + b

    def body() -> float:
        return mpicoll.allreduce(np.ones(3), mpicoll.Op(add, elementwise=True), algorithm="shm_flat")[0]

    with pytest.raises(_Fault):
        mpicoll.run_local(body, 3, timeout=20)


@pytest.mark.parametrize("algorithm", ["shm_flat", "shm_pipelined/4k", "cma"])
def test_a_rank_that_dies(algorithm: str) -> None:
    def body() -> str:
        world = mpicoll.world()
        mpicoll.allreduce(np.ones(3000), algorithm=algorithm)
        if world.rank == 1:
            return "dead"
        with pytest.raises(mpicoll.RankFailed, match="rank 1 has exited") as caught:
            mpicoll.allreduce(np.ones(3000), algorithm=algorithm)
        assert caught.value.ranks == (1,)
        with pytest.raises(mpicoll.CommunicationError):
            mpicoll.allreduce(np.ones(3000), algorithm=algorithm)
        return "told"

    begin = time.monotonic()
    assert mpicoll.run_local(body, 2, timeout=80) == ["told", "dead"]
    assert time.monotonic() - begin < 60


def test_a_rank_that_dies_among_many() -> None:
    """Whoever notices first is told so; others may learn from it that the operation failed."""

    def body() -> str:
        world = mpicoll.world()
        mpicoll.allreduce(np.ones(3000), algorithm="shm_pipelined")
        if world.rank == 2:
            return "dead"
        with pytest.raises(mpicoll.CommunicationError) as caught:
            mpicoll.allreduce(np.ones(3000), algorithm="shm_pipelined")
        return type(caught.value).__name__

    begin = time.monotonic()
    ends = mpicoll.run_local(body, 4, timeout=80)
    assert "RankFailed" in ends
    assert set(ends) <= {"dead", "RankFailed", "CommunicationError"}
    assert time.monotonic() - begin < 60


def test_nothing_is_mistaken_after_a_timeout() -> None:
    """Who gave up waiting and goes on is not taken by the late rank for being still in the operation."""

    def body() -> str:
        world = mpicoll.world()
        mpicoll.allreduce(np.ones(3), algorithm="shm_pipelined")
        if world.rank == 1:
            time.sleep(1.0)
        seen = []
        for value in (1.0, 10.0, 100.0):
            try:
                seen.append(mpicoll.allreduce(np.full(3000, value), algorithm="shm_pipelined/4k")[-1] == 2 * value)
            except mpicoll.MpicollError:
                seen.append(True)
        assert all(seen)
        return "right or refused"

    assert mpicoll.run_local(body, 2, timeout=0.2) == ["right or refused"] * 2
