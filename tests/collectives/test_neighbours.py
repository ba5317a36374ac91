"""Collectives of neighbours against an oracle that knows all ranks' data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import fake_cuda
from support.device_bodies import Cupy
from support.ranks import Ranks

import mpicoll
from mpicoll import PROC_NULL
from mpicoll.transport import quirks

DTYPES = ["float64", "float16", "bool", "complex64", "S5", "i1"]


def block(rank: int, k: int, rows: int, dtype: Any = "float64") -> np.ndarray:
    """The k-th block that `rank` sends."""
    return (np.arange(2 * rows).reshape(rows, 2) + 10 * k + 100 * rank).astype(dtype)


def grids(size: int) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    dims = [dims for count in (1, 2) for dims in product(range(1, size + 1), repeat=count) if prod(dims) == size]
    return [(one, periods) for one in dims for periods in product((False, True), repeat=len(one))]


def arrivals(grid: mpicoll.CartesianCommunicator) -> list[tuple[int, int] | None]:
    """For each block that this rank receives, its sender and its number there; None beyond a border."""
    found: list[tuple[int, int] | None] = []
    for axis in range(len(grid.dims)):
        before, behind = grid.shift(axis)
        found.append(None if before == PROC_NULL else (before, 2 * axis + 1))
        found.append(None if behind == PROC_NULL else (behind, 2 * axis))
    return found


def check_grid(grid: mpicoll.CartesianCommunicator) -> None:
    number, expected = 2 * len(grid.dims), arrivals(grid)
    dtypes = DTYPES if all(grid.periods) else []
    for dtype, rows in [*((one, 2) for one in dtypes), ("float64", 0), ("float64", 5000)]:
        x = np.concatenate([block(grid.rank, k, rows, dtype) for k in range(number)])
        want = np.concatenate(
            [np.zeros((rows, 2), dtype) if one is None else block(*one, rows, dtype) for one in expected]
        )
        before = x.copy()
        np.testing.assert_array_equal(mpicoll.neighbor_alltoall(x, comm=grid), want)
        np.testing.assert_array_equal(x, before)
        np.testing.assert_array_equal(mpicoll.ineighbor_alltoall(x, comm=grid).wait(), want)
        mine = block(grid.rank, 0, rows, dtype)
        want = np.concatenate(
            [np.zeros((rows, 2), dtype) if one is None else block(one[0], 0, rows, dtype) for one in expected]
        )
        np.testing.assert_array_equal(mpicoll.neighbor_allgather(mine, comm=grid), want)
        np.testing.assert_array_equal(mpicoll.neighbor_allgather(mine, comm=grid, timeout=20.0), want)
        np.testing.assert_array_equal(mpicoll.ineighbor_allgather(mine, comm=grid).wait(), want)


def test_grids(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dims, periods in grids(world.size):
            with world.cart(dims, periods) as grid:
                check_grid(grid)
        part = world.split(world.rank % 2, -world.rank)
        assert part is not None
        with part.cart([part.size], True) as grid, grid.sub([True]) as line:
            check_grid(grid)
            check_grid(line)
        part.free()

    ranks(body)


def edges(size: int, seed: int) -> list[tuple[int, int]]:
    """Random edges, some of them several times, some from a rank to itself."""
    rng = np.random.default_rng(seed)
    return [tuple(map(int, rng.integers(size, size=2))) for _ in range(3 * size)]  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(3))
def test_graphs_with_counts(ranks: Ranks, seed: int) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank = world.rank
        all_edges = edges(world.size, seed)
        outgoing = [[dest for source, dest in all_edges if source == one] for one in range(world.size)]
        incoming = [source for source, dest in all_edges if dest == rank]
        # The n-th edge between two ranks, in the order of either.
        seen: dict[int, int] = defaultdict(int)
        senders = []
        for source in incoming:
            places = [k for k, dest in enumerate(outgoing[source]) if dest == rank]
            senders.append((source, places[seen[source]]))
            seen[source] += 1
        with world.graph(incoming, outgoing[rank]) as graph:

            def rows(source: int, k: int) -> int:
                return (3 * source + k + seed) % 4

            send, recv = [rows(rank, k) for k in range(len(outgoing[rank]))], [rows(*one) for one in senders]
            x = np.concatenate([np.empty((0, 2)), *(block(rank, k, n) for k, n in enumerate(send))])
            want = np.concatenate([np.empty((0, 2)), *(block(*one, rows(*one)) for one in senders)])
            np.testing.assert_array_equal(mpicoll.neighbor_alltoall(x, counts=(send, recv), comm=graph), want)
            # Reversed columns, into an array of every second row.
            out = np.full((2 * len(want), 2), -1.0)[::2]
            flipped = np.asfortranarray(x)[:, ::-1]
            assert mpicoll.neighbor_alltoall(flipped, counts=(send, recv), out=out, comm=graph) is out
            np.testing.assert_array_equal(out, want[:, ::-1])
            mine = block(rank, 0, rank + 1)
            want = np.concatenate([np.empty((0, 2)), *(block(one, 0, one + 1) for one in incoming)])
            counts = [one + 1 for one in incoming]
            np.testing.assert_array_equal(mpicoll.neighbor_allgather(mine, counts=counts, comm=graph), want)

    ranks(body)


def test_ranks_without_neighbours(several: Ranks) -> None:
    """A rank that only receives states the size of a block by its `out`, or by counts."""

    def body() -> None:
        world = mpicoll.world()
        rank, last = world.rank, world.size - 1
        with world.graph([0] if rank == last else [], [last] if rank == 0 else []) as graph:
            x = np.ones((3 if rank == 0 else 0, 2))
            if rank == last:
                with pytest.raises(mpicoll.ShapeError, match="no destinations"):
                    mpicoll.neighbor_alltoall(x, comm=graph)
            out = np.zeros((3, 2)) if rank == last else None
            found = mpicoll.neighbor_alltoall(x, out=out, comm=graph)
            assert found.shape == ((3, 2) if rank == last else (0, 2))
            assert found.all()
            assert mpicoll.neighbor_allgather(rank, comm=graph).tolist() == ([0] if rank == last else [])

    several(body)


def test_blocks_beyond_a_border_stay(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size]) as line:
            first, last = world.rank == 0, world.rank == world.size - 1
            x = np.array([world.rank, world.rank + 0.5])
            # Each once more, when the extension carries out the call.
            for kept, step in product((7.0, 8.0), (1, 2)):
                out = np.full(2 * step, kept)[::step]
                mpicoll.neighbor_alltoall(x, out=out, comm=line)
                assert out.tolist() == [kept if first else world.rank - 0.5, kept if last else world.rank + 1.0]
            out = np.array([7.0, 7.0])
            mpicoll.neighbor_allgather(np.float64(world.rank), out=out, comm=line)
            assert out.tolist() == [7.0 if first else world.rank - 1, 7.0 if last else world.rank + 1]
            # In place, where the border's blocks are those that were to be sent there.
            mpicoll.neighbor_alltoall(x, out=x, comm=line)
            assert x.tolist() == [
                world.rank if first else world.rank - 0.5,
                world.rank + 0.5 if last else world.rank + 1.0,
            ]

    ranks(body)


def test_tensors(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size], periods=True) as ring:
            found = mpicoll.neighbor_alltoall(torch.tensor([1, 2], dtype=torch.bfloat16) + world.rank, comm=ring)
            assert found.dtype == torch.bfloat16
            assert found.tolist() == [2 + (world.rank - 1) % world.size, 1 + (world.rank + 1) % world.size]

    several(body)


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_device_memory(several: Ranks, cuda: ModuleType, layout: str) -> None:
    arrays = Cupy(cuda, played=fake_cuda.is_fake(cuda))

    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size]) as line:
            values = np.array([[1.0, 2.0], [3.0, 4.0]]) + 10 * world.rank
            x = arrays.put(values) if layout == "contiguous" else arrays.put(np.repeat(values, 2, axis=1))[:, ::2]
            out = arrays.put(np.full((2, 2), -1.0))
            want = np.full((2, 2), -1.0)
            if world.rank:
                want[0] = [10 * world.rank - 7, 10 * world.rank - 6]
            if world.rank < world.size - 1:
                want[1] = [10 * world.rank + 11, 10 * world.rank + 12]
            assert mpicoll.neighbor_alltoall(x, out=out, comm=line) is out
            np.testing.assert_array_equal(arrays.get(out), want)
            found = mpicoll.neighbor_alltoall(x, comm=line)
            assert arrays.is_one(found)
            np.testing.assert_array_equal(arrays.get(found), np.where(want == -1, 0, want))

    several(body)
    arrays.forget()


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.ones((2, 2))
        for call in (mpicoll.neighbor_allgather, mpicoll.neighbor_alltoall, mpicoll.exchange_halo):
            with pytest.raises(mpicoll.CommunicatorError, match="have no neighbours; pass comm="):
                call(x)
        with world.cart([world.size], periods=True) as ring:
            rank = f"rank {world.rank} of {world.size}"
            for arguments in (
                {"x": np.ones(3)},
                {"x": np.ones(()), "out": np.ones(2)},
                {"x": x, "counts": [1, 1, 1]},
                {"x": x, "counts": ([1], [1, 1])},
                {"x": x, "counts": ([1, 1], [1, -1])},
                {"x": x, "counts": ([1, 2], [1, 1])},
                {"x": x, "counts": ([1, 1], [1, 0.5])},
                {"x": x, "out": np.ones((3, 2))},
            ):
                with pytest.raises(mpicoll.ShapeError, match=rf"neighbor_alltoall: .*\({rank}\)"):
                    mpicoll.neighbor_alltoall(comm=ring, **arguments)  # type: ignore[arg-type]
            for counts in ([1], [1, -2], 2, [1, "a"]):
                with pytest.raises(mpicoll.ShapeError, match=rf"neighbor_allgather: counts .*\({rank}\)"):
                    mpicoll.neighbor_allgather(x, counts=counts, comm=ring)  # type: ignore[arg-type]
            with pytest.raises(mpicoll.DTypeError):
                mpicoll.neighbor_allgather([1, 2], comm=ring)
            with pytest.raises(mpicoll.DTypeError):
                mpicoll.neighbor_allgather(x, out=np.ones((4, 2), "f4"), comm=ring)
            with pytest.raises(mpicoll.ArgumentError, match="timeout"):
                mpicoll.neighbor_allgather(x, comm=ring, timeout=-1)
            # No message has been sent.
            assert mpicoll.neighbor_allgather(x, comm=ring).shape == (4, 2)

    some(body)


@contextmanager
def collect(failures: list[str]) -> Iterator[None]:
    try:
        yield
    except (mpicoll.MismatchError, mpicoll.TruncationError) as error:
        failures.append(str(error))


def test_ranks_that_disagree(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size], periods=True) as ring:
            x = np.ones(2 + 2 * (world.rank == 0))
            failures: list[str] = []
            with collect(failures):
                mpicoll.neighbor_alltoall(x, comm=ring)
            # Without shared memory only the neighbours notice it.
            assert failures or world.rank not in (0, 1, world.size - 1)
            assert all("neighbor_alltoall" in one for one in failures)
        with world.cart([world.size], periods=True) as ring, pytest.raises(mpicoll.MismatchError):
            (mpicoll.neighbor_allgather if world.rank else mpicoll.neighbor_alltoall)(np.ones(2), comm=ring)
        assert mpicoll.allreduce(1) == world.size

    several(body)


@pytest.mark.mpi
def test_the_order_is_that_of_mpi() -> None:
    from mpi4py import MPI

    world = mpicoll.world()
    is_other = quirks.NEIGHBOR_ORDER.applies_to(MPI.Get_library_version())
    for dims, periods in grids(world.size):
        if is_other and any(extent <= 2 and period for extent, period in zip(dims, periods, strict=True)):
            continue
        theirs = MPI.COMM_WORLD.Create_cart(dims, periods)
        with world.cart(dims, periods) as grid:
            x = np.concatenate([block(world.rank, k, 3) for k in range(2 * len(dims))])
            want, out = np.zeros_like(x), np.zeros_like(x)
            theirs.Neighbor_alltoall(x, want)
            np.testing.assert_array_equal(mpicoll.neighbor_alltoall(x, out=out, comm=grid), want)
            mine, every = x[:3].copy(), np.zeros_like(x)
            theirs.Neighbor_allgather(mine, every)
            np.testing.assert_array_equal(mpicoll.neighbor_allgather(mine, comm=grid), every)
        theirs.Free()


def is_repeated(name: str, x: Any, out: Any, comm: mpicoll.Communicator, *key: Any) -> bool:
    """Carry out a call like an earlier one by the extension alone. Return False if that can't be done."""
    queue = comm._core.queue
    return queue.run_repeated(queue, x, out, name, *(key or (None,))) is not queue


