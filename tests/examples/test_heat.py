"""examples/heat.py, beside the same scheme on one array, and the lines of mpi4py that its docstring shows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from support.launch import ROOT, mpirun

import mpicoll

HEAT = ROOT / "examples" / "heat.py"


def solve(points: int, steps: int) -> tuple[float, float]:
    plate = np.zeros((points + 2, points + 2))
    plate[0] = 100.0
    for _ in range(steps):
        around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] += 0.2 * (around - 4 * plate[1:-1, 1:-1])
    return plate[1:-1, 1:-1].mean(), plate[1:-1, 1:-1].max()


def check(output: str, dims: str, points: int, steps: int) -> None:
    assert f"{points} x {points} points on {dims} ranks, {steps} steps" in output
    found = re.search(r"mean ([\d.]+), highest ([\d.]+)", output)
    assert found is not None, output
    np.testing.assert_allclose([float(one) for one in found.groups()], solve(points, steps), rtol=1e-9)


def test_alone() -> None:
    done = subprocess.run(
        [sys.executable, HEAT, "--points", "17", "--steps", "30"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    check(done.stdout, "1 x 1", 17, 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dims"), [(2, "2 x 1"), pytest.param(3, "3 x 1", marks=pytest.mark.long), (4, "2 x 2")]
)
def test_ranks(size: int, dims: str) -> None:
    done = mpirun(size, HEAT, "--points", "23", "--steps", "40", warm=True)
    assert done.returncode == 0, done.stdout
    check(done.stdout, dims, 23, 40)


@pytest.mark.slow
def test_a_plate_with_too_few_points() -> None:
    done = mpirun(2, HEAT, "--points", "1")
    assert done.returncode != 0
    assert "1 points can't be divided by a grid of 2 x 1 ranks" in done.stdout


@pytest.mark.mpi
def test_the_lines_of_mpi4py_exchange_the_same() -> None:
    from mpi4py import MPI

    text = ast.get_docstring(ast.parse(HEAT.read_text()))
    assert text is not None
    names: dict[str, Any] = {"MPI": MPI}
    exec(textwrap.dedent(text[text.index("    def exchange") :]), names)
    world = mpicoll.world()
    with world.cart(2) as grid:
        theirs = MPI.COMM_WORLD.Create_cart(grid.dims)
        part = np.random.default_rng(world.rank).random((5, 4))
        found = mpicoll.exchange_halo(part, comm=grid)
        names["exchange"](part, theirs)
        np.testing.assert_array_equal(found, part)
        theirs.Free()
