"""Where every rank of a job stands, in words: who waits for whom, who has not called what, who never will.

The watch thread of each rank takes :func:`own_state`, one rank collects them and makes a text file and a JSON of them.
How far an operation has come is what its executor publishes (:mod:`mpicoll.engine.diagnostics.position`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from mpicoll.engine import record
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
from mpicoll.engine.diagnostics.wording import READ, rank_list
from mpicoll.engine.record import Call, Entry, Group, Raw, Site, Wait
from mpicoll.errors import ArgumentError
from mpicoll.transport.base import Tally

State: TypeAlias = dict[str, Any]
"""What a rank says of itself, for JSON; of one that is gone what :func:`absent` says, of one that could not be asked
what :func:`unreached` says."""

LIMIT = 1_000_000
"""Bytes that the state of a rank may take as JSON."""

IN_TRANSIT = 30.0
"""Seconds for which a message may be on its way when its sender is done with it: a slow network takes 3 s for what the
kernels keep."""


class Queue(Protocol):
    """The queue of a communicator, in so far as it is looked at here: a :class:`~mpicoll.engine.progress.Progress`."""

    current: Raw | None
    executing: Executing
    thread: int
    number: int
    group: Group
    queue: deque[Any]
    background: bool

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for their turn, or for what is in the queue."""


