"""The merged file of a trace, in the Trace Event Format that Chrome and Perfetto display.

A process per rank, in it a track per communicator for collectives, and others for messages. The file has one event a
line, so that it can be read again without being held in memory as a whole.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpicoll.engine.tracing.table import VERSION, Interned, Ints, TracedComm, TracedRank, TraceTable
from mpicoll.engine.tracing.wait_analysis import add_wait_times
from mpicoll.errors import SetupError

_MIN_WAIT = 10.0
"""Microseconds from which on a wait is drawn as a separate slice."""

_SENDS = {"send": False, "isend": True}
_RECEIVES = {"recv": False, "irecv": False}
"""Names of sends and receives, with True for those that are counted as started only."""

_CALL_ARGUMENTS = ("nbytes", "dtype", "shape", "op", "root", "algorithm", "peer", "tag")


def format_events(table: TraceTable) -> Iterator[str]:
    """Yield the text of the file, in pieces."""
    about = {
        "mpicoll trace": VERSION,
        "job": table.job,
        "missing ranks": table.missing,
        "processes": [{"rank": one.rank, "host": one.host, "pid": one.pid, "node": one.node} for one in table.ranks],
        "communicators": [{"key": one.key, "name": one.name, "members": one.members} for one in table.comms],
        "calls": table.calls,
    }
    # The last entry of the object, so that all before it can be read by itself.
    # Without displayTimeUnit, in which some versions of Perfetto read all times, instead of microseconds.
    yield json.dumps({"otherData": about})[:-1] + ', "traceEvents": ['
    arrows = _Arrows()
    comma = "\n"
    for process in table.ranks:
        for text in _format_rank(table, process, arrows):
            yield comma + text
            comma = ",\n"
    for text in arrows.format_arrows():
        yield comma + text
        comma = ",\n"
    yield "\n]}\n"


def _format_rank(table: TraceTable, process: TracedRank, arrows: _Arrows) -> Iterator[str]:
    """Yield the events of a rank, in the order in which they begin."""
    pid = process.rank
    yield _format_metadata(pid, 0, "process_name", name=f"rank {process.rank} ({process.host})")
    yield _format_metadata(pid, 0, "process_sort_index", sort_index=process.rank)
    rows = np.flatnonzero(table.rank == process.rank)
    rows = rows[np.argsort(table.begin[rows], kind="stable")]
    tracks = _Tracks(table, rows)
    for (_, lane), (tid, name) in tracks.names.items():
        yield _format_metadata(pid, tid, "thread_name", name=name if lane == 0 else f"{name} ({lane + 1})")
        yield _format_metadata(pid, tid, "thread_sort_index", sort_index=tid)
    names = [json.dumps(one["name"]) for one in table.calls]
    arguments = [json.dumps(_call_arguments(one) | {"call": place})[1:-1] for place, one in enumerate(table.calls)]
    comms = [json.dumps({"communicator": one.name, "key": one.key})[1:-1] for one in table.comms]
    texts = [json.dumps(one) for one in table.texts]
    columns = (
        table.comm,
        table.number,
        table.call,
        table.begin,
        table.end,
        table.site,
        table.error,
        table.wait,
        table.last,
    )
    listed = (column[rows].tolist() for column in columns)
    for tid, comm, number, call, begin, end, site, error, wait, last in zip(tracks.tids, *listed, strict=True):
        started = end != end
        text = (
            f'{{"name":{names[call]},"cat":"{"collective" if number else "message"}","ph":"X","pid":{pid},"tid":{tid},'
            f'"ts":{begin:.3f},"dur":{_format_duration(begin, end)},'
            f'"args":{{{arguments[call]},{comms[comm]},"number":{number}'
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
        if wait >= _MIN_WAIT:
            yield (
                f'{{"name":"waits for rank {last}","cat":"wait","ph":"X","pid":{pid},"tid":{tid},"ts":{begin:.3f},'
                f'"dur":{_format_duration(begin, begin + wait)}}}'
            )
        if not number:
            arrows.add(table.comms[comm], pid, table.calls[call], (begin, begin if started else end, tid), started)


def _format_duration(begin: float, end: float) -> str:
    """Return the duration as written: computed from rounded times, so that slices that do not overlap do not overlap in
    the file."""
    return "0" if end != end else f"{round(end, 3) - round(begin, 3):.3f}"


def _format_metadata(pid: int, tid: int, what: str, **args: Any) -> str:
    return json.dumps({"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args})


def _call_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call in the file, except its name."""
    arguments = {"bytes" if name == "nbytes" else name: call[name] for name in _CALL_ARGUMENTS if name in call}
    if "shape" in arguments:
        arguments["shape"] = str(arguments["shape"])
    if "parts" in call:
        arguments["parts"] = ", ".join(part["text"] for part in call["parts"])
    return arguments


