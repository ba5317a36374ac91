"""Tracing: each rank records its operations, and at the end rank 0 writes one file for all of them.

While tracing is active, each operation costs a rank one append to a list, which a thread writes out twice a second.
Each rank writes its own part, ``DIR/JOB/rank-N.jsonl``, so that a killed rank loses little data; at the end rank 0
makes ``DIR/JOB.json`` of the parts (see :mod:`mpicoll.engine.timeline`), which are sent to rank 0 where it can't read
them in the file system.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.engine import timeline
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Past, Sink, Site, described, keepers
from mpicoll.engine.diagnostics.process_exit import last_acts, say
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import CommunicationError, SetupError, Timeout
from mpicoll.transport.base import Transport

_PERIOD = 0.5
"""Seconds between two writes. All ranks of a node write at the same time, so that they delay each other only once."""

_BATCH = 2000
"""Operations written at a time, which bounds the time for which the thread holds the interpreter lock."""

_FIELDS = 7
"""Number of recorded fields per operation."""

_KEPT = 4096
"""Maximum number of calls cached by identity, and of calls cached by content, before the cache is cleared."""

_PINGS = 32
"""Round trips used to measure the offset of another clock; the fastest one counts."""

_CHUNK = 4 << 20
"""Bytes of the messages in which a part is sent."""

_TAG = 32767
"""Tag of the duplicate on which ranks communicate for tracing."""

_ANSWER = 60.0
"""Seconds within which a rank has to reply after rank 0 has contacted it."""

_told = attrgetter(*(name for name in Call.__slots__ if name != "parts"))

Clock = Callable[[], float]


class Recorder:
    """Recorder of the operations of the rank `rank` of the world, in the file `path`.

    Records only operations on communicators of the same world as the one whose key is `key`: ranks may be threads of
    one process. Raises OSError if the file can't be created.
    """

    def __init__(self, path: Path, job: str, rank: int, key: str) -> None:
        self._rank = rank
        self._local = _is_local(key)
        self._base = time.monotonic()
        self._file = path.open("wb")
        self._lines: list[str] = []
        self._say(
            job=job, rank=rank, host=socket.gethostname(), pid=os.getpid(), base=self._base, version=timeline.VERSION
        )
        self._put()
        # Numbers of groups, calls and texts in the file. Groups are identified by identity, and kept alive for that.
        self._groups: dict[int, int] = {}
        self._calls: dict[Call, int] = {}
        self._contents: dict[Any, int] = {}
        self._texts: dict[Any, int] = {}
        self._drawn = itertools.count()
        self._kept: list[Group] = []
        # A flat list, not tuples: the garbage collector would visit each tuple again and again.
        self._new: list[Any] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._sink = _sink(self._new)
        keepers.add(self._sink)
        self._thread = threading.Thread(target=self._run, name="mpicoll-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop recording, and write the recorded operations."""
        keepers.remove(self._sink)
        self._end.set()
        self._thread.join()
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write the recorded operations. Nothing is written if another thread holds the lock for too long."""
        if not self._lock.acquire(timeout=_PERIOD):
            return
        try:
            if self._file.closed:
                return
            taken = self._new[:]
            del self._new[: len(taken)]
            for start in range(0, len(taken), _BATCH * _FIELDS):
                _make_room(self._calls)
                _make_room(self._texts)
                self._write(taken[start : start + _BATCH * _FIELDS])
        except OSError as error:
            keepers.remove(self._sink)
            self._new.clear()
            say(f"rank {self._rank} is not traced any more, since {self._file.name} can't be written: {error}")
            with suppress(OSError):
                self._file.close()
        finally:
            self._lock.release()

    def _run(self) -> None:
        while not self._end.wait(_PERIOD - time.monotonic() % _PERIOD):
            self.flush()

    def _write(self, taken: list[Any]) -> None:
        groups, numbers, calls, begins, sites, ends, errors = (taken[place::_FIELDS] for place in range(_FIELDS))
        idents = list(map(id, groups))
        if set(idents) - self._groups.keys():
            self._learn_groups(groups)
        for call in set(calls).difference(self._calls):
            self._learn_call(call)
        rows = np.empty(len(groups), timeline.ROW)
        rows["group"] = list(map(self._groups.__getitem__, idents))
        rows["number"] = numbers
        rows["call"] = list(map(self._calls.__getitem__, calls))
        rows["begin"] = (np.array(begins) - self._base) * 1e9
        until = (np.array(ends, float) - self._base) * 1e9  # NaN for None
        rows["end"] = np.where(np.isnan(until), -1, until)
        rows["site"] = self._texted(sites, None)
        rows["error"] = self._texted(errors, "")
        rows = rows[rows["group"] >= 0]
        if len(rows):
            self._say(rows=b64encode(rows.tobytes()).decode())
            self._put()

    def _put(self) -> None:
        self._file.write("".join(line + "\n" for line in self._lines).encode())
        self._lines.clear()
        self._file.flush()  # the data survives if the process is killed

    def _say(self, **fields: Any) -> None:
        self._lines.append(json.dumps(fields))

    def _learn_groups(self, groups: list[Group]) -> None:
        for group in groups:
            if id(group) in self._groups:
                continue
            self._kept.append(group)
            index = -1  # groups of other ranks
            if group.members[group.rank] == self._rank and _is_local(group.key) == self._local:
                index = next(self._drawn)
                self._say(group=index, key=group.key, name=group.name, members=group.members)
            self._groups[id(group)] = index

    def _learn_call(self, call: Call) -> None:
        """Number a call by its content, since many calls are created again each time."""
        content = _content(call)
        index = self._contents.get(content)
        if index is None:
            _make_room(self._contents)
            index = self._contents[content] = next(self._drawn)
            self._say(call=index, **_definition(call))
        self._calls[call] = index

    def _texted(self, texts: list[Site | str | None], none: str | None) -> int | list[int]:
        """Return the numbers of `texts`, -1 for `none`."""
        there = set(texts)
        if there == {none}:
            return -1
        for text in there.difference(self._texts):
            self._texts[text] = next(self._drawn)
            self._say(text=self._texts[text], says=str(text))
        return [-1 if text == none else self._texts[text] for text in texts]


def _sink(new: list[Any]) -> Sink:
    extend = new.extend

    def sink(one: Past) -> None:
        (group, number, call, begin, site), end, error = one
        extend((group, number, call, begin, site, end, error))

    return sink


def _make_room(known: dict[Any, int]) -> None:
    if len(known) >= _KEPT:
        known.clear()


def _is_local(key: str) -> bool:
    """Return True if the key is that of a communicator of threads."""
    return ":" in key


def _content(call: Call) -> Any:
    return (_told(call), *map(_content, call.parts)) if call.parts else _told(call)


def _definition(call: Call) -> dict[str, Any]:
    fields = described(call)
    return fields | {"parts": [_definition(part) for part in call.parts]} if call.parts else fields


class Tracing:
    """Active trace on the ranks of a communicator. `path` is the path of the resulting file."""

    def __init__(self, folder: Path, transport: Transport, limit: float) -> None:
        """Begin tracing. Collective. Raises SetupError on a rank that can't write to `folder`."""
        self._owner = os.getpid()
        self._limit = limit
        self._link = link = transport.duplicate(_TAG)
        self._nodes = transport.nodes
        self._members = transport.members
        self._clocks: timeline.Clocks = {}
        job = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}" if link.rank == 0 else ""
        self.job = link.texts(job)[0]
        # The program may change its working directory later.
        self.path = folder.absolute() / f"{self.job}.json"
        self._parts = folder.absolute() / self.job
        if link.rank == 0:
            for rank in range(1, link.size):
                if self._leads(rank):
                    self._compare_clocks(rank)
                self._order(rank, b"q")
        else:
            self._serve()
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            if link.rank == 0:
                self._tell_about_job()
            self._part = self._parts / timeline.part_name(self._members[link.rank])
            self._recorder = Recorder(self._part, self.job, self._members[link.rank], transport.key)
        except OSError as error:
            raise SetupError(
                f"rank {link.rank} can't write its trace to {folder}: {error.strerror}; give a folder that it may write"
                " to (MPICOLL_TRACE)"
            ) from error
        self._last_act = self._recorder.flush
        last_acts.append(self._last_act)

    def stop(self) -> None:
        """Stop recording and leave the parts to ``mpicoll trace merge``."""
        if os.getpid() == self._owner and self._last_act in last_acts:
            last_acts.remove(self._last_act)
            self._recorder.stop()

    def finish(self) -> None:
        """Stop recording, and make one file of all parts. Collective. A dead rank delays the others for at most the
        limit; the file contains as much of its part as rank 0 can read."""
        if os.getpid() != self._owner:
            return
        self.stop()
        try:
            if self._link.rank == 0:
                self._gather()
            else:
                size = np.array([self._part.stat().st_size], np.int64).view(np.uint8)
                self._link.isend(size, 0, 0).wait(self._limit)
                self._serve()
        except (CommunicationError, OSError) as error:
            say(
                f"rank {self._link.rank}: the trace is not complete: {error}; `mpicoll trace merge {self._parts}` makes"
                " one of the parts that are there"
            )

    def free(self) -> None:
        """Release the transport that the ranks used for tracing. Collective."""
        self._link.free()

    # Rank 0 sends commands of one letter, which the other ranks execute until the letter q.

    def _order(self, rank: int, letter: bytes) -> None:
        self._link.isend(np.frombuffer(letter, np.uint8).copy(), rank, 1).wait(_ANSWER)

    def _serve(self) -> None:
        letter = np.zeros(1, np.uint8)
        while True:
            self._link.irecv(letter, 0, 1).wait(self._limit)
            order = letter.tobytes()
            if order == b"p":
                now = np.array([clock()]).view(np.uint8)
                self._link.isend(now, 0, 2).wait(_ANSWER)
            elif order == b"s":
                self._send_part()
            elif order == b"d":
                self._part.unlink()
                with suppress(OSError):  # other ranks of this host may still have their parts in the folder
                    self._parts.rmdir()
            else:
                return

    def _compare_clocks(self, rank: int) -> None:
        """Measure the offset of the clock of the node of `rank` from the clock of this node."""
        answer = np.zeros(1)
        best, found = float("inf"), (0.0, 0.0)
        for _ in range(_PINGS):
            arriving = self._link.irecv(answer.view(np.uint8), rank, 2)
            begin = clock()
            self._order(rank, b"p")
            arriving.wait(_ANSWER)
            end = clock()
            if end - begin < best:
                best, found = end - begin, (float(answer[0]), float(answer[0]) - (begin + end) / 2)
        self._clocks.setdefault(self._nodes[rank], []).append(found)

    def _leads(self, rank: int) -> bool:
        """Return True if `rank` is the rank that reports the clock of another node."""
        return self._nodes[rank] != self._nodes[0] and self._nodes.index(self._nodes[rank]) == rank

    def _tell_about_job(self) -> None:
        nodes = {str(member): node for member, node in zip(self._members, self._nodes, strict=True)}
        timeline.write_about(self._parts, {"job": self.job, "nodes": nodes, "clocks": self._clocks})

    def _gather(self) -> None:
        """Collect all parts on rank 0, and make the file."""
        lost = self._each_rank()
        self._tell_about_job()
        timeline.merge(self._parts)
        if not lost:
            shutil.rmtree(self._parts)

    def _each_rank(self) -> list[str]:
        """Serve each rank in the order of arrival, and return the errors."""
        link, lost = self._link, []
        sizes = np.zeros(link.size, np.int64)
        coming = {rank: link.irecv(sizes[rank : rank + 1].view(np.uint8), rank, 0) for rank in range(1, link.size)}
        deadline = time.monotonic() + self._limit
        while coming:
            for rank, pending in list(coming.items()):
                try:
                    if pending.test() is None:
                        if time.monotonic() < deadline:
                            continue
                        raise Timeout(f"rank {rank} has not come within {self._limit:g} s")
                    self._talk_to(rank, int(sizes[rank]))
                except CommunicationError as error:
                    lost.append(str(error))
                del coming[rank]
            time.sleep(1e-3)
        for one in lost:
            say(f"trace {self.path}: {one}")
        return lost

    def _talk_to(self, rank: int, size: int) -> None:
        if self._leads(rank):
            self._compare_clocks(rank)
        part = self._parts / timeline.part_name(self._members[rank])
        if not part.exists() or part.stat().st_size != size:
            self._fetch(rank, part, size)
            self._order(rank, b"d")
        self._order(rank, b"q")

    def _fetch(self, rank: int, part: Path, size: int) -> None:
        self._order(rank, b"s")
        with part.open("wb") as file:
            while size > 0:
                chunk = np.empty(min(size, _CHUNK), np.uint8)
                self._link.irecv(chunk, rank, 3).wait(_ANSWER)
                file.write(chunk.tobytes())
                size -= chunk.size

    def _send_part(self) -> None:
        with self._part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                self._link.isend(np.frombuffer(chunk, np.uint8).copy(), 0, 3).wait(_ANSWER)


def clock() -> float:
    """Return the time by the clock of the operations: the same clock for all processes of a host."""
    return time.monotonic()


@contextmanager
def trace(folder: str | Path, *, comm: CommLike = None) -> Iterator[Path]:
    """Trace the operations of the ranks of `comm` (default: the world) in the block: ``with mpicoll.trace("traces") as
    path: ...``

    Collective: all ranks enter and exit it alike. It yields the path of the file that exists after the block: one trace
    in the Chrome format for all ranks, which https://ui.perfetto.dev displays and ``mpicoll trace summary`` summarises.
    Each rank writes its part to `folder` meanwhile, and rank 0 the file; the folder is created if it does not exist.

    Each operation takes about 1 µs longer, and 53 bytes in the part, 300 in the file. If the block raises, this rank
    stops recording and leaves its part, because the other ranks may not exit the block: ``mpicoll trace merge`` makes a
    file of the existing parts. Raises SetupError if the rank can't write to `folder`.
    """
    communicator = resolve(comm)
    tracing = Tracing(Path(folder), communicator.transport, communicator.timeout)
    try:
        yield tracing.path
    except BaseException:
        tracing.stop()
        raise
    communicator.progress.drain(communicator.timeout)
    tracing.finish()
    tracing.free()
