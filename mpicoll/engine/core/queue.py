"""In which order, and on which thread, the collectives of a communicator run.

All of them go through one FIFO, because MPI wants the same order on all ranks and lets blocking and non-blocking
collectives never match: a rank may wait for an operation at once that another started in the background. Whoever holds
the lock runs the head of the queue: a worker thread in the background, or a caller that waits.

Two threads of a program that call blocking operations on one communicator at once get an error: which of them takes the
lock first may differ from rank to rank. Whoever finds the lock free need not look for the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Raw, Site, Wait, call_site, keepers
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.stacks import thread_names
from mpicoll.engine.diagnostics.watchdog import FULL_FROM, Watch
from mpicoll.errors import CommunicationError, CommunicatorError, Timeout, TruncationError

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("mpicoll")

_ENDING = threading.Lock()
"""Held for the moment in which a job ends or is asked to say when it does."""

_NAPS = 20e-6, 1e-3
"""Seconds between looks of who waits with a bound: first, and at most."""

_IDLE = 5.0
"""Seconds after which a worker with nothing to do ends. A program may have thousands of communicators."""


class _Refusal:
    """What stands in the place of a queue's locks in a process that must not communicate."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise CommunicatorError(
            f"communicator {self._name}: this process was forked from an MPI rank, and can't communicate; only the rank"
            " itself can"
        )

    __enter__ = acquire = locked = _raise
    active = property(_raise)

    def __exit__(self, *args: object) -> None:
        """Never reached, but asked for by ``with``."""


class Observer(Protocol):
    """Who wants to see operations before and after they run, in their turn.

    ``sites`` asks for where they were called. A ``thorough`` one wants each call to be prepared anew, so that
    `function` is a :class:`~mpicoll.engine.operation.Task` where it is a collective on arrays. One that ``compares``
    sees to it that all ranks call the same.
    """

    sites: bool
    thorough: bool
    compares: bool

    def before(self, entry: Raw, function: Callable[..., Any]) -> None:
        """May raise, on all ranks alike, in the place of the operation."""

    def after(self, entry: Raw, function: Callable[..., Any]) -> None:
        """The same, when the operation has been carried out."""


def unmatched(call: Call) -> None:
    """Leave the ranks' calls uncompared."""


class Job:
    """An operation in the queue."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_function",
        "_progress",
        "call",
        "done",
        "error",
        "reported",
        "site",
        "value",
    )
    __reduce_ex__ = refuse_pickling("Job", "wait() for it and pass on its value")

    def __init__(self, progress: Progress, function: Callable[[], Any], call: Call, site: Site | None) -> None:
        self.error: BaseException | None = None
        self.reported = False  # whether somebody has learned how it ended
        self._progress = progress
        self._function = function
        self.call = call
        self.site = site
        self.done = False
        self._callbacks: list[Callable[[Job], None]] = []
        self.value: Any = None

    def __str__(self) -> str:
        return f"{self.call} on {self._progress.group}"

    def run(self) -> None:
        """Carry it out. The progress lock is held."""
        progress = self._progress
        outer, progress.runner = progress.runner, get_ident()
        try:
            self.value = progress.carry_out(self._function, self.call, self.site)
        except Exception as error:  # noqa: BLE001  whoever waits for it gets it
            self.error = error
            progress.failures.add(self)
        except BaseException as error:
            # An interrupt is meant for the thread that it reaches, whatever that thread is doing for others.
            self.error = error
            raise
        finally:
            try:
                self.finish()
            finally:
                progress.runner = outer

    def finish(self) -> None:
        """It is done: tell who asked for it."""
        with _ENDING:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Job], None]) -> None:
        """Call ``callback(job)`` once it is done, at once if it is already.

        It runs on the thread that happens to finish the job, and holds up the others of its communicator meanwhile; it
        must not wait or raise."""
        with _ENDING:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def test(self) -> bool:
        """Whether it has completed."""
        self._progress.poke()
        return self.done

    @property
    def awaited(self) -> tuple[Progress, Call]:
        """The queue, and its call."""
        return self._progress, self.call

    @property
    def limit(self) -> float:
        """Seconds that it may take."""
        return self._progress.group.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Its value or its exception. Raises Timeout after `timeout` seconds; the operation stays pending then.

        `bound` is what the caller was given, if `timeout` is what is left of it."""
        self._progress.complete(self, timeout, bound)
        self.reported = True
        if self.error is not None:
            raise self.error
        return self.value

    def __del__(self) -> None:
        # A Job whose making was interrupted (by Ctrl-C) has no attributes.
        if getattr(self, "error", None) is not None and not self.reported:
            _log.error("%s failed, and nobody waited for it", self, exc_info=self.error)


