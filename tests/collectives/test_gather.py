"""gather against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support.exercise import algorithm_names, run_rows
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "gather")


def test_every_root_and_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        native = world._core.transport.native is not None
        for counts in ([2] * world.size, [(rank * 3 + 1) % 4 for rank in range(world.size)], [0] * world.size):
            mine = np.full((counts[world.rank], 3), world.rank)
            want = np.repeat(np.arange(world.size), counts)[:, None] * np.ones((1, 3), int)
            for root in range(world.size):
                for name in algorithm_names("gather", native=native):
                    got = mpicoll.gather(mine, root, counts=counts, algorithm=name)
                    if world.rank == root:
                        np.testing.assert_array_equal(got, want)
                    else:
                        assert got is None

    ranks(body)


def test_the_roots_block_may_lie_in_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for root in range(world.size):
            for name in algorithm_names("gather", native=world._core.transport.native is not None):
                out = np.full(2 * world.size, -1)
                x = out[2 * world.rank : 2 * world.rank + 2]
                x[...] = world.rank
                got = mpicoll.gather(x, root, out=out if world.rank == root else None, algorithm=name)
                if world.rank == root:
                    assert got is out
                    np.testing.assert_array_equal(out, np.repeat(np.arange(world.size), 2))

    ranks(body)
