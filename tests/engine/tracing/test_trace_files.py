"""Finding and loading traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.traces import BARRIER, part

from mpicoll.engine.tracing import trace_files
from mpicoll.errors import SetupError


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="there is no trace"):
        trace_files.load(tmp_path)
    with pytest.raises(SetupError, match=r"nothing\.json: No such file"):
        trace_files.load(tmp_path / "nothing.json")


def test_the_newest_of_several(tmp_path: Path) -> None:
    for age, name in enumerate(("third", "first", "second")):
        part(tmp_path / name, 0, [("0.0", 1, BARRIER, 1000.0, 1001.0)])
        if name == "first":
            trace_files.merge(tmp_path / name)
        for path in (tmp_path / name, tmp_path / f"{name}.json"):
            if path.exists():
                os.utime(path, (1e9 - age, 1e9 - age))
    assert [one.name for one in trace_files.find_traces(tmp_path)] == ["second", "first.json", "third"]
    assert trace_files.load(tmp_path).job == "third"
