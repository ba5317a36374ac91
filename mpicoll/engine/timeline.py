"""Merged traces: the parts of all ranks on one clock, the wait times between ranks, and the file for viewers.

The file is in the Chrome trace format: a process per rank, in it a track per communicator for collectives, and others
for messages. It has one event a line, so that it can be read again without being held in memory as a whole.
"""

from __future__ import annotations

import heapq
import json
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mpicoll.errors import SetupError

VERSION = 1
"""Version of the format of parts and files."""

Clocks: TypeAlias = "dict[int, list[tuple[float, float]]]"
"""Points for each node except rank 0's: a time of its clock, and the seconds by which it was ahead of rank 0's clock.
"""

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.void]

ROW = np.dtype(
    [
        *(("group", "<i4"), ("number", "<i8"), ("call", "<i4"), ("begin", "<i8"), ("end", "<i8")),
        *(("site", "<i4"), ("error", "<i4")),
    ]
)
"""Operation in a part. `group`, `call`, `site` and `error` (-1 for none) are numbers defined earlier in the part;
`begin` and `end` (-1 if it was only started) are nanoseconds since the `base` of the part."""

_ABOUT = "about.json"
_PART = "rank-"

_SEEN = 10.0
"""Microseconds from which on a wait is drawn as a separate slice."""

_SENDS = {"send": False, "isend": True}
_RECEIVES = {"recv": False, "irecv": False}
"""Names of sends and receives, with True for those that are counted as started only."""


@dataclass(slots=True)
class Process:
    """Rank of the job."""

    rank: int
    host: str
    pid: int
    node: int = 0


@dataclass(slots=True)
class Comm:
    """Communicator of the job."""

    key: str
    name: str
    members: list[int]


@dataclass(slots=True)
class Timeline:
    """Operations of all ranks.

    Each operation has a row in these columns: `rank` (of the world), `comm` (of `comms`), `number` (index of the
    collective on the communicator, from 1; 0 for other operations), `call` (of `calls`), `begin` and `end` in
    microseconds since the first operation began (`end` is NaN for an operation that was only started), `site` and
    `error` (of `texts`, -1 for none). Added by :func:`align`: `wait`, the microseconds until the last of the ranks
    entered (NaN for operations other than collectives), and `last`, that rank.

    `missing` are the ranks without a part.
    """

    job: str
    processes: list[Process] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rank: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    comm: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    number: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    call: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    begin: Floats = field(default_factory=lambda: np.empty(0))
    end: Floats = field(default_factory=lambda: np.empty(0))
    site: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    error: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    wait: Floats = field(default_factory=lambda: np.empty(0))
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.rank)


class _Table:
    """Table that numbers objects by content."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._index: dict[str, int] = {}

    def number(self, thing: Any, key: str) -> int:
        """Return the number of `thing`."""
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.all)
            self.all.append(thing)
        return index


# --- parts


def part_name(rank: int) -> str:
    """Return the name of the part of the rank `rank` of the world."""
    return f"{_PART}{rank}.jsonl"


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """Write rank 0's data on the job: its name, the node of each rank, and the clocks of nodes."""
    (folder / _ABOUT).write_text(json.dumps(about))


def is_parts(folder: Path) -> bool:
    """Return True if `folder` contains the parts of a job."""
    return any(folder.glob(f"{_PART}*.jsonl"))


def merge(folder: Path) -> Path:
    """Make one file of the parts in `folder`, beside it, and return its path.

    Raises SetupError if there is no part, or one that is damaged elsewhere than at its end.
    """
    line = load_parts(folder)
    target = folder.with_name(f"{line.job}.json")
    made = target.with_name(f"{target.name}.part")
    with made.open("w") as file:
        for text in chrome(line):
            file.write(text)
    made.replace(target)
    return target


