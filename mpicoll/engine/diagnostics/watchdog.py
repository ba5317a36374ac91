"""The watchdog thread of a rank, which bounds waits, detects failed ranks and ends the job.

A blocking MPI call can't be left, and does not report which ranks it waits for. So each rank runs this thread, which
communicates with the watchdogs of the other ranks beside MPI (:mod:`mpicoll.transport.control.network`). The lowest
living rank is the *speaker*: it collects the states of all ranks, writes the report, and prints the reason to stderr
once for the whole job.
"""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import WeakSet

from mpicoll.config import config
from mpicoll.engine.diagnostics import report_file, stacks
from mpicoll.engine.diagnostics.analysis import analyse
from mpicoll.engine.diagnostics.deadlock import Deadlock, find_deadlock, open_questions
from mpicoll.engine.diagnostics.flight_recorder import Call, Entry, Group, Raw, Wait
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.process_exit import end_launcher, last_acts, leave_signals_alone, left_to_the_watch, say
from mpicoll.engine.diagnostics.rank_state import absent, counts, last_calls, own_state, unreached
from mpicoll.engine.diagnostics.wording import rank_list
from mpicoll.errors import CommunicationError, MismatchError, RankFailed
from mpicoll.transport.control.network import ControlNetwork, Message, PeerExit
from mpicoll.transport.control.process_status import Process, signal_name

_log = logging.getLogger("mpicoll")

_AFTER_INTERRUPT = 2.0
"""Seconds that an interrupted call has to return to Python."""

_TERM_TOGETHER = 0.1
"""Seconds in which a launcher's SIGTERM reaches all ranks that it ends."""

_ANSWER = 2.0
"""Seconds in which the watchdogs of the other ranks answer."""

_ANSWER_AT_DEATH = 0.15
"""Seconds in which they answer after a rank has died: the launcher leaves the others a quarter of a second."""

_SETTLED = 0.4
"""Fraction of MPICOLL_STUCK_AFTER between two looks at all ranks: a wait found stuck by both looks is stuck."""

_RARELY = 60.0
"""Maximum seconds between two requests for a look because of one wait. The interval doubles with each request."""

_LEFT = 0.2
"""Seconds that a rank waits before it compares its waits with the final states of ranks that have left."""

_PRIVATE = 2.0
"""Seconds that a call has to raise Timeout by itself, where it can."""

_GRACE = 1.0
"""Seconds that a rank has to raise Timeout after it has the report, and the speaker to end the job after a death."""

_RAISES = 5.0
"""Seconds that an operation that can never complete has to raise, if it polls, before the job is ended."""

_BEHIND = 3.0
"""Seconds that the other ranks give the speaker before they end the job themselves."""

_LAUNCHER = 3.0
"""Seconds in which the launcher has ended a job on several hosts, if all hosts answer."""

_ALIKE = 0.25
"""Seconds in which ranks that end with the same error receive each other's reports."""

_FLUSH = 0.2
"""Seconds for the last messages to be sent."""

_POSITIONS = 1000
"""Number of freed or dropped communicators whose last collective number is kept."""

FULL_FROM = 0.5
"""Shortest bound, in seconds, that is worth a report: with a shorter one a program only polls for a message."""


_Key: TypeAlias = tuple[str, int, float]


class Watched(Protocol):
    """A queue of collectives, which waits for one thing at a time."""

    group: Group
    number: int
    current: Raw | None
    executing: Executing
    thread: int
    background: bool
    queue: deque[Any]

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait for their turn, or for an operation in the queue."""

    def drain(self, timeout: float) -> bool:
        """Wait until the queue is empty, at most `timeout` seconds. Return True if it is empty."""

    def refuse(self) -> None:
        """Raise CommunicatorError from now on."""

    def unreported(self) -> Sequence[Any]:
        """Return the operations that failed in the background without a report to any caller, with their ``error``."""


class _Doom(NamedTuple):
    """The reason why operations can never complete."""

    why: str
    mismatch: bool

    def error(self) -> CommunicationError:
        return MismatchError(self.why) if self.mismatch else CommunicationError(self.why)


class _Inquiry:
    """A request for the states of all ranks."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.answered = threading.Event()
        self.text = ""


