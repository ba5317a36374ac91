"""Traces that mpicoll has not written, or that were changed: an error that names the file, and no other exception."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_json import FUZZING, VALUES, places, replaced
from support.traces import ALLREDUCE, BARRIER, message, part

from mpicoll.cli.trace_summary import summarise
from mpicoll.engine.tracing import trace_files
from mpicoll.errors import SetupError


def make_trace(folder: Path) -> Path:
    events = [("0.0", 1, ALLREDUCE, 1000.0, 1001.0), ("0.0", 2, BARRIER, 1002.0, None)]
    for rank, one in ((0, message("send", 1, 7)), (1, message("recv", 0, 7))):
        part(folder, rank, [*events, ("0.0", 0, one, 1003.0, 1004.0)], sites={0: "train.py:3"}, errors={1: "late"})
    return folder


@contextmanager
def read_or_fail(path: Path) -> Iterator[None]:
    """Accept an error that names the file. Numbers without a meaning may give results without one."""
    failure = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        except SetupError as error:
            failure = str(error)
    assert failure is None or str(path) in failure


@pytest.mark.parametrize("merged", [False, True], ids=["part", "file"])
@pytest.mark.parametrize("examples", [150, FUZZING])
def test_any_change_gives_a_trace_or_an_error(tmp_path: Path, merged: bool, examples: int) -> None:
    folder = make_trace(tmp_path / "job")
    path = trace_files.merge(folder) if merged else folder / "rank-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Lines of a file in the format of viewers are JSON without the brackets and commas around them.
    ends = [("]}\n" if merged and number == 0 else "") for number in range(len(lines))]
    values = [json.loads(line.rstrip(",\n") + end) for line, end in zip(lines, ends, strict=True) if line[0] == "{"]

    @settings(max_examples=examples, database=None)
    @given(st.data())
    def change(data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(values) - 1))
        place = data.draw(st.sampled_from(places(values[number])))
        new = json.dumps(replaced(values[number], place, data.draw(VALUES | st.just(...))))
        text = new[: len(new) - len(ends[number].strip())] + lines[number][len(lines[number].rstrip(",\n")) :]
        path.write_text("".join([*lines[:number], text, *lines[number + 1 :]]))
        source = path if merged else folder
        with read_or_fail(source):
            summarise(trace_files.load(source))
            if not merged:
                target = trace_files.merge(folder)
                assert target.parent == tmp_path
                target.unlink()

    change()


@pytest.mark.parametrize("examples", [100, FUZZING])
def test_any_bytes_give_an_error(tmp_path: Path, examples: int) -> None:
    path = make_trace(tmp_path / "job") / "rank-0.jsonl"
    whole = path.read_bytes()

    @settings(max_examples=examples, database=None)
    @given(st.integers(0, len(whole)), st.integers(0, len(whole)), st.binary(max_size=20))
    def change(first: int, last: int, new: bytes) -> None:
        path.write_bytes(whole[:first] + new + whole[last:])
        with read_or_fail(path.parent):
            summarise(trace_files.load(path.parent))

    change()