class _Tracks:
    """Assignment of the `rows` of a rank, which are in the order of `begin`, to tracks.

    The collectives of a communicator are sequential; messages may overlap, and then they are drawn on as many tracks as
    needed.
    """

    def __init__(self, table: TraceTable, rows: Ints) -> None:
        self.names: dict[tuple[tuple[int, bool], int], tuple[int, str]] = {}
        self.tids: list[int] = []
        busy: dict[tuple[int, bool], list[tuple[float, int]]] = defaultdict(list)
        free: dict[tuple[int, bool], list[int]] = defaultdict(list)
        counted = Counter(comm.name for comm in table.comms)
        ends = np.where(np.isnan(table.end), table.begin, table.end)[rows].round(3).tolist()
        places = table.comm[rows].tolist(), table.number[rows].tolist(), table.begin[rows].round(3).tolist()
        for place, number, begin, end in zip(*places, ends, strict=True):
            comm, what = table.comms[place], (place, not number)
            under_way, idle = busy[what], free[what]
            while under_way and under_way[0][0] <= begin:
                heapq.heappush(idle, heapq.heappop(under_way)[1])
            lane = heapq.heappop(idle) if idle else len(under_way)
            heapq.heappush(under_way, (end, lane))
            if (what, lane) not in self.names:
                name = comm.name if counted[comm.name] == 1 else f"{comm.name} [{comm.key}]"
                self.names[what, lane] = len(self.names) + 1, f"{name}: messages" if what[1] else name
            self.tids.append(self.names[what, lane][0])


ArrowEnd: TypeAlias = "tuple[int, float, int]"
"""End of an arrow: a process, a time and a track."""


class _Arrows:
    """Arrows from sends to receives.

    Messages between two ranks of a communicator with one tag arrive in the order in which they were sent. Where the
    match is ambiguous (a rank receives from any rank, or any tag; the numbers of sends and receives differ) there are
    no arrows.
    """

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int, int, int], list[ArrowEnd]] = defaultdict(list)
        self._received: dict[tuple[str, int, int, int], list[ArrowEnd]] = defaultdict(list)
        self._ambiguous: set[tuple[str, int]] = set()

    def add(
        self, comm: TracedComm, rank: int, call: dict[str, Any], when: tuple[float, float, int], started: bool
    ) -> None:
        """Record a send or a receive of `rank` of the world."""
        begin, end, track = when
        for one in call.get("parts", [call]):
            name = one["name"]
            peer, tag = one.get("peer"), one.get("tag")
            if _SENDS.get(name) is started and peer is not None:
                self._sent[comm.key, rank, comm.members[peer], tag].append((rank, begin, track))
            elif _RECEIVES.get(name) is started:
                if peer is None or tag is None:
                    self._ambiguous.add((comm.key, rank))
                else:
                    self._received[comm.key, comm.members[peer], rank, tag].append((rank, end, track))

    def format_arrows(self) -> Iterator[str]:
        """Yield the events of the arrows."""
        number = 0
        for pair, sends in self._sent.items():
            receives = self._received.get(pair, [])
            if len(sends) != len(receives) or (pair[0], pair[2]) in self._ambiguous:
                continue
            for ends in zip(sends, sorted(receives, key=lambda end: end[1]), strict=True):
                number += 1
                for phase, (pid, time, tid) in zip(('"s"', '"f","bp":"e"'), ends, strict=True):
                    yield (
                        f'{{"name":"message","cat":"message","ph":{phase},"id":{number},"pid":{pid},"tid":{tid},'
                        f'"ts":{time:.3f}}}'
                    )


def load_file(path: Path) -> TraceTable:
    """Return the operations of a file that mpicoll has merged.

    Raises SetupError if it can't be read, and various exceptions if mpicoll has not made it.
    """
    try:
        with path.open() as file:
            return _read_events(file)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from error


def _read_events(file: Iterable[str]) -> TraceTable:
    texts = iter(file)
    about = json.loads(next(texts, "").rstrip("\n") + "]}")["otherData"]
    if about["mpicoll trace"] != VERSION:
        raise ValueError("another version")
    table = TraceTable(
        about["job"],
        [TracedRank(**one) for one in about["processes"]],
        about["missing ranks"],
        [TracedComm(**one) for one in about["communicators"]],
        about["calls"],
    )
    comms = {one.key: place for place, one in enumerate(table.comms)}
    interned = Interned()
    ints: list[tuple[int, ...]] = []
    floats: list[tuple[float, float]] = []
    for text in texts:
        if text.startswith("]"):
            break
        event = json.loads(text.rstrip(",\n"))
        if event["ph"] != "X" or event["cat"] == "wait":
            continue
        args, begin = event["args"], event["ts"]
        named = [interned.add(args[kind], args[kind]) if kind in args else -1 for kind in ("site", "error")]
        ints.append((event["pid"], comms[args["key"]], args["number"], args["call"], *named))
        floats.append((begin, float("nan") if "started" in args else begin + event["dur"]))
    indices = np.array(ints, np.int64).reshape(-1, 6)
    times = np.array(floats).reshape(-1, 2)
    table.texts = interned.all
    table.rank, table.comm, table.number, table.call, table.site, table.error = indices.T
    table.begin, table.end = times.T
    table.check()
    add_wait_times(table)
    return table