@pytest.mark.extension
@pytest.mark.parametrize("rows", [1, 30, 250, 3000, 40_000])
def test_repeated_calls(several: Ranks, rows: int) -> None:
    """The sizes are such that messages take each of the ways through memory."""

    def body() -> None:
        world = mpicoll.world()
        shared = world._core.no_shm_reason is None and world._core.no_cma_reason is None
        for dims, periods in (([world.size], True), ([world.size], False), ([1, world.size], [True, False])):
            with world.cart(dims, periods) as grid:
                number, expected = 2 * len(dims), arrivals(grid)
                for turn in range(4):
                    x = np.concatenate([block(grid.rank, k, rows) for k in range(number)]) + turn
                    want = np.concatenate(
                        [np.full((rows, 2), 7.0) if one is None else block(*one, rows) + turn for one in expected]
                    )
                    out = np.full_like(want, 7.0)
                    mpicoll.neighbor_alltoall(x, out=out, comm=grid)
                    np.testing.assert_array_equal(out, want)
                    found = mpicoll.neighbor_alltoall(x, comm=grid)
                    np.testing.assert_array_equal(found, np.where(want == 7.0, found, want))
                    mine = block(grid.rank, turn, rows)
                    want = np.concatenate(
                        [np.full((rows, 2), 7.0) if one is None else block(one[0], turn, rows) for one in expected]
                    )
                    out = np.full_like(want, 7.0)
                    mpicoll.neighbor_allgather(mine, out=out, comm=grid)
                    np.testing.assert_array_equal(out, want)
                if shared:
                    assert is_repeated("neighbor_allgather", mine, out, grid)
                    np.testing.assert_array_equal(out, want)
                    assert not is_repeated("neighbor_allgather", out[:rows], out, grid)  # they overlap

    several(body)


