"""Reading parts: the clocks of nodes, and parts that are lost or damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.traces import ALLREDUCE, part, read

from mpicoll.engine.tracing import parts, trace_files
from mpicoll.errors import SetupError


def test_clocks_of_other_nodes(tmp_path: Path) -> None:
    """Rank 1's clock is 500 s ahead at first, and gains 1 ms in 10 s."""
    folder = tmp_path / "job"

    def other(moment: float) -> float:
        return moment + 500.0 + 1e-4 * (moment - 1000.0)

    spans = [(1000.0 + number, 1000.5 + number) for number in range(1, 11)]
    part(folder, 0, [("0.0", number, ALLREDUCE, *span) for number, span in enumerate(spans)])
    part(
        folder,
        1,
        [("0.0", number, ALLREDUCE, other(begin), other(end)) for number, (begin, end) in enumerate(spans)],
        base=1500.0,
    )
    clocks = {1: [(other(moment), other(moment) - moment) for moment in (1000.0, 1011.0)]}
    parts.write_job_file(folder, {"job": "job", "nodes": {"0": 0, "1": 1}, "clocks": clocks})
    table = parts.load_parts(folder)
    np.testing.assert_allclose(table.begin[:10], table.begin[10:], atol=0.1)
    np.testing.assert_allclose(table.end[:10], table.end[10:], atol=0.1)


def test_a_clock_that_was_asked_once(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 1, ALLREDUCE, 1000.0, 1000.5)])
    part(folder, 1, [("0.0", 1, ALLREDUCE, 993.25, 993.5)], base=990.0)
    parts.write_job_file(folder, {"job": "job", "nodes": {"0": 0, "1": 1}, "clocks": {1: [(990.0, -7.0)]}})
    np.testing.assert_allclose(parts.load_parts(folder).begin, [0, 0.25e6], atol=1e-3)


def test_a_rank_without_a_part(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    for rank in (0, 2):
        part(folder, rank, [("0.0", 1, ALLREDUCE, 1000.0 + rank, 1003.0)])
    parts.write_job_file(folder, {"job": "job", "nodes": {"0": 0, "1": 0, "2": 0}, "clocks": {}})
    table = parts.load_parts(folder)
    assert table.missing == [1]
    np.testing.assert_allclose(table.wait, [2e6, 0], atol=1e-3)
    events = read(trace_files.merge(folder))
    assert {one["pid"] for one in events} == {0, 2}
    assert trace_files.load(tmp_path).missing == [1]


def test_what_a_killed_rank_was_writing(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)])
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1][:20])
    assert len(parts.load_parts(tmp_path / "job")) == 1
    path.write_bytes(whole[: whole.index(b"\n") // 2])  # not even its first line
    with pytest.raises(SetupError, match="contains no part of a trace"):
        parts.load_parts(tmp_path / "job")


def test_a_damaged_part(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [("0.0", 1, ALLREDUCE, 1000.0, 1001.0)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"group": \n', *lines[1:]]))
    with pytest.raises(SetupError, match=r"rank-0.jsonl, line 2, is damaged: "):
        trace_files.merge(tmp_path / "job")


def test_a_part_of_another_version(tmp_path: Path) -> None:
    path = part(tmp_path / "job", 0, [])
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(SetupError, match="not a part of a trace that this version of mpicoll can read"):
        parts.load_parts(tmp_path / "job")
