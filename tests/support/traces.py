"""Traces made by hand, and a reader of the Chrome trace format that forgives nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.engine.tracing import parts

ALLREDUCE = {
    "name": "allreduce",
    "nbytes": 1024,
    "dtype": "float32",
    "shape": [256],
    "op": "sum",
    "algorithm": "ring",
    "text": "allreduce(float32[256], op=sum) by ring",
}
BARRIER = {"name": "barrier", "nbytes": 0, "algorithm": "native", "text": "barrier() by native"}


def message(name: str, peer: int | None, tag: int | None, nbytes: int = 8) -> dict[str, Any]:
    """A call that sends or receives."""
    made = {"name": name, "nbytes": nbytes, "dtype": "uint8", "shape": [nbytes], "peer": peer, "tag": tag}
    return {key: value for key, value in made.items() if value is not None} | {"text": f"{name}(...)"}


Event = tuple[str, int, dict[str, Any], float, float | None]
"""Key of the communicator, number, call, begin and end in seconds."""


def part(
    folder: Path,
    rank: int,
    events: Sequence[Event],
    *,
    comms: dict[str, list[int]] | None = None,
    base: float = 1000.0,
    errors: dict[int, str] | None = None,
    sites: dict[int, str] | None = None,
) -> Path:
    """Write the part of a rank. `errors` and `sites` are by place among the events."""
    folder.mkdir(parents=True, exist_ok=True)
    comms = comms or {"0.0": [0, 1, 2]}
    lines: list[dict[str, Any]] = [
        {"job": folder.name, "rank": rank, "host": f"host{rank}", "pid": 100 + rank, "base": base, "version": 1}
    ]
    groups = {key: number for number, key in enumerate(comms)}
    lines += [
        {"group": number, "key": key, "name": f"comm {key}", "members": comms[key]} for key, number in groups.items()
    ]
    rows = np.empty(len(events), parts.ROW)
    for place, (key, number, call, begin, end) in enumerate(events):
        index = 1000 + 10 * place
        lines.append({"call": index, **call})
        said = [-1, -1]
        for which, texts in enumerate((sites, errors)):
            if texts is not None and place in texts:
                said[which] = index + 1 + which
                lines.append({"text": said[which], "says": texts[place]})
        until = -1 if end is None else round((end - base) * 1e9)
        rows[place] = (groups[key], number, index, round((begin - base) * 1e9), until, *said)
    lines.append({"rows": parts.encode_rows(rows)})
    path = folder / parts.part_name(rank)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


KEYS = {
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur"},
    "M": {"name", "ph", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "ph", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "ph", "pid", "tid", "ts", "id", "bp"},
}
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace. Asserts all that viewers rely on."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert set(content) == {"otherData", "traceEvents"}
    events: list[dict[str, Any]] = content["traceEvents"]
    for event in events:
        assert set(event) - {"args"} == KEYS[event["ph"]] - {"args"}, event
        for key in ("pid", "tid"):
            assert type(event[key]) is int
            assert event[key] >= 0
        for key in {"ts", "dur"} & set(event):
            assert type(event[key]) in (int, float)
            assert event[key] >= 0
        assert type(event["name"]) is str
        assert type(event.get("args", {})) is dict
        if event["ph"] == "M":
            assert list(event["args"]) == [METADATA[event["name"]]]
    _slices_nest(events)
    _arrows_join_slices(events)
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert named >= {(one["pid"], one["tid"]) for one in events if one["ph"] != "M"}
    return events


def _nanoseconds(time: float) -> int:
    return round(1000 * time)


def _span(event: dict[str, Any]) -> tuple[int, int]:
    begin = _nanoseconds(event["ts"])
    return begin, begin + _nanoseconds(event["dur"])


def _slices_nest(events: list[dict[str, Any]]) -> None:
    """On a track each begins no earlier than the one before, and lies in those that are open, or after them."""
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(_span(event))
    for spans in tracks.values():
        assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
        ends: list[int] = []
        for begin, end in spans:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1]
            ends.append(end)


def _arrows_join_slices(events: list[dict[str, Any]]) -> None:
    """Each has a begin and an end, in this order, both on a slice."""
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            here = [one for one in events if one["ph"] == "X" and one["pid"] == event["pid"]]
            spans = [_span(one) for one in here if one["tid"] == event["tid"]]
            assert any(begin <= _nanoseconds(event["ts"]) <= end for begin, end in spans)
    for ends in arrows.values():
        assert [one["ph"] for one in ends] == ["s", "f"]
        assert ends[1]["bp"] == "e"
        assert ends[0]["ts"] <= ends[1]["ts"]


def operations(events: list[dict[str, Any]], rank: int | None = None) -> list[dict[str, Any]]:
    """The operations among the events, of all ranks or of one."""
    return [one for one in events if one["ph"] == "X" and one["cat"] != "wait" and (rank is None or one["pid"] == rank)]


def names(events: list[dict[str, Any]], what: str) -> dict[Any, str]:
    """Return the names of processes or threads, by pid, or by pid and tid."""
    return {
        one["pid"] if what == "process" else (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == f"{what}_name"
    }