def load_parts(folder: Path) -> Timeline:
    """Return the timeline of the parts in `folder`. Raises SetupError as :func:`merge` does."""
    parts = sorted(folder.glob(f"{_PART}*.jsonl"), key=lambda path: (len(path.name), path.name))
    about: dict[str, Any] = {}
    if (folder / _ABOUT).exists():
        about = json.loads((folder / _ABOUT).read_text())
    tables = _Table(), _Table(), _Table()
    columns: list[_Columns] = []
    line = Timeline(about.get("job", folder.name), comms=tables[0].all, calls=tables[1].all, texts=tables[2].all)
    nodes = {int(rank): node for rank, node in about.get("nodes", {}).items()}
    clocks: Clocks = {int(node): points for node, points in about.get("clocks", {}).items()}
    for path in parts:
        head, rows = _read_part(path, tables)
        if head is None:
            continue  # the rank was killed before it had written its first line
        rank, node = head["rank"], nodes.get(head["rank"], 0)
        line.processes.append(Process(rank, head["host"], head["pid"], node))
        columns.append(_Columns(rank, rows, head["base"], clocks.get(node, [])))
    if not columns:
        raise SetupError(f"{folder} holds no part of a trace")
    line.missing = sorted(set(nodes) - {one.rank for one in line.processes})
    first = min((float(one.begin.min()) for one in columns if len(one.begin)), default=0.0)
    line.rank = np.concatenate([np.full(len(one.begin), one.rank) for one in columns])
    line.comm, line.number, line.call, line.site, line.error = (
        np.concatenate([one.rows[name].astype(np.int64) for one in columns])
        for name in ("group", "number", "call", "site", "error")
    )
    line.begin = np.concatenate([one.begin - first for one in columns]) * 1e6
    line.end = np.concatenate([one.end - first for one in columns]) * 1e6
    align(line)
    return line


class _Columns:
    """Columns of a part, on rank 0's clock."""

    def __init__(self, rank: int, rows: Rows, base: float, points: Sequence[tuple[float, float]]) -> None:
        self.rank = rank
        self.rows = rows
        # Both are computed alike, so that no operation ends after the next one began.
        self.begin = _corrected(base + 1e-9 * rows["begin"].astype(np.float64), points)
        self.end = _corrected(base + 1e-9 * rows["end"].astype(np.float64), points)
        self.end[rows["end"] < 0] = np.nan


def _corrected(times: Floats, points: Sequence[tuple[float, float]]) -> Floats:
    """Return `times`, of a clock that was ahead at some `points`, on rank 0's clock; the offset is interpolated
    linearly."""
    if not points:
        return times
    at, ahead = zip(*points, strict=True)
    corrected: Floats = times - np.interp(times, at, ahead)
    return corrected


def _read_part(path: Path, tables: tuple[_Table, _Table, _Table]) -> tuple[dict[str, Any] | None, Rows]:
    """Return the first line of a part, and its rows with the numbers of `tables`."""
    head: dict[str, Any] | None = None
    known = {-1: -1}
    batches = [np.empty(0, ROW)]
    for said in _lines(path):
        if "rows" in said:
            rows = np.frombuffer(b64decode(said["rows"]), ROW).copy()
            for name in ("group", "call", "site", "error"):
                rows[name] = [known[one] for one in rows[name].tolist()]
            batches.append(rows)
        elif head is None:
            head = said
            if said.get("version") != VERSION:
                raise SetupError(f"{path} is no part of a trace that this version of mpicoll can read")
        else:
            _learn(said, known, tables)
    return head, np.concatenate(batches)


def _learn(said: dict[str, Any], known: dict[int, int], tables: tuple[_Table, _Table, _Table]) -> None:
    """Register a number that a part defines."""
    comms, calls, texts = tables
    if "group" in said:
        comm = Comm(said["key"], said["name"], said["members"])
        known[said["group"]] = comms.number(comm, comm.key)
    elif "call" in said:
        number = said.pop("call")
        known[number] = calls.number(said, json.dumps(said, sort_keys=True))
    else:
        known[said["text"]] = texts.number(said["says"], said["says"])