class Waiting:
    """A wait of this thread, registered with the watch for as long as it is entered. One that `polls` calls
    :meth:`check` now and then."""

    __slots__ = ("_outer", "_polls", "_watch", "entry")

    def __init__(self, watch: Watch | None, entry: Raw, *, polls: bool = True) -> None:
        self._watch = watch
        self.entry = entry
        self._polls = polls
        self._outer: Wait | None = None

    def __enter__(self) -> Self:
        if self._watch is not None:
            active, ident = self._watch.active, get_ident()
            self._outer = active.get(ident)
            active[ident] = (self.entry, False, self._polls)
        return self

    def check(self) -> None:
        """Raise CommunicationError if it can never complete; to be called now and then."""
        if self._watch is not None:
            self._watch.check(self.entry)

    def __exit__(self, *args: object) -> None:
        if self._watch is not None:
            active, ident = self._watch.active, get_ident()
            if self._outer is None:
                del active[ident]
            else:
                active[ident] = self._outer


class Progress:
    """The queue of one communicator, which is `group` to those who look at it from outside."""

    def __repr__(self) -> str:
        return f"the queue of communicator {self.group.name}"

    def __init__(
        self, group: Group, watch: Watch | None, *, background: bool, explain: Callable[[Exception], Exception]
    ) -> None:
        self.group = group
        self._watch = watch
        self.background = background
        self.explain = explain
        self.lock = threading.Lock()
        self.queue: deque[Job] = deque()
        # What has failed in the background, as long as somebody may still wait for it.
        self.failures: WeakSet[Job] = WeakSet()
        self._filled = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self.observer: Observer | None = None
        # What all collectives begin with: it raises on all ranks if they call different ones, where that costs little.
        self.match: Callable[[Call], None] = unmatched
        # How many collectives have begun, which all ranks count alike; the one that runs, what carries it out, and on
        # which thread, which is stored first.
        self.number = 0
        self.current: Raw | None = None
        self.executing = Executing()
        self.thread = 0
        # Of the last job what `current` was then; the thread that runs a job or something else that is no blocking
        # collective; and the threads whose blocking collective comes after those.
        self._background_entry: Raw | None = None
        self.runner: int | None = None
        self._behind: list[tuple[int, Call]] = []
        # Threads that wait, without a bound, for what was submitted.
        self._awaiting: list[int] = []
        if watch is not None:
            watch.add(self)

    @property
    def thorough(self) -> bool:
        """Whether each call has to be prepared anew."""
        return self.observer is not None and self.observer.thorough

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait, without a bound, until it is their turn or what was submitted has ended."""
        return {ident for ident, _ in self._behind.copy()}.union(self._awaiting)

    def guarded(self, function: Callable[..., Any], call: Call, *args: Any, bounded: bool = False) -> Any:
        """Call `function` under the watch, which reports `call` if it takes too long. For whatever blocks outside the
        queue. `bounded` says that the program has given the call a bound, past which it raises Timeout.
        """
        site = call_site() if self.observer is not None and self.observer.sites else None
        entry = (self.group, 0, call, monotonic(), site)
        if self._watch is None:
            return self._kept(entry, function, args)
        active, ident = self._watch.active, get_ident()
        outer = active.get(ident)  # of what a signal's handler has interrupted
        active[ident] = (entry, bounded, False)
        try:
            return self._kept(entry, function, args)
        finally:
            if outer is None:
                del active[ident]
            else:
                active[ident] = outer

    def meet(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """Call `function`, which returns only if all `ranks` of the communicator (None: all of them) call it too. It
        takes no turn in the queue: of the meetings with one name of `call` the n-th is the same on all these ranks."""
        watch, whole = self._watch, self.group
        if watch is None:
            return self.guarded(function, call)
        ranks = range(len(whole.members)) if ranks is None else ranks
        members = tuple(whole.members[rank] for rank in ranks)
        group = Group(f"{whole.key} {call.name}", whole.name, members, ranks.index(whole.rank), whole.timeout)
        site = call_site() if self.observer is not None and self.observer.sites else None
        entry = (group, watch.begin_meeting(group.key), call, monotonic(), site)
        with Waiting(watch, entry, polls=False):
            return self._kept(entry, function, ())

    def waiting(self, call: Call, timeout: float) -> Waiting:
        """A wait that polls for at most `timeout` seconds, and takes no turn in the queue."""
        group = self.group if timeout <= self.group.timeout else replace(self.group, timeout=timeout)
        return Waiting(self._watch, (group, 0, call, monotonic(), None))

    def _kept(self, entry: Raw, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function`, and keep how that ended."""
        try:
            value = function(*args)
        except BaseException as error:
            keepers.keep((entry, monotonic(), _words(error)))
            raise
        keepers.keep((entry, monotonic(), ""))
        return value

    def run(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """Run a blocking operation, in which all ranks take part, after everything that was submitted before it.

        Raises CommunicatorError if another thread is in such a call, or if this one is already in an operation of this
        queue, which a signal handler or a function of the program has interrupted."""
        # In this order: a job leaves the queue when the lock is held.
        if self.queue or self.lock.locked():
            return self._run_behind(function, call, *args)
        with self.lock:
            if self.observer is not None:
                return self.carry_out(function, call, None, *args)
            # carry_out, written out for the calls that are made most.
            self.thread = get_ident()
            self.number = number = self.number + 1
            self.current = entry = (self.group, number, call, monotonic(), None)
            try:
                self.match(call)
                value = function(*args)
            except BaseException as error:  # noqa: BLE001  raised again
                raise self.failed(entry, error)  # noqa: B904  it has its cause
            self.current = None
            keepers.keep((entry, monotonic(), ""))
            return value

    def _run_behind(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """The same where something was submitted, or the lock is held."""
        me = get_ident(), call
        if self._behind or self.runner == me[0] or self._blocking() is not None:
            self._not_within(call)
            self._not_beside(me)
        try:
            self._behind.append(me)
            with self.lock:
                while self.queue:
                    self.queue.popleft().run()
                return self.carry_out(function, call, None, *args)
        finally:
            if me in self._behind:  # an interrupt may have come first
                self._behind.remove(me)

    def aside(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """:meth:`meet`, after everything that was submitted before it."""
        self._not_within(call)
        self._awaiting.append(me := get_ident())
        try:
            with self.lock:
                while self.queue:
                    self.queue.popleft().run()
                self.runner = me
                try:
                    return self.meet(function, call, ranks)
                finally:
                    self.runner = None
        finally:
            self._awaiting.remove(me)

    def carry_out(self, function: Callable[..., Any], call: Call, site: Site | None, *args: Any) -> Any:
        """Run an operation now, before the eyes of the observer. The lock is held."""
        observer = self.observer
        if observer is not None and observer.sites and site is None:
            site = call_site()
        self.thread = get_ident()
        self.number += 1
        entry = (self.group, self.number, call, monotonic(), site)
        if self.runner is not None:
            self._background_entry = entry
        self.current = entry
        try:
            if observer is None or not observer.compares:
                self.match(call)
            if observer is not None:
                observer.before(entry, function)
            value = function(*args)
            if observer is not None:
                observer.after(entry, function)
        except BaseException as error:  # noqa: BLE001  raised again
            raise self.failed(entry, error)  # noqa: B904  it has its cause
        self.current = None
        keepers.keep((entry, monotonic(), ""))
        return value

    def failed(self, entry: Raw, error: BaseException) -> BaseException:
        """The operation that runs has ended by `error`: what to raise for it."""
        try:
            shown = self.explained(error) if isinstance(error, Exception) else error
            if type(shown) is TruncationError:
                shown = self._of_other_size(entry, shown)
            if isinstance(shown, Timeout):
                # While the others still see it here.
                shown = self._given_up(entry, shown)
            elif type(shown) is CommunicationError:
                shown = self._after_failures(shown)
        finally:
            self.current = None
        keepers.keep((entry, monotonic(), _words(shown)))
        return shown

    def explained(self, error: Exception) -> Exception:
        """What to raise for `error`, which is its cause unless it is the same."""
        explained = self.explain(error)
        if explained is not error:
            explained.__cause__ = error
        return explained

    def submit(self, function: Callable[[], Any], call: Call) -> Job:
        """Queue an operation, in which all ranks take part, for the background."""
        job = Job(self, function, call, call_site() if self.observer is not None and self.observer.sites else None)
        with self._filled:
            self.queue.append(job)
            self._filled.notify()
            if self.background and self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"mpicoll-{self.group.name}", daemon=True)
                self._worker.start()
        return job

    def poke(self) -> None:
        """Without a worker, testing is what makes progress."""
        if not self.background and self.queue and self.lock.acquire(blocking=False):
            try:
                self._head()
            finally:
                self.lock.release()

    def complete(self, job: Job, timeout: float | None, bound: float | None = None) -> None:
        """Return when `job` is done. Without a timeout this thread helps, else the worker does it alone."""
        if timeout is None:
            if not job.done:
                self._not_within(job.call, "wait() for ")
            self._awaiting.append(me := get_ident())
            try:
                while not job.done:
                    with self.lock:
                        self._head()
            finally:
                self._awaiting.remove(me)
            return
        if self._watch is None:
            self._complete_within(job, timeout, bound)
            return
        self._watch.bounded.append(job.call)
        try:
            self._complete_within(job, timeout, bound)
        finally:
            self._watch.bounded.remove(job.call)

    def _complete_within(self, job: Job, timeout: float, bound: float | None) -> None:
        deadline = time.monotonic() + timeout
        nap = _NAPS[0]
        while not job.done:
            if time.monotonic() > deadline:
                whole = timeout if bound is None else bound
                if self._watch is not None:
                    self._watch.excused.append(job.call)
                raise self.late(self._place(job, whole), whole)
            self.poke()
            time.sleep(nap)
            nap = min(1.1 * nap, _NAPS[1])

    def _place(self, job: Job, seconds: float) -> str:
        """Which collective `job` is, and how far it has come in `seconds`."""
        queue, running = self.queue.copy(), self.current
        if job in queue:
            behind = "" if running is None else f" (behind {running[2]} number {running[1]})"
            return f"{job.call} number {self.number + 1 + queue.index(job)}{behind}"
        if seconds < FULL_FROM:
            return f"{job.call} number {self.number}"
        now = self.executing.position(self.group.members)
        return f"{job.call} number {self.number}{f' (in {now.where})' if now.waits_for else ''}"

    def late(self, what: str, seconds: float, after: str = "; it is still pending") -> Timeout:
        """What to raise when `what` has not completed within `seconds`. From half a second on, it asks all ranks where
        they are."""
        group = self.group
        text = f"{what} on {group}, rank {group.rank}: not complete within the timeout of {seconds:g} s{after}"
        return Timeout(self._with_report(text, seconds))

    def _given_up(self, entry: Raw, error: Timeout) -> Timeout:
        """What to raise for a collective that has waited for longer than the communicator's timeout."""
        group, number, call, _, _ = entry
        text = f"{call} number {number} on {group}, rank {group.rank}: {error}"
        shown = Timeout(self._with_report(text, group.timeout))
        shown.__cause__ = error
        return shown

    def unreported(self) -> list[Job]:
        """What has failed in the background without that anybody has learned of it."""
        return [job for job in list(self.failures) if job.done and not job.reported]

    def _after_failures(self, error: CommunicationError) -> CommunicationError:
        """What to raise for `error` of a collective, which may be due to one that has failed in the background."""
        earlier = self.unreported()
        if not earlier:
            return error
        earlier[0].reported = True
        shown = CommunicationError(
            f"{error}. Before, {earlier[0]}, rank {self.group.rank}, failed in the background: {earlier[0].error}"
        )
        shown.__cause__ = error
        return shown

    def _of_other_size(self, entry: Raw, error: TruncationError) -> TruncationError:
        """What to raise for a collective in which more or less data came than this rank expects."""
        group, number, call, _, _ = entry
        shown = TruncationError(
            f"{call} number {number} on {group.name}, rank {group.rank} of {len(group.members)}: {error}. Pass the same"
            " shape and dtype on all ranks, or counts= where their blocks differ; MPICOLL_CHECK=1 says which rank"
            " passes what"
        )
        shown.__cause__ = error
        return shown

    def _with_report(self, text: str, seconds: float) -> str:
        words = "" if self._watch is None or seconds < FULL_FROM else self._watch.inquire(text)
        return f"{text}\n{words}" if words else text

    def drain(self, timeout: float) -> bool:
        """Wait for everything that was submitted; whether that came about."""
        deadline = time.monotonic() + timeout
        while self.queue or self.lock.locked():
            if time.monotonic() > deadline:
                return False
            self.poke()
            time.sleep(1e-4)
        return True

    def close(self, *, abandon: bool = False) -> None:
        """End the worker, after what is queued has run or, to `abandon` it, without."""
        if abandon:
            self.abandon()
        self._not_within(Call("free"))
        self._awaiting.append(me := get_ident())
        try:
            with self.lock:
                while self.queue:
                    self.queue.popleft().run()
        finally:
            self._awaiting.remove(me)
        self.stop()

    def abandon(self) -> None:
        """Fail everything that is queued and does not run yet. Waits for nothing."""
        while self.queue:
            with suppress(IndexError):  # somebody else has just taken the last one
                job = self.queue.popleft()
                job.error = CommunicatorError(f"{job}: abandoned")
                job.finish()

    def refuse(self) -> None:
        """Raise CommunicatorError from now on: this process was forked from the one that communicates."""
        self.lock = self._filled = self._watch = _Refusal(self.group.name)  # type: ignore[assignment]

    def dropped(self) -> None:
        """The communicator is gone."""
        if not self._closed:
            self.retire()
        self.stop()

    def retire(self) -> None:
        """The program calls nothing on the communicator any more."""
        if self._watch is not None:
            # What is queued has still to begin, and so may have what holds the lock.
            self._watch.keep_position(self.group, self.number + len(self.queue) + self.lock.locked())

    def stop(self) -> None:
        """Let the worker end when the queue is empty."""
        with self._filled:
            self._closed = True
            self._filled.notify()

    def _blocking(self) -> Raw | None:
        """The blocking collective that runs, on whichever thread."""
        while True:
            # No lock is held: which of them was the last job's is certain for what runs before and after.
            running, background, again = self.current, self._background_entry, self.current
            if running is again:
                return None if running is background else running

    def _not_within(self, call: Call, verb: str = "") -> None:
        """Raise CommunicatorError if this thread holds the lock, for which `call` would wait for ever."""
        running = self._blocking()
        if self.runner == get_ident():
            within = "an operation" if self.current is None else _numbered(self.current)
        elif running is not None and self.thread == get_ident():
            within = _numbered(running)
        else:
            return
        raise CommunicatorError(
            f"{verb}{call} on {self.group}, rank {self.group.rank}: called in the middle of {within} on the same"
            f" communicator and thread ({threading.current_thread().name}), which can't go on before this call returns."
            " A signal handler, a function passed as op or a callback may use another communicator, such as one made by"
            " Communicator.duplicate() beforehand; or call this after the operation"
        )

    def _not_beside(self, me: tuple[int, Call]) -> None:
        """Raise CommunicatorError if another thread is in a blocking collective, or waits to begin one. Those that run
        or await what was submitted are none."""
        running = self._blocking()
        others = [(ident, call) for ident, call in self._behind.copy() if ident != me[0]]
        if running is not None or others:
            # A thread that finds the lock free takes no note of itself, which would take 30 ns of each call.
            what = others[0][1] if running is None else running[2]
            ident = next((ident for ident, call in others if call is what), None)
            number = "" if running is None else f" number {running[1]}"
            raise CommunicatorError(
                f"{me[1]} on {self.group}, rank {self.group.rank}: thread {threading.current_thread().name} calls it"
                f" while {_other_thread(ident)} is in {what}{number} on the same communicator, so other ranks might run"
                " the two in another order. Give each thread a communicator of its own (Communicator.duplicate() or"
                " split(0), called beforehand in one thread), or call both in one thread, in the background if they"
                " should overlap (iallreduce and its kin)"
            )

    def _head(self) -> None:
        """Run the head of the queue, if there is one. The lock is held."""
        if self.queue:
            self.queue.popleft().run()

    def _work(self) -> None:
        while True:
            with self._filled:
                while not self.queue and not self._closed:
                    if not self._filled.wait(_IDLE):
                        break
                if not self.queue:
                    self._worker = None
                    return
            with self.lock, suppress(BaseException):  # the job keeps it for whoever waits
                self._head()


def _numbered(entry: Raw) -> str:
    return f"{entry[2]} number {entry[1]}"


def _other_thread(ident: int | None) -> str:
    """The thread `ident`; if that isn't known, the threads of the program besides this one."""
    threads = thread_names()
    known = [threads[ident]] if ident in threads else []
    this = get_ident()
    ours = ("mpicoll-callback", "mpicoll-rank-")
    names = known or sorted(
        name
        for one, name in threads.items()
        if one != this and (not name.startswith("mpicoll-") or name.startswith(ours))
    )
    return f"thread {names[0]}" if len(names) == 1 else f"another thread (of {', '.join(names) or 'unknown name'})"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
