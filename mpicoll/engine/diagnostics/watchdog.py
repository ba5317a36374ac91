"""The thread of a rank that never waits for the others: it bounds their waits, learns of deaths, and ends the job.

MPI's calls can't be left, and tell nobody whom they wait for. So each rank has this thread, which talks to those of
the other ranks beside MPI (:mod:`mpicoll.transport.control.network`). The lowest rank that lives is the *speaker*: it
collects what the ranks say about themselves, writes the report, and says on stderr what has happened, once for all.
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
"""Seconds in which the watches of the other ranks answer."""

_ANSWER_AT_DEATH = 0.15
"""The same when somebody has died: the launcher leaves the others a quarter of a second."""

_SETTLED = 0.4
"""The part of MPICOLL_STUCK_AFTER that lies between two looks at all ranks: what both of them find stands still."""

_RARELY = 60.0
"""Seconds, at most, between two requests for a look because of one wait. The time doubles from one to the next."""

_LEFT = 0.2
"""Seconds that a rank waits before it compares its waits with what ranks that have left have done."""

_PRIVATE = 2.0
"""Seconds that a call has to raise Timeout by itself, where it can."""

_GRACE = 1.0
"""Seconds that a rank has to raise Timeout once it has the report, and the speaker to end the job after a death."""

_RAISES = 5.0
"""Seconds that an operation that can never complete has to raise, if it polls, before the job is ended."""

_BEHIND = 3.0
"""Seconds that the others leave to the speaker."""

_LAUNCHER = 3.0
"""Seconds in which the launcher has ended a job on several hosts, if they all answer."""

_ALIKE = 0.25
"""Seconds in which ranks that end by the same error learn of each other."""

_FLUSH = 0.2
"""Seconds in which last words get out."""

_POSITIONS = 1000
"""Of how many freed or dropped communicators it is known how far the program has come on them."""

FULL_FROM = 0.5
"""A bound of fewer seconds is a program's way to look whether something has come, and worth no report."""


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
        """Return the threads that wait for their turn, or for what is in the queue."""

    def drain(self, timeout: float) -> bool:
        """Wait until there is nothing left to do; whether that came about."""

    def refuse(self) -> None:
        """Raise CommunicatorError from now on."""

    def unreported(self) -> Sequence[Any]:
        """What has failed in the background, with its ``error``, of which nobody has learned."""


class _Doom(NamedTuple):
    """Why operations can never complete."""

    why: str
    mismatch: bool

    def error(self) -> CommunicationError:
        return MismatchError(self.why) if self.mismatch else CommunicationError(self.why)


