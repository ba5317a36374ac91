"""Order and threads of the collectives of a communicator.

All collectives go through one FIFO, because MPI requires the same order on all ranks and never matches blocking with
non-blocking collectives: a rank may block in an operation that another rank started in the background. The thread that
holds the lock runs the head of the queue: a worker thread in the background, or a caller that waits. Calls that the
extension has begun in the thread of their caller (``csrc/begun_calls.c``) come before all that is queued.

Two threads of a program that call blocking operations on one communicator at the same time get an error: the order in
which they acquire the lock may differ between ranks. A thread that finds the lock free does not check for other
threads.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from mpicoll.engine.core.arrays import do_nothing
from mpicoll.engine.core.observer import Observer, accept_any_call
from mpicoll.engine.core.process_local import ForkedLock
from mpicoll.engine.core.queue_errors import (
    concurrent_call_error,
    deadline_error,
    describe_error,
    name_and_number,
    nested_call_error,
    size_error,
    timeout_error,
)
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.engine.core.registered_wait import RegisteredWait
from mpicoll.engine.diagnostics.flight_recorder import (
    Call,
    CallSite,
    EntryTuple,
    Group,
    begin_entry,
    find_call_site,
    sinks,
)
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.watchdog import MIN_REPORTED_TIMEOUT, Watchdog
from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed, Timeout, TruncationError
from mpicoll.extension import make_calls, make_queue_lock
from mpicoll.transport.waiting import wait_for

if TYPE_CHECKING:
    from mpicoll._shm import BegunCall, Collective, MessageCall, NativeCall, WindowMemory
    from mpicoll.engine.core.arena import Arena

_LATENESS = 0.8
"""Part of a communicator's timeout that ranks have, when it is freed or the program ends, to begin the calls that
another rank has ended."""

_IDLE = 5.0
"""Seconds after which an idle worker ends. A program may have thousands of communicators."""


@functools.cache
def _show_numpy_layout() -> None:
    """Have the extension read the fields of numpy arrays."""
    from mpicoll._shm import set_numpy_interface, set_numpy_layout  # there is a collective of the extension

    sample = np.zeros((2, 3), np.int16)
    sample.flags.writeable = False
    set_numpy_layout((np.ones(4), sample[:, 1:]))
    # Its name before numpy 2.0 is the second one.
    names = "numpy._core._multiarray_umath", "numpy.core._multiarray_umath"
    module = next((sys.modules[name] for name in names if name in sys.modules), None)
    capsule = getattr(module, "_ARRAY_API", None)
    if capsule is not None:
        set_numpy_interface(capsule)


def leave_to_python(missing: Any, x: Any, out: Any, *key: Any) -> Any:
    """Return `missing`: there is no call to repeat."""
    return missing


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
        # It has the number of the collectives begun, which is the same on all ranks.
        self.lock = make_queue_lock()
        self.pending: deque[QueuedOperation] = deque()
        # Background operations that failed, as long as a caller may still wait for them.
        self.failures: WeakSet[QueuedOperation] = WeakSet()
        self._filled = threading.Condition()
        self._worker: threading.Thread | None = None
        self._handed_over = False
        self._closed = False
        self._observer: Observer | None = None
        self.calls = make_calls(self.lock, self, self.pending, group)
        # Begins a call like an earlier one, and returns its request; if it can't, its first argument.
        self.begin_repeated: Callable[..., Any] = leave_to_python if self.calls is None else self.calls.begin
        # Carries out a call like an earlier one, and returns its result; if it can't, its first argument.
        self.run_repeated: Callable[..., Any] = leave_to_python if self.calls is None else self.calls.run
        # How many times calls were discarded: what :meth:`bind_call` returned before is to be bound again.
        self.discards = 0
        # Called first by all collectives: raises on all ranks if they call different ones, where that costs little.
        # Returns the exception of a signal handler that is to be raised after the collective, which all ranks have
        # begun.
        self.match: Callable[[Call], BaseException | None] = accept_any_call
        # What the ranks of a node share, as soon as it exists.
        self.arena: Arena | None = None
        # The running collective, its executor, and its thread, which is stored first.
        self.current: EntryTuple | None = None
        self.executing = Executing()
        self.thread = 0
        # The value of `current` during the last queued operation; the thread that runs a queued operation, or one that
        # is not a blocking collective; and the threads whose blocking collectives follow these.
        self.background_entry: EntryTuple | None = None
        self.runner_thread: int | None = None
        self._behind: list[tuple[int, Call]] = []
        # Threads that wait, without a bound, for what was submitted.
        self._awaiting: list[int] = []
        if watch is not None:
            watch.waits.add(self)

    @property
    def number(self) -> int:
        """Number of the collectives begun, which is the same on all ranks."""
        return self.lock.number

    @property
    def observer(self) -> Observer | None:
        """The observer of all operations, if there is one."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        if self.calls is not None:
            self.calls.enabled = observer is None

    def add_call(
        self,
        key: tuple[Any, ...],
        x: Any,
        result: Any,
        make_result: Callable[[], Any] | None,
        carrier: Collective | NativeCall | MessageCall,
        call: Call,
        *,
        in_place: bool,
    ) -> None:
        """Have later blocking calls like `call` carried out by `carrier`; see :meth:`mpicoll._shm.Calls.add`."""
        assert self.calls is not None
        _show_numpy_layout()
        self.calls.add(key, x, result, make_result, carrier, call, in_place)

    def bind_call(self, carrier: Collective | NativeCall, call: Call, source: Any, target: Any) -> Callable[[], bool]:
        """Return a function that carries out `call` on the flat arrays `source` and `target`, and returns True; False
        if Python has to."""
        from mpicoll._shm import BoundCall

        assert self.calls is not None
        return BoundCall(self.calls, carrier, call, source, target).run

    def bind_window(self, memory: WindowMemory, turn: Any, local: Any, shapes: list[tuple[int, ...]]) -> None:
        """Have later calls of a window carried out by `memory`; see :meth:`mpicoll._shm.WindowMemory.bind`."""
        if self.calls is not None:
            _show_numpy_layout()
            memory.bind(self.calls, turn, local, shapes)

    def discard_calls(self) -> None:
        """Carry out all calls as if they were the first ones."""
        self.discards += 1
        if self.calls is not None:
            self.calls.clear()

    @property
    def needs_every_operation(self) -> bool:
        """True if each call has to be prepared again."""
        return self.observer is not None and self.observer.needs_every_operation

    def waiting_threads(self) -> set[int]:
        """Return the threads that wait, without a bound, for their turn or for a submitted operation."""
        return {ident for ident, _ in list(self._behind)}.union(self._awaiting)

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
        group = self.group if timeout <= self.group.timeout else self.group.with_timeout(timeout)
        return RegisteredWait(self.watch, (group, 0, call, monotonic(), None))

    def _run_recorded(self, entry: EntryTuple, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `function` and record the outcome."""
        try:
            begin_entry(entry)
            value = function(*args)
        except BaseException as error:
            sinks.emit((entry, monotonic(), describe_error(error)))
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
            if self.has_begun:
                self.run_pending()
            if self.observer is not None:
                return self.run_observed(function, call, None, *args)
            # run_observed, inlined for the most frequent calls.
            self.thread = get_ident()
            self.lock.number = number = self.lock.number + 1
            self.current = entry = (self.group, number, call, monotonic(), None)
            try:
                begin_entry(entry)
                interrupt = self.match(call)
                value = function(*args)
                if interrupt is not None:
                    raise interrupt
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
                self.run_pending()
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
                self.run_pending()
                self.runner_thread = me
                try:
                    return self.run_unqueued(function, call, ranks)
                finally:
                    self.runner_thread = None
        finally:
            self._awaiting.remove(me)

    def _run_operation(self, operation: QueuedOperation) -> None:
        """Carry out a queued operation. The lock is held."""
        outer, self.runner_thread = self.runner_thread, get_ident()
        # Exceptions of signal handlers that were kept until the operation has ended: they are not its outcome, and
        # delivered to the current thread, even if that thread runs another thread's operation.
        interrupts: list[BaseException] = []
        try:
            operation.value = self.run_observed(
                operation.function, operation.call, operation.site, interrupts=interrupts
            )
        except Exception as error:  # noqa: BLE001  delivered to the thread that waits
            operation.error = error
            self.failures.add(operation)
        except BaseException as error:
            operation.error = error  # an interrupt amid the operation, which can't go on
            raise
        finally:
            try:
                operation.finish()
            finally:
                self.runner_thread = outer
        if interrupts:
            raise interrupts[0]

    def _call_keeping(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], interrupts: list[BaseException]
    ) -> Any:
        """Call `function`, and add the exception of a signal handler during its waits in shared memory to
        `interrupts`."""
        arena = self.arena
        if arena is None:
            return function(*arguments)
        arena.keeps_interrupt = True
        try:
            return function(*arguments)
        finally:
            arena.keeps_interrupt = False
            interrupt = arena.take_interrupt()
            if interrupt is not None:
                interrupts.append(interrupt)

    @property
    def has_begun(self) -> bool:
        """True if calls have been begun and not completed."""
        return self.calls is not None and self.calls.begun > 0

    @property
    def queued(self) -> int:
        """Number of the collectives that come next, and have no number yet."""
        return len(self.pending) + (0 if self.calls is None else self.calls.deferred)

    def run_pending(self) -> None:
        """Complete all calls that were begun, and run all queued operations. The lock is held."""
        while self.pending or self.has_begun:
            self._run_next()

    def run_observed(
        self,
        function: Callable[..., Any],
        call: Call,
        site: CallSite | None,
        *args: Any,
        interrupts: list[BaseException] | None = None,
    ) -> Any:
        """Run an operation now, with the observer's callbacks. The lock is held. Exceptions of signal handlers that are
        kept until the operation has ended are added to `interrupts`, if given, instead of being raised then."""
        observer = self.observer
        if observer is not None and observer.needs_call_sites and site is None:
            site = find_call_site()
        self.thread = get_ident()
        self.lock.number = number = self.lock.number + 1
        entry = (self.group, number, call, monotonic(), site)
        if self.runner_thread is not None:
            self.background_entry = entry
        self.current = entry
        interrupt = None
        kept: list[BaseException] = [] if interrupts is None else interrupts
        try:
            begin_entry(entry)
            if observer is None or not observer.compares_calls:
                interrupt = self.match(call)
            if observer is not None:
                observer.before(entry, function, kept)
            value = self._call_keeping(function, args, kept)
            if interrupt is not None:
                kept.append(interrupt)
            if observer is not None:
                observer.after(entry, function, kept)
        except BaseException as error:  # noqa: BLE001  raised again
            if kept and interrupts is None:
                raise kept[0] from self.conclude_failure(entry, error)
            raise self.conclude_failure(entry, error)  # noqa: B904  it has its cause
        if kept and interrupts is None:
            raise self.conclude_failure(entry, kept[0])
        self.current = None
        sinks.emit((entry, monotonic(), ""))
        return value

    def conclude_failure(self, entry: EntryTuple, error: BaseException) -> BaseException:
        """Return the exception to raise for the running operation, which has ended with `error`."""
        try:
            shown = self.explain_error(error) if isinstance(error, Exception) else error
            if isinstance(shown, TruncationError):
                shown = size_error(entry, shown)
            if isinstance(shown, Timeout):
                # Before `current` is cleared, so that the other ranks still see the operation in the report.
                shown = deadline_error(self.watch, entry, shown)
            elif type(shown) is CommunicationError or type(shown) is CommunicatorError:
                shown = self._name_earlier_failure(shown)
        finally:
            self.current = None
        sinks.emit((entry, monotonic(), describe_error(shown)))
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
            if self.background:
                self._start_worker()
        return operation

    def _start_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._run_worker, name=f"mpicoll-{self.group.name}", daemon=True)
            self._worker.start()

    def keep_failure(self, call: Call, error: BaseException) -> QueuedOperation:
        """Return an operation that has failed with `error`, for a call that was begun. Called by the extension."""
        failed = self._make_failed(call, error)
        self.failures.add(failed)
        return failed

    def _make_failed(self, call: Call, error: BaseException) -> QueuedOperation:
        failed = QueuedOperation(self, do_nothing, call, None)
        failed.error = error
        failed.done = True
        return failed

    def hand_over_begun(self) -> None:
        """Have the worker complete the calls that were begun. Without a worker, only threads that wait or test do so.
        Called by the extension."""
        if self.calls is None or not self.background:
            return
        self.calls.attend_to_begun()
        with self._filled:
            self._handed_over = True
            self._filled.notify()
            self._start_worker()

    def conclude_begun(self) -> None:
        """Complete the oldest call that was begun, in which the ranks have to meet. Called by the extension."""
        self.hand_over_begun()
        self.make_progress()

    def wait_for_begun(self, begun: BegunCall, timeout: float | None, bound: float | None) -> None:
        """Return when a call that was begun is done. Raises Timeout after `timeout` seconds. Called by the
        extension."""
        if timeout is not None:
            if begun.test():
                return
            self.hand_over_begun()
        self.wait_until_done(begun, timeout, bound)

    def make_progress(self) -> None:
        """Run the head of the queue if there is no worker: then only testing makes progress."""
        if not self.background and (self.pending or self.has_begun) and self.lock.acquire(blocking=False):
            try:
                self._run_next()
            finally:
                self.lock.release()

    def wait_until_done(
        self, operation: QueuedOperation | BegunCall, timeout: float | None, bound: float | None = None
    ) -> None:
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

    def _wait_within(self, operation: QueuedOperation | BegunCall, timeout: float, bound: float | None) -> None:
        if wait_for(lambda: operation.done or None, timeout, self.make_progress):
            return
        whole = timeout if bound is None else bound
        if self.watch is not None:
            self.watch.waits.timed_out.append(operation.call)
        raise timeout_error(self.watch, self.group, self._describe_progress(operation, whole), whole)

    def _describe_progress(self, operation: QueuedOperation | BegunCall, seconds: float) -> str:
        """Describe the collective of `operation` and its progress after `seconds`."""
        queue, running = self.pending.copy(), self.current
        if isinstance(operation, QueuedOperation):
            deferred = 0 if self.calls is None else self.calls.deferred
            number = self.number + deferred + 1 + queue.index(operation) if operation in queue else self.number
            waits = operation in queue
        else:
            number = operation.number
            waits = running is None or running[1] != number
        if waits:
            behind = "" if running is None else f" (behind {running[2]} number {running[1]})"
            return f"{operation.call} number {number}{behind}"
        if seconds < MIN_REPORTED_TIMEOUT:
            return f"{operation.call} number {number}"
        now = self.executing.position(self.group.members)
        return f"{operation.call} number {number}{f' (in {now.where})' if now.waits_for else ''}"

    def unreported_failures(self) -> list[QueuedOperation]:
        """Return the operations that have failed in the background and whose errors have not been reported."""
        return [operation for operation in list(self.failures) if operation.done and not operation.reported]

    def _name_earlier_failure(
        self, error: CommunicationError | CommunicatorError
    ) -> CommunicationError | CommunicatorError:
        """Return the exception for `error` of a collective, which may be caused by an earlier failure in the
        background."""
        earlier = self.unreported_failures()
        if not earlier:
            return error
        earlier[0].reported = True
        failure = earlier[0].error
        assert failure is not None
        shown = type(error)(
            f"{error}. Before, {earlier[0]}, rank {self.group.rank}, failed in the background:"
            f" {describe_error(failure)}"
        )
        shown.__cause__ = error
        return shown

    def drain(self, timeout: float) -> bool:
        """Wait for all submitted operations. Return False if they have not completed within `timeout` seconds."""
        if self.has_begun:
            self.hand_over_begun()
        return bool(
            wait_for(
                lambda: not (self.pending or self.lock.locked() or self.has_begun) or None, timeout, self.make_progress
            )
        )

    def describe_repeated(self, call: Call) -> bytes:
        """Return the description of a call that will be repeated, for ranks that call another collective. Called by the
        extension."""
        from mpicoll.engine.core.call_mismatch import encode_repeated_call  # late: the start of a job does not need it

        return encode_repeated_call(call).encode()

    def has_unseen_calls(self) -> bool:
        """Return True if this rank has ended calls that were not compared with those of all ranks."""
        return self.arena is not None and self.arena.find_unseen_call() is not None

    def compare_unseen_calls(self) -> None:
        """Compare the calls that this rank has ended ahead of other ranks, where no later call will do so.

        Raises MismatchError if they differ; CommunicationError if a rank can't begin them any more. That a rank is late
        is no error.
        """
        if self.arena is None:
            return
        with self.lock:
            self.run_pending()
            if not self.has_unseen_calls():
                return
            self.thread = get_ident()
            try:
                self.arena.compare_unseen_calls(_LATENESS * self.group.timeout, self._show_unseen_call)
            except RankFailed:
                # Ranks that have died are reported by the watchdog, and are no error where the program goes on without
                # them. Without it nothing else ends the job.
                if self.watch is None:
                    raise
            except CommunicationError as error:
                raise self.explain_error(error)  # noqa: B904  it has its cause
            finally:
                self.current = None

    def _show_unseen_call(self) -> None:
        """Show the first call that was not compared as running: the watchdog finds out if a rank has left without it.
        Ranks that are late may still begin this call, but not the next one."""
        unseen = None if self.arena is None else self.arena.find_unseen_call()
        if unseen is not None and (self.current is None or self.current[1] != unseen[1]):
            self.current = (self.group, unseen[1], unseen[0], monotonic(), None)

    def close(self, *, abandon: bool = False) -> None:
        """End the worker, after the queued operations have run or, with `abandon`, without running them."""
        if abandon:
            self.abandon()
        self._reject_nested(Call("free"))
        self._awaiting.append(me := get_ident())
        try:
            with self.lock:
                self.run_pending()
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
        if self.calls is not None and self.has_begun and self.lock.acquire(blocking=False):
            try:
                self.calls.fail_begun(
                    lambda call: self._make_failed(call, CommunicatorError(f"{call} on {self.group}: abandoned"))
                )
            finally:
                self.lock.release()

    def refuse(self) -> None:
        """Make all further operations raise CommunicatorError: this process was forked from the process that
        communicates."""
        self.discard_calls()
        if self.calls is not None:
            self.calls.enabled = False
            self.calls.refuses = True
        self.lock = self._filled = self.watch = ForkedLock(self.group.name)  # type: ignore[assignment]

    def on_dropped(self) -> None:
        """Retire the queue, end the worker and release shared memory when the communicator is garbage-collected."""
        if not self._closed:
            self.retire()
        self.stop()
        if self.has_begun:
            self.hand_over_begun()
        if self.pending or self.lock.locked() or self.has_begun:
            return
        if self.has_unseen_calls() and self.watch is not None:
            self.watch.waits.keep(self)  # to compare these calls at exit
            return
        # They refer to the arena.
        self.match, self.arena = accept_any_call, None
        self.discard_calls()

    def retire(self) -> None:
        """Record the final position of the communicator, on which the program makes no more calls."""
        if self.watch is not None:
            # Queued operations have yet to begin, deferred ones too, and so may the holder of the lock.
            self.watch.waits.retire(self.group, self.number + self.queued + self.lock.locked())

    def stop(self) -> None:
        """Make the worker end when the queue is empty."""
        with self._filled:
            self._closed = True
            self._filled.notify()

    def _blocking_entry(self) -> EntryTuple | None:
        """Return the blocking collective that runs on any thread, or None."""
        if (call := self.lock.call) is not None:
            return self.group, self.lock.number, call, monotonic(), None
        while True:
            # No lock is held: `background_entry` is consistent only if `current` did not change meanwhile.
            running, background, again = self.current, self.background_entry, self.current
            if running is again:
                return None if running is background else running

    def _reject_nested(self, call: Call, verb: str = "") -> None:
        """Raise CommunicatorError if this thread holds the lock, for which `call` would wait forever."""
        running = self._blocking_entry()
        if self.runner_thread == get_ident():
            within = "an operation" if self.current is None else name_and_number(self.current)
        elif running is not None and get_ident() == (self.lock.thread or self.thread):
            within = name_and_number(running)
        else:
            return
        raise nested_call_error(self.group, f"{verb}{call}", within)

    def _reject_concurrent(self, me: tuple[int, Call]) -> None:
        """Raise CommunicatorError if another thread runs a blocking collective or waits to begin one. Threads that run
        or await submitted operations do not count."""
        running = self._blocking_entry()
        others = [(ident, call) for ident, call in list(self._behind) if ident != me[0]]
        if running is not None or others:
            # A thread that finds the lock free is not recorded, because that would cost 30 ns per call.
            what = others[0][1] if running is None else running[2]
            ident = next((ident for ident, call in others if call is what), self.lock.thread)
            number = "" if running is None else f" number {running[1]}"
            raise concurrent_call_error(self.group, me[1], ident, f"{what}{number}")

    def _run_next(self) -> None:
        """Complete the oldest call that was begun; if there is none, run the head of the queue, if that is not empty.
        The lock is held."""
        if self.calls is not None and self.calls.begun > 0:
            self.calls.complete_oldest()
        elif self.pending:
            self._run_operation(self.pending.popleft())

    def _run_worker(self) -> None:
        while True:
            with self._filled:
                while not (self.pending or self._handed_over or self._closed):
                    if not self._filled.wait(_IDLE):
                        break
                if not (self.pending or self._handed_over):
                    self._worker = None
                    return
                self._handed_over = False
            with self.lock, suppress(BaseException):  # the operation keeps the exception for its waiter
                if self.calls is not None and self.calls.complete_handed_over():
                    self._handed_over = True
                elif self.pending:
                    self._run_next()