def _lines(path: Path) -> Iterator[Any]:
    """Yield the content of each line. A killed process may have left its last line unfinished."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                said = json.loads(text)
            except ValueError as error:
                if not text.endswith(b"\n"):
                    return
                raise SetupError(f"{path}, line {number}, is damaged: {error}") from error
            yield said


# --- wait times


def align(line: Timeline) -> None:
    """Compute the wait times: the n-th collective of a communicator is the same one on all its ranks.

    A rank waits until the last rank has entered, but no longer than its own part of the collective takes: its exchanges
    with other ranks may complete before the last rank enters.
    """
    line.wait = np.full(len(line), np.nan)
    line.last = np.full(len(line), -1)
    chosen = np.flatnonzero(line.number > 0)
    if not len(chosen):
        return
    begin, end = line.begin[chosen], line.end[chosen]
    where, count = instances(line, chosen)
    latest = np.full(count, -np.inf)
    np.maximum.at(latest, where, begin)
    last = np.empty(count, np.int64)
    order = np.argsort(begin, kind="stable")
    last[where[order]] = line.rank[chosen][order]  # the last of those that begin one counts
    line.wait[chosen] = np.minimum(latest[where] - begin, end - begin)
    line.last[chosen] = last[where]


def instances(line: Timeline, rows: Ints) -> tuple[Ints, int]:
    """Return for each of the `rows`, which are collectives, the number of its collective; and the number of
    collectives."""
    most = int(line.number[rows].max()) + 1 if len(rows) else 1
    _, where = np.unique(line.comm[rows] * most + line.number[rows], return_inverse=True)
    return where, int(where.max()) + 1 if len(rows) else 0


# --- the file


def chrome(line: Timeline) -> Iterator[str]:
    """Yield the text of the file, piece by piece."""
    about = {
        "mpicoll trace": VERSION,
        "job": line.job,
        "missing ranks": line.missing,
        "processes": [{"rank": one.rank, "host": one.host, "pid": one.pid, "node": one.node} for one in line.processes],
        "communicators": [{"key": one.key, "name": one.name, "members": one.members} for one in line.comms],
        "calls": line.calls,
    }
    # The last entry of the object, so that all before it can be read by itself.
    yield json.dumps({"displayTimeUnit": "ns", "otherData": about})[:-1] + ', "traceEvents": ['
    arrows = _Arrows(line)
    comma = "\n"
    for process in line.processes:
        for text in _process(line, process, arrows):
            yield comma + text
            comma = ",\n"
    for text in arrows.texts():
        yield comma + text
        comma = ",\n"
    yield "\n]}\n"


def _process(line: Timeline, process: Process, arrows: _Arrows) -> Iterator[str]:
    """Yield the events of a rank, in the order in which they begin."""
    pid = process.rank
    yield _meta(pid, 0, "process_name", name=f"rank {process.rank} ({process.host})")
    yield _meta(pid, 0, "process_sort_index", sort_index=process.rank)
    rows = np.flatnonzero(line.rank == process.rank)
    rows = rows[np.argsort(line.begin[rows], kind="stable")]
    tracks = _Tracks(line, rows)
    for (_, lane), (tid, name) in tracks.made.items():
        yield _meta(pid, tid, "thread_name", name=name if lane == 0 else f"{name} ({lane + 1})")
        yield _meta(pid, tid, "thread_sort_index", sort_index=tid)
    names = [json.dumps(one["name"]) for one in line.calls]
    arguments = [json.dumps(_arguments(one) | {"call": place})[1:-1] for place, one in enumerate(line.calls)]
    comms = [json.dumps({"communicator": one.name, "key": one.key})[1:-1] for one in line.comms]
    texts = [json.dumps(one) for one in line.texts]
    columns = (line.comm, line.number, line.call, line.begin, line.end, line.site, line.error, line.wait, line.last)
    listed = (column[rows].tolist() for column in columns)
    for tid, comm, number, call, begin, end, site, error, wait, last in zip(tracks.of, *listed, strict=True):
        started = end != end
        text = (
            f'{{"name":{names[call]},"cat":"{"collective" if number else "message"}","ph":"X","pid":{pid},"tid":{tid},'
            f'"ts":{begin:.3f},"dur":{_duration(begin, end)},"args":{{{arguments[call]},{comms[comm]},"number":{number}'
        )
        if started:
            text += ',"started":true'
        if number:
            text += f',"wait_us":{wait:.3f},"last_rank":{last}'
        if site >= 0:
            text += f',"site":{texts[site]}'
        if error >= 0:
            text += f',"error":{texts[error]}'
        yield text + "}}"
        if wait >= _SEEN:
            yield (
                f'{{"name":"waits for rank {last}","cat":"wait","ph":"X","pid":{pid},"tid":{tid},"ts":{begin:.3f},'
                f'"dur":{_duration(begin, begin + wait)}}}'
            )
        if not number:
            arrows.add(line.comms[comm], pid, line.calls[call], (begin, begin if started else end, tid), started)


def _duration(begin: float, end: float) -> str:
    """Return the duration as written: computed from rounded times, so that slices that do not overlap do not overlap in
    the file."""
    return "0" if end != end else f"{round(end, 3) - round(begin, 3):.3f}"


def _meta(pid: int, tid: int, what: str, **args: Any) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args})


_SHOWN = ("nbytes", "dtype", "shape", "op", "root", "algorithm", "peer", "tag")


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in the file, except its name."""
    made = {"bytes" if name == "nbytes" else name: call[name] for name in _SHOWN if name in call}
    if "shape" in made:
        made["shape"] = str(made["shape"])
    if "parts" in call:
        made["parts"] = ", ".join(part["text"] for part in call["parts"])
    return made


