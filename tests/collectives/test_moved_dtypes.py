"""Operations that move data take any dtype of fixed size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support.exercise import algorithm_names
from support.ranks import Ranks

import mpicoll

NUMPY = {
    "datetime": np.dtype("M8[ns]"),
    "timedelta": np.dtype("m8[s]"),
    "bytes": np.dtype("S5"),
    "text": np.dtype("U3"),
    "structured": np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    "void": np.dtype("V7"),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int4": np.dtype(ml_dtypes.int4),
    "longdouble": np.dtype(np.longdouble),
    "big endian": np.dtype(">u2"),
}


def _filled(dtype: np.dtype, rows: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 100, rows * 2 * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(rows, 2)


def _same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", NUMPY.values(), ids=NUMPY.keys())
def test_numpy(ranks: Ranks, dtype: np.dtype) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        native = world._core.transport.native is not None
        blocks = [_filled(dtype, 3, seed) for seed in range(size)]
        # astype, since numpy joins arrays in native byte order
        whole = np.concatenate(blocks).astype(dtype, copy=False)
        root = size - 1
        for name in algorithm_names("bcast", native=native):
            _same(mpicoll.bcast(blocks[rank], root, algorithm=name), blocks[root])
        for name in algorithm_names("allgather", native=native):
            _same(mpicoll.allgather(blocks[rank], algorithm=name), whole)
        for name in algorithm_names("gather", native=native):
            got = mpicoll.gather(blocks[rank], root, algorithm=name)
            if rank == root:
                _same(got, whole)
        for name in algorithm_names("scatter", native=native):
            x = whole if rank == root else np.empty((3, 2), dtype)
            _same(mpicoll.scatter(x, root, algorithm=name), blocks[rank])
        sent = [_filled(dtype, 2 * size, 50 + source) for source in range(size)]
        want = np.concatenate([one[2 * rank : 2 * rank + 2] for one in sent]).astype(dtype, copy=False)
        for name in algorithm_names("alltoall", native=native):
            _same(mpicoll.alltoall(sent[rank], algorithm=name), want)
        _same(mpicoll.sendrecv(blocks[rank][::-1], (rank + 1) % size, (rank - 1) % size), blocks[rank - 1][::-1])

    ranks(body)


@pytest.mark.extension
@pytest.mark.parametrize(("mine", "theirs"), [(">f8", "<f8"), ("i4,f4", "f4,i4"), ("2u1,u2", "u1,u1,u2")])
def test_dtypes_that_differ_in_more_than_their_name(several: Ranks, mine: str, theirs: str) -> None:
    def body() -> None:
        world = mpicoll.world()
        x = np.zeros(2 * world.size, mine if world.rank else theirs)
        for call in (mpicoll.bcast, mpicoll.allgather, mpicoll.gather, mpicoll.alltoall):
            comm = world.duplicate()
            with pytest.raises(mpicoll.MismatchError, match="they differ in dtype"):
                call(x, comm=comm)
            comm.free()
        with world.cart([world.size], True) as ring:
            for call in (mpicoll.neighbor_allgather, mpicoll.neighbor_alltoall, mpicoll.exchange_halo):
                with pytest.raises(mpicoll.MismatchError, match="they differ in"):
                    call(np.tile(x, 2), comm=ring)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        with mpicoll.debug():
            if 0 in (world.rank, left):
                with pytest.raises(mpicoll.MismatchError, match="they differ in dtype"):
                    mpicoll.sendrecv(x, right, left)
            else:
                mpicoll.sendrecv(x, right, left)

    several(body)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.complex32], ids=str)
def test_torch(ranks: Ranks, dtype: torch.dtype) -> None:
    def body() -> None:
        world = mpicoll.world()
        rank, size = world.rank, world.size
        words = {1: torch.uint8, 4: torch.int32}[dtype.itemsize]

        def make(seed: int) -> torch.Tensor:
            return torch.arange(seed, seed + 6).to(words).view(dtype).reshape(3, 2)

        def same(got: torch.Tensor, want: torch.Tensor) -> None:
            assert got.dtype is dtype
            assert got.shape == want.shape
            assert torch.equal(got.view(words), want.view(words))

        blocks = [make(10 * seed) for seed in range(size)]
        for x in (blocks[rank], blocks[rank].T.contiguous().T):
            same(mpicoll.bcast(x, size - 1), blocks[-1])
            same(mpicoll.allgather(x), torch.cat([one.view(words) for one in blocks]).view(dtype))
            same(mpicoll.sendrecv(x, (rank + 1) % size, (rank - 1) % size), blocks[rank - 1])
        gathered = mpicoll.gather(blocks[rank], 0)
        if rank == 0:
            same(mpicoll.scatter(gathered, 0), blocks[0])
        else:
            same(mpicoll.scatter(blocks[rank], 0), blocks[rank])
        out = torch.empty(2, 3, dtype=words).view(dtype).T
        assert mpicoll.bcast(blocks[rank], 0, out=out) is out
        same(out.contiguous(), blocks[0])

    ranks(body)
