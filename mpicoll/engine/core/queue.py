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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite, EntryTuple, Group, Wait, find_call_site, sinks
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.stacks import thread_names
from mpicoll.engine.diagnostics.watchdog import MIN_REPORTED_TIMEOUT, Watchdog
from mpicoll.errors import CommunicationError, CommunicatorError, Timeout, TruncationError
from mpicoll.transport.waiting import wait_for

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("mpicoll")

_ENDING = threading.Lock()
"""Lock held briefly while an operation ends or a callback for its end is registered."""

_IDLE = 5.0
"""Seconds after which an idle worker ends. A program may have thousands of communicators."""


class _ForkedLock:
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

    ``needs_call_sites`` requests the call sites. ``needs_every_operation`` requires each call to be prepared again, so
    that `function` is a :class:`~mpicoll.engine.dispatch.Task` where it is a collective on arrays. An observer that
    ``compares_calls`` ensures that all ranks call the same operation.
    """

    needs_call_sites: bool
    needs_every_operation: bool
    compares_calls: bool

    def before(self, entry: EntryTuple, function: Callable[..., Any]) -> None:
        """Observe an operation before it runs. May raise, on all ranks alike, instead of running the operation."""

    def after(self, entry: EntryTuple, function: Callable[..., Any]) -> None:
        """Observe an operation after it has been carried out. May raise, on all ranks alike."""


def accept_any_call(call: Call) -> None:
    """Accept `call` without comparing it across the ranks."""


class QueuedOperation:
    """An operation in the queue."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_function",
        "_queue",
        "call",
        "done",
        "error",
        "reported",
        "site",
        "value",
    )
    __reduce_ex__ = refuse_pickling("QueuedOperation", "wait() for it and pass on its value")

    def __init__(self, queue: OperationQueue, function: Callable[[], Any], call: Call, site: CallSite | None) -> None:
        self.error: BaseException | None = None
        self.reported = False  # the outcome was delivered to a caller
        self._queue = queue
        self._function = function
        self.call = call
        self.site = site
        self.done = False
        self._callbacks: list[Callable[[QueuedOperation], None]] = []
        self.value: Any = None

    def __str__(self) -> str:
        return f"{self.call} on {self._queue.group}"

    def run(self) -> None:
        """Carry out the operation. The queue's lock is held."""
        queue = self._queue
        outer, queue.runner_thread = queue.runner_thread, get_ident()
        try:
            self.value = queue.run_observed(self._function, self.call, self.site)
        except Exception as error:  # noqa: BLE001  delivered to the thread that waits
            self.error = error
            queue.failures.add(self)
        except BaseException as error:
            # An interrupt is delivered to the current thread, even if that thread runs another thread's operation.
            self.error = error
            raise
        finally:
            try:
                self.finish()
            finally:
                queue.runner_thread = outer

    def finish(self) -> None:
        """Mark the operation as done and run its callbacks."""
        with _ENDING:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def when_done(self, callback: Callable[[QueuedOperation], None]) -> None:
        """Call ``callback(operation)`` once the operation is done, immediately if it is already.

        The callback runs on the thread that finishes the operation and blocks the other operations of the communicator
        meanwhile; it must not wait or raise.
        """
        with _ENDING:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def test(self) -> bool:
        """Return True if the operation has completed."""
        self._queue.make_progress()
        return self.done

    @property
    def awaited(self) -> tuple[OperationQueue, Call]:
        """The queue and the call of the operation."""
        return self._queue, self.call

    @property
    def limit(self) -> float:
        """Seconds that the operation may take."""
        return self._queue.group.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> Any:
        """Wait for the operation and return its value or raise its exception. Raises Timeout after `timeout` seconds,
        when the operation is still pending.

        `bound` is the timeout given by the caller, if `timeout` is the remainder of it.
        """
        self._queue.wait_until_done(self, timeout, bound)
        self.reported = True
        if self.error is not None:
            raise self.error
        return self.value

    def __del__(self) -> None:
        # A QueuedOperation whose constructor was interrupted (by Ctrl-C) has no attributes.
        if getattr(self, "error", None) is not None and not self.reported:
            _log.error("%s failed, and its error was not retrieved", self, exc_info=self.error)