def test_many_edges(ranks: Ranks) -> None:
    """More than there is room for in the list of a slot."""

    def body() -> None:
        world = mpicoll.world()
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        with world.graph([left] * 70 + [world.rank], [right] * 70 + [world.rank]) as graph:
            for rows in (1, 300):
                x = np.arange(71.0 * rows) + 1000 * world.rank
                for _ in range(3):
                    got = mpicoll.neighbor_alltoall(x, comm=graph)
                    want = np.concatenate([x[: 70 * rows] - 1000 * world.rank + 1000 * left, x[70 * rows :]])
                    np.testing.assert_array_equal(got, want)

    ranks(body)


@pytest.mark.extension
def test_blocks_of_other_sizes(several: Ranks) -> None:
    """Both the sender and the receiver raise the error, and the ranks remain synchronised."""

    def body() -> None:
        world = mpicoll.world()
        if world._core.no_shm_reason is not None or world._core.no_cma_reason is not None:
            pytest.skip("messages go through the transport")
        rank = world.rank
        with world.graph([0] if rank == 1 else [], [1] if rank == 0 else []) as graph:
            x, out = np.ones(3 if rank == 0 else 0), np.zeros(3 if rank == 1 else 0)
            for turn in range(4):
                if turn == 2 and rank == 0:
                    with pytest.raises(mpicoll.TruncationError, match=r"rank 0 of .* sends rank 1 40 bytes"):
                        mpicoll.neighbor_alltoall(np.ones(5), out=out, comm=graph)
                elif turn == 2 and rank == 1:
                    with pytest.raises(mpicoll.TruncationError, match=r"rank 1 of .* expects 24 bytes of rank 0"):
                        mpicoll.neighbor_alltoall(x, out=out, comm=graph)
                else:
                    mpicoll.neighbor_alltoall(x, out=out, comm=graph)
                    assert out.all()
                out[...] = 0
            assert mpicoll.allreduce(1, comm=graph) == world.size

    several(body)


