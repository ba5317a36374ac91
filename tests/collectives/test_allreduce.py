"""allreduce against the oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support.data import (
    DTYPES,
    HALVES,
    NON_COMMUTATIVE,
    OPS,
    Expected,
    expected,
    make_op,
    means,
    numbers,
    random,
    ulp,
    wrap,
)
from support.exercise import algorithm_names, run_rows, serves
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(ranks: Ranks, dtype: str) -> None:
    ranks(run_rows, "allreduce", dtype)


def _each_algorithm(dtype: str, op: str, shape: tuple[int, ...]) -> None:
    world = mpicoll.world()
    native = world._core.transport.native is not None
    inputs = [numbers(random(dtype, op, rank), dtype, shape, op) for rank in range(world.size)]
    want = expected(op, inputs, dtype)
    for name in algorithm_names("allreduce", native=native):
        if serves("allreduce", name, op, dtype):
            got = mpicoll.allreduce(inputs[world.rank].copy(), make_op(op, world.rank, dtype), algorithm=name)
            want.check(got, (op, name))


@pytest.mark.every_size
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_op_with_each_algorithm(ranks: Ranks, dtype: str) -> None:
    def body() -> None:
        for op in OPS:
            if means(op, dtype):
                _each_algorithm(dtype, op, (2, 2) if op == "user_matmul" else (13,))

    ranks(body)


@pytest.mark.parametrize("dtype", [*HALVES, "float32", "complex64", "int8"])
def test_ten_thousand_elements(ranks: Ranks, dtype: str) -> None:
    def body() -> None:
        for op in ("sum", "prod", "max", "avg"):
            if means(op, dtype):
                _each_algorithm(dtype, op, (10_000,))

    ranks(body)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_survives_cancellation(ranks: Ranks, dtype: str, library: str) -> None:
    """Large terms cancel over the ranks, and leave small ones that half precision would have lost on the way."""

    def body() -> None:
        world = mpicoll.world()
        rng = random(dtype)
        half = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        big = (rng.standard_normal(10_000) * 256).astype(half)
        terms = [rng.standard_normal(10_000).astype(half) for _ in range(world.size)]
        if world.size > 2:
            terms[0], terms[-1] = big, -big
        exact = np.sum([one.astype(np.float64) for one in terms], axis=0)
        rounding = world.size * 2.0**-24 * np.sum([np.abs(one.astype(np.float64)) for one in terms], axis=0)
        for op, value in (("sum", exact), ("avg", exact / world.size)):
            for name in algorithm_names("allreduce", native=world._core.transport.native is not None):
                result = mpicoll.allreduce(wrap(library, terms[world.rank]), op, algorithm=name)
                got = np.asarray(result) if library == "numpy" else result.to(torch.float64).numpy()
                Expected(value, ulp(value, dtype) + rounding).check(got.astype(np.float64), (op, name))

    ranks(body)


def test_half_precision_passes_through_values_beyond_its_range(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.full(5, -60000 if world.rank == world.size - 1 else 60000, np.float16)
        if world.size < 3:
            x[...] = 1
        total = 60000 * (world.size - 2) if world.size > 2 else world.size
        for name in algorithm_names("allreduce", native=world._core.transport.native is not None):
            got = mpicoll.allreduce(x, algorithm=name)
            mean = mpicoll.allreduce(x, "avg", algorithm=name)
            np.testing.assert_array_equal(got, np.full(5, total if total < 65520 else np.inf))
            np.testing.assert_array_equal(mean, np.full(5, total / world.size, np.float16))

    ranks(body)


def test_order_of_ranks_is_kept(ranks: Ranks) -> None:
    """Composition of affine maps in exact integers, as a function of whole arrays and as an elementwise one."""

    def compose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a[0] * b[0], a[1] * b[0] + b[1]])

    def body() -> None:
        world = mpicoll.world()
        maps = [np.stack([random("map", r).integers(-9, 9, 40), np.arange(40) + r]) for r in range(world.size)]
        want = maps[0]
        for one in maps[1:]:
            want = compose(want, one)
        for name in (None, "master_worker", "tree", "recursive_doubling"):
            if name is None or serves("allreduce", name, "user_matmul"):
                np.testing.assert_array_equal(mpicoll.allreduce(maps[world.rank], compose, algorithm=name), want)

    ranks(body)


def test_some_algorithm_serves_each_kind_of_function() -> None:
    for op in NON_COMMUTATIVE:
        assert any(serves("allreduce", name, op) for name in mpicoll.schedules.algorithms_of("allreduce"))


def test_ranks_may_use_different_libraries_and_layouts(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        inputs = [numbers(random("mixed", rank), "float32", (6, 4)) for rank in range(world.size)]
        mine = inputs[world.rank]
        x = [mine, torch.from_numpy(mine), mine.T.copy().T, torch.from_numpy(mine.T.copy()).T][world.rank % 4]
        for name in algorithm_names("allreduce", native=world._core.transport.native is not None):
            got = mpicoll.allreduce(x, algorithm=name)
            assert type(got) is type(x)
            expected("sum", inputs, "float32").check(np.asarray(got), name)

    ranks(body)


def test_all_ranks_get_the_same_bits(ranks: Ranks) -> None:
    """Each algorithm adds in one order for all ranks, so that replicas of a model can't drift apart."""

    def body() -> None:
        world = mpicoll.world()
        for dtype in ("float32", "bfloat16"):
            x = numbers(random("bits", dtype, world.rank), dtype, (999,))
            for name in algorithm_names("allreduce", native=False):
                got = mpicoll.allreduce(x, algorithm=name).view(np.uint8)
                everyone = mpicoll.allgather(got).reshape(world.size, -1)
                assert (everyone == everyone[0]).all(), (dtype, name)

    ranks(body)


