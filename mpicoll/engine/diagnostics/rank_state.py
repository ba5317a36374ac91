"""The state of a rank, as data for the other ranks.

The progress of an operation is published by its executor (:mod:`mpicoll.engine.diagnostics.position`).
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from mpicoll.engine.diagnostics import flight_recorder
from mpicoll.engine.diagnostics.call_facts import State, comm_key, describe_call, is_meeting, messages_of
from mpicoll.engine.diagnostics.departures import list_counts
from mpicoll.engine.diagnostics.flight_recorder import CallSite, Entry, EntryTuple, Group, Wait
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.engine.diagnostics.stacks import (
    call_site_in,
    is_idle,
    program_site,
    runs_program,
    source_line,
    take_stacks,
    thread_names,
)
from mpicoll.transport import launch_env

LIMIT = 1_000_000
"""Maximum size in bytes of the state of a rank as JSON."""


IN_TRANSIT = 30.0
"""Seconds for which a message may be in transit after its send has completed.

A slow network takes 3 s for the data in kernel buffers.
"""


class Queue(Protocol):
    """The part of a communicator's queue (:class:`~mpicoll.engine.core.queue.OperationQueue`) that is read here."""

    current: EntryTuple | None
    executing: Executing
    thread: int
    group: Group
    background: bool

    @property
    def number(self) -> int:
        """Number of the collectives begun."""

    @property
    def queued(self) -> int:
        """Number of the collectives that come next, and have no number yet."""

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for their turn, or for an operation in the queue."""


def snapshot(
    rank: int,
    size: int,
    queues: Iterable[Queue],
    active: Mapping[int, Wait],
    *,
    full: bool,
    program: int | None = None,
    started: Callable[[], Iterable[tuple[str, int | None]]] = tuple,
    calls: Sequence[Sequence[Any]] = (),
    met: Mapping[str, int] | None = None,
    retired: Mapping[str, int] | None = None,
) -> State:
    """Return the state of this rank, for JSON.

    It may be called on any thread at any time, also while other threads are stuck: it takes no lock that they may
    hold, sends nothing and raises nothing. Parts that could not be determined are listed under "failed".

    Args:
        rank: The rank of this process, or of this thread, in the job.
        size: The number of ranks of the job.
        queues: The queues of the communicators of the rank.
        active: The waits outside of the queues, by thread.
        full: Include the stacks of all threads and the last operations, as many as fit into ``LIMIT`` bytes.
        program: The thread that runs the program; by default the main thread.
        started: Returns the messages that may be in transit: "send" or "recv", and the tag.
        calls: Collectives, as (key of the communicator, number). The state contains the calls of this rank for those of
            them that have ended here, and for meetings the number that it has begun.
        met: The numbers of meetings begun, by key.
        retired: The communicators on which the program makes no more calls, by key, with the number of collectives that
            it has called there.
    """
    state: State = {"rank": rank, "size": size}
    try:
        snapshotter = _Snapshotter(rank, list(queues), dict(active), program, started, state, calls)
        snapshotter.take(full=full)
        state |= snapshotter.positions(met or {}, retired or {})
    except Exception as error:  # noqa: BLE001  the parts that were found must be returned
        state.setdefault("failed", []).append(f"{type(error).__name__}: {error}")
    return state


class _Snapshotter:
    """A snapshot of this process."""

    def __init__(
        self,
        rank: int,
        queues: list[Queue],
        active: dict[int, Wait],
        program: int | None,
        started: Callable[[], Iterable[tuple[str, int | None]]],
        state: State,
        calls: Sequence[Sequence[Any]],
    ) -> None:
        self._rank = rank
        self._queues = queues
        self._active = active
        self._stacks: dict[int, list[CallSite]] = {}
        self._names = thread_names()
        self._program = program or threading.main_thread().ident or 0
        self._started_messages = started
        self._ambiguous_names: set[str] = set()
        # Each queue is read once: it changes meanwhile.
        self._running = [(queue, _read_running(queue)) for queue in queues]
        self._state = state
        self._requested = {(key, number) for key, number in calls}

    def take(self, *, full: bool) -> None:
        state = self._state
        try:
            self._stacks = take_stacks()
        except OSError as error:
            state["failed"] = [f"stacks: {error}"]
        with suppress(Exception):
            names = Counter(queue.group.name for queue in self._queues)
            self._ambiguous_names = {name for name, times in names.items() if times > 1}
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("process", self._process),
            ("queues", self._queue_states),
            ("pending", self._pending),
            ("program", self._program_state),
            ("others", self._other_threads),
            ("started", self._messages_in_transit),
            ("called", self._ended_calls),
        ]
        if full:
            parts += [("threads", self._threads), ("past", self._past_operations)]
        for name, find in parts:
            try:
                state[name] = find()
            except Exception as error:  # noqa: BLE001  the other parts must be returned
                state.setdefault("failed", []).append(f"{name}: {type(error).__name__}: {error}")
        if full:
            _trim(state)

    def positions(self, met: Mapping[str, int], retired: Mapping[str, int]) -> State:
        """Return the numbers of meetings, and of communicators that are no longer used."""
        queues = self._state.get("queues", [])
        busy = {one["key"] for one in queues if one["running"] or one["queued"]}
        known = {*retired, *(one["key"] for one in queues)}
        asked = {key for key, _ in self._requested} | {entry[0].key for entry, _, _ in self._active.values()}
        return {
            "retired": {key: number for key, number in retired.items() if key not in busy},
            "met": {key: met.get(key, 0) for key in asked if is_meeting(key) and comm_key(key) in known},
        }

    def _process(self) -> State:
        versions = {"python": platform.python_version()}
        for name in ("mpicoll", "torch", "numpy"):
            module = sys.modules.get(name)
            if module is not None:
                versions[name] = str(getattr(module, "__version__", "unknown"))
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "batch": launch_env.describe_batch_job(os.environ),
            "versions": versions,
            "time": time.time(),
            "clock": time.monotonic(),
            "thread": self._names.get(self._program, ""),
        }

    def _queue_states(self) -> list[State]:
        return [
            {
                "key": queue.group.key,
                "name": self._name(queue.group),
                "members": list(queue.group.members),
                "number": queue.number if running is None else running.entry[1],
                "running": running is not None,
                "queued": queue.queued,
                "background": queue.background,
            }
            | self._message_counts(queue.group)
            for queue, running in self._running
        ]

    @staticmethod
    def _message_counts(group: Group) -> State:
        """Return the numbers of messages that this rank has sent and received.

        The result is empty if there may be uncounted messages.
        """
        traffic = group.traffic
        if traffic is None or traffic.uncounted:
            return {}
        sent, received = list_counts(group, traffic.sent), list_counts(group, traffic.received)
        return {"sent": sent, "received": received, "answered": traffic.answered}

    def _ended_calls(self) -> list[State]:
        """Return the calls of this rank for the requested collectives that have ended here."""
        if not self._requested:
            return []
        return [
            {
                "key": group.key,
                "number": number,
                "call": describe_call(call, group),
                "site": _describe_site(site),
                "failed": bool(error),
            }
            for (group, number, call, _, site), end, error in flight_recorder.list_history()
            if end is not None and (group.key, number) in self._requested and self._is_own(group)
        ]

    def _pending(self) -> list[State]:
        found = []
        for _, running in self._running:
            if running is not None:
                entry, thread, position = running
                found.append(self._operation(entry, thread, position, bounded=False))
        for ident, (entry, bounded, polls) in self._active.items():
            found.append(self._operation(entry, ident, Position(polls=polls), bounded=bounded))
        return found

    def _name(self, group: Group) -> str:
        """Return the name of `group`, with its key if several communicators have this name."""
        return f"{group.name} [{comm_key(group.key)}]" if group.name in self._ambiguous_names else group.name

    def _operation(self, raw: EntryTuple, ident: int | None, position: Position, *, bounded: bool) -> State:
        entry = Entry._make(raw)
        site = entry.site or (None if ident is None else call_site_in(self._stacks.get(ident, [])))
        native = "the MPI library" if entry.call.algorithm.startswith("native") else ""
        return {
            "key": entry.group.key,
            "group": self._name(entry.group),
            "members": list(entry.group.members),
            "number": entry.number,
            "call": describe_call(entry.call, entry.group),
            "begin": entry.begin,
            "seconds": round(time.monotonic() - entry.begin, 3),
            "site": _describe_site(site),
            "thread": "" if ident is None else self._names.get(ident, "?"),
            "program": ident == self._program,
            "where": position.where or native,
            "waits_for": list(position.waits_for),
            "bounded": bounded,
            "polls": position.polls,
        }

    def _program_state(self) -> State:
        """Return the position of the thread that runs the program, and the wait that it is in."""
        if self._program not in self._names:
            return {"site": None, "waits": "ended"}
        return {"site": _describe_site(program_site(self._stacks.get(self._program, [])))} | self._wait_of_program()

    def _wait_of_program(self) -> State:
        """Return the wait of the program's thread for a queue or for a message, without regard to its own bound."""
        waits: list[tuple[float, State]] = [
            (running.entry[3], {"waits": "queue", "key": queue.group.key})
            for queue, running in self._running
            if running is not None and running.thread == self._program
        ]
        if self._program in self._active:
            group, number, _, begin, _ = self._active[self._program][0]
            waits.append((begin, {"waits": "queue", "key": group.key} if number else {"waits": "message"}))
        if waits:  # the last one has interrupted the others
            return max(waits, key=itemgetter(0))[1]
        for queue in self._queues:
            if self._program in queue.waiting_threads():
                return {"waits": "queue", "key": queue.group.key}
        return {"waits": ""}

    def _other_threads(self) -> list[str]:
        """Return the names of the other threads that may communicate on behalf of the program.

        Threads of this package are included while they run code of the program, as at the end of an operation
        in the background.
        """
        found = []
        for ident in self._stacks.keys() | self._names.keys():
            name, stack = self._names.get(ident, "?"), self._stacks.get(ident, [])
            if ident in (threading.get_ident(), self._program) or name.startswith("mpicoll-rank-"):
                continue
            if not is_idle(stack) and (not name.startswith("mpicoll-") or runs_program(stack)):
                found.append(name)
        return found

    def _messages_in_transit(self) -> list[State]:
        """Return the messages that may be in transit although no thread of this rank waits for them.

        The destinations of messages that are being sent in the background are not known.
        """
        kinds: set[tuple[str, str | None, int | None, int | None]] = {
            (way, None, None, tag) for way, tag in self._started_messages()
        }
        now = time.monotonic()
        for raw, end, _ in flight_recorder.list_history():
            group, _, call, _, _ = raw
            if not call.collective and end is not None and now - end < IN_TRANSIT and self._is_own(group):
                sent = messages_of(describe_call(call, group), group.key)
                kinds |= {("send", group.key, one["peer"], one["tag"]) for one in sent if one["way"] == "send"}
        return [dict(zip(("way", "key", "peer", "tag"), kind, strict=True)) for kind in kinds]

    def _is_own(self, group: Group) -> bool:
        """Return True if this rank made the call: ranks may be threads of one process."""
        return not group.members or group.members[group.rank] == self._rank

    def _threads(self) -> list[State]:
        found = []
        for ident, stack in self._stacks.items():
            if ident == threading.get_ident() != self._program:
                continue  # the thread that takes the snapshot
            found.append(
                {
                    "name": self._names.get(ident, "?"),
                    "ident": ident,
                    "program": ident == self._program,
                    "stack": [
                        f"{frame.file}:{frame.line} in {frame.function}" + (f"\n    {line}" if line else "")
                        for frame in stack
                        for line in [source_line(frame)]
                    ],
                }
            )
        return sorted(found, key=lambda one: not one["program"])

    def _past_operations(self) -> list[State]:
        found = []
        for raw, end, error in flight_recorder.list_history():
            entry = Entry._make(raw)
            if not self._is_own(entry.group):
                continue
            found.append(
                {
                    "number": entry.number,
                    "key": entry.group.key,
                    "group": self._name(entry.group),
                    "name": entry.call.name,
                    "call": str(entry.call)[:500],
                    "begin": entry.begin,
                    "seconds": None if end is None else end - entry.begin,
                    "state": "failed" if error else "started" if end is None else "ok",
                    "error": error[:500],
                    "site": _describe_site(entry.site),
                }
            )
        return found


