"""scatter against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support.exercise import algorithm_names, run_rows
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "scatter")


def test_every_root_and_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        native = world._core.transport.native is not None
        for counts in ([2] * world.size, [(rank * 3 + 1) % 4 for rank in range(world.size)], [0] * world.size):
            whole = np.arange(sum(counts) * 3).reshape(-1, 3)
            start = sum(counts[: world.rank])
            want = whole[start : start + counts[world.rank]]
            for root in range(world.size):
                x = whole if world.rank == root else np.full_like(want, -1)
                for name in algorithm_names("scatter", native=native):
                    got = mpicoll.scatter(x, root, counts=counts, algorithm=name)
                    np.testing.assert_array_equal(got, want)

    ranks(body)


def test_others_need_only_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        out = np.zeros(2)
        x = np.arange(2.0 * world.size) if world.rank == 0 else None
        assert mpicoll.scatter(x, out=out) is out
        assert out.tolist() == [2 * world.rank, 2 * world.rank + 1]

    ranks(body)


def test_the_roots_block_may_stay_in_x(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for root in range(world.size):
            for name in algorithm_names("scatter", native=world._core.transport.native is not None):
                x = np.arange(2 * world.size)
                out = x[2 * world.rank : 2 * world.rank + 2] if world.rank == root else np.zeros(2, int)
                assert mpicoll.scatter(x if world.rank == root else None, root, out=out, algorithm=name) is out
                assert out.tolist() == [2 * world.rank, 2 * world.rank + 1]

    ranks(body)