class _Tracks:
    """Assignment of the `rows` of a rank, which are in the order of `begin`, to tracks.

    The collectives of a communicator are sequential; messages may overlap, and then they are drawn on as many tracks as
    needed.
    """

    def __init__(self, line: Timeline, rows: Ints) -> None:
        self.made: dict[tuple[tuple[int, bool], int], tuple[int, str]] = {}
        self.of: list[int] = []
        busy: dict[tuple[int, bool], list[tuple[float, int]]] = defaultdict(list)
        free: dict[tuple[int, bool], list[int]] = defaultdict(list)
        counted = Counter(comm.name for comm in line.comms)
        ends = np.where(np.isnan(line.end), line.begin, line.end)[rows].round(3).tolist()
        places = line.comm[rows].tolist(), line.number[rows].tolist(), line.begin[rows].round(3).tolist()
        for place, number, begin, end in zip(*places, ends, strict=True):
            comm, what = line.comms[place], (place, not number)
            under_way, idle = busy[what], free[what]
            while under_way and under_way[0][0] <= begin:
                heapq.heappush(idle, heapq.heappop(under_way)[1])
            lane = heapq.heappop(idle) if idle else len(under_way)
            heapq.heappush(under_way, (end, lane))
            if (what, lane) not in self.made:
                name = comm.name if counted[comm.name] == 1 else f"{comm.name} [{comm.key}]"
                self.made[what, lane] = len(self.made) + 1, f"{name}: messages" if what[1] else name
            self.of.append(self.made[what, lane][0])


End: TypeAlias = "tuple[int, float, int]"
"""End of an arrow: a process, a time and a track."""