class _Inquiry:
    """Somebody's question where everybody is."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.answered = threading.Event()
        self.text = ""


class Watch:
    """Ends the job when something has been waiting for longer than its communicator's timeout, when it waits in vain,
    or when a rank has died, unless ranks may (`survives`, under ULFM).

    Who waits says so in ``current`` (a queue of collectives) or in ``active``, by thread; ``period`` is the most
    seconds between two looks. `interrupts`, from
    :func:`~mpicoll.engine.diagnostics.process_exit.listen_for_signals`, lets it end the job when Ctrl-C can't interrupt
    who waits, and say what SIGTERM has ended.
    """

    def __init__(self, period: float, abort: Callable[[int], None], interrupts: int | None = None) -> None:
        self.active: dict[int, Wait] = {}
        self.survives = False
        # Operations for which somebody who waited has got Timeout, and decides what is to be done.
        self.excused: deque[Call] = deque(maxlen=100)
        # Operations for which a thread waits within a bound of its own now, and will get Timeout.
        self.bounded: list[Call] = []
        # Called on the speaker, before it ends the job, with a rank that has ended unannounced, and how.
        self.on_death: Callable[[int, str], None] = lambda rank, why: None
        # What has to be done about a rank that has died, where others survive that.
        self.mourn: Callable[[int], None] = lambda rank: None
        # Returns the messages that this process has started, which may be under way: "send" or "recv", and the tag.
        self.started: Callable[[], list[tuple[str, int | None]]] = list
        self.rank, self.size = 0, 1
        self._line: ControlNetwork | None = None
        self._joined = threading.Event()
        self._job = ""
        self._folder: Path | None = None
        self._places: list[Any] = []  # where each rank lives
        self._processes: dict[int, Process] = {}
        self._interrupts = interrupts
        self._interrupted: tuple[float, set[_Key]] | None = None
        self._queues: WeakSet[Watched] = WeakSet()
        self._lock = threading.Lock()
        self._period = period
        self._abort = abort
        self._cut_off = False  # whether a host is lost
        self._suspect = ""  # why the launcher may be about to end the job
        self._told: dict[int, str] = {}  # ranks that said of what they die
        self._alike: dict[str, set[int]] = {}  # the same, by what marks those that die alike
        self._heard_end = threading.Condition()  # of the two
        self._left: dict[int, dict[str, Any]] = {}  # ranks that have exited, as absent() takes them
        self._doomed: dict[_Key, _Doom] = {}  # operations that can never complete
        self._doomed_since: dict[_Key, float] = {}
        self._found: tuple[Any, ...] = ()  # the waits that the last look has found to be stuck
        self._looked = 0.0
        self._wanted = False  # whether a rank has asked the speaker for a look
        self._next_look: dict[_Key, float] = {}  # for each wait, when a look is due because of it
        self._positions: dict[str, tuple[Group, int]] = {}  # of communicators that the program has freed or dropped
        self._met: dict[str, int] = {}  # how many meetings of each sequence have begun, by its key
        self._asked = 0
        self._answers: dict[int, Any] = {}
        self._later: deque[Message | PeerExit] = deque()
        self._inquiries: deque[_Inquiry] = deque()
        self._answered = 0.0  # when somebody has got an answer, who is about to raise Timeout
        self._leaving = False
        self._ending: float | None = None  # when this rank ends the job if nobody else has
        self._why = ""
        threading.Thread(target=self._run, name="mpicoll-watch", daemon=True).start()

    # --- what others call

    def add(self, queue: Watched) -> None:
        """Watch `queue` for as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[Watched]:
        """All queues that are watched."""
        with self._lock:
            return list(self._queues)

    def forked(self) -> None:
        """In a forked child, which has no such thread: nothing works any more that communicates."""
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
        """Talk to the other ranks by `line` from now on, whose `addresses` it has. `job` names the job; reports go to
        `folder`, if that is not None."""
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
        """Say that this rank ends the job, to stderr and to the others.

        Of the ranks that call it within a moment with the same non-empty `alike`, in which each may name itself, the
        lowest says it for all. It alone returns at once, to end the job; should it fail to, the others say it
        themselves and return some seconds later."""
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
        """Tell the other watches, so that they don't look for another reason, and do what is to be done before."""
        for act in last_acts:
            with suppress(Exception):  # nothing must keep the others from being told
                act()
        line = self._line
        if line is not None:
            line.send({"kind": "dying", "of": of, "alike": alike})
            line.flush(_FLUSH)

    def leave(self) -> None:
        """Tell the others that this rank calls nothing any more."""
        line, self._leaving = self._line, True
        leave_signals_alone()
        if line is not None:
            line.leave({"kind": "left"} | self._last_position())

    def close(self) -> None:
        """The ranks have all left: MPI is at its end."""
        line, self._line = self._line, None
        self._joined.clear()
        if line is not None:
            line.close()

    def keep_position(self, group: Group, number: int) -> None:
        """The program has freed or dropped the communicator of `group` after `number` collectives: it calls nothing on
        it any more."""
        # Without a lock: the garbage collector may call it on a thread that holds one.
        self._positions[group.key] = group, number
        oldest = list(self._positions)[:-_POSITIONS]
        for key in oldest:
            self._positions.pop(key, None)
        for key in list(self._met) if oldest else ():
            if key.partition(" ")[0] in oldest:
                self._met.pop(key, None)

    def begin_meeting(self, key: str) -> int:
        """This rank comes to the next meeting of the sequence `key`: its number."""
        number = self._met[key] = self._met.get(key, 0) + 1
        return number

    def _last_position(self) -> dict[str, Any]:
        """What the others need to know of a rank that leaves to tell what it will never do."""
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
        """For a rank that polls in an operation: raise CommunicationError if that can never complete."""
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
        """The ranks of the job that have died."""
        line = self._line
        return set() if line is None else {rank for rank, one in line.gone.items() if one.why != "left"}

    def inquire(self, why: str) -> str:
        """Ask all ranks where they are, because of `why`, and write the report: what it says, in short. Not for the
        watch's own thread. Takes some seconds at most."""
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
        """Wait for what comes, and look after what waits."""
        events = self._wait(self._pause())
        if self._leaving:
            return  # what others say goes through this rank, but means it no more
        while self._later:
            self._heed(self._later.popleft())
        for event in events:
            self._heed(event)
        now = time.monotonic()
        waiting = self._waiting()
        for entry in waiting:
            # Who waits in shared memory raises by itself, and asks the others meanwhile.
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
        """Seconds until the next look."""
        waiting, now = self._waiting(), time.monotonic()
        bounds = [entry.group.timeout / 4 for entry in waiting]
        bounds += [max(0.05, self._due(entry) - now) for entry in waiting]
        if self._found or self._wanted:
            bounds.append(max(0.05, self._looked + self._settled() - now))
        if self._left and waiting:
            bounds.append(_LEFT)
        if self._ending is not None or self._doomed_since or self._suspect:
            bounds.append(0.05)  # of the last, the launcher's SIGTERM is next, and leaves little time
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
        """This rank and those that are not known to be gone."""
        line = self._line
        gone = {} if line is None else line.gone
        return {self.rank, *(rank for rank in range(self.size) if rank not in gone and rank not in self._told)}

    def _speaker(self) -> int:
        """The rank that speaks for those that can be heard."""
        return min(self._reachable())

    # --- what comes from the others

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
            # If its goodbye was lost, all is well; if it left MPI out, the launcher is about to end the job.
            self._suspect = self._suspect or f"{why}; the job is ended"
            return
        lost = [gone.rank]
        if gone.why == "unreachable":  # and so is all else on its host
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
        """Somebody ends the job. Should that fail, this rank does."""
        if self._ending is None:
            self._ending, self._why = time.monotonic() + seconds, why

    def _pending(self, entry: Entry) -> str:
        """An operation that waits, and where it was called."""
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
        """The states of all ranks; None of those that don't answer within `seconds`. They tell what they have called
        as the collectives in `calls`."""
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
            # One that passes on the answers of others is there, though its own may be late.
            if line.hub in silent and len(silent) + len(line.gone) == self.size - 1:
                states |= {rank: unreached(rank, line.hub) for rank in silent - {line.hub}}
        return states

    # --- what goes wrong

    def _heed_the_left(self, waiting: list[Entry], now: float) -> None:
        """Fail what waits for ranks that have left: what they have done is final, so a single look is enough."""
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
        """End the job if an operation that can never complete has not raised, as one that blocks inside MPI can't."""
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
        """Seconds between two looks."""
        return _SETTLED * config().stuck_after

    def _due(self, entry: Entry) -> float:
        """When the states of all ranks are to be collected because of a wait: so that a second look is over when it
        has lasted MPICOLL_STUCK_AFTER."""
        return self._next_look.get(_key(entry), entry.begin + config().stuck_after - self._settled())

    def _look_closer(self, waiting: list[Entry], now: float) -> None:
        """Find operations that can never complete. Each rank asks the speaker for a look because of its waits."""
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
        """What the states of all ranks prove to be stuck, if they don't change."""
        states = {rank: one for rank, one in self._collect(_ANSWER, full=False).items() if one is not None}
        questions = open_questions(states)
        if questions:
            answers = self._collect(_ANSWER, full=False, calls=questions)
            states = {rank: one for rank, one in answers.items() if one is not None}
        return find_deadlock(states, self.size)

    def _doom(self, waits: Sequence[Sequence[Any]], doom: _Doom) -> None:
        """`waits` can never complete: those of this rank raise, or the job is ended."""
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
        """Ask all ranks where they are. Returns what that says, in short, and a function that writes the report and
        says where it is, or why there is none. The function may block for as long as the file system does."""
        try:
            states = self._collect(seconds, full=True)
            questions = open_questions({rank: one for rank, one in states.items() if one is not None})
            if questions and seconds > _ANSWER_AT_DEATH:
                states = self._collect(seconds, full=True, calls=questions)
            analysis = analyse(states, self.size)
        except Exception as error:  # noqa: BLE001  whatever is wrong with it must not keep the job from being ended
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
        """Have the job ended, by the speaker if possible."""
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
        """End all ranks that can be reached, and the launcher if it waits for those that can't."""
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
        raise SystemExit  # never reached but in tests: this thread has nothing more to do

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
        """What the main thread waits in, which an interrupt is meant for."""
        pending = self._state(full=False).get("pending", [])
        return {(one["key"], one["number"], one["begin"]) for one in pending if one["program"]}

    def _terminated(self) -> None:
        """SIGTERM: somebody's word to this rank alone, or the launcher's to all that it ends."""
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
        """Python can't interrupt a call that blocks inside MPI; so end the job if one outlasts an interrupt."""
        if self._interrupted is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        when, then = self._interrupted
        stuck = [entry for entry in waiting if _key(entry) in then]
        if not stuck:
            self._interrupted = None
        elif now - when >= _AFTER_INTERRUPT:
            self._end(f"interrupted, but {self._pending(stuck[0])} goes on waiting")


def _key(entry: Entry) -> _Key:
    """By which an operation is known again: its call may be that of many."""
    return entry.group.key, entry.number, entry.begin


def _death(gone: PeerExit, status: int | None) -> str:
    """How a rank came to its end."""
    if status is None and gone.words:
        return f"has crashed ({gone.words.splitlines()[0]})"
    if status is None:
        return "is gone without a word: killed, or left by os._exit"
    if status >= 0:
        return f"ended with exit status {status} without a word (os._exit?)"
    name = signal_name(-status)
    hint = " (kill -9, or the kernel for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}" if not gone.words else f"died of {name}"
