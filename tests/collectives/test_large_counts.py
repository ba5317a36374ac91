"""The paths beyond MPI's counts, with the limits made small instead of the arrays large."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.data import expected, numbers, random

import mpicoll

pytestmark = pytest.mark.mpi


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go as derived datatypes from 100 bytes on, native collectives end at 100 elements."""
    from mpicoll.transport import mpi

    monkeypatch.setattr(mpi.messages, "INT_MAX", 100)
    monkeypatch.setattr(mpi.MpiNative, "max_count", 100)
    monkeypatch.setattr(mpi.messages, "_BLOCK", 64)


@pytest.fixture
def world(small_limits: None) -> Iterator[mpicoll.Communicator]:
    # a communicator of its own: what was prepared before must not be used
    comm = mpicoll.world().split(0)
    assert comm is not None
    comm._core.no_shm_reason = "this test is about MPI's counts"
    yield comm
    comm.free()


def test_choice_says_why_native_is_not_taken(world: mpicoll.Communicator) -> None:
    chosen = mpicoll.explain("allreduce", 101 * 8, dtype="float64", comm=world)
    assert chosen.name != "native"
    assert "101 elements are more than MPI's counts hold" in str(chosen)
    assert mpicoll.explain("allreduce", 100 * 8, dtype="float64", comm=world).name == "native"
    with pytest.raises(mpicoll.AlgorithmError, match="101 elements"):
        mpicoll.allreduce(np.zeros(101), algorithm="native", comm=world)


@pytest.mark.parametrize("count", [100, 101, 1000, 4096])
def test_reductions(world: mpicoll.Communicator, count: int) -> None:
    rows = count * world.size
    inputs = [numbers(random(count, rank), "float64", (rows,)) for rank in range(world.size)]
    mine = inputs[world.rank]
    want = expected("sum", inputs, "float64")
    want.check(mpicoll.allreduce(mine, comm=world))
    want.rows(count * world.rank, count * (world.rank + 1)).check(mpicoll.reduce_scatter(mine, comm=world))
    expected("sum", inputs[: world.rank + 1], "float64").check(mpicoll.scan(mine, comm=world))
    root = world.size - 1
    result = mpicoll.reduce(mine, "sum", root, comm=world)
    if world.rank == root:
        want.check(result)
    for name in mpicoll.schedules.algorithms_of("allreduce"):
        want.check(mpicoll.allreduce(mine, algorithm=name, comm=world), name)


@pytest.mark.parametrize("count", [100, 101, 1000, 4097])
def test_moves(world: mpicoll.Communicator, count: int) -> None:
    rank, size = world.rank, world.size
    blocks = [np.random.default_rng(seed).integers(0, 255, count, np.uint8) for seed in range(size)]
    whole = np.concatenate(blocks)
    np.testing.assert_array_equal(mpicoll.bcast(blocks[rank], size - 1, comm=world), blocks[-1])
    np.testing.assert_array_equal(mpicoll.allgather(blocks[rank], comm=world), whole)
    gathered = mpicoll.gather(blocks[rank], comm=world)
    if rank == 0:
        np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_array_equal(mpicoll.scatter(whole if rank == 0 else blocks[rank], comm=world), blocks[rank])
    want = np.tile(blocks[rank], size)
    np.testing.assert_array_equal(mpicoll.alltoall(whole, comm=world), want)


@pytest.mark.parametrize("count", [0, 100, 101, 1000, 100_000])
def test_messages(world: mpicoll.Communicator, count: int) -> None:
    rank, size = world.rank, world.size
    right, left = (rank + 1) % size, (rank - 1) % size
    x = np.random.default_rng(rank).integers(0, 255, count, np.uint8)
    want = np.random.default_rng(left).integers(0, 255, count, np.uint8)
    status = mpicoll.Status()
    np.testing.assert_array_equal(mpicoll.sendrecv(x, right, left, status=status, comm=world), want)
    assert status.nbytes == count
    request = mpicoll.isend(x, right, comm=world)
    assert mpicoll.probe(left, comm=world).nbytes == count
    np.testing.assert_array_equal(mpicoll.recv(x, left, comm=world), want)
    request.wait()


def test_size_mismatch_is_still_seen(world: mpicoll.Communicator) -> None:
    rank, size = world.rank, world.size
    request = mpicoll.isend(np.zeros(300, np.uint8), (rank + 1) % size, comm=world)
    with pytest.raises(mpicoll.TruncationError):
        mpicoll.recv(np.zeros(200, np.uint8), (rank - 1) % size, comm=world)
    request.wait()


def test_alltoall_with_counts_that_only_some_ranks_can_not_hold(world: mpicoll.Communicator) -> None:
    """All ranks must take the same algorithm, though each knows its own counts only."""
    matrix = [[150 if (i, j) == (0, world.size - 1) else 1 for j in range(world.size)] for i in range(world.size)]
    send, recv = matrix[world.rank], [row[world.rank] for row in matrix]
    x = np.repeat(10 * world.rank + np.arange(world.size), send).astype(np.uint8)
    want = np.repeat(10 * np.arange(world.size) + world.rank, recv).astype(np.uint8)
    np.testing.assert_array_equal(mpicoll.alltoall(x, counts=(send, recv), comm=world), want)
