"""The part of a trace that each rank writes while the job runs, ``DIR/JOB/rank-N.jsonl``.

A part is a file of JSON lines: a first line on the rank, definitions of communicators, calls and texts, and batches of
rows that refer to them by number. Viewers read the Trace Event Format of the merged file instead (see
:mod:`mpicoll.engine.tracing.chrome_format`). Parts are not in that format, because an event of it cannot be written in
its final form before all ranks' parts are known (its time on rank 0's clock, its track and wait time), and a row takes
a fifth of an event's bytes and half of the time to write.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll import atomic_files
from mpicoll.engine.tracing.table import VERSION, Floats, Interned, TracedComm, TracedRank, TraceTable
from mpicoll.engine.tracing.wait_analysis import add_wait_times
from mpicoll.errors import SetupError

Clocks: TypeAlias = "dict[int, list[tuple[float, float]]]"
"""Points for each node except rank 0's: a time of its clock, and the seconds by which it was ahead of rank 0's clock.
"""

Rows: TypeAlias = npt.NDArray[np.void]

ROW = np.dtype(
    [
        *(("group", "<i4"), ("number", "<i8"), ("call", "<i4"), ("begin", "<i8"), ("end", "<i8")),
        *(("site", "<i4"), ("error", "<i4")),
    ]
)
"""Operation in a part. `group`, `call`, `site` and `error` (-1 for none) are numbers defined earlier in the part;
`begin` and `end` (-1 if it was only started) are nanoseconds since the `base` of the part."""

_JOB_FILE = "about.json"
_PREFIX = "rank-"


def part_name(rank: int) -> str:
    """Return the file name of the part of the rank `rank` of the world."""
    return f"{_PREFIX}{rank}.jsonl"


def find_parts(folder: Path) -> list[Path]:
    """Return the parts in `folder` in the order of ranks."""
    return sorted(folder.glob(f"{_PREFIX}*.jsonl"), key=lambda path: (len(path.name), path.name))


def write_job_file(folder: Path, job: dict[str, Any]) -> None:
    """Write rank 0's data on the job: its name (`job`), the node of each rank (`nodes`), and `clocks` by node."""
    atomic_files.write(folder / _JOB_FILE, json.dumps(job))


def encode_rows(rows: Rows) -> str:
    """Return `rows`, of type ROW, as text."""
    return b64encode(rows.tobytes()).decode()


def load_parts(folder: Path) -> TraceTable:
    """Return the operations of the parts in `folder`.

    Raises SetupError if there is no part, or one that is damaged elsewhere than at its end.
    """
    job: dict[str, Any] = {}
    if (folder / _JOB_FILE).exists():
        job = json.loads((folder / _JOB_FILE).read_text())
    interned = Interned(), Interned(), Interned()
    columns: list[_Columns] = []
    table = TraceTable(job.get("job", folder.name), comms=interned[0].all, calls=interned[1].all, texts=interned[2].all)
    nodes = {int(rank): node for rank, node in job.get("nodes", {}).items()}
    clocks: Clocks = {int(node): points for node, points in job.get("clocks", {}).items()}
    for path in find_parts(folder):
        head, rows = _read_part(path, interned)
        if head is None:
            continue  # the rank was killed before it had written its first line
        rank, node = head["rank"], nodes.get(head["rank"], 0)
        table.ranks.append(TracedRank(rank, head["host"], head["pid"], node))
        columns.append(_Columns(rank, rows, head["base"], clocks.get(node, [])))
    if not columns:
        raise SetupError(f"{folder} contains no part of a trace")
    table.missing = sorted(set(nodes) - {one.rank for one in table.ranks})
    first = min((float(one.begin.min()) for one in columns if len(one.begin)), default=0.0)
    table.rank = np.concatenate([np.full(len(one.begin), one.rank) for one in columns])
    table.comm, table.number, table.call, table.site, table.error = (
        np.concatenate([one.rows[name].astype(np.int64) for one in columns])
        for name in ("group", "number", "call", "site", "error")
    )
    table.begin = np.concatenate([one.begin - first for one in columns]) * 1e6
    table.end = np.concatenate([one.end - first for one in columns]) * 1e6
    table.check()
    add_wait_times(table)
    return table


class _Columns:
    """Columns of a part, on rank 0's clock."""

    def __init__(self, rank: int, rows: Rows, base: float, points: Sequence[tuple[float, float]]) -> None:
        self.rank = rank
        self.rows = rows
        # Both are computed alike, so that no operation ends after the next one began.
        self.begin = _correct_clock(base + 1e-9 * rows["begin"].astype(np.float64), points)
        self.end = _correct_clock(base + 1e-9 * rows["end"].astype(np.float64), points)
        self.end[rows["end"] < 0] = np.nan


def _correct_clock(times: Floats, points: Sequence[tuple[float, float]]) -> Floats:
    """Return `times`, of a clock that was ahead at some `points`, on rank 0's clock; the offset is interpolated
    linearly."""
    if not points:
        return times
    at, ahead = zip(*points, strict=True)
    corrected: Floats = times - np.interp(times, at, ahead)
    return corrected


def _read_part(path: Path, interned: tuple[Interned, Interned, Interned]) -> tuple[dict[str, Any] | None, Rows]:
    """Return the first line of a part, and its rows with the indices of the `interned` definitions."""
    head: dict[str, Any] | None = None
    indices = {-1: -1}
    batches = [np.empty(0, ROW)]
    for line in _read_lines(path):
        if "rows" in line:
            rows = np.frombuffer(b64decode(line["rows"]), ROW).copy()
            for name in ("group", "call", "site", "error"):
                rows[name] = [indices[one] for one in rows[name].tolist()]
            batches.append(rows)
        elif head is None:
            head = line
            if line.get("version") != VERSION:
                raise SetupError(f"{path} is not a part of a trace that this version of mpicoll can read")
        else:
            _intern(line, indices, interned)
    return head, np.concatenate(batches)


def _intern(line: dict[str, Any], indices: dict[int, int], interned: tuple[Interned, Interned, Interned]) -> None:
    """Add a definition of a part to the definitions of all parts."""
    comms, calls, texts = interned
    if "group" in line:
        comm = TracedComm(line["key"], line["name"], line["members"])
        indices[line["group"]] = comms.add(comm, comm.key)
    elif "call" in line:
        number = line.pop("call")
        indices[number] = calls.add(line, json.dumps(line, sort_keys=True))
    else:
        indices[line["text"]] = texts.add(line["says"], line["says"])


def _read_lines(path: Path) -> Iterator[Any]:
    """Yield the content of each line. A killed process may have left its last line unfinished."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                if not text.endswith(b"\n"):
                    return
                raise SetupError(f"{path}, line {number}, is damaged: {error}") from error
            yield line