def _trim(state: State) -> None:
    """Reduce `state` to ``LIMIT`` bytes: keep the newest operations and the innermost frames."""
    past, threads = state.get("past", []), state.get("threads", [])
    if len(json.dumps(state)) > LIMIT:
        for one in past:
            one["call"], one["error"] = one["call"][:80], one["error"][:80]
    while len(json.dumps(state)) > LIMIT and (past or threads):
        if past:
            del past[: (len(past) + 1) // 2]
        elif any(len(one["stack"]) > 10 for one in threads):
            for one in threads:
                del one["stack"][10:]
        else:
            del threads[len(threads) // 2 :]


class _Running(NamedTuple):
    """The operation of a queue: its entry, the thread that executes it (None: not known), and its position."""

    entry: EntryTuple
    thread: int | None
    position: Position


def _read_running(queue: Queue) -> _Running | None:
    """Return the operation that runs in a queue. Its parts belong to the same moment."""
    entry = queue.current
    for _ in range(_TRIES):
        if entry is None:
            return None
        thread, position = queue.thread, queue.executing.position(queue.group.members)
        before, entry = entry, queue.current
        if entry is before:
            return _Running(entry, thread, position)
    # The operation changed at each attempt, so operations are short and none of them waits.
    return None if entry is None else _Running(entry, None, Position())


_TRIES = 10


def _describe_site(site: CallSite | None) -> State | None:
    return None if site is None else {"file": site.file, "line": site.line, "function": site.function}