def test_tensor_that_requires_grad(ranks: Ranks) -> None:
    def body() -> None:
        x = torch.ones(3, requires_grad=True)
        got = mpicoll.allreduce(x)
        assert not got.requires_grad
        assert got.tolist() == [mpicoll.world().size] * 3

    ranks(body)


def test_lazily_conjugated_tensor(ranks: Ranks) -> None:
    def body() -> None:
        size = mpicoll.world().size
        x = torch.tensor([1 + 2j, 3 - 1j]).conj()
        assert mpicoll.allreduce(x).tolist() == [size * (1 - 2j), size * (3 + 1j)]
        assert mpicoll.allreduce(x.imag).tolist() == [-2 * size, size]
        assert x.is_conj()

    ranks(body)


def test_expanded_input(ranks: Ranks) -> None:
    def body() -> None:
        size = mpicoll.world().size
        np.testing.assert_array_equal(
            mpicoll.allreduce(np.broadcast_to(np.arange(3), (4, 3))), [[0, size, 2 * size]] * 4
        )
        assert mpicoll.allreduce(torch.ones(1).expand(5)).tolist() == [size] * 5

    ranks(body)


def test_user_function_on_a_dtype_that_only_moves(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        days = np.array(["2020-01-01", "2030-01-01"], "M8[D]") + world.rank
        latest = mpicoll.allreduce(days, mpicoll.Op(np.maximum, commutative=True, elementwise=True))
        assert latest.dtype == days.dtype
        np.testing.assert_array_equal(latest, days - world.rank + world.size - 1)

    ranks(body)


@pytest.mark.parametrize("writes_to", [0, 1])
def test_function_that_writes_to_an_argument(ranks: Ranks, writes_to: int) -> None:
    """As ``a += b; return a`` does. In shared memory an argument may be the data of another rank."""

    def add(*operands: np.ndarray) -> np.ndarray:
        operands[writes_to][...] = operands[0] + operands[1]
        return operands[writes_to]

    def body() -> None:
        world = mpicoll.world()
        op = mpicoll.Op(add, commutative=True, elementwise=True)
        total = world.size * (world.size + 1) // 2
        for name in (None, *mpicoll.schedules.algorithms_of("allreduce"), "shm_flat", "shm_pipelined"):
            for count in (5, 20_000):
                x = np.full(count, world.rank + 1)
                try:
                    got = mpicoll.allreduce(x, op, algorithm=name)
                except mpicoll.AlgorithmError:
                    continue  # the ranks share no memory
                np.testing.assert_array_equal(got, np.full(count, total), f"{name}")
                np.testing.assert_array_equal(x, np.full(count, world.rank + 1), f"{name}")

    ranks(body)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_is_extreme(ranks: Ranks, dtype: str) -> None:
    """As for minloc and maxloc, and as in numpy; whichever rank has it, and whatever the algorithm."""

    def body() -> None:
        world = mpicoll.world()
        inputs = [numbers(random(dtype, rank), dtype, (40,)) for rank in range(world.size)]
        for rank, one in enumerate(inputs):
            one[rank :: world.size + 2] = np.nan
        for op, ufunc in (("min", np.minimum), ("max", np.maximum)):
            want = ufunc.reduce([one.astype(np.float64) for one in inputs])
            for name in algorithm_names("allreduce", native=False):
                got = mpicoll.allreduce(inputs[world.rank], op, algorithm=name)
                np.testing.assert_array_equal(got.astype(np.float64), want, err_msg=f"{op} {name}")

    ranks(body)
