"""Probe programs: how they end, and how their reports are read."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mpicoll.transport.probes import MARK, ProbeImpossible, WrongResult, merge_reports, read_reports, run


@pytest.mark.parametrize(
    ("error", "said"),
    [(WrongResult("x"), {"wrong": "x"}), (ProbeImpossible("y"), {"unable": "y"}), (ImportError("z"), {"unable": "z"})],
    ids=["wrong", "unable", "import"],
)
def test_how_probes_end(
    error: Exception, said: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Any:
        raise error

        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)

    assert run({"job": fails}, "job") == 1
    assert merge_reports(capsys.readouterr().out) == said
    assert run({"job": lambda: {"all": "well"}}, "job") == 0
    assert merge_reports(capsys.readouterr().out) == {"done": {"all": "well"}}


def test_unexpected_values(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert run({}, "no such probe") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "KeyError: 'no such probe'" in said.err


def test_lines_of_others_are_no_harm() -> None:
    text = f"hello\n{MARK}{json.dumps({'a': 1})}\n{MARK}{{half\nx{MARK}{{}}\n"
    assert list(read_reports(text)) == [{"a": 1}]
