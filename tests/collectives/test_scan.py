"""scan against the oracle."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.data import DTYPES, HALVES, OPS, expected, make_op, means, numbers, random
from support.exercise import algorithm_names, run_rows, serves
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
@pytest.mark.slow
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "scan")


def test_each_dtype_and_op_with_each_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dtype, op in product(DTYPES, OPS):
            if op == "avg" or not means(op, dtype):
                continue
            shape = (2, 2) if op == "user_matmul" else (11,)
            inputs = [numbers(random(dtype, op, rank), dtype, shape, op) for rank in range(world.size)]
            want = expected(op, inputs[: world.rank + 1], dtype)
            for name in algorithm_names("scan", native=world._core.transport.native is not None):
                if serves("scan", name, op, dtype):
                    got = mpicoll.scan(inputs[world.rank], make_op(op, world.rank, dtype), algorithm=name)
                    want.check(got, (op, name))

    ranks(body)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_of_ten_thousand_elements(ranks: Ranks, dtype: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        inputs = [numbers(random(dtype, rank), dtype, (10_000,)) for rank in range(world.size)]
        for name in algorithm_names("scan", native=world._core.transport.native is not None):
            got = mpicoll.scan(inputs[world.rank], algorithm=name)
            expected("sum", inputs[: world.rank + 1], dtype).check(got, name)

    ranks(body)


def test_first_rank_gets_its_own_values(ranks: Ranks) -> None:
    def body() -> None:
        x = np.array([3.5, -1.0])
        got = mpicoll.scan(x, "prod")
        if mpicoll.world().rank == 0:
            np.testing.assert_array_equal(got, x)
            assert not np.may_share_memory(got, x)
        else:
            assert got[1] == (-1.0) ** (mpicoll.world().rank + 1)

    ranks(body)


def test_an_exception_of_the_function_is_raised_on_the_ranks_that_need_the_result(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()

        def join(a: Any, b: Any) -> Any:
            if world.rank == 1:
                raise ValueError("bad data")
            return a + b

        for shape in (3,), (100_000,):
            if world.rank == 0:
                np.testing.assert_array_equal(mpicoll.scan(np.ones(shape), join, algorithm="linear"), np.ones(shape))
            elif world.rank == 1:
                with pytest.raises(ValueError, match="bad data"):
                    mpicoll.scan(np.ones(shape), join, algorithm="linear")
            else:
                with pytest.raises(mpicoll.CommunicationError, match=rf"rank {world.rank - 1} failed in this"):
                    mpicoll.scan(np.ones(shape), join, algorithm="linear")
            assert mpicoll.allreduce(1) == world.size

    ranks(body)
