"""The page of benchmarks is that of its data, and the script refuses to mix machines."""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
from support.launch import ROOT


@pytest.fixture(scope="module")
def benchmarks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_benchmarks", ROOT / "ci" / "docs" / "benchmarks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(date: str, *collectives: str, cores: int = 2, seconds: float = 1e-6) -> dict[str, Any]:
    """What `mpicoll bench --json` writes, with a block more and less than the median."""

    def timed(median: float) -> dict[str, Any]:
        blocks = [0.5 * median, median, 2 * median]
        return {"state": "timed", "takes": "ring", "median": median, "p99": 1.0, "verified": True, "blocks": blocks}

    points = [
        {
            "collective": name,
            "size": size,
            "nbytes": size,
            "dtype": "float32",
            "op": "sum",
            "ranks": 2,
            "contestants": {"mpicoll": timed(seconds), "mpi4py": timed(2e-6)},
        }
        for name in collectives
        for size in (8, 1024)
    ]
    machine = {"node": "secret", "system": "Linux", "processor": "one", "cores": cores}
    about = {"command": "mpicoll bench", "date": date, "ranks": 2, "nodes": 1, "mpi": "MPI", "method": "well"}
    return {**about, "machine": machine, "versions": {"python": "3"}, "settings": {}, "points": points}


def test_the_page_is_that_of_the_data(benchmarks: ModuleType) -> None:
    """To write it again: python ci/docs/benchmarks.py"""
    data = json.loads(benchmarks.DATA.read_text())
    assert benchmarks.PAGE.read_text() == benchmarks.write_page(data)
    for collective, chosen in benchmarks.group(data).items():
        figure = ROOT / "docs" / "images" / f"bench-{collective}.svg"
        assert figure.exists() is bool(chosen[0]["nbytes"])
        assert all(one["verified"] for point in chosen for one in point["contestants"].values())


def test_the_best_of_several_runs_counts(benchmarks: ModuleType) -> None:
    runs = [run("2026-01-03T12:00", "scan", "bcast"), run("2026-01-01T12:00", "scan", seconds=0.5e-6)]
    data = benchmarks.merge(runs)
    assert "secret" not in json.dumps(data)
    page = benchmarks.write_page(data)
    assert "| [bcast](#bcast) | 0.50 | 0.50 | 0.50 |" in page
    assert "| [scan](#scan) | 0.25 | 0.25 | 0.25 |" in page
    assert "| 8 B | 1.00 µs | 2.00 µs | 0.50 | 750 ns to 1.50 µs | `ring` |" in page
    assert page.index("## bcast") < page.index("## scan")
    assert "2026-01-01 to 2026-01-03" in page
    assert "in up to 2 runs" in page
    assert data == benchmarks.merge(runs[::-1])


def test_runs_of_several_machines_make_no_page(benchmarks: ModuleType) -> None:
    with pytest.raises(SystemExit, match="differ"):
        benchmarks.merge([run("1", "bcast"), run("1", "scan", cores=4)])
