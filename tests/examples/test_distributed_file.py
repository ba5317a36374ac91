"""examples/distributed_file.py, and the lines of mpi4py that its docstring shows."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT, mpirun
from support.ranks import Ranks

import mpicoll

EXAMPLE = ROOT / "examples" / "distributed_file.py"


def check(output: str, path: Path, dims: str, rows: int, mine: int) -> None:
    assert f"{rows} x {rows} elements by {dims} ranks, written in" in output
    assert f"rank 0 has read {mine} rows; the mean of all elements is {(rows**2 - 1) / 2:.1f}" in output
    np.testing.assert_array_equal(np.load(path), np.arange(float(rows**2)).reshape(rows, rows))


def test_alone(tmp_path: Path) -> None:
    path = tmp_path / "matrix.npy"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--rows", "7", "--path", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    check(done.stdout, path, "1 x 1", 7, 7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dims", "mine"), [(4, "2 x 2", 3), pytest.param(3, "3 x 1", 4, marks=pytest.mark.long)]
)
def test_ranks(size: int, dims: str, mine: int, tmp_path: Path) -> None:
    path = tmp_path / "matrix.npy"
    done = mpirun(size, EXAMPLE, "--rows", "11", "--path", path)
    assert done.returncode == 0, done.stdout
    check(done.stdout, path, dims, 11, mine)


@pytest.mark.mpi
def test_the_lines_of_mpi4py_write_the_same(tmp_path: Path) -> None:
    from mpi4py import MPI

    text = ast.get_docstring(ast.parse(EXAMPLE.read_text()))
    assert text is not None
    names: dict[str, Any] = {"MPI": MPI, "np": np, "io": io}
    exec(textwrap.dedent(text[text.index("    def save") :]), names)
    folder, world = Ranks("mpi").share(tmp_path), mpicoll.world()
    x = np.random.default_rng(world.rank).random((4, 3))
    names["save"](str(folder / "theirs"), x, (0, 3 * world.rank), (4, 3 * world.size), MPI.COMM_WORLD)
    mpicoll.save(folder / "ours", x, starts=(0, 3 * world.rank))
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
