"""File: what the ranks write is in the file, as numpy has it, and what they read is what numpy has written."""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import Comms, Ranks

import mpicoll
from mpicoll.transport.files import FileBlock

UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)

DRIVERS = ("posix", "mpi")


def list_drivers() -> tuple[str, ...]:
    return DRIVERS if mpicoll.world().mpi is not None else ("posix",)


def divide(shape: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return begin and extents of the block of a rank: random cuts along each axis, which are the same on all ranks."""
    cuts = np.random.default_rng(prod_key(shape, size))
    first, extents = [0] * len(shape), list(shape)
    axis = int(cuts.integers(len(shape)))
    ends = np.sort(cuts.integers(0, shape[axis] + 1, size - 1)).tolist()
    begin, end = [0, *ends][rank], [*ends, shape[axis]][rank]
    first[axis], extents[axis] = begin, end - begin
    return tuple(first), tuple(extents)


def prod_key(shape: tuple[int, ...], size: int) -> int:
    return hash((shape, size)) % 2**32


def slices(first: tuple[int, ...], extents: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(first, extents, strict=True))


def test_offsets(ranks: Ranks, tmp_path: Path) -> None:
    """Arrays of any strides, dtypes and sizes lie at the offsets that the ranks pass, in C order."""
    folder = ranks.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        rng = np.random.default_rng(5)
        whole = rng.integers(0, 1000, (world.size, 6, 8)).astype("i4")
        mine = whole[world.rank]
        for driver in list_drivers():
            path = folder / f"offsets-{driver}"
            with mpicoll.File.open(path, "w+", driver=driver) as file:
                at = 100 + world.rank * mine.nbytes
                file.write_at_all(at, mine)
                np.testing.assert_array_equal(file.read_at_all(100, whole.shape, "i4"), whole)
                assert file.get_size() == 100 + whole.nbytes
                for x in (np.asfortranarray(mine), np.repeat(mine, 2, axis=1)[:, ::2], mine[::-1, ::-1]):
                    file.write_at(at, x)
                    np.testing.assert_array_equal(file.read_at(at, x.shape, x.dtype), x)
                    out = np.zeros_like(mine.T).T
                    assert file.read_at(at, out=out) is out
                    np.testing.assert_array_equal(out, x)
                file.sync()
                neighbour = (world.rank + 1) % world.size
                found = file.read_at_all(100 + neighbour * mine.nbytes, mine.shape, "i4")
                np.testing.assert_array_equal(found, whole[neighbour, ::-1, ::-1])
                # Not all ranks have something.
                file.write_at_all(0, np.arange(10.0) if world.rank == 0 else np.empty(0))
                np.testing.assert_array_equal(file.read_at_all(0, 10, "f8"), np.arange(10.0))
                assert file.read_at_all(10**6, (0, 3), "f8").shape == (0, 3)
                file.write_at_all(8 * world.rank, 2.5 if world.rank == 0 else np.array(world.rank + 0.5))
                assert file.read_at(0, (), "f8") == 2.5
                file.set_size(100)
                assert file.get_size() == 100
                file.sync()
            file.close()
            assert path.stat().st_size == 100
            assert "closed" in repr(file)

    ranks(body)


def test_dtypes(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        values = np.arange(12) % 2 + world.rank
        with mpicoll.File.open(folder / "dtypes", "w+") as file:
            for dtype in ("bool", "i1", ">f8", "f2", "c16", "S3", "U2", "M8[s]", [("a", "i4"), ("b", "f8", 2)]):
                x = values.astype(dtype)
                file.write_at_all(1000 * world.rank, x)
                found = file.read_at_all(1000 * world.rank, 12, dtype)
                assert found.dtype == x.dtype
                np.testing.assert_array_equal(found, x)
            for dtype in (torch.bfloat16, torch.float32, torch.complex64, torch.float8_e5m2, torch.bool):
                x = torch.arange(12).reshape(3, 4).to(dtype)
                for tensor in (x, x.T, x[:, ::2]):
                    file.write_at_all(1000 * world.rank, tensor)
                    found = file.read_at_all(1000 * world.rank, tuple(tensor.shape), dtype, like="torch")
                    assert found.dtype == dtype
                    assert torch.equal(found.view(torch.uint8), tensor.contiguous().view(torch.uint8))
                    out = torch.zeros_like(x).T if tensor.shape == (4, 3) else torch.zeros_like(tensor)
                    assert file.read_at(1000 * world.rank, out=out) is out
                    assert torch.equal(out.contiguous().view(torch.uint8), found.view(torch.uint8))
            words = np.array([1.0, -2.5], "f4").view("u4") >> 16
            file.write_at_all(1000 * world.rank, torch.tensor([1.0, -2.5], dtype=torch.bfloat16))
            np.testing.assert_array_equal(file.read_at(1000 * world.rank, 2, "u2"), words)

    ranks(body)


def test_subarrays(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's block of an array in the file, divided along any axis, some of them empty."""
    folder = ranks.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        for driver in list_drivers():
            for shape in ((7,), (5, 6), (6, 1, 5), (3, 4, 2, 5), (4, 0)):
                whole = np.random.default_rng(1).random(shape)
                first, extents = divide(shape, world.rank, world.size)
                mine = np.asfortranarray(whole[slices(first, extents)])
                path = folder / f"{driver}-{len(shape)}"
                with mpicoll.File.open(path, "w+", driver=driver) as file:
                    file.write_at_all(0, np.arange(3) if world.rank == 0 else np.empty(0))
                    file.write_subarray_all(24, mine, shape, first)
                    found = file.read_subarray_all(24, shape, first, extents, "f8")
                    np.testing.assert_array_equal(found, mine)
                    # All ranks may read the same part.
                    half = tuple(n // 2 for n in shape)
                    found = file.read_subarray_all(24, shape, half, tuple(n - n // 2 for n in shape), "f8")
                    np.testing.assert_array_equal(found, whole[slices(half, shape)])
                data = path.read_bytes()
                assert data == np.arange(3).tobytes() + whole.tobytes()

    ranks(body)


def test_grid_of_blocks(several: Ranks, tmp_path: Path) -> None:
    """Blocks along two axes at once, on a communicator that is not the world."""
    folder = several.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        whole = np.arange(12 * 12 * 2, dtype="f4").reshape(12, 12, 2)
        with world.cart(2) as grid:
            part = tuple(12 // n for n in grid.dims)
            first = (*(at * n for at, n in zip(grid.coords, part, strict=True)), 0)
            mine = torch.from_numpy(whole[slices(first, (*part, 2))].copy())
            with mpicoll.File.open(folder / "grid", "x+", comm=grid) as file:
                file.write_subarray_all(0, mine, whole.shape, first)
                out = torch.empty_like(mine)
                assert file.read_subarray_all(0, whole.shape, first, out=out) is out
                assert torch.equal(out, mine)
        np.testing.assert_array_equal(np.fromfile(folder / "grid", "f4"), whole.reshape(-1))
        comms = Comms()
        part_comm = comms["group"]
        if part_comm is not None:
            with mpicoll.File.open(folder / "group", "w", comm=part_comm) as file:
                file.write_at_all(part_comm.rank, np.full(1, part_comm.rank, "u1"))
            assert (folder / "group").read_bytes() == bytes(range(part_comm.size))
        comms.free()
        freed = mpicoll.world().duplicate()
        file = mpicoll.File.open(folder / "freed", "w", comm=freed)
        freed.free()
        with pytest.raises(mpicoll.CommunicatorError, match="it was freed"):
            file.close()

    several(body)


@contextmanager
def limited_size(limit: int) -> Iterator[None]:
    """Files can't be written past `limit`, by none of the threads of this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, UNLIMITED[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)


def test_errors_of_the_system(ranks: Ranks, tmp_path: Path) -> None:
    """All ranks raise the same error, also if it is one of a single rank, and go on."""
    folder = ranks.share(tmp_path)
    found = []

    def body() -> None:
        world = mpicoll.world()
        last = world.size - 1
        for path, mode, number in (("none", "r", 2), ("none/none", "w", 2), (".", "r", 21), (".", "w", 21)):
            with pytest.raises(mpicoll.FileError, match=r"File.open: '.*': .* on rank") as caught:
                mpicoll.File.open(folder / path, mode)
            assert caught.value.errno == number
            assert caught.value.filename == str(folder / path)
        (folder / "there").touch()
        mpicoll.barrier()
        with pytest.raises(mpicoll.FileError, match="exists on rank 0") as caught:
            mpicoll.File.open(folder / "there", "x")
        assert caught.value.ranks == (0,)
        for driver in list_drivers():
            with mpicoll.File.open(folder / "there", "w+", driver=driver) as file:
                file.write_at_all(world.rank, np.zeros(1, "u1"))
                for name, arguments in (
                    ("read_at_all", (0 if world.rank < last else 1000, 1, "u1")),
                    ("read_subarray_all", (0, (30, 2), (0, 0), (1, 1) if world.rank < last else (30, 1), "u1")),
                ):
                    with pytest.raises(mpicoll.FileError, match=rf"{name}: .* has {world.size} bytes") as caught:
                        getattr(file, name)(*arguments)
                    assert caught.value.ranks == (last,)
                    found.append(str(caught.value))
                with pytest.raises(mpicoll.FileError, match=rf"read_at: .*rank {world.rank} of {world.size}"):
                    file.read_at(1000, 1, "f8")
                mpicoll.barrier()
                with limited_size(2000):
                    with pytest.raises(mpicoll.FileError, match="write_at_all: ") as caught:
                        file.write_at_all(world.rank if world.rank < last else 1999, np.zeros(2, "u1"))
                    if driver == "posix":  # MPI may report it on the other ranks as well, under another number
                        assert str(caught.value).endswith(f" on rank {last}")
                        assert (caught.value.ranks, caught.value.errno) == ((last,), 27)
                    with pytest.raises(mpicoll.FileError, match="write_at: "):
                        file.write_at(3000, np.zeros(2))
                    mpicoll.barrier()
                assert file.read_at_all(0, 1, "u1")[0] == 0
            # It is closed after an error that all ranks have got.
            with pytest.raises(mpicoll.FileError), mpicoll.File.open(folder / "there", driver=driver) as file:
                file.read_at_all(0, 10000, "u1")
            assert "closed" in repr(file)
        error = mpicoll.FileError("text", "name", 2, (1,))
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.filename, again.errno, again.ranks) == ("text", "name", 2, (1,))

    ranks(body)
    if ranks.local:
        assert len(set(found)) == 2


def test_wrong_arguments(some: Ranks, tmp_path: Path) -> None:
    folder = some.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        place = rf"rank {world.rank} of {world.size}"
        path = folder / "file"
        for arguments, kwargs in (
            ((path, "a"), {}),
            ((path, "rb"), {}),
            ((3, "w"), {}),
            (("", "w"), {}),
            ((path, "w"), {"driver": "h5"}),
        ):
            with pytest.raises(mpicoll.ArgumentError, match=f"File.open: .*{place}"):
                mpicoll.File.open(*arguments, **kwargs)
        if world.mpi is None:
            with pytest.raises(mpicoll.ArgumentError, match="needs MPI"):
                mpicoll.File.open(path, "w", driver="mpi")
        assert not path.exists()
        mpicoll.barrier()
        read_only = np.zeros(2)
        read_only.flags.writeable = False
        x = np.ones((2, 3))
        with mpicoll.File.open(path, "w+") as file:
            wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
                (mpicoll.ArgumentError, "write_at", (-1, x), {}),
                (mpicoll.ArgumentError, "write_at", (2**63 - 8, x), {}),
                (mpicoll.ArgumentError, "write_at_all", (1.5, x), {}),
                (mpicoll.DTypeError, "write_at", (0, np.array([None])), {}),
                (mpicoll.DTypeError, "write_at", (0, [1.0]), {}),
                (mpicoll.ArgumentError, "read_at", (0,), {}),
                (mpicoll.ArgumentError, "read_at", (0, 3), {}),
                (mpicoll.ArgumentError, "read_at", (0, 3, "f8"), {"out": x}),
                (mpicoll.ShapeError, "read_at", (0, -3, "f8"), {}),
                (mpicoll.DTypeError, "read_at", (0, 3, "object"), {}),
                (mpicoll.DTypeError, "read_at", (0, 3, "f8"), {"like": "jax"}),
                (mpicoll.ShapeError, "read_at", (0,), {"out": read_only}),
                (mpicoll.ShapeError, "read_at", (0,), {"out": torch.zeros(1).expand(4)}),
                (mpicoll.DTypeError, "read_at_all", (0,), {"out": 2.5}),
                (mpicoll.ShapeError, "write_subarray_all", (0, x, (4, 4), (3, 0)), {}),
                (mpicoll.ShapeError, "write_subarray_all", (0, x, (4, 4), (0,)), {}),
                (mpicoll.ShapeError, "write_subarray_all", (0, x, (4, 4), (-1, 0)), {}),
                (mpicoll.ShapeError, "read_subarray_all", (0, (4, 4), (0, 2), (1, 3), "f8"), {}),
                (mpicoll.ArgumentError, "set_size", (-1,), {}),
            ]
            for kind, name, arguments, kwargs in wrong:
                with pytest.raises(kind, match=f"File.{name}: .*{place}"):
                    getattr(file, name)(*arguments, **kwargs)
            assert file.get_size() == 0
            with pytest.raises(TypeError, match="can't be pickled"):
                pickle.dumps(file)
        for mode, name in (("r", "write_at"), ("w", "read_at")):
            with mpicoll.File.open(path, mode) as file:
                with pytest.raises(mpicoll.ArgumentError, match=f"{name}: .*mode '{mode}'.*{place}"):
                    getattr(file, name)(0, *((x,) if mode == "r" else (1, "f8")))
                file.close()
                file.close()
                with pytest.raises(mpicoll.ArgumentError, match="it is closed"):
                    file.sync()
        with pytest.raises(ValueError, match="of this rank"), mpicoll.File.open(path) as file:
            raise ValueError("of this rank")
        assert "closed" in repr(file)

    some(body)


def test_different_files(several: Ranks, tmp_path: Path) -> None:
    folder = several.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.MismatchError, match=r"File\.open"):
            mpicoll.File.open(folder / f"{world.rank}", "w")
        assert not list(folder.iterdir())
        mpicoll.barrier()

    several(body)


@pytest.mark.parametrize(
    ("sizes", "starts", "subsizes", "runs"),
    [
        ((4, 5, 6), (1, 0, 0), (2, 5, 6), [(60, 120)]),
        ((4, 5, 6), (1, 2, 0), (2, 3, 6), [(84, 36), (144, 36)]),
        ((4, 5, 6), (1, 2, 0), (1, 3, 6), [(84, 36)]),
        ((4, 5, 6), (1, 2, 3), (1, 1, 2), [(90, 4)]),
        ((2, 3), (0, 1), (2, 2), [(2, 4), (8, 4)]),
        ((2, 3), (0, 1), (2, 0), []),
        ((), (), (), [(0, 2)]),
    ],
)
def test_runs(
    sizes: tuple[int, ...], starts: tuple[int, ...], subsizes: tuple[int, ...], runs: list[tuple[int, int]]
) -> None:
    """As few as possible: consecutive bytes are one."""
    block = FileBlock(7, 2, sizes, starts, subsizes)
    assert list(block.list_runs()) == [(7 + offset, nbytes) for offset, nbytes in runs]
    assert block.nbytes == sum(nbytes for _, nbytes in runs)
    assert block.end == max((7 + offset + nbytes for offset, nbytes in runs), default=0)
    assert block.is_contiguous == (len(runs) < 2)
