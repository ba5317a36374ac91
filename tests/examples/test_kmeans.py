"""examples/kmeans.py, beside k-means of all points in one process, and the lines of mpi4py that its docstring shows."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.launch import ROOT, mpirun

import mpicoll

KMEANS = ROOT / "examples" / "kmeans.py"
CLUSTERS = 5


def make_points() -> np.ndarray:
    random = np.random.default_rng(7)
    return random.normal(0, 6, (CLUSTERS, 2))[np.arange(203) % CLUSTERS] + random.normal(size=(203, 2))


def solve(points: np.ndarray, steps: int) -> float:
    centers = points[:CLUSTERS].copy()
    for _ in range(steps):
        nearest = ((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
        centers = np.stack(
            [
                points[nearest == at].mean(axis=0) if (nearest == at).any() else center
                for at, center in enumerate(centers)
            ]
        )
    return float(((points[:, None] - centers) ** 2).sum(axis=2).min(axis=1).mean())


def check(output: str, size: int) -> None:
    found = re.search(
        rf"203 points, {CLUSTERS} clusters, {size} ranks: (\d+) steps\nmean squared distance ([\d.]+)", output
    )
    assert found is not None, output
    assert 1 < int(found[1]) <= 20
    np.testing.assert_allclose(float(found[2]), solve(make_points(), int(found[1])), rtol=1e-8)


def make_arguments(folder: Path) -> list[str | Path]:
    np.save(folder / "points.npy", make_points())
    return [KMEANS, "--clusters", str(CLUSTERS), "--steps", "20", "--path", folder / "points.npy"]


def test_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *make_arguments(tmp_path)], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    check(done.stdout, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_ranks(size: int, tmp_path: Path) -> None:
    done = mpirun(size, *make_arguments(tmp_path))
    assert done.returncode == 0, done.stdout
    check(done.stdout, size)


@pytest.mark.slow
def test_too_few_points() -> None:
    done = mpirun(2, KMEANS, "--points", "6", "--clusters", "4")
    assert done.returncode != 0
    assert "rank 0 has 3 points, and 4 clusters" in done.stdout


@pytest.mark.mpi
def test_the_lines_of_mpi4py_find_the_same_centers() -> None:
    from mpi4py import MPI

    names = runpy.run_path(str(KMEANS))
    text = ast.get_docstring(ast.parse(KMEANS.read_text()))
    assert text is not None
    theirs = dict(names, MPI=MPI)
    exec(textwrap.dedent(text[text.index("    def step") :]), theirs)
    world = mpicoll.world()
    points = np.array_split(make_points(), world.size)[world.rank]
    # The last center is far from all points.
    centers = np.array([[0.0, 0.0], [3.0, 1.0], [100.0, 100.0]])
    ours = names["step"](points, centers)
    np.testing.assert_allclose(ours, theirs["step"](points, centers, MPI.COMM_WORLD), rtol=1e-12)
    np.testing.assert_array_equal(ours[2], centers[2])