class _Arrows:
    """Arrows from sends to receives.

    Messages between two ranks of a communicator with one tag arrive in the order in which they were sent. Where the
    match is ambiguous (a rank receives from any rank, or any tag; the numbers of sends and receives differ) there are
    no arrows.
    """

    def __init__(self, line: Timeline) -> None:
        self._leaving: dict[tuple[str, int, int, int], list[End]] = defaultdict(list)
        self._arriving: dict[tuple[str, int, int, int], list[End]] = defaultdict(list)
        self._unclear: set[tuple[str, int]] = set()

    def add(self, comm: Comm, rank: int, call: dict[str, Any], when: tuple[float, float, int], started: bool) -> None:
        """Record a send or a receive of `rank` of the world."""
        begin, end, track = when
        for one in call.get("parts", [call]):
            name = one["name"]
            peer, tag = one.get("peer"), one.get("tag")
            if _SENDS.get(name) is started and peer is not None:
                self._leaving[comm.key, rank, comm.members[peer], tag].append((rank, begin, track))
            elif _RECEIVES.get(name) is started:
                if peer is None or tag is None:
                    self._unclear.add((comm.key, rank))
                else:
                    self._arriving[comm.key, comm.members[peer], rank, tag].append((rank, end, track))

    def texts(self) -> Iterator[str]:
        """Yield the events of the arrows."""
        number = 0
        for pair, leaving in self._leaving.items():
            arriving = self._arriving.get(pair, [])
            if len(leaving) != len(arriving) or (pair[0], pair[2]) in self._unclear:
                continue
            for ends in zip(leaving, sorted(arriving, key=lambda end: end[1]), strict=True):
                number += 1
                for phase, (pid, time, tid) in zip(('"s"', '"f","bp":"e"'), ends, strict=True):
                    yield (
                        f'{{"name":"message","cat":"message","ph":{phase},"id":{number},"pid":{pid},"tid":{tid},'
                        f'"ts":{time:.3f}}}'
                    )


# --- reading the file again


def load(path: Path) -> Timeline:
    """Return the timeline of a file, of a folder of parts, or of the newest job in a folder of traces.

    Raises SetupError if there is none.
    """
    found = jobs(path)
    if not found:
        raise SetupError(f"{path}: there is no trace")
    newest = found[-1]
    return load_parts(newest) if newest.is_dir() else load_file(newest)


def jobs(path: Path) -> list[Path]:
    """Return the traces in `path`, oldest first: files, and folders of parts without a file."""
    if not path.is_dir():
        return [path]
    if is_parts(path):
        return [path]
    found = {one.stem: one for one in path.glob("*.json")}
    for one in path.iterdir():
        if one.is_dir() and is_parts(one):
            found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: one.stat().st_mtime)


def load_file(path: Path) -> Timeline:
    """Return the timeline of a file that :func:`merge` has made. Raises SetupError for any other file."""
    try:
        with path.open() as file:
            return _load(file)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise SetupError(f"{path} is no trace that `mpicoll trace` has made") from error


def _load(file: Iterable[str]) -> Timeline:
    texts = iter(file)
    about = json.loads(next(texts).rstrip("\n") + "]}")["otherData"]
    if about["mpicoll trace"] != VERSION:
        raise ValueError("another version")
    line = Timeline(
        about["job"],
        [Process(**one) for one in about["processes"]],
        about["missing ranks"],
        [Comm(**one) for one in about["communicators"]],
        about["calls"],
    )
    comms = {one.key: place for place, one in enumerate(line.comms)}
    said = _Table()
    ints: list[tuple[int, ...]] = []
    floats: list[tuple[float, float]] = []
    for text in texts:
        if text.startswith("]"):
            break
        event = json.loads(text.rstrip(",\n"))
        if event["ph"] != "X" or event["cat"] == "wait":
            continue
        args, begin = event["args"], event["ts"]
        words = [said.number(args[kind], args[kind]) if kind in args else -1 for kind in ("site", "error")]
        ints.append((event["pid"], comms[args["key"]], args["number"], args["call"], *words))
        floats.append((begin, float("nan") if "started" in args else begin + event["dur"]))
    table = np.array(ints, np.int64).reshape(-1, 6)
    times = np.array(floats).reshape(-1, 2)
    line.texts = said.all
    line.rank, line.comm, line.number, line.call, line.site, line.error = table.T
    line.begin, line.end = times.T
    align(line)
    return line
