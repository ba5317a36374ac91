"""save and load, beside numpy.load and numpy.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.collectives import npy


def numpy_load(path: Path, **options: Any) -> np.ndarray:
    """Python's parser, which numpy calls, is not safe for several threads."""
    with npy._parsing:
        return np.load(path, **options)


def test_rows(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's rows, of different numbers and dtypes, lie one behind the other; any number of ranks reads them."""
    folder = ranks.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        counts = [(3 * rank + 1) % 5 for rank in range(world.size)]
        begin = sum(counts[: world.rank])
        for number, dtype in enumerate(("f8", ">i2", "c8", "bool", "S4", "M8[ns]", [("a", "i4"), ("b", "f4", (2,))])):
            path = folder / f"rows-{number}.npy"
            whole = (np.arange(sum(counts) * 6).reshape(-1, 3, 2) % 120).astype("i8").astype(dtype)
            mine = whole[begin : begin + counts[world.rank]]
            mpicoll.save(path, np.asfortranarray(mine))
            found = numpy_load(path, mmap_mode="r")
            assert found.dtype == whole.dtype
            np.testing.assert_array_equal(found, whole)
            parts = np.array_split(whole, world.size)
            loaded = mpicoll.load(path)
            assert loaded.dtype == whole.dtype
            np.testing.assert_array_equal(loaded, parts[world.rank])
            out = np.zeros_like(mine[:, ::-1]).swapaxes(1, 2)
            block = mpicoll.load(path, starts=(begin, 0, 0), shape=mine.shape)
            np.testing.assert_array_equal(block, mine)
            assert out.size == block.size
        mpicoll.save(folder / "numbers.npy", float(world.rank))
        np.testing.assert_array_equal(numpy_load(folder / "numbers.npy"), np.arange(world.size))

    ranks(body)


def test_blocks_of_a_grid(ranks: Ranks, tmp_path: Path) -> None:
    folder = ranks.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        whole = np.random.default_rng(3).random((7, 9, 2)).astype("f4")
        with world.cart(2) as grid:
            ends = [
                [extent * at // parts for at in range(parts + 1)]
                for extent, parts in zip(whole.shape, grid.dims, strict=False)
            ]
            first = (*(cuts[at] for cuts, at in zip(ends, grid.coords, strict=True)), 0)
            last = (*(cuts[at + 1] for cuts, at in zip(ends, grid.coords, strict=True)), 2)
            place = tuple(slice(begin, end) for begin, end in zip(first, last, strict=True))
            mine = torch.from_numpy(whole[place].copy())
            mpicoll.save(folder / "grid.npy", mine, starts=first, comm=grid)
            np.testing.assert_array_equal(numpy_load(folder / "grid.npy"), whole)
            out = torch.zeros(mine.shape[::-1]).permute(2, 1, 0)
            assert mpicoll.load(folder / "grid.npy", first, out=out, comm=grid) is out
            assert torch.equal(out, mine)
            # An array in Fortran order, as numpy may have written it.
            if grid.rank == 0:
                np.save(folder / "fortran.npy", np.asfortranarray(whole))
            mpicoll.barrier(comm=grid)
            found = mpicoll.load(folder / "fortran.npy", first, mine.shape, like="torch", comm=grid)
            assert torch.equal(found, mine)
            rows = mpicoll.load(folder / "fortran.npy", comm=grid)
            np.testing.assert_array_equal(rows, np.array_split(whole, grid.size)[grid.rank])
        # The last rank has all, and the others nothing.
        extent = 4 if world.rank == world.size - 1 else 0
        mpicoll.save(folder / "one.npy", np.ones((extent, 2)), starts=(0, 0) if extent else (9, 9))
        np.testing.assert_array_equal(numpy_load(folder / "one.npy"), np.ones((4, 2)))
        mpicoll.save(folder / "none.npy", np.ones((0, 2)))
        assert numpy_load(folder / "none.npy").shape == (0, 2)
        assert mpicoll.load(folder / "none.npy").shape == (0, 2)

    ranks(body)


def test_dtypes_without_a_name(some: Ranks, tmp_path: Path) -> None:
    """numpy stores bfloat16 as raw bytes, and so do we."""
    folder = some.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        values = np.arange(8.0).reshape(4, 2) + world.rank
        whole = np.concatenate([np.arange(8.0).reshape(4, 2) + rank for rank in range(world.size)])
        for name, x in (
            ("torch", torch.from_numpy(values).to(torch.bfloat16)),
            ("numpy", values.astype(ml_dtypes.bfloat16)),
        ):
            path = folder / f"{name}.npy"
            mpicoll.save(path, x)
            np.testing.assert_array_equal(numpy_load(path).view(ml_dtypes.bfloat16).astype("f8"), whole)
            found = mpicoll.load(path, dtype="bfloat16", like="torch")
            assert found.dtype == torch.bfloat16
            np.testing.assert_array_equal(found.double().numpy(), values)
            out = torch.empty(4, 2, dtype=torch.bfloat16)
            assert mpicoll.load(path, (4 * world.rank, 0), out=out) is out
            assert torch.equal(out, found)
            array = mpicoll.load(path, dtype=ml_dtypes.bfloat16)
            np.testing.assert_array_equal(array.astype("f8"), values)
            assert mpicoll.load(path).dtype == np.dtype("V2")
            with pytest.raises(mpicoll.DTypeError, match="torch has none"):
                mpicoll.load(path, like="torch")
        mpicoll.save(folder / "f8.npy", values.astype(ml_dtypes.float8_e5m2))
        found = numpy_load(folder / "f8.npy").view(ml_dtypes.float8_e5m2)
        np.testing.assert_array_equal(found, whole.astype(ml_dtypes.float8_e5m2))
        # A header of more than one page, and one of version 2.0.
        for fields in (200, 3000):
            path, dtype = folder / f"{fields}.npy", [(f"a_long_name_of_a_field_{at}", "i1") for at in range(fields)]
            mpicoll.save(path, np.zeros(2, dtype))
            assert numpy_load(path, max_header_size=10**6).dtype == np.dtype(dtype)
            assert mpicoll.load(path).dtype == np.dtype(dtype)

    some(body)


def test_blocks_that_do_not_fit(several: Ranks, tmp_path: Path) -> None:
    folder = several.share(tmp_path)
    path = folder / "x.npy"

    def body() -> None:
        world = mpicoll.world()
        first = world.rank == 0
        for x, starts, words in (
            (np.ones(3, "f8" if first else "f4"), None, "different dtypes: float64, float32"),
            (np.ones(3, ">f8" if first else "<f8"), None, "different dtypes: >f8, float64"),
            (np.ones((2, 3) if first else (2, 2)), None, "different extents"),
            (np.ones((2, 3) if first else 2), None, "different dimensions"),
            (np.ones(2), (0,) if first else None, "only some have starts"),
            (np.ones(2), (world.rank,), "overlap: those of ranks 0 and 1"),
            (np.ones(2), (3 * world.rank,), "leave gaps in an array"),
        ):
            with pytest.raises(mpicoll.MismatchError, match=rf"save: .*{words}.*rank {world.rank} of"):
                mpicoll.save(path, x, starts=starts)
        # One rank's argument is wrong, and all of them raise.
        wrong: tuple[tuple[Any, Any, type[Exception]], ...] = (
            (np.array([None]), None, mpicoll.DTypeError),
            (np.ones(3), (0, 1), mpicoll.ShapeError),
            (np.ones(3), (-1,), mpicoll.ShapeError),
        )
        for x, starts, kind in wrong:
            with pytest.raises(kind if first else mpicoll.ArgumentError, match=r"save: .*rank 0 of"):
                mpicoll.save(path, x if first else np.ones(3), starts=starts if first else None)
        assert not path.exists()

    several(body)


def test_files_that_do_not_fit(some_more: Ranks, tmp_path: Path) -> None:
    folder = some_more.share(tmp_path)

    def body() -> None:
        world = mpicoll.world()
        first = world.rank == 0
        path = folder / "x.npy"
        if first:
            np.save(path, np.ones((6, 2)))
            np.save(folder / "object.npy", np.array([None]), allow_pickle=True)
            data = path.read_bytes()
            for name, content in (("short", data[:-8]), ("head", data[:50]), ("other", b"x" * 200), ("empty", b"")):
                (folder / name).write_bytes(content)
            (folder / "dict").write_bytes(data.replace(b"'shape'", b"'SHAPE'"))
        mpicoll.barrier()
        for name in ("head", "other", "empty", "dict"):
            with pytest.raises(mpicoll.FileError, match=r"is not a \.npy file"):
                mpicoll.load(folder / name)
        with pytest.raises(mpicoll.FileError, match="has 216 bytes"):
            mpicoll.load(folder / "short", (0, 0), (6, 2))
        with pytest.raises(mpicoll.FileError, match="No such file"):
            mpicoll.load(folder / "none")
        with pytest.raises(mpicoll.DTypeError, match="object"):
            mpicoll.load(folder / "object.npy")
        wrong: tuple[tuple[tuple[Any, ...], dict[str, Any], type[Exception]], ...] = (
            (((0, 0), (7, 2)), {}, mpicoll.ShapeError),
            (((0,), (6,)), {}, mpicoll.ShapeError),
            (((0, 0),), {}, mpicoll.ArgumentError),
            ((None, (2, 2)), {}, mpicoll.ShapeError),
            ((), {"out": np.ones((5, 2))}, mpicoll.ShapeError),
            ((), {"out": np.ones((-(-6 // world.size), 2), "f4")}, mpicoll.DTypeError),
            ((), {"dtype": "f4"}, mpicoll.DTypeError),
            ((), {"like": "jax"}, mpicoll.DTypeError),
        )
        for arguments, kwargs, kind in wrong:
            with pytest.raises(kind if first else mpicoll.ArgumentError, match=r"load: .*rank 0 of"):
                mpicoll.load(path, *(arguments if first else ()), **(kwargs if first else {}))
        np.testing.assert_array_equal(mpicoll.load(path, (0, 1), (6, 1)), np.ones((6, 1)))

    some_more(body)
