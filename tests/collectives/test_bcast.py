"""bcast against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support.exercise import algorithm_names, run_rows
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "bcast")


def test_every_root_and_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for root in range(world.size):
            for count in (1, 2, 1000, 100_003):
                want = np.arange(count) * (root + 1)
                for name in algorithm_names("bcast", native=world._core.transport.native is not None):
                    x = want.copy() if world.rank == root else np.full(count, -1)
                    np.testing.assert_array_equal(mpicoll.bcast(x, root, algorithm=name), want)

    ranks(body)


def test_in_place_in_memory_that_is_not_contiguous(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for root in range(world.size):
            for name in algorithm_names("bcast", native=world._core.transport.native is not None):
                base = np.full(9, -1)
                x = base[1::2]
                x[...] = world.rank
                assert mpicoll.bcast(x, root, out=x, algorithm=name) is x
                assert base.tolist() == [-1, root] * 4 + [-1]

    ranks(body)


def test_others_need_only_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        root = world.size - 1
        out = np.zeros((2, 3))
        x = np.arange(6.0).reshape(2, 3) if world.rank == root else None
        assert mpicoll.bcast(x, root, out=out) is out
        np.testing.assert_array_equal(out, np.arange(6.0).reshape(2, 3))

    ranks(body)


def test_python_objects_of_the_buffer_protocol(ranks: Ranks) -> None:
    def body() -> None:
        x = b"hello" if mpicoll.world().rank == 0 else bytes(5)
        assert mpicoll.bcast(x).tobytes() == b"hello"

    ranks(body)
