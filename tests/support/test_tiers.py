"""Selections of each tier from some tests, whose parameters and marks are like those of the project's own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from support import tiers
from support.launch import ROOT

TESTS = """
import pytest
from support.ranks import ranks, several

@pytest.mark.parametrize("c", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(4))
def test_product(a, b, c): pass

@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize(("a", "c"), [(1, 1), (2, 2)])
def test_table(a, b, c): pass

def test_ranks(ranks): pass

def test_several(several): pass

@pytest.mark.every_size
def test_sizes(ranks): pass

@pytest.mark.parametrize("a", range(5))
def test_shared(several, a): pass

@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("a", range(3))
def test_shared_product(ranks, a, b): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.long)])
def test_some(a): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_those.py").write_text(TESTS)
    return tmp_path


def collected(folder: Path, *options: str, names: tuple[str, ...] = ("",)) -> dict[str, list[str]]:
    """The parameters of what is collected, of the tests with these names, by the name of the test."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    command += [f"--rootdir={folder}", "-m", "not mpi", "--collect-only", "-q", *options]
    command += [folder / name for name in names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("test_those.py::"):
            name, _, parameters = line.removeprefix("test_those.py::").partition("[")
            found.setdefault(name, []).append(parameters.removesuffix("]"))
    return found


def test_the_files_that_come_first_are_there() -> None:
    spec = importlib.util.spec_from_file_location("those", ROOT / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    assert len(conftest.FIRST) == len(set(conftest.FIRST)) > 5
    assert all((ROOT / "tests" / name).is_file() for name in conftest.FIRST)


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_two_and_four_ranks_share_rows(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(range(7))
    monkeypatch.setattr(tiers, "_selected", tier)
    shares = [tiers.take_share(rows, size) for size in range(1, 5)]
    assert shares == ([rows] * 4 if tier == "long" else [rows, [0, 2, 4, 6], rows, [1, 3, 5]])


def test_tiers(folder: Path) -> None:
    long = collected(folder)
    assert {name: len(rows) for name, rows in long.items()} == {
        "test_product": 36,
        "test_table": 6,
        "test_ranks": 4,
        "test_several": 3,
        "test_sizes": 4,
        "test_shared": 15,
        "test_shared_product": 36,
        "test_long": 1,
        "test_slow": 1,
        "test_some": 2,
    }
    assert collected(folder, "--tier", "long") == long

    default = collected(folder, "--tier", "default")
    product = [row.split("-") for row in default.pop("test_product")]
    assert len(product) < 20
    for one, other in combinations(range(3), 2):
        wanted = {(row.split("-")[one], row.split("-")[other]) for row in long["test_product"]}
        assert {(row[one], row[other]) for row in product} == wanted
    shared = [row.rsplit("-", 2) for row in default.pop("test_shared_product")]
    assert sorted((a, b) for _, a, b in shared) == [(a, b) for a in "012" for b in "012"]
    assert sorted(Counter(world for world, _, _ in shared).items()) == [("local-1", 5), ("local-3", 4)]
    assert default == {
        "test_table": long["test_table"],  # `a` and `c` are one choice
        "test_ranks": ["local-1", "local-3"],
        "test_several": ["local-2", "local-3"],
        "test_sizes": long["test_sizes"],
        "test_shared": ["local-2-0", "local-2-2", "local-2-4", "local-3-1", "local-3-3"],
        "test_slow": [""],
        "test_some": ["1"],
    }

    quick = collected(folder, "--tier", "quick")
    assert {name: len(rows) for name, rows in quick.items()} == {
        name: 1 for name in long if name not in ("test_long", "test_slow")
    }
    assert all(set(rows) <= set(long[name]) for name, rows in quick.items())

    names = ("test_ranks[local-2]", "test_long", "test_product[3-1-2]", "test_slow")
    assert collected(folder, "--tier", "quick", names=tuple(f"test_those.py::{name}" for name in names)) == {
        "test_ranks": ["local-2"],
        "test_long": [""],
        "test_product": ["3-1-2"],
        "test_slow": [""],
    }
