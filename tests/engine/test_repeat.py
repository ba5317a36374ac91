"""Calls that come again: what was kept for the first one serves the others, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks

import mpicoll

SIZES = (1, 1000, 3000, 20000, 300000)


def values(count: int, rank: int, turn: int) -> Any:
    return np.random.default_rng([count, rank, turn]).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", SIZES)
def test_results_are_those_of_the_call(several: Ranks, count: int) -> None:
    """New arrays, out, in place, slices and strided arrays by turns, with different contents each time."""

    def body() -> None:
        world = mpicoll.world()
        kept = []
        for turn in range(8):
            x = values(count, world.rank, turn)
            want = np.sum([values(count, rank, turn) for rank in range(world.size)], axis=0, dtype=np.float64)
            if turn % 4 == 0:
                got = mpicoll.allreduce(x)
                assert not np.may_share_memory(got, x)
            elif turn % 4 == 1:
                out = np.empty_like(x)
                got = mpicoll.allreduce(x, out=out)
                assert got is out
            elif turn % 4 == 2:
                got = mpicoll.allreduce(x, out=x)
                assert got is x
            else:
                got = mpicoll.allreduce(np.repeat(x, 2)[::2])
            if turn % 4 != 2:
                np.testing.assert_array_equal(x, values(count, world.rank, turn))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
            kept.append((got, want))
        for got, want in kept:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    several(body)


@pytest.mark.parametrize("count", SIZES)
def test_tensors_come_back_as_tensors(several: Ranks, count: int) -> None:
    def body() -> None:
        world = mpicoll.world()
        total = sum(range(world.size))
        for turn in range(4):
            x = torch.full((count,), float(world.rank), requires_grad=turn == 3)
            got = mpicoll.allreduce(x)
            assert type(got) is torch.Tensor
            assert got.dtype is torch.float32
            assert torch.equal(got, torch.full((count,), float(total)))
            out = torch.empty(count)
            assert mpicoll.allreduce(x.detach(), out=out) is out
            assert torch.equal(out, got)
            assert mpicoll.allreduce(out, "max", out=out) is out
            assert torch.equal(out, got)
            assert torch.equal(x.detach(), torch.full((count,), float(world.rank)))
            gathered = mpicoll.gather(x.detach(), 0)
            assert (gathered is None) == (world.rank != 0)
            if gathered is not None:
                assert torch.equal(gathered, torch.arange(world.size).repeat_interleave(count).float())

    several(body)


def test_what_only_looks_alike_is_kept_apart(several: Ranks) -> None:
    """Calls that differ in the shape, the dtype, the op, the root or the algorithm alone."""

    def body() -> None:
        world = mpicoll.world()
        size = world.size
        for _ in range(3):
            assert mpicoll.allreduce(np.ones((2, 3))).shape == (2, 3)
            assert mpicoll.allreduce(np.ones((3, 2))).shape == (3, 2)
            assert mpicoll.allreduce(np.ones(6, np.int64)).dtype == np.int64
            assert mpicoll.allreduce(np.ones(6, np.int32)).dtype == np.int32
            assert mpicoll.allreduce(np.full(6, 2.0), "prod")[0] == 2.0**size
            assert mpicoll.allreduce(np.full(6, 2.0), "avg")[0] == 2.0
            for root in range(size):
                assert (mpicoll.reduce(np.ones(6), root=root) is None) == (world.rank != root)
                assert mpicoll.bcast(np.full(6, world.rank), root)[0] == root
            assert mpicoll.allreduce(np.ones(6), algorithm="ring")[0] == size

    several(body)


def test_memory_that_is_made_later_changes_the_choice(several: Ranks) -> None:
    def body() -> None:
        x = np.ones(20000)
        before = mpicoll.explain("bcast", x.nbytes).name
        for _ in range(2):
            mpicoll.bcast(x)
        buffer = mpicoll.empty(20000, "float64")
        buffer[:] = mpicoll.world().rank
        after = mpicoll.explain("bcast", x.nbytes)
        if mpicoll.world().unshared is None:
            assert after.name == "pieces"
            assert "mpicoll.empty" in after.reason
        else:
            assert after.name == before
        assert mpicoll.bcast(buffer, 0, out=buffer)[-1] == 0
        assert mpicoll.bcast(x)[-1] == 1

    several(body)


def test_ranks_that_disagree_are_told(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.MismatchError, match=r"ranks? .* calls? allreduce.*they differ in shape"):
            mpicoll.allreduce(np.ones(5000 + 100 * world.rank), algorithm="pieces")
        with pytest.raises(mpicoll.MismatchError, match=r"ranks? .* calls? allreduce.*they differ in op"):
            mpicoll.allreduce(np.ones(5000), "max" if world.rank else "sum", algorithm="slots")
        assert mpicoll.allreduce(np.ones(5000), algorithm="slots")[0] == world.size

    several(body)


@pytest.mark.parametrize("dtype", [">f4", "f2", "i2"])
def test_dtypes_that_are_reduced_in_another_one(several: Ranks, dtype: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        size = world.size
        for count in (100 * size, 20000 * size):
            x = np.full(count, 1 + world.rank, dtype)
            want = size * (size + 1) / 2
            for algorithm in (None, "native" if dtype != "i2" and world.mpi else None):
                for _ in range(3):
                    for got in (
                        mpicoll.allreduce(x, algorithm=algorithm),
                        mpicoll.reduce_scatter(x, algorithm=algorithm),
                    ):
                        assert got.dtype == x.dtype
                        assert (got == want).all()

    several(body)