@pytest.mark.extension
def test_another_operation_after_repeated_ones(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size], periods=True) as ring:
            x, out = np.ones(2), np.zeros(2)
            for _ in range(4):
                mpicoll.neighbor_alltoall(x, out=out, comm=ring)
            with pytest.raises(mpicoll.MismatchError, match="neighbor_alltoall"):
                mpicoll.barrier(comm=ring) if world.rank == 0 else mpicoll.neighbor_alltoall(x, out=out, comm=ring)

    several(body)


def test_programs_of_several_operations(several: Ranks) -> None:
    """Random sequences, in which ranks run ahead of each other, on the same arrays."""

    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size], periods=True) as ring:
            before, behind = ring.shift(0)
            rng = np.random.default_rng(8)
            for _ in range(150):
                rows = int(rng.choice([1, 60, 2000]))
                what = rng.integers(5)
                x = np.arange(2.0 * rows) + world.rank
                if what == 0:
                    assert mpicoll.allreduce(1, comm=ring) == world.size
                elif what == 1:
                    assert mpicoll.bcast(np.full(rows, world.rank), 1, comm=ring)[-1] == 1
                elif what == 2:
                    got = mpicoll.neighbor_alltoall(x, comm=ring)
                    want = np.concatenate([np.arange(rows, 2.0 * rows) + before, np.arange(1.0 * rows) + behind])
                    np.testing.assert_array_equal(got, want)
                elif what == 3:
                    got = mpicoll.neighbor_allgather(x, comm=ring)
                    np.testing.assert_array_equal(
                        got, np.concatenate([x - world.rank + before, x - world.rank + behind])
                    )
                else:
                    halo = np.full((rows + 2, 3), float(world.rank))
                    mpicoll.exchange_halo(halo, out=halo, comm=ring)
                    assert halo[0].tolist() == [before] * 3
                    assert halo[-1].tolist() == [behind] * 3

    several(body)


@pytest.mark.extension
def test_neighbour_that_fails() -> None:
    """Its neighbours do not wait for it for ever."""
    errors: dict[int, BaseException] = {}

    def body() -> None:
        world = mpicoll.world()
        ring = world.cart([world.size], periods=True)
        x, out = np.ones(2), np.zeros(2)
        for _ in range(3):
            mpicoll.neighbor_alltoall(x, out=out, comm=ring)
        if world.rank == 0:
            raise ValueError("lost")
        try:
            for _ in range(100):
                mpicoll.neighbor_alltoall(x, out=out, comm=ring)
        except mpicoll.RankFailed as error:
            errors[world.rank] = error
            raise

    with pytest.raises(ValueError, match="lost"):
        mpicoll.run_local(body, 4)
    assert errors
