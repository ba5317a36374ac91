"""reduce_scatter against the oracle."""

from __future__ import annotations

from itertools import cycle, product

import numpy as np
import pytest
from support.data import DTYPES, HALVES, OPS, expected, make_op, means, numbers, random
from support.exercise import algorithm_names, run_rows, serves
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
@pytest.mark.slow
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "reduce_scatter")


def _each_algorithm(dtype: str, op: str, row: int, counts: list[int]) -> None:
    world = mpicoll.world()
    inputs = [numbers(random(dtype, op, rank), dtype, (sum(counts), row), op) for rank in range(world.size)]
    start = sum(counts[: world.rank])
    want = expected(op, inputs, dtype).rows(start, start + counts[world.rank])
    for name in algorithm_names("reduce_scatter", native=world._core.transport.native is not None):
        if serves("reduce_scatter", name, op, dtype):
            function = make_op(op, world.rank, dtype)
            got = mpicoll.reduce_scatter(inputs[world.rank], function, counts=counts, algorithm=name)
            want.check(got, (op, name, counts))


def _counts() -> list[list[int]]:
    size = mpicoll.world().size
    return [[2] * size, [(2 * rank) % 3 for rank in range(size)], [0] * (size - 1) + [3]]


@pytest.mark.slow
def test_each_dtype_and_op_with_each_algorithm(ranks: Ranks) -> None:
    """Equal, uneven and nearly empty blocks take turns."""

    def body() -> None:
        turns = cycle(_counts())
        for dtype, op in product(DTYPES, OPS):
            if means(op, dtype) and op != "user_matmul":
                _each_algorithm(dtype, op, 5, next(turns))

    ranks(body)


def test_every_division_into_blocks(ranks: Ranks) -> None:
    def body() -> None:
        for counts in _counts():
            for op in ("sum", "user_first"):
                _each_algorithm("float64", op, 5, counts)

    ranks(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_of_ten_thousand_elements(ranks: Ranks, dtype: str) -> None:
    def body() -> None:
        for counts in _counts():
            _each_algorithm(dtype, "sum", 2_500, counts)

    ranks(body)


def test_the_whole_array_may_hold_the_result(ranks: Ranks) -> None:
    """`out` is this rank's own block of `x`, as with MPI_IN_PLACE."""

    def body() -> None:
        world = mpicoll.world()
        for name in algorithm_names("reduce_scatter", native=world._core.transport.native is not None):
            x = np.arange(3.0 * world.size) + world.rank
            block = x[3 * world.rank : 3 * world.rank + 3]
            want = world.size * (np.arange(3.0) + 3 * world.rank) + sum(range(world.size))
            got = mpicoll.reduce_scatter(x, out=block, algorithm=name)
            assert got is block
            np.testing.assert_array_equal(got, want)

    ranks(body)
