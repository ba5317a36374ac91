"""allgather against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support.exercise import algorithm_names, run_rows
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "allgather")


def test_each_algorithm_with_uneven_blocks(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        size = world.size
        last_only = [0] * (size - 1) + [4]
        for counts in ([2] * size, [(rank * 3 + 1) % 4 for rank in range(size)], [0] * size, last_only):
            mine = np.full((counts[world.rank], 2), world.rank, np.int16)
            want = np.repeat(np.arange(size), counts)[:, None] * np.ones((1, 2), int)
            for name in algorithm_names("allgather", native=world._core.transport.native is not None):
                np.testing.assert_array_equal(mpicoll.allgather(mine, counts=counts, algorithm=name), want)

    ranks(body)


def test_own_block_may_lie_in_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for name in algorithm_names("allgather", native=world._core.transport.native is not None):
            out = np.full(2 * world.size, -1)
            x = out[2 * world.rank : 2 * world.rank + 2]
            x[...] = world.rank
            assert mpicoll.allgather(x, out=out, algorithm=name) is out
            np.testing.assert_array_equal(out, np.repeat(np.arange(world.size), 2))

    ranks(body)


def test_numbers_become_an_array(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        got = mpicoll.allgather(world.rank)
        assert type(got) is np.ndarray
        assert got.tolist() == list(range(world.size))

    ranks(body)