class RegisteredWait:
    """Wait of this thread, registered with the watch while the context is entered. A wait that `polls` calls
    :meth:`check` periodically."""

    __slots__ = ("_outer", "_polls", "_watch", "entry")

    def __init__(self, watch: Watchdog | None, entry: EntryTuple, *, polls: bool = True) -> None:
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


class OperationQueue:
    """Queue of one communicator, identified to outside observers by `group`."""

    def __repr__(self) -> str:
        return f"the queue of communicator {self.group.name}"

    def __init__(
        self, group: Group, watch: Watchdog | None, *, background: bool, explain: Callable[[Exception], Exception]
    ) -> None:
        self.group = group
        self.watch = watch
        self.background = background
        self.explain = explain
        self.lock = threading.Lock()
        self.pending: deque[QueuedOperation] = deque()
        # Background operations that failed, as long as a caller may still wait for them.
        self.failures: WeakSet[QueuedOperation] = WeakSet()
        self._filled = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self.observer: Observer | None = None
        # Called first by all collectives: raises on all ranks if they call different ones, where that costs little.
        self.match: Callable[[Call], None] = accept_any_call
        # The number of collectives begun, which is the same on all ranks; the running collective; its executor; and its
        # thread, which is stored first.
        self.number = 0
        self.current: EntryTuple | None = None
        self.executing = Executing()
        self.thread = 0
        # The value of `current` during the last queued operation; the thread that runs a queued operation, or one that
        # is not a blocking collective; and the threads whose blocking collectives follow these.
        self._background_entry: EntryTuple | None = None
        self.runner_thread: int | None = None
        self._behind: list[tuple[int, Call]] = []
        # Threads that wait, without a bound, for what was submitted.
        self._awaiting: list[int] = []
        if watch is not None:
            watch.waits.add(self)

    @property
    def needs_every_operation(self) -> bool:
        """True if each call has to be prepared again."""
        return self.observer is not None and self.observer.needs_every_operation

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait, without a bound, for their turn or for a submitted operation."""
        return {ident for ident, _ in self._behind.copy()}.union(self._awaiting)

    def run_with_deadline(self, function: Callable[..., Any], call: Call, *args: Any, bounded: bool = False) -> Any:
        """Call `function` under the watch, which reports `call` if it takes too long. For calls that block outside the
        queue. `bounded` states that the program has given the call a bound, past which it raises Timeout."""
        site = find_call_site() if self.observer is not None and self.observer.needs_call_sites else None
        entry = (self.group, 0, call, monotonic(), site)
        if self.watch is None:
            return self._run_recorded(entry, function, args)
        active, ident = self.watch.active, get_ident()
        outer = active.get(ident)  # entry of the call that a signal handler has interrupted
        active[ident] = (entry, bounded, False)
        try:
            return self._run_recorded(entry, function, args)
        finally:
            if outer is None:
                del active[ident]
            else:
                active[ident] = outer

    def run_unqueued(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """Call `function`, which returns only if all `ranks` of the communicator (None: all of them) call it too. The
        call bypasses the queue: the n-th meeting with one name of `call` is the same on all these ranks."""
        watch, whole = self.watch, self.group
        if watch is None:
            return self.run_with_deadline(function, call)
        ranks = range(len(whole.members)) if ranks is None else ranks
        members = tuple(whole.members[rank] for rank in ranks)
        group = Group(f"{whole.key} {call.name}", whole.name, members, ranks.index(whole.rank), whole.timeout)
        site = find_call_site() if self.observer is not None and self.observer.needs_call_sites else None
        entry = (group, watch.waits.begin_meeting(group.key), call, monotonic(), site)
        with RegisteredWait(watch, entry, polls=False):
            return self._run_recorded(entry, function, ())

    def waiting(self, call: Call, timeout: float) -> RegisteredWait:
        """Return a wait that polls for at most `timeout` seconds and bypasses the queue."""
        group = self.group if timeout <= self.group.timeout else replace(self.group, timeout=timeout)
        return RegisteredWait(self.watch, (group, 0, call, monotonic(), None))

    def _run_recorded(self, entry: EntryTuple, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` and record the outcome."""
        try:
            value = function(*args)
        except BaseException as error:
            sinks.emit((entry, monotonic(), _describe_error(error)))
            raise
        sinks.emit((entry, monotonic(), ""))
        return value

    def run(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """Run a blocking operation, in which all ranks take part, after all operations that were submitted before it.

        Raises CommunicatorError if another thread is in a blocking operation of this queue, or if this thread is
        already in one, which a signal handler or a function of the program has interrupted.
        """
        # In this order: an operation leaves the queue when the lock is held.
        if self.pending or self.lock.locked():
            return self._run_behind(function, call, *args)
        with self.lock:
            if self.observer is not None:
                return self.run_observed(function, call, None, *args)
            # run_observed, inlined for the most frequent calls.
            self.thread = get_ident()
            self.number = number = self.number + 1
            self.current = entry = (self.group, number, call, monotonic(), None)
            try:
                self.match(call)
                value = function(*args)
            except BaseException as error:  # noqa: BLE001  raised again
                raise self.conclude_failure(entry, error)  # noqa: B904  it has its cause
            self.current = None
            sinks.emit((entry, monotonic(), ""))
            return value

    def _run_behind(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """Run a blocking operation when operations are queued or the lock is held."""
        me = get_ident(), call
        if self._behind or self.runner_thread == me[0] or self._blocking_entry() is not None:
            self._reject_nested(call)
            self._reject_concurrent(me)
        try:
            self._behind.append(me)
            with self.lock:
                while self.pending:
                    self.pending.popleft().run()
                return self.run_observed(function, call, None, *args)
        finally:
            if me in self._behind:  # an interrupt may have preceded the append
                self._behind.remove(me)

    def run_after_pending(self, function: Callable[[], Any], call: Call, ranks: Sequence[int] | None = None) -> Any:
        """Call :meth:`run_unqueued` after all operations that were submitted before it."""
        self._reject_nested(call)
        self._awaiting.append(me := get_ident())
        try:
            with self.lock:
                while self.pending:
                    self.pending.popleft().run()
                self.runner_thread = me
                try:
                    return self.run_unqueued(function, call, ranks)
                finally:
                    self.runner_thread = None
        finally:
            self._awaiting.remove(me)

    def run_observed(self, function: Callable[..., Any], call: Call, site: CallSite | None, *args: Any) -> Any:
        """Run an operation now, with the observer's callbacks. The lock is held."""
        observer = self.observer
        if observer is not None and observer.needs_call_sites and site is None:
            site = find_call_site()
        self.thread = get_ident()
        self.number += 1
        entry = (self.group, self.number, call, monotonic(), site)
        if self.runner_thread is not None:
            self._background_entry = entry
        self.current = entry
        try:
            if observer is None or not observer.compares_calls:
                self.match(call)
            if observer is not None:
                observer.before(entry, function)
            value = function(*args)
            if observer is not None:
                observer.after(entry, function)
        except BaseException as error:  # noqa: BLE001  raised again
            raise self.conclude_failure(entry, error)  # noqa: B904  it has its cause
        self.current = None
        sinks.emit((entry, monotonic(), ""))
        return value

    def conclude_failure(self, entry: EntryTuple, error: BaseException) -> BaseException:
        """Return the exception to raise for the running operation, which has ended with `error`."""
        try:
            shown = self.explain_error(error) if isinstance(error, Exception) else error
            if type(shown) is TruncationError:
                shown = self._size_error(entry, shown)
            if isinstance(shown, Timeout):
                # Before `current` is cleared, so that the other ranks still see the operation in the report.
                shown = self._deadline_error(entry, shown)
            elif type(shown) is CommunicationError:
                shown = self._name_earlier_failure(shown)
        finally:
            self.current = None
        sinks.emit((entry, monotonic(), _describe_error(shown)))
        return shown

    def explain_error(self, error: Exception) -> Exception:
        """Return the exception to raise for `error`, with `error` as its cause unless both are the same."""
        explained = self.explain(error)
        if explained is not error:
            explained.__cause__ = error
        return explained

    def submit(self, function: Callable[[], Any], call: Call) -> QueuedOperation:
        """Queue an operation, in which all ranks take part, for execution in the background."""
        operation = QueuedOperation(
            self,
            function,
            call,
            find_call_site() if self.observer is not None and self.observer.needs_call_sites else None,
        )
        with self._filled:
            self.pending.append(operation)
            self._filled.notify()
            if self.background and self._worker is None:
                self._worker = threading.Thread(target=self._run_worker, name=f"mpicoll-{self.group.name}", daemon=True)
                self._worker.start()
        return operation

    def make_progress(self) -> None:
        """Run the head of the queue if there is no worker: then only testing makes progress."""
        if not self.background and self.pending and self.lock.acquire(blocking=False):
            try:
                self._run_next()
            finally:
                self.lock.release()

    def wait_until_done(self, operation: QueuedOperation, timeout: float | None, bound: float | None = None) -> None:
        """Return when `operation` is done. Without a timeout this thread runs queued operations too; otherwise only the
        worker does."""
        if timeout is None:
            if not operation.done:
                self._reject_nested(operation.call, "wait() for ")
            self._awaiting.append(me := get_ident())
            try:
                while not operation.done:
                    with self.lock:
                        self._run_next()
            finally:
                self._awaiting.remove(me)
            return
        if self.watch is None:
            self._wait_within(operation, timeout, bound)
            return
        self.watch.waits.bounded.append(operation.call)
        try:
            self._wait_within(operation, timeout, bound)
        finally:
            self.watch.waits.bounded.remove(operation.call)

    def _wait_within(self, operation: QueuedOperation, timeout: float, bound: float | None) -> None:
        if wait_for(lambda: operation.done or None, timeout, self.make_progress):
            return
        whole = timeout if bound is None else bound
        if self.watch is not None:
            self.watch.waits.timed_out.append(operation.call)
        raise self.timeout_error(self._describe_progress(operation, whole), whole)

    def _describe_progress(self, operation: QueuedOperation, seconds: float) -> str:
        """Describe the collective of `operation` and its progress after `seconds`."""
        queue, running = self.pending.copy(), self.current
        if operation in queue:
            behind = "" if running is None else f" (behind {running[2]} number {running[1]})"
            return f"{operation.call} number {self.number + 1 + queue.index(operation)}{behind}"
        if seconds < MIN_REPORTED_TIMEOUT:
            return f"{operation.call} number {self.number}"
        now = self.executing.position(self.group.members)
        return f"{operation.call} number {self.number}{f' (in {now.where})' if now.waits_for else ''}"

    def timeout_error(self, what: str, seconds: float, after: str = "; it is still pending") -> Timeout:
        """Return the Timeout for `what`, which has not completed within `seconds`. From half a second on, all ranks are
        queried for their positions."""
        group = self.group
        text = f"{what} on {group}, rank {group.rank}: not complete within the timeout of {seconds:g} s{after}"
        return Timeout(self._add_report(text, seconds))

    def _deadline_error(self, entry: EntryTuple, error: Timeout) -> Timeout:
        """Return the Timeout for a collective that has exceeded the communicator's timeout."""
        group, number, call, _, _ = entry
        text = f"{call} number {number} on {group}, rank {group.rank}: {error}"
        shown = Timeout(self._add_report(text, group.timeout))
        shown.__cause__ = error
        return shown

    def unreported_failures(self) -> list[QueuedOperation]:
        """Return the operations that have failed in the background and whose errors have not been reported."""
        return [operation for operation in list(self.failures) if operation.done and not operation.reported]

    def _name_earlier_failure(self, error: CommunicationError) -> CommunicationError:
        """Return the exception for `error` of a collective, which may be caused by an earlier failure in the
        background."""
        earlier = self.unreported_failures()
        if not earlier:
            return error
        earlier[0].reported = True
        shown = CommunicationError(
            f"{error}. Before, {earlier[0]}, rank {self.group.rank}, failed in the background: {earlier[0].error}"
        )
        shown.__cause__ = error
        return shown

    def _size_error(self, entry: EntryTuple, error: TruncationError) -> TruncationError:
        """Return the exception for a collective that received more or less data than this rank expects."""
        group, number, call, _, _ = entry
        shown = TruncationError(
            f"{call} number {number} on {group.name}, rank {group.rank} of {len(group.members)}: {error}. Pass the same"
            " shape and dtype on all ranks, or counts= where their blocks differ; MPICOLL_CHECK=1 reports what"
            " each rank passes"
        )
        shown.__cause__ = error
        return shown

    def _add_report(self, text: str, seconds: float) -> str:
        words = "" if self.watch is None or seconds < MIN_REPORTED_TIMEOUT else self.watch.reporter.request(text)
        return f"{text}\n{words}" if words else text

    def drain(self, timeout: float) -> bool:
        """Wait for all submitted operations. Return False if they have not completed within `timeout` seconds."""
        return bool(wait_for(lambda: not (self.pending or self.lock.locked()) or None, timeout, self.make_progress))

    def close(self, *, abandon: bool = False) -> None:
        """End the worker, after the queued operations have run or, with `abandon`, without running them."""
        if abandon:
            self.abandon()
        self._reject_nested(Call("free"))
        self._awaiting.append(me := get_ident())
        try:
            with self.lock:
                while self.pending:
                    self.pending.popleft().run()
        finally:
            self._awaiting.remove(me)
        self.stop()

    def abandon(self) -> None:
        """Fail all queued operations that do not run yet. Does not wait."""
        while self.pending:
            with suppress(IndexError):  # another thread may have taken the last operation
                operation = self.pending.popleft()
                operation.error = CommunicatorError(f"{operation}: abandoned")
                operation.finish()

    def refuse(self) -> None:
        """Make all further operations raise CommunicatorError: this process was forked from the process that
        communicates."""
        self.lock = self._filled = self.watch = _ForkedLock(self.group.name)  # type: ignore[assignment]

    def on_dropped(self) -> None:
        """Retire the queue and end the worker when the communicator is garbage-collected."""
        if not self._closed:
            self.retire()
        self.stop()

    def retire(self) -> None:
        """Record the final position of the communicator, on which the program makes no more calls."""
        if self.watch is not None:
            # Queued operations have yet to begin, and so may the holder of the lock.
            self.watch.waits.retire(self.group, self.number + len(self.pending) + self.lock.locked())

    def stop(self) -> None:
        """Make the worker end when the queue is empty."""
        with self._filled:
            self._closed = True
            self._filled.notify()

    def _blocking_entry(self) -> EntryTuple | None:
        """Return the blocking collective that runs on any thread, or None."""
        while True:
            # No lock is held: `_background_entry` is consistent only if `current` did not change meanwhile.
            running, background, again = self.current, self._background_entry, self.current
            if running is again:
                return None if running is background else running

    def _reject_nested(self, call: Call, verb: str = "") -> None:
        """Raise CommunicatorError if this thread holds the lock, for which `call` would wait forever."""
        running = self._blocking_entry()
        if self.runner_thread == get_ident():
            within = "an operation" if self.current is None else _name_and_number(self.current)
        elif running is not None and self.thread == get_ident():
            within = _name_and_number(running)
        else:
            return
        raise CommunicatorError(
            f"{verb}{call} on {self.group}, rank {self.group.rank}: called in the middle of {within} on the same"
            f" communicator and thread ({threading.current_thread().name}), which can't go on before this call returns."
            " A signal handler, a function passed as op or a callback may use another communicator, such as one made by"
            " Communicator.duplicate() beforehand; or call this after the operation"
        )

    def _reject_concurrent(self, me: tuple[int, Call]) -> None:
        """Raise CommunicatorError if another thread runs a blocking collective or waits to begin one. Threads that run
        or await submitted operations do not count."""
        running = self._blocking_entry()
        others = [(ident, call) for ident, call in self._behind.copy() if ident != me[0]]
        if running is not None or others:
            # A thread that finds the lock free is not recorded, because that would cost 30 ns per call.
            what = others[0][1] if running is None else running[2]
            ident = next((ident for ident, call in others if call is what), None)
            number = "" if running is None else f" number {running[1]}"
            raise CommunicatorError(
                f"{me[1]} on {self.group}, rank {self.group.rank}: thread {threading.current_thread().name} calls it"
                f" while {_describe_other_thread(ident)} is in {what}{number} on the same communicator, so other ranks"
                " might run the two in another order. Give each thread a communicator of its own"
                " (Communicator.duplicate() or split(0), called beforehand in one thread), or call both in one thread,"
                " in the background if they should overlap (iallreduce and similar functions)"
            )

    def _run_next(self) -> None:
        """Run the head of the queue, if the queue is not empty. The lock is held."""
        if self.pending:
            self.pending.popleft().run()

    def _run_worker(self) -> None:
        while True:
            with self._filled:
                while not self.pending and not self._closed:
                    if not self._filled.wait(_IDLE):
                        break
                if not self.pending:
                    self._worker = None
                    return
            with self.lock, suppress(BaseException):  # the operation keeps the exception for its waiter
                self._run_next()


def _name_and_number(entry: EntryTuple) -> str:
    return f"{entry[2]} number {entry[1]}"


def _describe_other_thread(ident: int | None) -> str:
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


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
