"""Order and threads of the collectives of a communicator.

All collectives go through one FIFO, because MPI requires the same order on all ranks and never matches blocking with
non-blocking collectives: a rank may block in an operation that another rank started in the background. The thread that
holds the lock runs the head of the queue: a worker thread in the background, or a caller that waits.

Two threads of a program that call blocking operations on one communicator at the same time get an error: the order in
which they acquire the lock may differ between ranks. A thread that finds the lock free does not check for other
threads.
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
"""Lock held briefly while a job ends or a callback for its end is registered."""

_NAPS = 20e-6, 1e-3
"""Seconds between two polls of a wait with a bound: first and maximum."""

_IDLE = 5.0
"""Seconds after which an idle worker ends. A program may have thousands of communicators."""


class _Refusal:
    """Replacement for a queue's locks in a process that must not communicate."""

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
        """Satisfy the context manager protocol; never reached."""


class Observer(Protocol):
    """Observer of operations, called before and after each operation in queue order.

    ``sites`` requests the call sites. A ``thorough`` observer requires each call to be prepared again, so that
    `function` is a :class:`~mpicoll.engine.operation.Task` where it is a collective on arrays. An observer that
    ``compares`` ensures that all ranks call the same operation.
    """

    sites: bool
    thorough: bool
    compares: bool

    def before(self, entry: Raw, function: Callable[..., Any]) -> None:
        """Observe an operation before it runs. May raise, on all ranks alike, instead of running the operation."""

    def after(self, entry: Raw, function: Callable[..., Any]) -> None:
        """Observe an operation after it has been carried out. May raise, on all ranks alike."""