# --- what a rank says of itself


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
    for (group, number, call, _, _), _, _ in reversed(record.past.copy()):
        if number and group.members[group.rank] == rank:
            found.append([group.key, number, call.name, _plain(call.root)])
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
            "met": {key: met.get(key, 0) for key in asked if _is_meeting(key) and _whole(key) in known},
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
                "call": _described(call, group),
                "site": _site(site),
            }
            for (group, number, call, _, site), end, _ in record.past.copy()
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
        return f"{group.name} [{_whole(group.key)}]" if group.name in self._twice else group.name

    def _operation(self, raw: Raw, ident: int | None, position: Position, *, bounded: bool) -> State:
        entry = Entry._make(raw)
        site = entry.site or (None if ident is None else call_site_in(self._stacks.get(ident, [])))
        native = "the MPI library" if entry.call.algorithm == "native" else ""
        return {
            "key": entry.group.key,
            "group": self._name(entry.group),
            "members": list(entry.group.members),
            "number": entry.number,
            "call": _described(entry.call, entry.group),
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
        for raw, end, _ in record.past.copy():
            group, _, call, _, _ = raw
            if not call.collective and end is not None and now - end < IN_TRANSIT and self._mine(group):
                sent = _messages(_described(call, group), group.key)
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
        for raw, end, error in record.past.copy():
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


def _described(call: Call, group: Group) -> State:
    """`call` for JSON, with the peers of messages as ranks of the world too."""
    found = {name: _plain(getattr(call, name)) for name in Call.__slots__ if name != "parts"}
    # A shape without dimensions says something, and so does it that no messages are taken; no counts don't.
    kept = ("shape", "takes")
    found = {
        name: value for name, value in found.items() if value is not None and (value not in ("", []) or name in kept)
    }
    found["text"] = str(call)
    if not call.collective and call.peer is not None and 0 <= call.peer < len(group.members):
        found["world"] = group.members[call.peer]
    if call.parts:
        found["parts"] = [_described(part, group) for part in call.parts]
    return found


def _plain(value: Any) -> Any:
    """`value` for JSON: callers pass numpy's numbers, too."""
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return int(value) if hasattr(value, "__index__") else str(value)


def _messages(call: State, key: str) -> list[State]:
    """The messages that a call sends or receives: to or from whom (None: any rank), with which tag (None: any). None
    if some of them are not known."""
    if call.get("collective"):
        return []
    parts = call.get("parts", [call])
    found = []
    for part in parts:
        name = part["name"]
        way = "send" if name in _SENDS else "recv" if name in _RECEIVES else None
        if way is None:
            return []
        found.append({"way": way, "key": key, "peer": part.get("world"), "tag": part.get("tag")})
    return found


_SENDS = ("send", "isend", "ssend", "issend")
_RECEIVES = ("recv", "irecv", "probe")


# --- what the states say together


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Ranks that wait for each other, none of which can go on.

    `waits` are the operations in which they wait, as (rank, key of the communicator, number, begin): the same at two
    looks if and only if these are. `keys` are the communicators of these, `cycle` ranks that wait each for the next,
    and the last for the first (empty where all wait for one that has left), `words` a sentence for each operation,
    those of the cycle first. `mismatches` are sentences about collectives that ranks have called differently, whose
    operations have no other words; `left` says that all wait for ranks that have left, directly or not.
    """

    ranks: tuple[int, ...]
    cycle: tuple[int, ...]
    keys: tuple[str, ...]
    waits: tuple[tuple[int, str, int, float], ...]
    words: tuple[str, ...]
    mismatches: tuple[str, ...] = ()
    left: bool = False

    def __str__(self) -> str:
        """All in one sentence."""
        words = ", ".join(_some(self.words))
        if self.mismatches:
            return "; ".join([*self.mismatches, *([words] if words else [])])
        if self.left:
            return words
        who = rank_list(self.ranks)
        head = f"{who} wait for each other" if len(self.ranks) > 1 and self.cycle else f"{who} can't go on"
        return f"deadlock: {head}: {words}"


@dataclass(slots=True)
class Analysis:
    """What happened, in `words`: sentences, the first of which is the point. `waiting` are the operations that ranks
    wait in, each with the ranks that have begun it and those that have not; `missing` are all ranks that are waited
    for, `silent` those that have not answered, `unreached` those that could not be asked."""

    words: list[str] = field(default_factory=list)
    waiting: list[State] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    deadlock: Deadlock | None = None


def analyse(states: Mapping[int, State | None], size: int) -> Analysis:
    """What the states of the ranks of a job of `size` say together; None is that of a rank that did not answer."""
    known = {rank: state for rank, state in states.items() if state is not None}
    found = Analysis(
        silent=[rank for rank in range(size) if rank not in known],
        unreached=[rank for rank, state in sorted(known.items()) if "unreached" in state],
    )
    collectives, messages = _waits(known)
    for wait in collectives:
        found.mismatches += _mismatch(wait, known)
    found.deadlock = _Deadlocks(known, _SURE).find()
    roots: list[str] = []
    others: list[str] = []
    for wait in [*collectives, *messages]:
        (roots if _is_root(wait, known) else others).append(_sentence(wait, known))
        found.waiting.append({name: wait[name] for name in ("key", "group", "number", "call", "begun", "missing")})
        found.missing = sorted({*found.missing, *wait["missing"]} - {*found.unreached})
    others += [_stand(wait) for wait in collectives if wait["missing"] and any(_where_of(wait))]
    found.words = [*found.mismatches]
    if found.deadlock is not None:
        found.words = [one for one in found.words if one not in found.deadlock.mismatches]
        found.words.insert(0, str(found.deadlock))
    found.words += _some(roots + others, "sentences")
    found.words += [
        f"rank {rank} {_whereabouts(state, '')}" for rank, state in sorted(known.items()) if "died" in state
    ]
    if found.unreached:
        relay = known[found.unreached[0]]["unreached"]
        found.words.insert(
            0,
            f"rank {relay} does not answer (stopped or frozen?); it passes on what ranks tell each other, so nothing is"
            f" known of {rank_list(found.unreached)}",
        )
    elif found.silent and any("died" in state for state in known.values()):  # there was little time to answer
        found.words.append(f"{rank_list(found.silent)} {_have(found.silent, 'has', 'have')} not answered")
    elif found.silent:
        verb = _have(found.silent, "does", "do")
        found.words.append(f"{rank_list(found.silent)} {verb} not answer (stopped or frozen?)")
    if not found.words:
        found.words.append("no rank waits in an operation")
    return found


def _some(words: Sequence[str], what: str = "") -> list[str]:
    """No more of them than people read; all is in what is said of each rank."""
    more = len(words) - READ
    return list(words) if more < 2 else [*words[:READ], f"and {more} more{what and f' {what}'}"]


def _have(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _waits(known: Mapping[int, State]) -> tuple[list[State], list[State]]:
    """The operations that ranks wait in, those that have waited longest first: collectives, and others."""
    collectives: dict[tuple[str, int], State] = {}
    messages: list[State] = []
    for rank, state in sorted(known.items()):
        for one in state.get("pending", []):
            if not one["number"]:
                missing = [peer["peer"] for peer in _messages(one["call"], one["key"]) if peer["peer"] is not None]
                messages.append(_wait(one) | {"by": {rank: one}, "begun": [rank], "missing": missing})
                continue
            wait = collectives.setdefault((one["key"], one["number"]), _wait(one) | {"by": {}})
            wait["by"][rank] = one
    for (key, number), wait in collectives.items():
        numbers = {rank: _number(known.get(rank), key) for rank in wait["members"]}
        wait["missing"] = [
            rank
            for rank, at in numbers.items()
            if (at is None or at < number) and "unreached" not in known.get(rank, ())
        ]
        wait["begun"] = [rank for rank, at in numbers.items() if at is not None and at >= number]
    return sorted(collectives.values(), key=_waited), sorted(messages, key=_waited)


def _waited(wait: State) -> float:
    return -max(float(one["seconds"]) for one in wait["by"].values())


def _wait(one: State) -> State:
    return {name: one[name] for name in ("key", "group", "members", "number")} | {"call": _text(one["call"])}


def _queue(state: State | None, key: str) -> State | None:
    return next((one for one in (state or {}).get("queues", []) if one["key"] == key), None)


def _number(state: State | None, key: str) -> int | None:
    """How many collectives of a communicator, or meetings of a sequence, a rank has begun; None if it is not known."""
    if state is not None and "numbers" in state:
        none = 0 if _is_meeting(key) and _whole(key) in state["numbers"] else None
        number: int | None = state["numbers"].get(key, none)
        return number
    if _is_meeting(key):
        return None if state is None else state.get("met", {}).get(key)
    queue = _queue(state, key)
    return (state or {}).get("retired", {}).get(key) if queue is None else int(queue["number"])


def _is_meeting(key: str) -> bool:
    """Whether it is the key of a sequence of meetings, and not that of a communicator."""
    return " " in key


def _whole(key: str) -> str:
    """The key of the communicator, where `key` may be that of meetings of some of its ranks."""
    return key.partition(" ")[0]


def _mismatch(wait: State, known: Mapping[int, State]) -> list[str]:
    """Say that ranks have called something else as the same collective, whether they still run it or not."""
    ended = {
        rank: one
        for rank in wait["begun"]
        if rank not in wait["by"]
        for one in known[rank].get("called", [])
        if (one["key"], one["number"]) == (wait["key"], wait["number"])
    }
    kinds = _kinds({rank: one["call"] for rank, one in [*wait["by"].items(), *ended.items()]})
    each = []
    for alike in kinds:
        running = [rank for rank in alike if rank in wait["by"]]
        if running:
            each.append(f"{rank_list(running)} {_have(running, 'calls', 'call')} {_call_at(wait['by'][running[0]])}")
        else:
            one = ended[alike[0]]
            has = _have(alike, "has", "have")
            each.append(f"{rank_list(alike)} {has} called {_text(one['call'])}{_at(one.get('site'))}")
    names = {_kind(one["call"]["name"]) for one in wait["by"].values()}
    each += [
        f"rank {rank} has called {one['call']}{_at(one['site'])}"
        for rank in wait["begun"]
        if rank not in wait["by"] and rank not in ended
        for one in known[rank].get("past", [])
        if (one["key"], one["number"]) == (wait["key"], wait["number"]) and _kind(one["name"]) not in names
    ]
    if len(each) < 2:
        return []
    return [
        f"collective number {wait['number']} on {wait['group']} is not the same on all ranks: {', '.join(_some(each))}"
    ]


def _kinds(calls: Mapping[int, State]) -> list[list[int]]:
    """The ranks, together with those whose calls may be the same collective."""
    kinds: list[list[int]] = []
    for rank, call in calls.items():
        for alike in kinds:
            if not _conflict(calls[alike[0]], call):
                alike.append(rank)
                break
        else:
            kinds.append([rank])
    return kinds


def _conflict(one: State, other: State) -> bool:
    """Whether two calls can't be the same collective. Only what both say counts: some keep no dtype."""
    if _kind(one["name"]) != _kind(other["name"]):
        return True
    fields = [(call.get("dtype"), call.get("op"), call.get("root"), call.get("algorithm")) for call in (one, other)]
    if any(a is not None and b is not None and a != b for a, b in zip(*fields, strict=True)):
        return True
    if "arrivals" not in one and "arrivals" not in other and _kind(one["name"]) != "alltoall":
        if "counts" in one and "counts" in other:
            return list(one["counts"]) != list(other["counts"])
        shapes = [call["shape"] for call in (one, other) if "shape" in call and "counts" not in call]
        if len(shapes) == 2 and math.prod(shapes[0]) != math.prod(shapes[1]):
            return True
    parts = [call.get("parts", []) for call in (one, other)]
    return len(parts[0]) != len(parts[1]) or any(map(_conflict, *parts))


_KINDS = (
    ("allreduce", "allreduce"),
    ("allgather", "allgather"),
    ("alltoall", "alltoall"),
    ("barrier", "barrier"),
    ("bcast", "bcast"),
    ("broadcast", "bcast"),
    ("exscan", "exscan"),
    ("gather", "gather"),
    ("reducescatter", "reduce_scatter"),
    ("reduce", "reduce"),
    ("scan", "scan"),
    ("scatter", "scatter"),
    ("split", "split"),
)


def _kind(name: str) -> str:
    """Which collective it is that is called `name` here or by torch."""
    short = name.replace("_", "")
    return next((kind for begin, kind in _KINDS if short.startswith(begin)), name)


def _sentence(wait: State, known: Mapping[int, State]) -> str:
    """Who waits for whom in an operation."""
    missing, number = wait["missing"], wait["number"]
    if number:
        what = f"{wait['call']} number {number} on {wait['group']}"
        if not missing:
            late = max(one["seconds"] for one in wait["by"].values())
            return f"{what} was begun by all its ranks, and has not ended after {late:.3g} s{_where_text(wait)}"
        what += f" waits for {rank_list(missing)}"
    else:
        (rank, one), *_ = wait["by"].items()
        what = f"rank {rank} has been waiting for {one['seconds']:.3g} s in {_call_at(one)}"
        if not missing:
            return what
    doing: dict[str, list[int]] = {}
    for rank in missing:
        doing.setdefault(_whereabouts(known.get(rank), wait["key"] if number else ""), []).append(rank)
    if len(doing) > 1 or not number:
        each = [f"{rank_list(ranks)} {_plural(text, ranks)}" for text, ranks in doing.items()]
        return f"{what}: {', '.join(_some(each))}"
    (text,) = doing
    state = known.get(missing[0])
    if state is None or state.keys() & {"left", "died", "unreached"}:
        return f"{what}, which {_plural(text, missing)}"
    called = f"which {_have(missing, 'has', 'have')} not called it: {_have(missing, 'it', 'they')}"
    return f"{what}, {called} {_plural(text, missing)}"


def _is_root(wait: State, known: Mapping[int, State]) -> bool:
    """Whether others may wait because of this one: some that are missing don't wait themselves, or none is missing."""
    if not wait["missing"]:
        return bool(wait["number"])
    return any(not known.get(rank, {}).get("pending") for rank in wait["missing"])


def _where_of(wait: State) -> dict[str, list[int]]:
    """The ranks by how far they have come."""
    found: dict[str, list[int]] = {}
    for rank, one in wait["by"].items():
        if one.get("where"):
            found.setdefault(one["where"], []).append(rank)
    return found


def _where_text(wait: State) -> str:
    stand = [f"{rank_list(ranks)} {_have(ranks, 'is', 'are')} in {where}" for where, ranks in _where_of(wait).items()]
    return f": {'; '.join(_some(stand))}" if stand else ""


def _stand(wait: State) -> str:
    return f"{wait['call']} number {wait['number']} on {wait['group']}{_where_text(wait)}"


def _plural(what: str, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return what
    for one, many in (
        ("is ", "are "),
        ("has ", "have "),
        ("runs its ", "run their "),
        ("waits ", "wait "),
    ):
        if what.startswith(one):
            return many + what[len(one) :]
    return what


def _whereabouts(state: State | None, key: str) -> str:
    """What a rank does that has not come: a verb and what follows."""
    if state is None:
        return "has not answered"
    if "left" in state:
        return "has left the job without calling it" if _whole(key) in state["numbers"] else "has left the job"
    if "died" in state:
        return f"has died{f' ({words})' if (words := state['died']) else ''}"
    if "unreached" in state:
        return f"could not be asked, since rank {state['unreached']} does not answer"
    pending = state.get("pending", [])
    own = next((one for one in pending if one["key"] == key and one["number"]), None)
    if own is not None:
        return f"is still in number {own['number']}, {_call_at(own)}"
    program = state.get("program", {})
    now = next((one for one in pending if one["program"]), None)
    if now is not None:
        return f"is in {_call_at(now)}"
    if program.get("waits") == "queue":
        behind = next((one for one in pending if one["key"] == program["key"] and one["number"]), None)
        after = f", behind {_text(behind['call'])}" if behind is not None else ""
        return f"waits for what it has started{after}{_at(program.get('site'))}"
    return f"runs its own program{_at(program.get('site'))}"


def _text(call: State) -> str:
    """The call without its algorithm."""
    text: str = call["text"]
    return text.removesuffix(f" by {call.get('algorithm')}")


def _named(one: State) -> str:
    """A call with its number and its communicator."""
    number = f" number {one['number']}" if one["number"] else ""
    return f"{_text(one['call'])}{number} on {one['group']}"


def _call_at(one: State) -> str:
    """A call with where it was called; on the world unless it says otherwise."""
    on = "" if one["group"] == "world" else f" on {one['group']}"
    return f"{_text(one['call'])}{on}{_at(one.get('site'))}"


def _at(site: State | None) -> str:
    return "" if site is None else f" at {Path(site['file']).name}:{site['line']} in {site['function']}"


# --- deadlocks


_ALL_NEED_ALL = ("allreduce", "allgather", "alltoall", "reduce_scatter", "barrier", "split")
_FROM_ROOT, _TO_ROOT = ("bcast", "scatter"), ("reduce", "gather")

_SURE = 2.0
"""Seconds for which ranks must have waited if there is only one look: longer than it takes to look at all ranks."""

_Agent: TypeAlias = tuple[str, int, str]
"""What waits for one thing at a time: ("queue", rank, key), or ("program", rank, "")."""


def deadlock(states: Mapping[int, State], size: int) -> Deadlock | None:
    """Ranks that can't go on, whatever happens, as each waits for others that can't go on either; None if there are
    none, or if that is not certain. Call it when the same operations were pending at two looks 2 s or more apart.

    A collective is taken to wait for no more ranks than the data that it moves makes it, and for those that its
    algorithm is just waiting for; a message may be under way if its other side has been started. Ranks without a state
    may do anything, and so may a rank with threads of its own beside that of the program.
    """
    return _Deadlocks(states, 0.0).find()


def open_questions(states: Mapping[int, State]) -> list[tuple[str, int]]:
    """Collectives, by key of the communicator and number, that have ended on ranks while others wait in them, and
    meetings. What they were there, and how many of them there were, is a question for :func:`own_state`."""
    collectives, _ = _waits(states)
    return [
        (wait["key"], wait["number"])
        for wait in collectives
        if any(
            rank not in wait["by"] and "queues" in states.get(rank, {})
            for rank in (wait["members"] if _is_meeting(wait["key"]) else wait["begun"])
        )
    ]


class _Deadlocks:
    """`least` are the seconds that an operation must have been pending to count."""

    def __init__(self, states: Mapping[int, State], least: float) -> None:
        # One that was not asked may do anything, as one that has not answered.
        self._states = {rank: state for rank, state in states.items() if "unreached" not in state}
        self._least = least
        self._absent: dict[tuple[str, int], list[int]] = {}
        self._mismatched: dict[tuple[str, int], str] = {}
        waits, _ = _waits(states)
        for wait in waits:
            for words in _mismatch(wait, states):
                self._mismatched[wait["key"], wait["number"]] = words
        self._queues = {
            (rank, queue["key"]): queue for rank, state in self._states.items() for queue in state.get("queues", [])
        }

    def find(self) -> Deadlock | None:
        released: dict[_Agent, _Wait] = {}
        for rank, state in self._states.items():
            for one in state.get("pending", []):
                if one["number"] and one["seconds"] >= self._least:
                    released["queue", rank, one["key"]] = self._collective(rank, one)
                elif not one["number"] and not one["program"]:
                    wait = self._message(rank, one)
                    if wait is not None:
                        released["thread", rank, one["thread"]] = wait
            wait = self._program(rank, state)
            if wait is not None:
                released["program", rank, ""] = wait
        stuck = set(released)
        while True:
            free = {agent for agent in stuck if released[agent].may_go_on(stuck)}
            if not free:
                break
            stuck -= free
        return self._told({agent: released[agent] for agent in sorted(stuck)}, stuck) if stuck else None

    def _collective(self, rank: int, one: State) -> _Wait:
        members, number, key = one["members"], one["number"], one["key"]
        if (key, number) in self._mismatched:
            return _Wait(rank, one, lambda stuck: False, lambda stuck: [])
        absent = self._absent.get((key, number))
        if absent is None:
            absent = [peer for peer in members if not self._has_begun(peer, key, number)]
            self._absent[key, number] = absent
        call = one["call"]
        if _is_meeting(key):
            needed = {peer for peer in members if "died" not in self._states.get(peer, {})}
        else:
            needed = _needed(call, members, members.index(rank)) | set(one.get("waits_for", []))
        needs = [peer for peer in absent if peer in needed]
        # Who only gives may be done without the others, but not while nobody at all is there to take it.
        gives = _kind(call["name"]) in (*_FROM_ROOT, *_TO_ROOT, "scan", "exscan") and not _is_empty(call)
        some = absent if gives and not needs and len(absent) == len(members) - 1 else []

        def may_go_on(stuck: set[_Agent]) -> bool:
            if needs:
                return all(self._comes(peer, key, stuck) for peer in needs)
            return not some or any(self._comes(peer, key, stuck) for peer in some)

        return _Wait(
            rank, one, may_go_on, lambda stuck: [peer for peer in needs or some if not self._comes(peer, key, stuck)]
        )

    def _has_begun(self, rank: int, key: str, number: int) -> bool:
        queue = self._queues.get((rank, key))
        begun = _number(self._states.get(rank), key) or 0 if queue is None else queue["number"]
        return bool(begun >= number)

    def _comes(self, rank: int, key: str, stuck: set[_Agent]) -> bool:
        """Whether `rank` may still begin another collective of a communicator, or another meeting of a sequence."""
        state, whole = self._states.get(rank, {}), _whole(key)
        if "left" in state:
            return whole not in state["numbers"]  # of one that was dropped long ago nothing is known
        if _is_meeting(key) and _number(state, key) is None:
            return True
        if whole in state.get("retired", ()):
            return False
        if (rank, whole) not in self._queues:
            return True
        return ("queue", rank, key) not in stuck and self._goes_on(rank, stuck)

    def _goes_on(self, rank: int, stuck: set[_Agent]) -> bool:
        """Whether `rank` may still do something."""
        state = self._states.get(rank, {})
        if "left" in state:
            return False
        if ("program", rank, "") not in stuck or state.get("others", True):
            return True
        # What is in the background may be just that, and what is done when it ends may start others.
        return any(
            (one["running"] or (one["queued"] and one["background"])) and ("queue", rank, one["key"]) not in stuck
            for one in state.get("queues", [])
        )

    def _program(self, rank: int, state: State) -> _Wait | None:
        """What the program of `rank` waits for, if that has no bound."""
        program = state.get("program", {})
        if program.get("waits") == "queue":
            agent = ("queue", rank, program["key"])
            return _Wait(rank, None, lambda stuck: agent not in stuck, lambda stuck: [])
        if program.get("waits") != "message":
            return None
        one = next((one for one in state.get("pending", []) if one["program"] and not one["number"]), None)
        return None if one is None else self._message(rank, one)

    def _message(self, rank: int, one: State) -> _Wait | None:
        """A wait for messages, if it is known for which, and if it has no bound."""
        if one.get("bounded") or one["seconds"] < self._least:
            return None
        ways = _messages(one["call"], one["key"])
        if not ways:
            return None
        others = [peer for peer in one["members"] if peer != rank]
        takes = one["call"].get("takes")

        def peers(way: State) -> list[int]:
            return others if way["peer"] is None else [way["peer"]]

        def may_come(way: State, stuck: set[_Agent]) -> bool:
            if takes is not None:
                return any(self._may_answer(rank, way["key"], peer, stuck) for peer in peers(way))
            return any(
                self._under_way(rank, way, peer, one["seconds"]) or self._goes_on(peer, stuck) for peer in peers(way)
            )

        def may(stuck: set[_Agent]) -> bool:
            # Of a sendrecv either way may be the one that is still to come.
            return (any if takes is None else all)(may_come(way, stuck) for way in ways)

        def on(stuck: set[_Agent]) -> list[int]:
            return [peer for way in ways if takes is None or not may_come(way, stuck) for peer in peers(way)]

        return _Wait(rank, one, may, on)

    def _count(self, rank: int, key: str, what: str, peer: int, tag: int | None) -> int | None:
        """How many messages with `tag` (None: any) `rank` has "sent" to or "received" from `peer` on a communicator;
        None if that is not known."""
        state = self._states.get(rank, {})
        queue = self._queues.get((rank, key))
        tally = (state.get("sent", {}).get(key) if what == "sent" else None) if queue is None else queue.get(what)
        if tally is None:
            return None
        of_peer = [(other, number) for to, other, number in tally if to == peer]
        if tag is not None and any(other is None for other, _ in of_peer):
            return None
        found: int = sum(number for other, number in of_peer if tag in (None, other))
        return found

    def _all_received(self, source: int, dest: int, key: str, tag: int | None = None) -> bool | None:
        """Whether no message with `tag` (None: any) from `source` to `dest` is under way; None if that is not known."""
        sent = self._count(source, key, "sent", dest, tag)
        received = self._count(dest, key, "received", source, tag)
        return None if sent is None or received is None else sent == received

    def _may_answer(self, rank: int, key: str, peer: int, stuck: set[_Agent]) -> bool:
        """Whether a message from `peer` may still come to a wait that lasts until it does: one that is under way, one
        that `peer` sends when it goes on, or one by which it answers a message that it takes while it waits."""
        if not self._all_received(peer, rank, key) or self._goes_on(peer, stuck):
            return True
        state = self._states[peer]
        waits = [one for one in state.get("pending", []) if one["key"] == key and "takes" in one["call"]]
        takes = any(rank in (one["members"][stage] for stage in one["call"]["takes"]) for one in waits)
        takes = takes or self._queues.get((peer, key), {}).get("answered", False)
        return takes and not self._all_received(rank, peer, key)

    def _under_way(self, rank: int, way: State, peer: int, waited: float) -> bool:
        """Whether the other side of a message may have been started, so that the message may be on its way."""
        state = self._states.get(peer)
        if state is None:
            return True
        if way["way"] == "recv":
            received = self._all_received(peer, rank, way["key"], way["tag"])
            if received is None:  # the tags were too many, perhaps
                received = self._all_received(peer, rank, way["key"])
            if received is not None:
                return not received
        started = list(state.get("started", []))
        for one in state.get("pending", []):
            started += _messages(one["call"], one["key"])
        if "left" in state and waited < IN_TRANSIT:
            return True
        return any(
            other["key"] in (None, way["key"])
            and other["way"] != way["way"]
            and other["peer"] in (None, rank)
            and (other["tag"] is None or way["tag"] is None or other["tag"] == way["tag"])
            for other in started
        )

    def _told(self, waits: dict[_Agent, _Wait], stuck: set[_Agent]) -> Deadlock:
        """In words."""
        edges: dict[int, list[int]] = {}
        same: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        found = []
        for wait in waits.values():
            one = wait.one
            if one is None:
                continue
            on = tuple(dict.fromkeys(wait.on(stuck)))
            edges.setdefault(wait.rank, []).extend(on)
            found.append((wait.rank, one["key"], one["number"], one["begin"]))
            if (one["key"], one["number"]) not in self._mismatched:
                same.setdefault((f"{_named(one)}{_at(one.get('site'))}", on), []).append(wait.rank)
        cycle = _cycle(edges)
        mismatched = {(key, number) for _, key, number, _ in found} & self._mismatched.keys()
        return Deadlock(
            ranks=tuple(sorted(edges)),
            cycle=cycle,
            keys=tuple(sorted({key for _, key, _, _ in found})),
            waits=tuple(sorted(found)),
            words=tuple(
                f"{rank_list(ranks)} {_have(ranks, 'waits', 'wait')} in {what} for {rank_list(on)}{self._gone(on)}"
                for (what, on), ranks in sorted(same.items(), key=lambda one: (not set(one[1]) & set(cycle), one[1]))
            ),
            mismatches=tuple(self._mismatched[one] for one in sorted(mismatched)),
            left=not mismatched and not cycle,
        )

    def _gone(self, ranks: Sequence[int]) -> str:
        """What is said of ranks that will never come since they have left."""
        left = [rank for rank in ranks if "left" in self._states.get(rank, {})]
        if not left:
            return ""
        who = "which" if len(left) == len(ranks) else f"of which {rank_list(left)}"
        return f", {who} {_have(left, 'has', 'have')} left the program"


@dataclass(slots=True)
class _Wait:
    """An agent that waits: `one` is the operation, `may_go_on` and `on` (for whom) depend on what else is stuck."""

    rank: int
    one: State | None
    may_go_on: Callable[[set[_Agent]], bool]
    on: Callable[[set[_Agent]], list[int]]


def _needed(call: State, members: Sequence[int], me: int) -> set[int]:
    """The ranks of the world without which a collective can't end on the `me`-th of `members`, whatever algorithm
    carries it out: those whose data it needs."""
    if call.get("parts"):
        return {rank for part in call["parts"] for rank in _needed(part, members, me)}
    name, counts, root = _kind(call["name"]), call.get("counts", []), call.get("root")
    if _is_empty(call):
        return set()
    if name in ("scan", "exscan"):
        return set(members[:me])
    if name in _FROM_ROOT:
        empty = name == "scatter" and counts and not counts[me]
        return set() if empty or root is None else {members[root]}
    if name in _TO_ROOT and root != me:
        return set()
    if name not in (*_ALL_NEED_ALL, *_TO_ROOT):
        return set()
    if name in ("allgather", "gather", "alltoall"):
        blocks = call.get("arrivals", []) if name == "alltoall" else counts
        return {rank for rank, count in zip(members, blocks, strict=True) if count} if blocks else set(members)
    if name == "reduce_scatter" and counts and not counts[me]:
        return set()
    return set(members)


def _is_empty(call: State) -> bool:
    """Whether nothing is moved, and nobody need wait."""
    if _kind(call["name"]) in ("barrier", "split"):
        return False
    shape = call.get("shape")
    uneven = "counts" in call or "arrivals" in call
    return bool(shape is not None and 0 in (shape[1:] if uneven else shape))


def _cycle(edges: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Ranks that wait each for the next, and the last for the first; empty if there are none, as when all wait for one
    that has left."""
    left = dict(edges)
    while idle := [rank for rank, peers in left.items() if not any(peer in left for peer in peers)]:
        for rank in idle:
            del left[rank]
    if not left:
        return ()
    path = [min(left)]
    while (following := next(peer for peer in left[path[-1]] if peer in left)) not in path:
        path.append(following)
    found = path[path.index(following) :]
    first = found.index(min(found))
    return (*found[first:], *found[:first])


# --- files


def write(
    folder: Path, job: str, why: str, states: Mapping[int, State | None], analysis: Analysis
) -> tuple[Path, Path]:
    """Write the report to `folder`, which is made if need be: as text, and as JSON for :func:`words_of`. A later report
    of the same `job` gets a number; none is ever overwritten. Both appear as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "mpicoll-report-" + (re.sub(r"[^\w.-]+", "_", job) or "job")
    content = {
        "format": _FORMAT,
        "job": job,
        "why": why,
        "time": time.time(),
        "size": 1 + max(states, default=-1),
        "states": {str(rank): state for rank, state in sorted(states.items())},
        "analysis": asdict(analysis),
    }
    text, data = text_of(why, states, analysis).encode(), json.dumps(content).encode()
    for number in itertools.count(1):
        stem = folder / (name if number == 1 else f"{name}-{number}")
        paths = stem.with_name(f"{stem.name}.txt"), stem.with_name(f"{stem.name}.json")
        if not paths[0].exists() and _new(paths[1], data):
            _new(paths[0], text)
            return paths
    raise AssertionError


_FORMAT = "mpicoll report 1"


def _new(path: Path, content: bytes) -> bool:
    """Make a file of `content`; whether there was none of that name before."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        temporary.chmod(0o644)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links; then the name is taken first
            path.touch(exist_ok=False)
            temporary.replace(path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def text_of(why: str, states: Mapping[int, State | None], analysis: Analysis) -> str:
    """The report for people: what happened, then each rank."""
    lines = [*analysis.words, "", f"Reason: {why}"]
    lines.append(f"Written {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
    for rank, state in sorted(states.items()):
        lines += ["", *_rank_lines(rank, state)]
        for thread in (state or {}).get("threads", []):
            lines += ["", f"  Thread {thread['name']} (most recent call first):"]
            lines += [f"    {line}" for one in thread["stack"] for line in one.split("\n")]
        past = (state or {}).get("past", [])
        if past:
            lines += ["", f"  Last {len(past)} operations, the last one first:"]
            lines += [f"    {_past_line(one)}" for one in reversed(past)]
    return "\n".join(lines) + "\n"


def _rank_lines(rank: int, state: State | None) -> list[str]:
    """A rank in a few lines."""
    if state is None:
        return [f"Rank {rank}: no answer"]
    if state.keys() & {"left", "died", "unreached"}:
        return [f"Rank {rank}: {_whereabouts(state, '')}"]
    process = state.get("process", {})
    versions = ", ".join(f"{name} {version}" for name, version in process.get("versions", {}).items())
    lines = [f"Rank {rank}: pid {process.get('pid')} on {process.get('host')} ({versions})"]
    for one in state.get("pending", []):
        number = f" number {one['number']}" if one["number"] else ""
        where = one.get("where", "")
        lines.append(
            f"  in {one['call']['text']}{number} on {one['group']} for {one['seconds']:.3g} s{_at(one['site'])}"
            f" [{one['thread']}]{f'; {where}' if where else ''}"
        )
    if not any(one["program"] for one in state.get("pending", [])):
        lines.append(f"  {_whereabouts(state | {'pending': []}, '')}")
    lines += [
        f"  {one['name']}: {one['number']} collectives begun{', one runs' if one['running'] else ''}"
        + (f", {one['queued']} queued" if one["queued"] else "")
        for one in state.get("queues", [])
        if one["number"] or one["queued"]
    ]
    lines += [f"  could not be found out: {failure}" for failure in state.get("failed", [])]
    return lines


def _past_line(one: State) -> str:
    number = f" number {one['number']}" if one["number"] else ""
    took = "" if one["seconds"] is None else f" in {one['seconds'] * 1e3:.3g} ms"
    error = f": {one['error']}" if one["error"] else ""
    return f"{one['call']}{number} on {one['group']}: {one['state']}{took}{_at(one['site'])}{error}"


def words_of(path: Path) -> str:
    """What happened, from the JSON of a report. Raises ArgumentError if it is none."""
    try:
        content = json.loads(Path(path).read_bytes())
        known = content["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is no report of mpicoll: {type(error).__name__}: {error}") from error
    if not known:
        raise ArgumentError(f"{path} is no report that this version can read: {content['format']!r}")
    states = {int(rank): state for rank, state in content["states"].items()}
    analysis = analyse(states, content["size"])
    when = f"{datetime.fromtimestamp(content['time'], timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    lines = [*analysis.words, "", f"Job {content['job']}, {when}: {content['why']}", ""]
    for rank, state in sorted(states.items()):
        lines += _rank_lines(rank, state)
    return "\n".join(lines) + "\n"
