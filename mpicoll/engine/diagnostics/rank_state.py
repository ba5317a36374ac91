"""Where a rank stands, as data for the others.

How far an operation has come is what its executor publishes (:mod:`mpicoll.engine.diagnostics.position`).
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from mpicoll.engine.diagnostics import flight_recorder
from mpicoll.engine.diagnostics.call_facts import State, describe_call, is_meeting, messages_of, plain, whole_key
from mpicoll.engine.diagnostics.flight_recorder import Entry, Group, Raw, Site, Wait
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.engine.diagnostics.stacks import (
    call_site_in,
    is_idle,
    program_site,
    runs_program,
    source_line,
    stacks,
    thread_names,
)
from mpicoll.transport.base import Tally

LIMIT = 1_000_000
"""Bytes that the state of a rank may take as JSON."""


IN_TRANSIT = 30.0
"""Seconds for which a message may be on its way when its sender is done with it: a slow network takes 3 s for what the
kernels keep."""


class Queue(Protocol):
    """The part of a communicator's queue (:class:`~mpicoll.engine.core.queue.Progress`) that is read here."""

    current: Raw | None
    executing: Executing
    thread: int
    number: int
    group: Group
    queue: deque[Any]
    background: bool

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for their turn, or for what is in the queue."""


def own_state(
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
    """The state of this rank, for JSON. `queues` are those of its communicators, `active` what blocks outside of them
    by thread; `program` is the thread that runs the program, by default the main one; `started` gives the messages that
    may be under way ("send" or "recv", and the tag). With `full` there are the stacks
    of all threads and the last operations too, as many as fit into ``LIMIT`` bytes. `calls` are collectives, as (key of
    the communicator, number), of which it says what it has called as them, if they have ended here; of meetings it says
    how many it has begun, of those in `met` (numbers by key). `retired` are the communicators on which the program
    calls nothing any more, by key, with the number of collectives that it has called there.

    To be called on any thread at any time, also while others are stuck: takes no lock that they may hold, sends
    nothing, raises nothing; what could not be found out is named under "failed".
    """
    state: State = {"rank": rank, "size": size}
    try:
        looker = _Looker(rank, list(queues), dict(active), program, started, state, calls)
        looker.look(full=full)
        state |= looker.positions(met or {}, retired or {})
    except Exception as error:  # noqa: BLE001  what there is must be told
        state.setdefault("failed", []).append(f"{type(error).__name__}: {error}")
    return state


def counts(group: Group, messages: Tally) -> list[list[int | None]]:
    """Numbers of messages by rank of `group`, for JSON: rank of the world, tag and number."""
    members = group.members
    return [[members[peer], tag, number] for (peer, tag), number in messages.items() if 0 <= peer < len(members)]


def absent(
    rank: int,
    how: str,
    words: str = "",
    numbers: Mapping[str, int] | None = None,
    sent: Mapping[str, Sequence[Sequence[int | None]]] | None = None,
    calls: Sequence[Sequence[Any]] = (),
) -> State:
    """The state of a rank that will not give one: it has "left" (it said goodbye, and calls nothing any more) or
    "died", of which `words` say more. `numbers` are the collectives that it had begun on each communicator by key;
    without them no wait for it can be said to never end. `sent` are the messages that it had sent, by key as
    :func:`counts` gives them, and `calls` its :func:`last_calls`."""
    assert how in ("left", "died")
    called = [
        {"key": key, "number": number, "call": {"name": name, "text": name} | ({} if root is None else {"root": root})}
        for key, number, name, root in calls
    ]
    return {"rank": rank, how: words, "numbers": dict(numbers or {}), "sent": dict(sent or {}), "called": called}


def last_calls(rank: int) -> list[list[Any]]:
    """The last collectives of `rank`, which is one of this process: the key of the communicator, number, name and
    root. Few, as each rank that leaves sends them to all others."""
    found = []
    for (group, number, call, _, _), _, _ in reversed(flight_recorder.past.copy()):
        if number and group.members[group.rank] == rank:
            found.append([group.key, number, call.name, plain(call.root)])
            if len(found) == _LAST_CALLS:
                break
    return found


_LAST_CALLS = 8


def unreached(rank: int, relay: int) -> State:
    """The state of a rank that was not asked, since `relay`, which passes messages on, does not answer."""
    return {"rank": rank, "unreached": relay}


class _Looker:
    """One look at this process."""

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
        self._stacks: dict[int, list[Site]] = {}
        self._names = thread_names()
        self._program = program or threading.main_thread().ident or 0
        self._under_way = started
        self._twice: set[str] = set()
        # One look at each: they change meanwhile.
        self._running = [(queue, _running(queue)) for queue in queues]
        self._state = state
        self._wanted = {(key, number) for key, number in calls}

    def look(self, *, full: bool) -> None:
        state = self._state
        try:
            self._stacks = stacks()
        except OSError as error:
            state["failed"] = [f"stacks: {error}"]
        with suppress(Exception):
            names = Counter(queue.group.name for queue in self._queues)
            self._twice = {name for name, times in names.items() if times > 1}
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("process", self._process),
            ("queues", self._of_queues),
            ("pending", self._pending),
            ("program", self._of_program),
            ("others", self._others),
            ("started", self._all_started),
            ("called", self._called),
        ]
        if full:
            parts += [("threads", self._threads), ("past", self._past)]
        for name, find in parts:
            try:
                state[name] = find()
            except Exception as error:  # noqa: BLE001  the rest must be told
                state.setdefault("failed", []).append(f"{name}: {type(error).__name__}: {error}")
        if full:
            _trim(state)

    def positions(self, met: Mapping[str, int], retired: Mapping[str, int]) -> State:
        """What is known of meetings, and of communicators that are used no more."""
        queues = self._state.get("queues", [])
        busy = {one["key"] for one in queues if one["running"] or one["queued"]}
        known = {*retired, *(one["key"] for one in queues)}
        asked = {key for key, _ in self._wanted} | {entry[0].key for entry, _, _ in self._active.values()}
        return {
            "retired": {key: number for key, number in retired.items() if key not in busy},
            "met": {key: met.get(key, 0) for key in asked if is_meeting(key) and whole_key(key) in known},
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
            "versions": versions,
            "time": time.time(),
            "clock": time.monotonic(),
            "thread": self._names.get(self._program, ""),
        }

    def _of_queues(self) -> list[State]:
        return [
            {
                "key": queue.group.key,
                "name": self._name(queue.group),
                "members": list(queue.group.members),
                "number": queue.number if running is None else running.entry[1],
                "running": running is not None,
                "queued": len(queue.queue),
                "background": queue.background,
            }
            | self._traffic(queue.group)
            for queue, running in self._running
        ]

    @staticmethod
    def _traffic(group: Group) -> State:
        """How many messages this rank has sent and received; nothing if others may travel that are not counted."""
        traffic = group.traffic
        if traffic is None or traffic.uncounted:
            return {}
        sent, received = counts(group, traffic.sent), counts(group, traffic.received)
        return {"sent": sent, "received": received, "answered": traffic.answered}

    def _called(self) -> list[State]:
        """What this rank has called as the collectives that were asked for, and that have ended here."""
        if not self._wanted:
            return []
        return [
            {
                "key": group.key,
                "number": number,
                "call": describe_call(call, group),
                "site": _site(site),
            }
            for (group, number, call, _, site), end, _ in flight_recorder.past.copy()
            if end is not None and (group.key, number) in self._wanted and self._mine(group)
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
        """What tells it from others."""
        return f"{group.name} [{whole_key(group.key)}]" if group.name in self._twice else group.name

    def _operation(self, raw: Raw, ident: int | None, position: Position, *, bounded: bool) -> State:
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
            "site": _site(site),
            "thread": "" if ident is None else self._names.get(ident, "?"),
            "program": ident == self._program,
            "where": position.where or native,
            "waits_for": list(position.waits_for),
            "bounded": bounded,
            "polls": position.polls,
        }

    def _of_program(self) -> State:
        """What the thread of the program does: nothing of ours, or in which wait it is."""
        if self._program not in self._names:
            return {"site": None, "waits": "ended"}
        return {"site": _site(program_site(self._stacks.get(self._program, [])))} | self._wait_of_program()

    def _wait_of_program(self) -> State:
        """For what the thread of the program waits without a bound of its own: for a queue, or for a message."""
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

    def _others(self) -> list[str]:
        """The threads that may communicate in the program's name, besides its own: also those of ours that run the
        program's code, as is done when an operation in the background ends."""
        found = []
        for ident in self._stacks.keys() | self._names.keys():
            name, stack = self._names.get(ident, "?"), self._stacks.get(ident, [])
            if ident in (threading.get_ident(), self._program) or name.startswith("mpicoll-rank-"):
                continue
            if not is_idle(stack) and (not name.startswith("mpicoll-") or runs_program(stack)):
                found.append(name)
        return found

    def _all_started(self) -> list[State]:
        """Messages that may be under way though nobody waits here for them. To whom those go that are just being sent
        in the background is not known."""
        kinds: set[tuple[str, str | None, int | None, int | None]] = {
            (way, None, None, tag) for way, tag in self._under_way()
        }
        now = time.monotonic()
        for raw, end, _ in flight_recorder.past.copy():
            group, _, call, _, _ = raw
            if not call.collective and end is not None and now - end < IN_TRANSIT and self._mine(group):
                sent = messages_of(describe_call(call, group), group.key)
                kinds |= {("send", group.key, one["peer"], one["tag"]) for one in sent if one["way"] == "send"}
        return [dict(zip(("way", "key", "peer", "tag"), kind, strict=True)) for kind in kinds]

    def _mine(self, group: Group) -> bool:
        """Whether it was this rank that did it: ranks may be threads of one process."""
        return not group.members or group.members[group.rank] == self._rank

    def _threads(self) -> list[State]:
        found = []
        for ident, stack in self._stacks.items():
            if ident == threading.get_ident() != self._program:
                continue  # it does this
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

    def _past(self) -> list[State]:
        found = []
        for raw, end, error in flight_recorder.past.copy():
            entry = Entry._make(raw)
            if not self._mine(entry.group):
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
                    "site": _site(entry.site),
                }
            )
        return found


def _trim(state: State) -> None:
    """Keep what there is room for: of the operations the newest, and of stacks the innermost frames."""
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
    """The operation of a queue: its entry, the thread that carries it out (None: not known), and its position."""

    entry: Raw
    thread: int | None
    position: Position


def _running(queue: Queue) -> _Running | None:
    """What runs in a queue. The parts are of one moment."""
    entry = queue.current
    for _ in range(_TRIES):
        if entry is None:
            return None
        thread, position = queue.thread, queue.executing.position(queue.group.members)
        before, entry = entry, queue.current
        if entry is before:
            return _Running(entry, thread, position)
    # They are short, and none of them waits.
    return None if entry is None else _Running(entry, None, Position())


_TRIES = 10


def _site(site: Site | None) -> State | None:
    return None if site is None else {"file": site.file, "line": site.line, "function": site.function}