class Watch:
    """The watchdog of a rank.

    It ends the job when an operation has been waiting for longer than the timeout of its communicator, when an
    operation can never complete, or when a rank has died, unless ranks may die (`survives`, under ULFM).

    Waits are registered in ``current`` (of a queue of collectives) or in ``active`` (by thread); ``period`` is the
    maximum number of seconds between two looks. `interrupts`, from
    :func:`~mpicoll.engine.diagnostics.process_exit.listen_for_signals`, lets the watchdog end the job when Ctrl-C
    can't interrupt a blocked thread, and report which ranks SIGTERM has ended.
    """

    def __init__(self, period: float, abort: Callable[[int], None], interrupts: int | None = None) -> None:
        self.active: dict[int, Wait] = {}
        self.survives = False
        # Operations for which a caller has got Timeout: the program decides how it continues.
        self.excused: deque[Call] = deque(maxlen=100)
        # Operations for which a thread waits with its own bound now, after which it gets Timeout.
        self.bounded: list[Call] = []
        # Called on the speaker, before it ends the job, with a rank that has exited unannounced and the reason.
        self.on_death: Callable[[int, str], None] = lambda rank, why: None
        # Called with a rank that has died, in a job that survives deaths.
        self.mourn: Callable[[int], None] = lambda rank: None
        # Returns the messages that this process has started and that may be in transit: "send" or "recv", and the tag.
        self.started: Callable[[], list[tuple[str, int | None]]] = list
        self.rank, self.size = 0, 1
        self._line: ControlNetwork | None = None
        self._joined = threading.Event()
        self._job = ""
        self._folder: Path | None = None
        self._places: list[Any] = []  # the host of each rank
        self._processes: dict[int, Process] = {}
        self._interrupts = interrupts
        self._interrupted: tuple[float, set[_Key]] | None = None
        self._queues: WeakSet[Watched] = WeakSet()
        self._lock = threading.Lock()
        self._period = period
        self._abort = abort
        self._cut_off = False  # whether a host is lost
        self._suspect = ""  # why the launcher may be about to end the job
        self._told: dict[int, str] = {}  # ranks that have announced their end, with the cause
        self._alike: dict[str, set[int]] = {}  # the ranks that announced the same cause, by its hash
        self._heard_end = threading.Condition()  # guards _told and _alike
        self._left: dict[int, dict[str, Any]] = {}  # ranks that have exited, as absent() takes them
        self._doomed: dict[_Key, _Doom] = {}  # operations that can never complete
        self._doomed_since: dict[_Key, float] = {}
        self._found: tuple[Any, ...] = ()  # the waits that the last look has found to be stuck
        self._looked = 0.0
        self._wanted = False  # True if a rank has requested a look from the speaker
        self._next_look: dict[_Key, float] = {}  # for each wait, when a look is due because of it
        self._positions: dict[str, tuple[Group, int]] = {}  # of communicators that the program has freed or dropped
        self._met: dict[str, int] = {}  # number of meetings begun, by the key of their sequence
        self._asked = 0
        self._answers: dict[int, Any] = {}
        self._later: deque[Message | PeerExit] = deque()
        self._inquiries: deque[_Inquiry] = deque()
        self._answered = 0.0  # time of the last answer to a thread, which is about to raise Timeout
        self._leaving = False
        self._ending: float | None = None  # time at which this rank ends the job if no other rank has
        self._why = ""
        threading.Thread(target=self._run, name="mpicoll-watch", daemon=True).start()

    # --- called by other threads

    def add(self, queue: Watched) -> None:
        """Watch `queue` for as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[Watched]:
        """Return all queues that are watched."""
        with self._lock:
            return list(self._queues)

    def forked(self) -> None:
        """Make every queue refuse operations, in a forked child: the child has no watchdog thread."""
        self._lock = threading.Lock()  # the thread may have held it
        for queue in self.queues():
            queue.refuse()

    def join(
        self,
        line: ControlNetwork,
        addresses: Sequence[dict[str, Any]],
        job: str,
        folder: Path | None,
        *,
        survives: bool,
    ) -> None:
        """Communicate with the other ranks through `line` from now on.

        `addresses` are the addresses of all ranks, by rank. `job` names the job. Reports are written to
        `folder` unless it is None. `survives` is True if ranks may die (ULFM).
        """
        self.rank, self.size, self.survives = line.rank, line.size, survives
        self._job, self._folder = job, folder
        self._places = [one["place"] for one in addresses]
        for rank, one in enumerate(addresses):
            if rank != line.rank and one["place"] == self._places[line.rank]:
                with suppress(OSError):  # of another namespace of processes, or just gone
                    self._processes[rank] = Process(one["pid"])
        if line.crash_fd is not None and not faulthandler.is_enabled():
            faulthandler.enable(file=line.crash_fd)
        self._line = line
        self._joined.set()

    def dying(self, of: str, alike: str = "") -> None:
        """Report to stderr and to the other ranks that this rank ends the job, because of `of`.

        Ranks that call it within ``_ALIKE`` seconds with the same non-empty `alike`, apart from their own rank
        number in it, are reported once, by the lowest of them. Only that rank returns at once, to end the job.
        If it fails to end the job, the other ranks report themselves and return after ``_BEHIND`` seconds.
        """
        if not alike or self._line is None:
            say(f"rank {self.rank} of {self.size} {of}", separate=True)
            self._tell_end(of)
            return
        mark = hashlib.sha256(re.sub(rf"\brank {self.rank}\b", "rank", alike).encode()).hexdigest()
        self._tell_end(of, mark)
        with self._heard_end:
            self._heard_end.wait_for(lambda: len(self._told) >= self.size - 1, _ALIKE)
            ranks = {self.rank, *self._alike.get(mark, ())}
        if self.rank != min(ranks):
            time.sleep(_BEHIND)  # in which this process is ended
            ranks = {self.rank}
        say(f"{rank_list(ranks)} of {self.size} {of}", separate=True)

    def _tell_end(self, of: str, alike: str = "") -> None:
        """Run ``last_acts``, and send the end of this rank to the other watchdogs.

        They then look for no other reason.
        """
        for act in last_acts:
            with suppress(Exception):  # a failing act must not keep the message from being sent
                act()
        line = self._line
        if line is not None:
            line.send({"kind": "dying", "of": of, "alike": alike})
            line.flush(_FLUSH)

    def leave(self) -> None:
        """Announce to the other ranks that this rank makes no more calls."""
        line, self._leaving = self._line, True
        leave_signals_alone()
        if line is not None:
            line.leave({"kind": "left"} | self._last_position())

    def close(self) -> None:
        """Close the control network after all ranks have left and MPI is finalized."""
        line, self._line = self._line, None
        self._joined.clear()
        if line is not None:
            line.close()

    def keep_position(self, group: Group, number: int) -> None:
        """Record that the program made `number` collectives on `group` before it freed or dropped the communicator.

        The program makes no more calls on that communicator.
        """
        # Without a lock: the garbage collector may call it on a thread that holds one.
        self._positions[group.key] = group, number
        oldest = list(self._positions)[:-_POSITIONS]
        for key in oldest:
            self._positions.pop(key, None)
        for key in list(self._met) if oldest else ():
            if key.partition(" ")[0] in oldest:
                self._met.pop(key, None)

    def begin_meeting(self, key: str) -> int:
        """Count a meeting of the sequence `key` that this rank begins, and return its number."""
        number = self._met[key] = self._met.get(key, 0) + 1
        return number

    def _last_position(self) -> dict[str, Any]:
        """Return the final state of this rank, from which other ranks derive which operations can never complete."""
        positions = self._positions | {queue.group.key: (queue.group, queue.number) for queue in self.queues()}
        return {
            "numbers": {key: number for key, (_, number) in positions.items()} | self._met,
            "sent": {
                key: counts(group, group.traffic.sent)
                for key, (group, _) in positions.items()
                if group.traffic is not None and not group.traffic.uncounted
            },
            "calls": last_calls(self.rank),
        }

    def check(self, raw: Raw | None) -> None:
        """Raise CommunicationError if the operation `raw`, in which this rank polls, can never complete."""
        doom = self._doomed.get(_key(Entry._make(raw))) if self._doomed and raw is not None else None
        if doom is not None:
            raise doom.error()

    def check_deaths(self, group: Group) -> None:
        """Raise RankFailed if a rank of `group` has died."""
        dead = self.dead() & set(group.members)
        if dead:
            names = ", ".join(map(str, sorted(dead)))
            raise RankFailed(f"rank {self.rank} of {self.size}: rank {names} has died", tuple(sorted(dead)))

    def dead(self) -> set[int]:
        """Return the ranks of the job that have died."""
        line = self._line
        return set() if line is None else {rank for rank, one in line.gone.items() if one.why != "left"}

    def inquire(self, why: str) -> str:
        """Collect the states of all ranks because of `why`, write the report, and return its summary.

        It takes at most ``2 * _ANSWER`` seconds. It must not be called on the watchdog's own thread.
        """
        if self._line is None:
            return ""
        inquiry = _Inquiry(why)
        self._inquiries.append(inquiry)
        self._line.wake()
        inquiry.answered.wait(2 * _ANSWER)
        return inquiry.text

    # --- its thread

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # noqa: BLE001  without this thread nothing would be bounded any more
                _log.exception("rank %d: the watch goes on after an error", self.rank)
                time.sleep(self._period)

    def _turn(self) -> None:
        """Wait for messages of other ranks, handle them, and check the waits of this rank."""
        events = self._wait(self._pause())
        if self._leaving:
            return  # this rank still forwards messages, but handles none
        while self._later:
            self._heed(self._later.popleft())
        for event in events:
            self._heed(event)
        now = time.monotonic()
        waiting = self._waiting()
        for entry in waiting:
            # A thread that waits in shared memory raises by itself, and meanwhile requests a report.
            bound = entry.group.timeout
            if any(entry.call is one for one in self.excused):
                bound = max(bound, config().timeout)
            if now - entry.begin > bound + _PRIVATE and now > self._answered + _GRACE:
                self._end_together(
                    f"{self._pending(entry)} has been waiting for more than {entry.group.timeout:g} s"
                    " (MPICOLL_TIMEOUT, or the timeout of its communicator)"
                )
        self._heed_the_left(waiting, now)
        self._heed_the_doomed(waiting, now)
        self._look_closer(waiting, now)
        self._heed_signals(waiting, now)
        while self._inquiries:
            self._answer(self._inquiries.popleft())
        if self._ending is not None and now > self._ending:
            self._end(self._why)

    def _pause(self) -> float:
        """Return the seconds until the next look."""
        waiting, now = self._waiting(), time.monotonic()
        bounds = [entry.group.timeout / 4 for entry in waiting]
        bounds += [max(0.05, self._due(entry) - now) for entry in waiting]
        if self._found or self._wanted:
            bounds.append(max(0.05, self._looked + self._settled() - now))
        if self._left and waiting:
            bounds.append(_LEFT)
        if self._ending is not None or self._doomed_since or self._suspect:
            bounds.append(0.05)  # after _suspect the launcher's SIGTERM follows, and leaves little time
        return min(self._period, *bounds) if bounds else self._period

    def _wait(self, seconds: float) -> list[Message | PeerExit]:
        line = self._line
        if line is not None:
            return line.poll(seconds)
        self._joined.wait(seconds)
        return []

    def _waiting(self) -> list[Entry]:
        found = [*(entry for entry, _, _ in self.active.copy().values()), *(queue.current for queue in self.queues())]
        return [Entry._make(one) for one in found if one is not None]

    def _reachable(self) -> set[int]:
        """Return this rank and the ranks that are not known to be gone."""
        line = self._line
        gone = {} if line is None else line.gone
        return {self.rank, *(rank for rank in range(self.size) if rank not in gone and rank not in self._told)}

    def _speaker(self) -> int:
        """Return the lowest reachable rank, which reports for all of them."""
        return min(self._reachable())

    # --- messages of other ranks

    def _heed(self, event: Message | PeerExit) -> None:
        if isinstance(event, PeerExit):
            if event.why != "left":
                self._heed_death(event)
            return
        body, source = event.body, event.source
        match body.get("kind"):
            case "dying":
                with self._heard_end:
                    self._told[source] = body["of"]
                    self._alike.setdefault(body["alike"], set()).add(source)
                    self._heard_end.notify_all()
                self._expect_the_end(
                    f"rank {source} of {self.size} {body['of'].partition('; the job is ')[0]}", 2 * _BEHIND
                )
            case "left":
                self._left[source] = {name: body[name] for name in ("numbers", "sent", "calls")}
            case "ask":
                self._tell_state(source, body["number"], full=body["full"], calls=body["calls"])
            case "state":
                if body["number"] == self._asked:
                    self._answers[source] = body["state"]
            case "end":
                self._end(body["why"])
            case "stuck":
                self._wanted = True
            case "doomed":
                self._doom(body["waits"], _Doom(body["why"], body["mismatch"]))

    def _heed_death(self, gone: PeerExit) -> None:
        if self.survives:
            self.mourn(gone.rank)
            return
        if gone.rank in self._told or gone.rank in self._left:
            return
        process = self._processes.pop(gone.rank, None)
        status = None if process is None else process.status()
        if process is not None:
            process.close()
        where = f" (process {gone.pid} on {gone.host})" if gone.pid else ""
        why = f"rank {gone.rank} of {self.size}{where} {_death(gone, status)}"
        if self._speaker() == self.rank:
            self.on_death(gone.rank, why)
        if status == 0:
            # If its farewell was lost, this is a normal exit; if it did not finalize MPI, the launcher ends the job.
            self._suspect = self._suspect or f"{why}; the job is ended"
            return
        lost = [gone.rank]
        if gone.why == "unreachable":  # and so are all ranks on its host
            self._cut_off = True
            lost = [rank for rank, place in enumerate(self._places) if place == self._places[gone.rank]]
            ranks = f"ranks {', '.join(map(str, lost))}" if len(lost) > 1 else f"rank {gone.rank}"
            why = f"{ranks} of {self.size} can't be reached any more: {gone.host} does not answer"
        self._told.update(dict.fromkeys(lost, why))
        if self._speaker() != self.rank:
            self._expect_the_end(why, _GRACE)
            return
        say(f"{why}; the job is ended" + (f". Its stacks:\n{gone.words}" if gone.words else ""), separate=True)
        self._examine(why, _ANSWER_AT_DEATH)[1]()
        self._tell_end("ends the job")
        self.end_all(1 if status is None else status if status > 0 else 128 - status)

    def _expect_the_end(self, why: str, seconds: float) -> None:
        """Expect another rank to end the job; end it on this rank if it has not ended after `seconds`."""
        if self._ending is None:
            self._ending, self._why = time.monotonic() + seconds, why

    def _pending(self, entry: Entry) -> str:
        """Return a description of a waiting operation and its call site."""
        group, number = entry.group, f" number {entry.number}" if entry.call.collective else ""
        sites = [
            f"{one['site']['file']}:{one['site']['line']} in {one['site']['function']}"
            for one in self._state(full=False).get("pending", [])
            if (one["key"], one["number"]) == (group.key, entry.number) and one.get("site")
        ]
        at = f", called at {sites[0]}," if sites else ""
        return f"{entry.call}{number} on {group.name}, rank {group.rank} of {len(group.members)}{at}"

    def _tell_state(self, to: int, number: int, *, full: bool, calls: Sequence[Sequence[Any]]) -> None:
        if self._line is not None:
            state = self._state(full=full, calls=calls)
            self._line.send({"kind": "state", "number": number, "state": state}, to)

    def _state(self, *, full: bool, calls: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        return own_state(
            self.rank,
            self.size,
            self.queues(),
            self.active.copy(),
            full=full,
            started=self.started,
            calls=calls,
            met=self._met.copy(),
            retired={key: number for key, (_, number) in self._positions.copy().items()},
        )

    def _collect(
        self, seconds: float, *, full: bool, calls: Sequence[Sequence[Any]] = ()
    ) -> dict[int, dict[str, Any] | None]:
        """Return the states of all ranks, None for those that don't answer within `seconds`.

        `calls` are collectives, as (key, number); the ranks report their calls of these. `full` requests stacks
        and past operations too.
        """
        self._asked += 1
        self._answers = {self.rank: self._state(full=full, calls=calls)}
        line = self._line
        if line is not None:
            line.send({"kind": "ask", "number": self._asked, "full": full, "calls": calls})
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if len(self._answers) + len(line.gone) >= self.size:
                    break
                for event in line.poll(max(0.0, deadline - time.monotonic())):
                    if isinstance(event, Message) and event.body.get("kind") in ("ask", "state"):
                        self._heed(event)
                    else:
                        self._later.append(event)
        states = {rank: self._answers.get(rank) for rank in range(self.size)}
        if line is not None:
            for rank, one in line.gone.items():
                how, words = ("left", "") if one.why == "left" else ("died", self._told.get(rank, one.why))
                states[rank] = absent(rank, how, words, **self._left.get(rank, {}))
            silent = {rank for rank, state in states.items() if state is None}
            # A hub that forwards answers of others is alive, though its own answer may be late.
            if line.hub in silent and len(silent) + len(line.gone) == self.size - 1:
                states |= {rank: unreached(rank, line.hub) for rank in silent - {line.hub}}
        return states

    # --- what goes wrong

    def _heed_the_left(self, waiting: list[Entry], now: float) -> None:
        """Fail operations that wait for ranks that have left.

        The state of a rank that has left is final, so a single look is sufficient.
        """
        left = set(self._left)
        if any(
            left & set(entry.group.members) and now - entry.begin > _LEFT and _key(entry) not in self._doomed
            for entry in waiting
        ):
            states = {rank: absent(rank, "left", **one) for rank, one in self._left.items()}
            found = find_deadlock(states | {self.rank: self._state(full=False)}, self.size)
            if found is not None:
                self._doom(found.waits, _Doom(str(found), bool(found.mismatches)))

    def _heed_the_doomed(self, waiting: list[Entry], now: float) -> None:
        """End the job if an operation that can never complete has not raised: one that blocks inside MPI can't."""
        self._doomed = {key: self._doomed[key] for key in map(_key, waiting) if key in self._doomed}
        self._doomed_since = {key: self._doomed_since.get(key, now) for key in self._doomed}
        if not self._doomed:
            return
        pending = self._state(full=False).get("pending", [])
        polling = {(one["key"], one["number"], one["begin"]) for one in pending if one.get("polls")}
        for key, since in self._doomed_since.items():
            if now - since > (_RAISES if key in polling else 0):
                self._end_together(self._doomed[key].why)

    @staticmethod
    def _settled() -> float:
        """Return the seconds between two looks."""
        return _SETTLED * config().stuck_after

    def _due(self, entry: Entry) -> float:
        """Return the time at which the states of all ranks are to be collected because of a wait.

        It is such that a second look is complete when the wait has lasted MPICOLL_STUCK_AFTER seconds.
        """
        return self._next_look.get(_key(entry), entry.begin + config().stuck_after - self._settled())

    def _look_closer(self, waiting: list[Entry], now: float) -> None:
        """Find operations that can never complete. Each rank requests a look from the speaker because of its waits."""
        line = self._line
        if line is None:
            return
        due = [entry for entry in waiting if now >= self._due(entry) and _key(entry) not in self._doomed]
        later = {_key(entry): now + min(max(config().stuck_after, now - entry.begin), _RARELY) for entry in due}
        known = {_key(entry) for entry in waiting}
        self._next_look = {key: at for key, at in self._next_look.items() if key in known} | later
        speaker = self._speaker()
        if speaker != self.rank:
            if due:
                line.send({"kind": "stuck"}, speaker)
            return
        self._wanted = self._wanted or bool(due)
        if not (self._wanted or self._found) or now - self._looked < self._settled():
            return
        self._wanted = False
        found = self._stuck()
        self._looked = time.monotonic()
        before, self._found = self._found, () if found is None else found.waits
        if found is not None and before == found.waits:
            line.send({"kind": "doomed", "waits": found.waits, "why": str(found), "mismatch": bool(found.mismatches)})
            self._doom(found.waits, _Doom(str(found), bool(found.mismatches)))
            self._found = ()

    def _stuck(self) -> Deadlock | None:
        """Return the deadlock that the states of all ranks prove if they don't change, or None."""
        states = {rank: one for rank, one in self._collect(_ANSWER, full=False).items() if one is not None}
        questions = open_questions(states)
        if questions:
            answers = self._collect(_ANSWER, full=False, calls=questions)
            states = {rank: one for rank, one in answers.items() if one is not None}
        return find_deadlock(states, self.size)

    def _doom(self, waits: Sequence[Sequence[Any]], doom: _Doom) -> None:
        """Mark the operations of this rank among `waits` as unable to complete: they raise, or the job is ended."""
        mine = {(key, number, begin) for rank, key, number, begin in waits if rank == self.rank}
        left = [*self.excused, *self.bounded]
        for entry in self._waiting():
            if _key(entry) in mine and not any(entry.call is one for one in left):
                self._doomed[_key(entry)] = doom

    def _answer(self, inquiry: _Inquiry) -> None:
        try:
            inquiry.text, write = self._examine(inquiry.why, _ANSWER)
            inquiry.text = "\n".join(filter(None, (inquiry.text, write())))
        finally:
            self._answered = time.monotonic()
            inquiry.answered.set()

    def _examine(self, why: str, seconds: float) -> tuple[str, Callable[[], str]]:
        """Collect the states of all ranks and analyse them.

        Returns the summary, and a function that writes the report and returns its path as a sentence, or the
        reason why there is none. The function may block for as long as the file system does.
        """
        try:
            states = self._collect(seconds, full=True)
            questions = open_questions({rank: one for rank, one in states.items() if one is not None})
            if questions and seconds > _ANSWER_AT_DEATH:
                states = self._collect(seconds, full=True, calls=questions)
            analysis = analyse(states, self.size)
        except Exception as error:  # noqa: BLE001  a failing analysis must not keep the job from being ended
            return f"There is no report, because of {error!r}", str
        words = "\n".join(one for one in analysis.words if one != why)

        def write() -> str:
            if self._folder is None:
                return ""
            try:
                path, _ = report_file.write(self._folder, self._job, why, states, analysis)
            except Exception as error:  # noqa: BLE001  as above
                return (
                    f"The report can't be written to {self._folder} ({error!r}); set MPICOLL_REPORT to a folder that"
                    " can be written to"
                )
            return f"Where each rank stands, its stacks and its last operations: {path}"

        return words, write

    def _end_together(self, why: str) -> None:
        """End the job through the speaker if possible."""
        if self._ending is not None:
            return
        speaker = self._speaker()
        if self._line is None or speaker == self.rank:
            self._end(why)
        self._line.send({"kind": "end", "why": why}, speaker)
        # If the speaker does not answer, one rank ends the job, and the others only if that one fails as well.
        deputy = self.rank == min(rank for rank in self._reachable() if rank != speaker)
        self._expect_the_end(why, _ANSWER + _BEHIND + (0 if deputy else _ANSWER + _BEHIND))

    def end_all(self, status: int) -> None:
        """End all reachable ranks with `status`, and the launcher if it would wait for unreachable ones."""
        if self._cut_off:
            if self._places.index(self._places[self.rank]) == self.rank:
                end_launcher()  # one for each host
        elif any(place != self._places[0] for place in self._places):
            end_launcher(_LAUNCHER)
        self._abort(status)

    def _end(self, why: str) -> NoReturn:
        words, write = self._examine(why, _ANSWER)
        say(f"{why}; the job is ended.\n{words}".rstrip(), separate=True)
        if where := write():
            say(where)
        self._tell_end("ends the job")
        self.end_all(1)
        raise SystemExit  # reached in tests only

    # --- signals

    def _heed_signals(self, waiting: list[Entry], now: float) -> None:
        if self._interrupts is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self._interrupts, 4096)
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is left_to_the_watch:
                self._terminated()
            if signal.SIGINT in numbers:
                self._interrupted = now, self._waits_of_the_program()
        self._heed_interrupt(waiting, now)

    def _waits_of_the_program(self) -> set[_Key]:
        """Return the operations in which the main thread waits: an interrupt concerns these."""
        pending = self._state(full=False).get("pending", [])
        return {(one["key"], one["number"], one["begin"]) for one in pending if one["program"]}

    def _terminated(self) -> None:
        """Handle SIGTERM, which was sent to this rank alone, or by the launcher to all ranks that it ends."""
        if self.survives:
            say(f"rank {self.rank} of {self.size} died of SIGTERM")
            os._exit(128 + signal.SIGTERM)  # the others go on
        if self._line is not None and not self._suspect:
            self._line.send({"kind": "term"})
            deadline = time.monotonic() + _TERM_TOGETHER
            while (left := deadline - time.monotonic()) > 0:
                for event in self._line.poll(left):
                    if isinstance(event, Message) and event.body.get("kind") == "term":
                        self._told.setdefault(event.source, "was ended by SIGTERM")
                    else:
                        self._heed(event)
        if self._suspect:
            if self._speaker() == self.rank:
                say(self._suspect, separate=True)
        elif not self._told:
            self.dying(f"died of SIGTERM; the job is ended. It was here:\n{stacks.traceback_of_main_thread()}")
        elif set(self._told.values()) == {"was ended by SIGTERM"} and self.rank < min(self._told):
            ranks = ", ".join(map(str, [self.rank, *sorted(self._told)]))
            say(f"ranks {ranks} of {self.size} were ended by SIGTERM", separate=True)
        self.end_all(128 + signal.SIGTERM)

    def _heed_interrupt(self, waiting: list[Entry], now: float) -> None:
        """End the job if an operation outlasts an interrupt: Python can't interrupt a call that blocks inside MPI."""
        if self._interrupted is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        when, then = self._interrupted
        stuck = [entry for entry in waiting if _key(entry) in then]
        if not stuck:
            self._interrupted = None
        elif now - when >= _AFTER_INTERRUPT:
            self._end(f"interrupted, but {self._pending(stuck[0])} goes on waiting")


def _key(entry: Entry) -> _Key:
    """Return what identifies an operation: the same Call object may be that of many operations."""
    return entry.group.key, entry.number, entry.begin


def _death(gone: PeerExit, status: int | None) -> str:
    """Return a description of how a rank ended."""
    if status is None and gone.words:
        return f"has crashed ({gone.words.splitlines()[0]})"
    if status is None:
        return "is gone without a word: killed, or left by os._exit"
    if status >= 0:
        return f"ended with exit status {status} without a word (os._exit?)"
    name = signal_name(-status)
    hint = " (kill -9, or the kernel for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}" if not gone.words else f"died of {name}"
