"""exchange_halo: each rank's part, with its halo, is a window into the whole array."""

from __future__ import annotations

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

INNER = (4, 3)
"""Extents of the inner part of each rank, along the axes that the grid divides."""

UNKNOWN = -1.0


def make_parts(
    grid: mpicoll.CartesianCommunicator, widths: tuple[int, ...], *, corners: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's part before and after the exchange. What no neighbour has is UNKNOWN, and what is not
    exchanged stays so."""
    inner = INNER[: len(widths)]
    whole = np.arange(float(prod(n * p for n, p in zip(inner, grid.dims, strict=True)))).reshape(
        [n * p for n, p in zip(inner, grid.dims, strict=True)]
    )
    padded = whole
    for axis, (width, periodic) in enumerate(zip(widths, grid.periods, strict=True)):
        border = [(width, width) if at == axis else (0, 0) for at in range(whole.ndim)]
        padded = np.pad(padded, border, "wrap") if periodic else np.pad(padded, border, constant_values=UNKNOWN)
    place = tuple(
        slice(at * n, (at + 1) * n + 2 * width) for at, n, width in zip(grid.coords, inner, widths, strict=True)
    )
    after = padded[place].copy()
    inside = tuple(slice(width, width + n) for width, n in zip(widths, inner, strict=True))
    before = np.full_like(after, UNKNOWN)
    before[inside] = after[inside]
    if not corners:
        after[_count_outer(after.shape, widths) > 1] = UNKNOWN
    return before, after


def _count_outer(shape: tuple[int, ...], widths: tuple[int, ...]) -> np.ndarray:
    """Return in how many axes each element lies in the halo."""
    found = np.zeros(shape, int)
    for axis, (extent, width) in enumerate(zip(shape, widths, strict=True)):
        at = np.arange(extent).reshape([-1 if one == axis else 1 for one in range(len(shape))])
        found += (at < width) | (at >= extent - width)
    return found


def check(grid: mpicoll.CartesianCommunicator, widths: tuple[int, ...]) -> None:
    for corners in (True, False):
        before, after = make_parts(grid, widths, corners=corners)
        options: dict[str, Any] = {"corners": corners, "comm": grid}
        x = before.copy()
        found = mpicoll.exchange_halo(x, widths, **options)
        np.testing.assert_array_equal(found, after)
        np.testing.assert_array_equal(x, before)
        assert mpicoll.exchange_halo(x, widths, out=x, timeout=20.0, **options) is x
        np.testing.assert_array_equal(x, after)
        for order in (
            np.asfortranarray(before),
            np.repeat(before, 2, axis=-1)[..., ::2],
            np.flip(np.flip(before).copy()),
        ):
            x = order.copy(order="K")
            mpicoll.iexchange_halo(x, widths, out=x, **options).wait()
            np.testing.assert_array_equal(x, after)


def test_grids_of_one_and_two_dimensions(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        for count in (1, 2):
            for dims in product(range(1, world.size + 1), repeat=count):
                if prod(dims) != world.size:
                    continue
                for periods in product((False, True), repeat=count):
                    with world.cart(dims, periods) as grid:
                        for widths in [(1,) * count, (3, 2)[:count], (0, 1)[:count]]:
                            check(grid, widths)

    ranks(body)


def test_square_parts(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank at a border sends faces of two axes that begin at one element, and have as many bytes."""
    monkeypatch.setitem(globals(), "INNER", (4, 4))

    def body() -> None:
        size = mpicoll.world().size
        for dims in {(size, 1), (1, size), tuple(mpicoll.dims_create(size, 2))}:
            with mpicoll.world().cart(dims) as grid:
                check(grid, (2, 2))

    ranks(body)


def test_axes_and_dtypes(ranks: Ranks) -> None:
    """Further axes are not divided; dimensions may divide any axis."""

    def body() -> None:
        world = mpicoll.world()
        with world.cart(2, periods=[True, False]) as grid:
            before, after = make_parts(grid, (1, 1))
            for dtype in ("float16", "complex64", "S8", "i4"):
                x, want = (np.stack([one.T.astype(dtype)] * 3) for one in (before, after))
                mpicoll.exchange_halo(x, axes=(-1, 1), out=x, comm=grid)
                np.testing.assert_array_equal(x, want)
            tensor = mpicoll.exchange_halo(torch.tensor(before, dtype=torch.bfloat16), comm=grid)
            assert torch.equal(tensor, torch.tensor(after, dtype=torch.bfloat16))
            empty = np.empty((3, 3, 0))
            assert mpicoll.exchange_halo(empty, comm=grid).shape == (3, 3, 0)
            out = np.zeros_like(before)
            mpicoll.exchange_halo(before, out=out, comm=grid)
            np.testing.assert_array_equal(out, after)
        with world.cart([world.size], True) as ring, ring.sub([False]) as alone:
            assert mpicoll.exchange_halo(np.array(2.5), comm=alone) == 2.5

    ranks(body)


def test_parts_of_different_extents(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size]) as line:
            x = np.full(world.rank + 3, float(world.rank))
            mpicoll.exchange_halo(x, out=x, comm=line)
            assert x[0] == max(world.rank - 1, 0)
            assert x[-1] == min(world.rank + 1, world.size - 1)

    several(body)


