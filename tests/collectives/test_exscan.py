"""exscan against the oracle."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.data import DTYPES, OPS, Expected, dtype_of, expected, make_op, means, neutral, numbers, random
from support.exercise import algorithm_names, run_rows, serves
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "exscan")


def test_each_dtype_and_op_with_each_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dtype, op in product(DTYPES, OPS):
            if op == "avg" or not means(op, dtype):
                continue
            shape = (2, 2) if op == "user_matmul" else (11,)
            inputs = [numbers(random(dtype, op, rank), dtype, shape, op) for rank in range(world.size)]
            value = neutral(op, dtype)
            nothing = None if value is None else Expected(np.full(shape, value, dtype_of(dtype)))
            want = expected(op, inputs[: world.rank], dtype) if world.rank else nothing
            for name in algorithm_names("exscan", native=world._core.transport.native is not None):
                if serves("exscan", name, op, dtype):
                    got = mpicoll.exscan(inputs[world.rank], make_op(op, world.rank, dtype), algorithm=name)
                    if want is None:
                        assert got is None
                    else:
                        want.check(got, (op, name))

    ranks(body)


def test_out_of_the_first_rank_is_left_alone_where_there_is_no_identity(ranks: Ranks) -> None:
    def body() -> None:
        rank = mpicoll.world().rank
        out = np.full((2, 2), 7)
        got = mpicoll.exscan(np.full((2, 2), 2), np.matmul, out=out)
        assert (got is None) if rank == 0 else (got is out)
        assert (out == (7 if rank == 0 else 2 ** (2 * rank - 1))).all()

    ranks(body)


def test_function_that_writes_to_its_first_argument(ranks: Ranks) -> None:
    """It is the result of this rank, and what the next rank gets is made of it."""

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a += b
        return a

    def body() -> None:
        rank = mpicoll.world().rank
        for name in (None, *mpicoll.schedules.algorithms_of("exscan")):
            got = mpicoll.exscan(np.full(3, rank + 1), add, algorithm=name)
            if rank > 0:
                assert got.tolist() == [rank * (rank + 1) // 2] * 3

    ranks(body)
