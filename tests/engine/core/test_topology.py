"""Communicators with neighbours: grids and graphs."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
from support.ranks import Ranks, ranks, several, some

import mpicoll
from mpicoll import PROC_NULL

__all__ = ["ranks", "several", "some"]


def grids(size: int) -> list[tuple[int, ...]]:
    return [dims for count in (1, 2, 3) for dims in product(range(1, size + 1), repeat=count) if prod(dims) == size]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_extents_are_as_equal_as_possible(count: int) -> None:
    for size in range(1, 61):
        found = mpicoll.dims_create(size, count)
        lists = product(range(1, size + 1), repeat=count) if size <= 24 else [found]
        best = min(tuple(sorted(one, reverse=True)) for one in lists if prod(one) == size)
        assert found == best
        assert list(found) == sorted(found, reverse=True)
        assert prod(found) == size


def test_given_extents_stay() -> None:
    assert mpicoll.dims_create(24, [0, 2, 0]) == (4, 2, 3)
    assert mpicoll.dims_create(24, (4, 6)) == (4, 6)
    assert mpicoll.dims_create(1_000_003, 3) == (1_000_003, 1, 1)
    assert mpicoll.dims_create(1, 0) == ()


@pytest.mark.parametrize(
    ("size", "dims"),
    [(0, 2), (6.0, 1), (6, -1), (6, [4, 0]), (6, [7, 0]), (6, [2, 2]), (6, "ab"), (2, 0), (6, [-2, -3])],
)
def test_invalid_extents(size: Any, dims: Any) -> None:
    with pytest.raises(mpicoll.ArgumentError, match="dims_create: "):
        mpicoll.dims_create(size, dims)


def test_grids(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dims in grids(world.size):
            for periods in product((False, True), repeat=len(dims)) if len(dims) == 1 else [(True, False, True)]:
                check_grid(world, dims, periods[: len(dims)])
        with world.cart([world.size], True) as grid, grid.duplicate() as other:
            assert (other.dims, other.coords, other.shift(0)) == (grid.dims, grid.coords, grid.shift(0))

    ranks(body)


def check_grid(world: mpicoll.Communicator, dims: tuple[int, ...], periods: tuple[bool, ...]) -> None:
    with world.cart(dims, periods) as grid:
        assert (grid.dims, grid.periods, grid.size, grid.rank) == (dims, periods, world.size, world.rank)
        places = list(product(*map(range, dims)))  # in C order
        assert grid.coords == places[grid.rank]
        assert [grid.coords_of(rank) for rank in range(grid.size)] == places
        for axis, by in product(range(len(dims)), (-2, -1, 0, 1, 3)):
            ends = []
            for step in (-by, by):
                at = list(grid.coords)
                at[axis] += step
                inside = 0 <= at[axis] < dims[axis]
                at[axis] %= dims[axis]
                ends.append(places.index(tuple(at)) if inside or periods[axis] else PROC_NULL)
            assert grid.shift(axis, by) == tuple(ends)
            at = list(grid.coords)
            at[axis] += by
            assert grid.rank_of(at) == ends[1]
        assert mpicoll.allreduce(1, comm=grid) == grid.size


def test_ranks_beyond_a_grid(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        grid = world.cart([world.size - 1])
        assert (grid is None) == (world.rank == world.size - 1)
        assert grid is None or grid.shift(0) == (world.rank - 1 if world.rank else PROC_NULL, *grid.shift(0)[1:])
        chosen = world.cart([0, 1])
        assert chosen is not None
        assert chosen.dims == (world.size, 1)
        chosen.free()
        if grid is not None:
            grid.free()

    several(body)


def test_parts_of_a_grid(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        grid = world.cart(2, periods=[True, False])
        assert grid is not None
        for remain in product((False, True), repeat=2):
            with grid.sub(remain) as part:
                assert part.dims == tuple(n for n, keep in zip(grid.dims, remain, strict=True) if keep)
                assert part.coords == tuple(at for at, keep in zip(grid.coords, remain, strict=True) if keep)
                assert part.periods == tuple(p for p, keep in zip((True, False), remain, strict=True) if keep)
                found = [grid.coords_of(rank) for rank in mpicoll.allgather(grid.rank, comm=part)]
                assert [[c for c, keep in zip(one, remain, strict=True) if not keep] for one in found] == [
                    [c for c, keep in zip(grid.coords, remain, strict=True) if not keep]
                ] * part.size
        with grid.sub(True) as same, grid.sub(False) as alone:
            assert (same.size, alone.size, alone.dims, alone.coords) == (grid.size, 1, (), ())
        grid.free()

    ranks(body)


def test_wrong_arguments_of_grids(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for dims, periods in [
            ([world.size + 1], False),
            ([-1], False),
            ("x", False),
            (1.5, False),
            ([world.size, 1], [True]),
            ([world.size], [2]),
            ([world.size], None),
        ]:
            with pytest.raises(mpicoll.ArgumentError, match="cart: "):
                world.cart(dims, periods)  # type: ignore[arg-type]
        grid = world.cart([world.size, 1])
        assert grid is not None
        for call in (
            lambda: grid.shift(2),
            lambda: grid.shift(-1),
            lambda: grid.shift(0, 0.5),  # type: ignore[arg-type]
            lambda: grid.rank_of([0]),
            lambda: grid.rank_of([0, 0.5]),  # type: ignore[list-item]
            lambda: grid.coords_of(world.size),
            lambda: grid.sub([True]),
        ):
            with pytest.raises(mpicoll.ArgumentError):
                call()
        for lists in ([world.size], [0]), ([0], [-1]), ([0.5], [0]), (0, [0]):
            with pytest.raises(mpicoll.RankError, match="graph: "):
                world.graph(*lists)  # type: ignore[arg-type]
        assert mpicoll.allreduce(1) == world.size
        grid.free()
        with pytest.raises(mpicoll.CommunicatorError):
            grid.sub(True)

    some(body)


def test_ranks_that_pass_different_grids(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.MismatchError, match="periods"):
            world.cart([world.size], periods=world.rank == 0)
        assert mpicoll.allreduce(1) == world.size

    several(body)


def test_graphs(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        with world.graph([(rank - 1) % size, rank], [rank, (rank + 1) % size]) as graph:
            assert graph.sources == ((rank - 1) % size, rank)
            assert graph.destinations == (rank, (rank + 1) % size)
            assert (graph.rank, graph.size) == (rank, size)
            with graph.duplicate() as other:
                assert other.sources == graph.sources
        # An edge that its other rank has not passed.
        with pytest.raises(mpicoll.MismatchError, match=f"rank 0 passed rank {size - 1} 1 times in destinations"):
            world.graph([], [size - 1] if rank == 0 else [])
        assert mpicoll.allreduce(1) == size

    ranks(body)


@pytest.mark.mpi
def test_grids_are_those_of_mpi() -> None:
    from mpi4py import MPI

    world = mpicoll.world()
    for count in (1, 2, 3):
        dims = MPI.Compute_dims(world.size, [0] * count)
        assert mpicoll.dims_create(world.size, count) == tuple(dims)
        for periods in [(False, True, True)[:count]]:
            theirs = MPI.COMM_WORLD.Create_cart(dims, periods)
            with world.cart(dims, periods) as grid:
                assert list(grid.coords) == theirs.coords
                for axis, by in product(range(count), (-1, 1, 2)):
                    wanted = theirs.Shift(axis, by)
                    found = grid.shift(axis, by)
                    assert [MPI.PROC_NULL if one == PROC_NULL else one for one in found] == list(wanted)
            theirs.Free()
