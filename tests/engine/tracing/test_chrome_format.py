"""The merged file in the Trace Event Format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.traces import ALLREDUCE, BARRIER, message, names, operations, part, read

from mpicoll.engine.tracing import chrome_format, parts, trace_files
from mpicoll.errors import SetupError


def test_nothing_has_happened(tmp_path: Path) -> None:
    part(tmp_path / "job", 0, [])
    path = trace_files.merge(tmp_path / "job")
    assert path == tmp_path / "job.json"
    events = read(path)
    assert operations(events) == []
    assert names(events, "process") == {0: "rank 0 (host0)"}
    assert len(trace_files.load(path)) == 0


def test_what_the_file_says(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 3, ALLREDUCE, 1000.0, 1000.5)], sites={0: "train.py:7 in step"})
    part(folder, 1, [("0.0", 3, ALLREDUCE, 1000.25, 1000.5)], errors={0: "Timeout: late"})
    events = read(trace_files.merge(folder))
    first, second = operations(events)
    assert first["name"] == second["name"] == "allreduce"
    assert first["cat"] == "collective"
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (0, 500e3, 250e3, 250e3)
    assert first["args"] == {
        "bytes": 1024,
        "dtype": "float32",
        "shape": "[256]",
        "op": "sum",
        "algorithm": "ring",
        "call": 0,
        "communicator": "comm 0.0",
        "key": "0.0",
        "number": 3,
        "wait_us": 250e3,
        "last_rank": 1,
        "site": "train.py:7 in step",
    }
    assert second["args"]["error"] == "Timeout: late"
    assert [(one["name"], one["pid"], one["ts"], one["dur"]) for one in events if one.get("cat") == "wait"] == [
        ("waits for rank 1", 0, 0, 250e3)
    ]
    assert names(events, "process") == {0: "rank 0 (host0)", 1: "rank 1 (host1)"}
    assert names(events, "thread") == {(0, 1): "comm 0.0", (1, 1): "comm 0.0"}


def test_messages_side_by_side_are_on_several_tracks(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    spans = [(1000.0, 1000.5), (1000.1, 1000.3), (1000.2, 1000.6), (1000.4, 1000.7), (1000.6, 1000.8)]
    part(folder, 0, [("0.0", 0, message("irecv", 1, None), *span) for span in spans])
    events = read(trace_files.merge(folder))
    assert [one["tid"] for one in operations(events)] == [1, 2, 3, 2, 1]
    name = "comm 0.0: messages"
    assert names(events, "thread") == {(0, 1): name, (0, 2): f"{name} (2)", (0, 3): f"{name} (3)"}


def test_what_one_collective_ends_with_another_begins(tmp_path: Path) -> None:
    """To the nanosecond, with a clock that drifts: rounding must not let them overlap."""
    folder = tmp_path / "job"
    times = 1000.0 + np.cumsum(np.random.default_rng(5).integers(1, 9999, 2000)) * 1e-9
    part(
        folder,
        0,
        [("0.0", place + 1, BARRIER, *times[place : place + 2].tolist()) for place in range(1999)],
    )
    clocks = {1: [(999.0, 0.123456789), (1001.0, 0.123654321)]}
    parts.write_job_file(folder, {"job": "job", "nodes": {"0": 1}, "clocks": clocks})
    events = read(trace_files.merge(folder))
    assert {one["tid"] for one in operations(events)} == {1}


def test_communicators_of_one_name_are_distinguished(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    events = [("0.1", 1, BARRIER, 1000.0, 1000.1), ("0.2", 1, BARRIER, 1000.1, 1000.2)]
    path = part(folder, 0, events, comms={"0.1": [0], "0.2": [0]})
    path.write_text(path.read_text().replace("comm 0.2", "comm 0.1"))
    assert set(names(read(trace_files.merge(folder)), "thread").values()) == {"comm 0.1 [0.1]", "comm 0.1 [0.2]"}


def arrows(events: list[dict[str, Any]]) -> list[tuple[int, float, int, float]]:
    found = {one["id"]: [] for one in events if one["ph"] == "s"}  # type: dict[int, list[Any]]
    for one in events:
        if one["ph"] in "sf":
            found[one["id"]] += [one["pid"], one["ts"] / 1e6]
    return sorted(tuple(one) for one in found.values())


def test_arrows_between_messages(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    comms = {"0.0": [0, 1, 2], "0.1": [2, 1]}
    both = {"name": "sendrecv", "parts": [message("send", 0, 0), message("recv", 0, 5)], "text": "sendrecv(...)"}
    part(
        folder,
        0,
        [
            ("0.0", 0, message("send", 1, 5), 1000.0, 1000.1),
            ("0.0", 0, message("irecv", 1, 0), 1000.2, None),
            ("0.0", 0, message("irecv", 1, 0), 1000.5, 1000.7),
        ],
        comms=comms,
    )
    part(folder, 1, [("0.0", 0, both, 1000.3, 1000.6), ("0.1", 0, message("isend", 0, 1), 1001.0, None)], comms=comms)
    part(folder, 2, [("0.1", 0, message("recv", 1, 1), 1000.8, 1001.5)], comms=comms)
    events = read(trace_files.merge(folder))
    assert arrows(events) == [(0, 0.0, 1, 0.6), (1, 0.3, 0, 0.7), (1, 1.0, 2, 1.5)]
    started = [one for one in operations(events) if one["args"].get("started")]
    assert [(one["name"], one["dur"]) for one in started] == [("irecv", 0), ("isend", 0)]


@pytest.mark.parametrize("receive", [message("recv", None, 5), message("recv", 0, None), message("recv", 0, 6)])
def test_no_arrow_where_it_is_not_clear(tmp_path: Path, receive: dict[str, Any]) -> None:
    folder = tmp_path / "job"
    part(folder, 0, [("0.0", 0, message("send", 1, 5), 1000.0, 1000.1)])
    part(folder, 1, [("0.0", 0, message("recv", 0, 5), 1000.0, 1000.2), ("0.0", 0, receive, 1000.2, 1000.3)])
    # One more receive than messages, or one that may have got it.
    part(folder, 2, [("0.0", 0, message("send", 1, 6), 1000.0, 1000.1)])
    found = arrows(read(trace_files.merge(folder)))
    assert found == ([(0, 0.0, 1, 0.2)] if receive.get("tag") == 6 else [])


def test_the_file_can_be_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    events = [
        ("0.0", 1, ALLREDUCE, 1000.125, 1000.5),
        ("0.0", 0, message("isend", 1, 0), 1000.625, None),
        ("0.0", 2, BARRIER, 1001.0, 1001.5),
    ]
    part(folder, 0, events, errors={2: "CommunicationError: ☠"}, sites={0: "a.py:1 in f"})
    part(folder, 2, events[:1])
    parts.write_job_file(folder, {"job": "job", "nodes": {"0": 0, "1": 0, "2": 1}, "clocks": {}})
    before = parts.load_parts(folder)
    after = chrome_format.load_file(trace_files.merge(folder))
    for name in ("rank", "comm", "number", "begin", "end", "wait", "last"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name), err_msg=name)
    for name in ("job", "ranks", "missing", "comms"):
        assert getattr(before, name) == getattr(after, name)
    for one, other in ((before, after), (after, before)):
        for kind in ("site", "error"):
            texts = [[(*of.texts, "")[index] for index in getattr(of, kind)] for of in (one, other)]
            assert texts[0] == texts[1]
    assert [before.calls[one] for one in before.call] == [after.calls[one] for one in after.call]


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}\n', "[1, 2"])
def test_a_file_of_another_program(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"other.json is not a trace that mpicoll has made"):
        trace_files.load(path)
