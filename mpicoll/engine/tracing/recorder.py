"""The recorder of the operations of one rank.

While it is active, each operation costs one append to a list, which a thread writes to the rank's part twice a second,
so that a killed rank loses little data.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite, Group, Record, Sink, serialize_call, sinks
from mpicoll.engine.diagnostics.process_exit import log_to_stderr
from mpicoll.engine.tracing import parts
from mpicoll.engine.tracing.table import VERSION

_PERIOD = 0.5
"""Seconds between two writes. All ranks of a node write at the same time, so that they delay each other only once."""

_BATCH = 2000
"""Operations written at a time, which bounds the time for which the thread holds the interpreter lock."""

_FIELDS = 7
"""Number of recorded fields per operation."""

_CACHE_SIZE = 4096
"""Maximum number of calls cached by identity, and of calls cached by content, before the cache is cleared."""

_call_fields = attrgetter(*(name for name in Call.__slots__ if name != "parts"))


class Recorder:
    """Recorder of the operations of the rank `rank` of the world, in the file `path`.

    Records only operations on communicators of the same world as the one whose key is `key`: ranks may be threads of
    one process. Raises OSError if the file can't be created.
    """

    def __init__(self, path: Path, job: str, rank: int, key: str) -> None:
        self._rank = rank
        self._local = _is_local(key)
        self._base = time.monotonic()
        self._file = path.open("xb")  # another user may be able to place a link in the folder
        self._lines: list[str] = []
        self._add_line(job=job, rank=rank, host=socket.gethostname(), pid=os.getpid(), base=self._base, version=VERSION)
        self._write_lines()
        # Numbers of groups, calls and texts in the file. Groups are identified by identity, and kept alive for that.
        self._groups: dict[int, int] = {}
        self._calls: dict[Call, int] = {}
        self._contents: dict[Any, int] = {}
        self._texts: dict[Any, int] = {}
        self._next_number = itertools.count()
        self._held: list[Group] = []
        # A flat list, not tuples: the garbage collector would visit each tuple again and again.
        self._new: list[Any] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._sink = _make_sink(self._new)
        sinks.add(self._sink)
        self._thread = threading.Thread(target=self._run, name="mpicoll-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop recording, and write the recorded operations."""
        sinks.remove(self._sink)
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
                _bound_cache(self._calls)
                _bound_cache(self._texts)
                self._write_batch(taken[start : start + _BATCH * _FIELDS])
        except OSError as error:
            sinks.remove(self._sink)
            self._new.clear()
            log_to_stderr(f"rank {self._rank} is no longer traced: {self._file.name} can't be written: {error}")
            with suppress(OSError):
                self._file.close()
        finally:
            self._lock.release()

    def _run(self) -> None:
        while not self._end.wait(_PERIOD - time.monotonic() % _PERIOD):
            self.flush()

    def _write_batch(self, batch: list[Any]) -> None:
        groups, numbers, calls, begins, sites, ends, errors = (batch[place::_FIELDS] for place in range(_FIELDS))
        idents = list(map(id, groups))
        if set(idents) - self._groups.keys():
            self._define_groups(groups)
        for call in set(calls).difference(self._calls):
            self._define_call(call)
        rows = np.empty(len(groups), parts.ROW)
        rows["group"] = list(map(self._groups.__getitem__, idents))
        rows["number"] = numbers
        rows["call"] = list(map(self._calls.__getitem__, calls))
        rows["begin"] = (np.array(begins) - self._base) * 1e9
        finished = (np.array(ends, float) - self._base) * 1e9  # NaN for None
        rows["end"] = np.where(np.isnan(finished), -1, finished)
        rows["site"] = self._number_texts(sites, None)
        rows["error"] = self._number_texts(errors, "")
        rows = rows[rows["group"] >= 0]
        if len(rows):
            self._add_line(rows=parts.encode_rows(rows))
            self._write_lines()

    def _write_lines(self) -> None:
        self._file.write("".join(line + "\n" for line in self._lines).encode())
        self._lines.clear()
        self._file.flush()  # the data survives if the process is killed

    def _add_line(self, **fields: Any) -> None:
        self._lines.append(json.dumps(fields))

    def _define_groups(self, groups: list[Group]) -> None:
        for group in groups:
            if id(group) in self._groups:
                continue
            self._held.append(group)
            index = -1  # groups of other ranks
            if group.members[group.rank] == self._rank and _is_local(group.key) == self._local:
                index = next(self._next_number)
                self._add_line(group=index, key=group.key, name=group.name, members=group.members)
            self._groups[id(group)] = index

    def _define_call(self, call: Call) -> None:
        """Assign a number to a call by its content, since many calls are created again each time."""
        content = _content_key(call)
        index = self._contents.get(content)
        if index is None:
            _bound_cache(self._contents)
            index = self._contents[content] = next(self._next_number)
            self._add_line(call=index, **_describe_call(call))
        self._calls[call] = index

    def _number_texts(self, texts: list[CallSite | str | None], none: str | None) -> int | list[int]:
        """Return the numbers of `texts`, -1 for `none`."""
        distinct = set(texts)
        if distinct == {none}:
            return -1
        for text in distinct.difference(self._texts):
            self._texts[text] = next(self._next_number)
            self._add_line(text=self._texts[text], says=str(text))
        return [-1 if text == none else self._texts[text] for text in texts]


def _make_sink(new: list[Any]) -> Sink:
    extend = new.extend

    def sink(one: Record) -> None:
        (group, number, call, begin, site), end, error = one
        extend((group, number, call, begin, site, end, error))

    return sink


def _bound_cache(cache: dict[Any, int]) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()


def _is_local(key: str) -> bool:
    """Return True if the key is that of a communicator of threads."""
    return ":" in key


def _content_key(call: Call) -> Any:
    return (_call_fields(call), *map(_content_key, call.parts)) if call.parts else _call_fields(call)


def _describe_call(call: Call) -> dict[str, Any]:
    fields = serialize_call(call)
    return fields | {"parts": [_describe_call(part) for part in call.parts]} if call.parts else fields
