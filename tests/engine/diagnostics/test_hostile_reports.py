"""Reports that were changed in any way: a summary, or an error that names the file, and no other exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_json import FUZZING, VALUES, places, replaced
from support.rank_states import WORLD, at_work, crossed, in_message, waits

from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.departures import make_departed_state
from mpicoll.engine.diagnostics.report_file import summarize, write
from mpicoll.errors import ArgumentError

PROCESS = {"pid": 77, "host": "here", "versions": {"python": "3.11.7", "mpicoll": "0.1"}}

SOME = {0: waits(process=PROCESS), 1: at_work(failed=["others: KeyError: 3"]), 2: in_message("recv", 0), 3: None}

CASES: list[dict[int, Any]] = [
    SOME,
    dict(enumerate(crossed())),
    {0: in_message("recv", 1), 1: in_message("recv", 0), 2: make_departed_state(2, "left", "", {WORLD[0]: 3})},
    {0: waits(), 1: make_departed_state(1, "died", "killed by SIGKILL"), 2: {"unreached": 3}, 3: None},
]


def make_report(folder: Path, states: dict[int, Any]) -> Path:
    return write(folder, "job", "timeout of 30 s", states, analyse(states, len(states)))[1]


def read_or_fail(path: Path) -> None:
    try:
        text = summarize(path)
    except ArgumentError as error:
        assert str(path) in str(error)  # noqa: PT017  a change may have no effect
    else:
        assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("examples", [300, FUZZING])
def test_any_change_gives_a_summary_or_an_error(tmp_path: Path, examples: int) -> None:
    paths = [make_report(tmp_path / str(number), states) for number, states in enumerate(CASES)]
    reports = [(path, json.loads(path.read_text())) for path in paths]
    found = [(path, whole, place) for path, whole in reports for place in places(whole) if place[:1] != ("analysis",)]

    @settings(max_examples=examples, database=None)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        path, whole, place = data.draw(st.sampled_from(found))
        path.write_text(json.dumps(replaced(whole, place, data.draw(VALUES | st.just(...)))))
        read_or_fail(path)

    change()


@pytest.mark.parametrize("examples", [100, FUZZING])
def test_any_bytes_give_a_summary_or_an_error(tmp_path: Path, examples: int) -> None:
    path = make_report(tmp_path, SOME)
    whole = path.read_bytes()

    @settings(max_examples=examples, database=None)
    @given(st.integers(0, len(whole)), st.integers(0, len(whole)), st.binary(max_size=20))
    def change(first: int, last: int, new: bytes) -> None:
        path.write_bytes(whole[:first] + new + whole[last:])
        read_or_fail(path)

    change()


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"format": ' + b'{"a": ' * 100_000, b"\xff\xfe", b'"\\ud800"'])
def test_deep_and_undecodable_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"report\.json"):
        summarize(path)


def test_a_job_of_very_many_ranks(tmp_path: Path) -> None:
    """The size alone must take no memory and no time."""
    path = make_report(tmp_path, SOME)
    for change in ({"size": 10**9}, {"size": 10**400}, {"states": {"1000000000": None}, "size": 10**9 + 1}):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(ArgumentError, match=r"mpicoll-report-job\.json"):
            summarize(path)