def test_device_memory(several: Ranks, cuda: ModuleType) -> None:
    arrays = Cupy(cuda, played=fake_cuda.is_fake(cuda))

    def body() -> None:
        world = mpicoll.world()
        with world.cart(2, periods=[False, True]) as grid:
            for corners in (True, False):
                before, after = make_parts(grid, (1, 1), corners=corners)
                for x in (arrays.put(before), arrays.put(np.repeat(before, 2, axis=1))[:, ::2]):
                    found = mpicoll.exchange_halo(x, corners=corners, comm=grid)
                    assert arrays.is_one(found)
                    np.testing.assert_array_equal(arrays.get(found), after)
                    np.testing.assert_array_equal(arrays.get(x), before)
                    mpicoll.exchange_halo(x, corners=corners, out=x, comm=grid)
                    np.testing.assert_array_equal(arrays.get(x), after)

    several(body)
    arrays.forget()


def test_wrong_arguments(some: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.ones((6, 6))
        with world.cart([world.size, 1], periods=True) as grid:
            for arguments in (
                {"width": -1},
                {"width": 1.5},
                {"width": [1]},
                {"width": 3},
                {"axes": [0]},
                {"axes": [0, 2]},
                {"axes": [1, -1]},
                {"axes": "ab"},
                {"out": np.ones((6, 5))},
            ):
                with pytest.raises(mpicoll.ShapeError, match=rf"exchange_halo: .*rank {world.rank} of {world.size}"):
                    mpicoll.exchange_halo(x, comm=grid, **arguments)  # type: ignore[arg-type]
            with pytest.raises(mpicoll.ShapeError, match="of 1 dimensions"):
                mpicoll.exchange_halo(np.ones(6), comm=grid)
            with pytest.raises(mpicoll.DTypeError):
                mpicoll.exchange_halo(x, out=x.astype("f4"), comm=grid)
            assert mpicoll.exchange_halo(x, comm=grid).sum() == 36
            for width in (np.int64(1), np.ones(2, int)):
                assert mpicoll.exchange_halo(x, width, comm=grid).sum() == 36  # type: ignore[arg-type]
        with world.graph([world.rank], [world.rank]) as graph:
            with pytest.raises(mpicoll.CommunicatorError, match="form no grid"):
                mpicoll.exchange_halo(x, comm=graph)
            assert mpicoll.neighbor_alltoall(x, comm=graph).shape == (6, 6)

    some(body)


def test_neighbours_that_disagree(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with world.cart([world.size], True) as ring, pytest.raises(mpicoll.TruncationError, match="exchange_halo"):
            mpicoll.exchange_halo(np.ones((6, 3 + world.rank % 2)), comm=ring)
        with world.cart([world.size], True) as ring, pytest.raises(mpicoll.MismatchError, match="width"):
            mpicoll.exchange_halo(np.ones((9, 3)), 1 + (world.rank == 0), comm=ring)

    several(body)


@pytest.mark.extension
@pytest.mark.parametrize("half", [None, 128, 1 << 60])
def test_repeated_calls(several: Ranks, monkeypatch: pytest.MonkeyPatch, half: int | None) -> None:
    """Also with layers that are larger than the memory for messages, or where no rank can allocate that."""

    def body() -> None:
        world = mpicoll.world()
        for dims, periods in (([world.size, 1], [True, False]), ([1, world.size], [False, True]), ([0, 0], True)):
            with world.cart(dims, periods) as grid:
                for corners in (True, False):
                    before, after = make_parts(grid, (1, 2), corners=corners)
                    # Planes, whose layers are small and large.
                    for count in (1, 5, 800):
                        x, want = (np.repeat(one[..., None], count, axis=2) for one in (before, after))
                        y = x.copy()
                        for _ in range(3):
                            y[...] = x
                            assert mpicoll.exchange_halo(y, (1, 2), corners=corners, out=y, comm=grid) is y
                            np.testing.assert_array_equal(y, want)
                            np.testing.assert_array_equal(
                                mpicoll.exchange_halo(x, (1, 2), corners=corners, comm=grid), want
                            )
                        core = grid._core
                        if core.no_shm_reason is None and core.no_cma_reason is None:
                            missing = object()
                            key = "exchange_halo", (1, 2), None, corners
                            assert core.queue.run_repeated(missing, y, y, *key) is y
                            np.testing.assert_array_equal(y, want)

    if half is not None:
        monkeypatch.setattr("mpicoll.engine.core.arena.MESSAGE_BYTES", half)
    several(body)