def unmatched(call: Call) -> None:
    """Accept `call` without comparing it across the ranks."""


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
        self.reported = False  # the outcome was delivered to a caller
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
        """Carry out the job. The progress lock is held."""
        progress = self._progress
        outer, progress.runner = progress.runner, get_ident()
        try:
            self.value = progress.carry_out(self._function, self.call, self.site)
        except Exception as error:  # noqa: BLE001  delivered to the thread that waits
            self.error = error
            progress.failures.add(self)
        except BaseException as error:
            # An interrupt is delivered to the current thread, even if that thread runs another thread's job.
            self.error = error
            raise
        finally:
            try:
                self.finish()
            finally:
                progress.runner = outer

    def finish(self) -> None:
        """Mark the job as done and run its callbacks."""
        with _ENDING:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Job], None]) -> None:
        """Call ``callback(job)`` once the job is done, immediately if it is already.

        The callback runs on the thread that finishes the job and blocks the other operations of the communicator
        meanwhile; it must not wait or raise.
        """
        with _ENDING:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def test(self) -> bool:
        """Return True if the job has completed."""
        self._progress.poke()
        return self.done

    @property
    def awaited(self) -> tuple[Progress, Call]:
        """The queue and the call of the job."""
        return self._progress, self.call

    @property
    def limit(self) -> float:
        """Seconds that the job may take."""
        return self._progress.group.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Wait for the job and return its value or raise its exception. Raises Timeout after `timeout` seconds; the
        operation stays pending then.

        `bound` is the timeout given by the caller, if `timeout` is the remainder of it.
        """
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
    """Wait of this thread, registered with the watch while the context is entered. A wait that `polls` calls
    :meth:`check` periodically."""

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
        """Raise CommunicationError if the wait can never complete; to be called periodically."""
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
    """Queue of one communicator, identified to outside observers by `group`."""

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
        # Background jobs that failed, as long as a caller may still wait for them.
        self.failures: WeakSet[Job] = WeakSet()
        self._filled = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self.observer: Observer | None = None
        # Called first by all collectives: raises on all ranks if they call different ones, where that costs little.
        self.match: Callable[[Call], None] = unmatched
        # The number of collectives begun, which is the same on all ranks; the running collective; its executor; and its
        # thread, which is stored first.
        self.number = 0
        self.current: Raw | None = None
        self.executing = Executing()
        self.thread = 0
        # The value of `current` during the last job; the thread that runs a job or another operation that is not a
        # blocking collective; and the threads whose blocking collectives come after those.
        self._background_entry: Raw | None = None
        self.runner: int | None = None
        self._behind: list[tuple[int, Call]] = []
        # Threads that wait, without a bound, for what was submitted.
        self._awaiting: list[int] = []
        if watch is not None:
            watch.add(self)

    @property
    def thorough(self) -> bool:
        """True if each call has to be prepared again."""
        return self.observer is not None and self.observer.thorough

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait, without a bound, for their turn or for a submitted operation."""
        return {ident for ident, _ in self._behind.copy()}.union(self._awaiting)

    def guarded(self, function: Callable[..., Any], call: Call, *args: Any, bounded: bool = False) -> Any:
        """Call `function` under the watch, which reports `call` if it takes too long. For calls that block outside the
        queue. `bounded` states that the program has given the call a bound, past which it raises Timeout."""
        site = call_site() if self.observer is not None and self.observer.sites else None
        entry = (self.group, 0, call, monotonic(), site)
        if self._watch is None:
            return self._kept(entry, function, args)
        active, ident = self._watch.active, get_ident()
        outer = active.get(ident)  # entry of the call that a signal handler has interrupted
        active[ident] = (entry, bounded, False)
        try:
            return self._kept(entry, function, args)
        finally:
            if outer is None:
                del active[ident]
            else:
                active[ident] = outer

    def meet(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """Call `function`, which returns only if all `ranks` of the communicator (None: all of them) call it too. The
        call bypasses the queue: the n-th meeting with one name of `call` is the same on all these ranks."""
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
        """Return a wait that polls for at most `timeout` seconds and bypasses the queue."""
        group = self.group if timeout <= self.group.timeout else replace(self.group, timeout=timeout)
        return Waiting(self._watch, (group, 0, call, monotonic(), None))

    def _kept(self, entry: Raw, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` and record the outcome."""
        try:
            value = function(*args)
        except BaseException as error:
            keepers.keep((entry, monotonic(), _words(error)))
            raise
        keepers.keep((entry, monotonic(), ""))
        return value

    def run(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """Run a blocking operation, in which all ranks take part, after all operations that were submitted before it.

        Raises CommunicatorError if another thread is in a blocking operation of this queue, or if this thread is
        already in one, which a signal handler or a function of the program has interrupted.
        """
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
        """Run a blocking operation when operations are queued or the lock is held."""
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
            if me in self._behind:  # an interrupt may have preceded the append
                self._behind.remove(me)

    def aside(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """Call :meth:`meet` after all operations that were submitted before it."""
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
        """Run an operation now, with the observer's callbacks. The lock is held."""
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
        """Return the exception to raise for the running operation, which has ended with `error`."""
        try:
            shown = self.explained(error) if isinstance(error, Exception) else error
            if type(shown) is TruncationError:
                shown = self._of_other_size(entry, shown)
            if isinstance(shown, Timeout):
                # Before `current` is cleared, so that the other ranks still see the operation in the report.
                shown = self._given_up(entry, shown)
            elif type(shown) is CommunicationError:
                shown = self._after_failures(shown)
        finally:
            self.current = None
        keepers.keep((entry, monotonic(), _words(shown)))
        return shown

    def explained(self, error: Exception) -> Exception:
        """Return the exception to raise for `error`, with `error` as its cause unless both are the same."""
        explained = self.explain(error)
        if explained is not error:
            explained.__cause__ = error
        return explained

    def submit(self, function: Callable[[], Any], call: Call) -> Job:
        """Queue an operation, in which all ranks take part, for execution in the background."""
        job = Job(self, function, call, call_site() if self.observer is not None and self.observer.sites else None)
        with self._filled:
            self.queue.append(job)
            self._filled.notify()
            if self.background and self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"mpicoll-{self.group.name}", daemon=True)
                self._worker.start()
        return job

    def poke(self) -> None:
        """Run the head of the queue if there is no worker: then only testing makes progress."""
        if not self.background and self.queue and self.lock.acquire(blocking=False):
            try:
                self._head()
            finally:
                self.lock.release()

    def complete(self, job: Job, timeout: float | None, bound: float | None = None) -> None:
        """Return when `job` is done. Without a timeout this thread runs queued operations too; otherwise the worker
        runs them alone."""
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
        """Describe the collective of `job` and its progress after `seconds`."""
        queue, running = self.queue.copy(), self.current
        if job in queue:
            behind = "" if running is None else f" (behind {running[2]} number {running[1]})"
            return f"{job.call} number {self.number + 1 + queue.index(job)}{behind}"
        if seconds < FULL_FROM:
            return f"{job.call} number {self.number}"
        now = self.executing.position(self.group.members)
        return f"{job.call} number {self.number}{f' (in {now.where})' if now.waits_for else ''}"

    def late(self, what: str, seconds: float, after: str = "; it is still pending") -> Timeout:
        """Return the Timeout for `what`, which has not completed within `seconds`. From half a second on, all ranks are
        queried for their positions."""
        group = self.group
        text = f"{what} on {group}, rank {group.rank}: not complete within the timeout of {seconds:g} s{after}"
        return Timeout(self._with_report(text, seconds))

    def _given_up(self, entry: Raw, error: Timeout) -> Timeout:
        """Return the Timeout for a collective that has exceeded the communicator's timeout."""
        group, number, call, _, _ = entry
        text = f"{call} number {number} on {group}, rank {group.rank}: {error}"
        shown = Timeout(self._with_report(text, group.timeout))
        shown.__cause__ = error
        return shown

    def unreported(self) -> list[Job]:
        """Return the jobs that have failed in the background and whose errors have not been reported."""
        return [job for job in list(self.failures) if job.done and not job.reported]

    def _after_failures(self, error: CommunicationError) -> CommunicationError:
        """Return the exception for `error` of a collective, which may be caused by an earlier failure in the
        background."""
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
        """Return the exception for a collective that received more or less data than this rank expects."""
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
        """Wait for all submitted operations. Return False if they have not completed within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.queue or self.lock.locked():
            if time.monotonic() > deadline:
                return False
            self.poke()
            time.sleep(1e-4)
        return True

    def close(self, *, abandon: bool = False) -> None:
        """End the worker, after the queued operations have run or, with `abandon`, without running them."""
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
        """Fail all queued operations that do not run yet. Does not wait."""
        while self.queue:
            with suppress(IndexError):  # another thread may have taken the last job
                job = self.queue.popleft()
                job.error = CommunicatorError(f"{job}: abandoned")
                job.finish()

    def refuse(self) -> None:
        """Make all further operations raise CommunicatorError: this process was forked from the process that
        communicates."""
        self.lock = self._filled = self._watch = _Refusal(self.group.name)  # type: ignore[assignment]

    def dropped(self) -> None:
        """Retire the queue and end the worker when the communicator is garbage-collected."""
        if not self._closed:
            self.retire()
        self.stop()

    def retire(self) -> None:
        """Record the final position of the communicator, on which the program makes no more calls."""
        if self._watch is not None:
            # Queued jobs have yet to begin, and so may the holder of the lock.
            self._watch.keep_position(self.group, self.number + len(self.queue) + self.lock.locked())

    def stop(self) -> None:
        """Make the worker end when the queue is empty."""
        with self._filled:
            self._closed = True
            self._filled.notify()

    def _blocking(self) -> Raw | None:
        """Return the blocking collective that runs on any thread, or None."""
        while True:
            # No lock is held: `_background_entry` is consistent only if `current` did not change meanwhile.
            running, background, again = self.current, self._background_entry, self.current
            if running is again:
                return None if running is background else running

    def _not_within(self, call: Call, verb: str = "") -> None:
        """Raise CommunicatorError if this thread holds the lock, for which `call` would wait forever."""
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
        """Raise CommunicatorError if another thread runs a blocking collective or waits to begin one. Threads that run
        or await submitted operations do not count."""
        running = self._blocking()
        others = [(ident, call) for ident, call in self._behind.copy() if ident != me[0]]
        if running is not None or others:
            # A thread that finds the lock free is not recorded, because that would cost 30 ns per call.
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
        """Run the head of the queue, if the queue is not empty. The lock is held."""
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
            with self.lock, suppress(BaseException):  # the job keeps the exception for its waiter
                self._head()


def _numbered(entry: Raw) -> str:
    return f"{entry[2]} number {entry[1]}"


def _other_thread(ident: int | None) -> str:
    """Return the name of the thread `ident`; if unknown, the names of the program's threads except this one."""
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
