"""reduce against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product, repeat

import numpy as np
import pytest
from support.data import DTYPES, HALVES, OPS, expected, make_op, means, numbers, random
from support.exercise import algorithm_names, run_rows, serves
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
@pytest.mark.slow
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "reduce")


def _each_algorithm(dtype: str, op: str, length: int, roots: Iterator[int]) -> None:
    world = mpicoll.world()
    inputs = [numbers(random(dtype, op, rank), dtype, (length,), op) for rank in range(world.size)]
    want = expected(op, inputs, dtype)
    for name in algorithm_names("reduce", native=world._core.transport.native is not None):
        if serves("reduce", name, op, dtype):
            root = next(roots) % world.size
            got = mpicoll.reduce(inputs[world.rank], make_op(op, world.rank, dtype), root, algorithm=name)
            if world.rank == root:
                want.check(got, (op, name, root))
            else:
                assert got is None


def test_each_dtype_and_op_with_each_algorithm(ranks: Ranks) -> None:
    """Roots take turns."""

    def body() -> None:
        roots = count()
        for dtype, op in product(DTYPES, OPS):
            if means(op, dtype) and op != "user_matmul":
                _each_algorithm(dtype, op, 7, roots)

    ranks(body)


def test_every_root(ranks: Ranks) -> None:
    def body() -> None:
        for root in range(mpicoll.world().size):
            for op in ("sum", "user_first"):
                _each_algorithm("float64", op, 7, repeat(root))

    ranks(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_of_ten_thousand_elements(ranks: Ranks, dtype: str) -> None:
    def body() -> None:
        _each_algorithm(dtype, "sum", 10_000, count())

    ranks(body)


def test_algorithms_that_keep_the_order_for_root_zero_only(ranks: Ranks) -> None:
    """They serve an operation that does not commute when the root is rank 0."""

    def body() -> list[str]:
        world = mpicoll.world()
        matrices = [random("matrix", rank).integers(-5, 5, (2, 2)) for rank in range(world.size)]
        served = []
        for name, algorithm in mpicoll.schedules.algorithms_of("reduce").items():
            if algorithm.keeps_order(0) and algorithm.slots(world.size)[0] == 1:
                got = mpicoll.reduce(matrices[world.rank], np.matmul, 0, algorithm=name)
                if world.rank == 0:
                    want = matrices[0]
                    for one in matrices[1:]:
                        want = want @ one
                    np.testing.assert_array_equal(got, want)
                served.append(name)
        return served

    assert all(ranks(body))
