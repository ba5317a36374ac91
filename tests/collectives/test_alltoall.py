"""alltoall against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from support.exercise import algorithm_names, run_rows
from support.ranks import Ranks

import mpicoll


@pytest.mark.every_size
def test_rows(ranks: Ranks) -> None:
    ranks(run_rows, "alltoall")


def test_each_algorithm(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for rows in (0, 1, 3, 500):
            x = np.array([[world.rank, dest] for dest in range(world.size) for _ in range(rows)]).reshape(-1, 2)
            want = np.array([[source, world.rank] for source in range(world.size) for _ in range(rows)]).reshape(-1, 2)
            for name in algorithm_names("alltoall", native=world._core.transport.native is not None):
                np.testing.assert_array_equal(mpicoll.alltoall(x, algorithm=name), want)

    ranks(body)


def test_transposes_a_matrix_of_counts(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        matrix = [[(3 * i + j * j) % 4 for j in range(world.size)] for i in range(world.size)]
        send, recv = matrix[world.rank], [row[world.rank] for row in matrix]
        x = np.repeat(100 * world.rank + np.arange(world.size), send)
        want = np.repeat(100 * np.arange(world.size) + world.rank, recv)
        for name in (None, "pairwise"):
            np.testing.assert_array_equal(mpicoll.alltoall(x, counts=(send, recv), algorithm=name), want)

    ranks(body)


@pytest.mark.parametrize(("mine", "theirs"), [(2, 4), (1, 3), (9, 5)])
def test_two_ranks_that_both_expect_what_they_send(several: Ranks, mine: int, theirs: int) -> None:
    """Differences of opposite sign, such as rank 0 and rank 1 have here, must not cancel out."""

    def body() -> None:
        world = mpicoll.world()
        # On a communicator of its own, which may be out of step afterwards.
        pair = world.split(world.rank if world.rank > 1 else 0)
        if pair.size == 2:
            counts = [0, 0]
            counts[1 - pair.rank] = theirs if pair.rank else mine
            with pytest.raises((mpicoll.MismatchError, mpicoll.TruncationError)):
                mpicoll.alltoall(np.ones(sum(counts)), counts=(counts, counts), comm=pair)
        assert mpicoll.allreduce(1) == world.size

    several(body)
