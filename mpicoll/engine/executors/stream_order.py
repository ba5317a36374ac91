"""Collectives on device memory that are ordered by the streams of the devices: the host submits them and returns.

The ranks meet on the host, where they compare their calls and exchange what the work needs. After that each rank's
stream writes to a word of shared host memory that it has come to the collective; the stream of a rank that works waits
for these words, works, and writes another word, for which the streams of the other ranks wait. Both words of a rank
hold the number of the last collective, which grows, so that no word has to be reset. All ranks have submitted their
part soon after they have met, whatever their programs do then: a stream depends on no host any more.

A rank that dies, or whose work fails, leaves the streams of others waiting. A thread of each process looks for that. It
first marks the communicator as failed, and only then writes the words for which its streams wait: all later calls, and
waits for earlier ones, raise the error, because what the released streams have left is no result. Where the death of
a rank ends the job, the streams keep waiting until the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import numpy as np

from mpicoll.buffers.device import Device, StreamEvent
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call, Entry, EntryTuple
from mpicoll.errors import CommunicationError, MpicollError, RankFailed, Timeout
from mpicoll.logs import get_logger
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicoll.engine.core.arena import Arena

_LINE = 64
"""Bytes of a cache line. Each word has one of its own."""

_READY, _DONE = 0, 1
"""The words of a rank: its stream has come to a collective; the work that it does for others is done."""

_FAR = 1 << 30
"""Distance of numbers from which on words are set again: they are compared in a cyclic order of 2**32 numbers."""

_TRIAL = 5.0
"""Seconds within which streams have to see the words of others in the trial."""

_PERIOD = 0.05
"""Seconds between two looks at collectives that have not completed."""

_EXIT = 5.0
"""Seconds that collectives have to complete when the process ends."""


class _ThisThread(threading.local):
    """An object of each thread."""

    def __init__(self) -> None:
        self.token = object()
        self.deferral: Deferral | None = None


_this_thread = _ThisThread()


class Completion:
    """The end of submitted collectives, as a point in the work of a device. `kept` is what their work needs; `entry`
    names the collective for reports."""

    __slots__ = ("__weakref__", "_device", "_orders", "begin", "completed", "entry", "event", "kept", "number")

    def __init__(
        self, device: Device, orders: Sequence[SubmittedCollectives], entry: EntryTuple | None, kept: Any
    ) -> None:
        self._device = device
        self._orders = orders
        self.entry = entry
        self.kept: list[Any] = [kept]
        # None until all is submitted.
        self.event: StreamEvent | None = None
        self.completed = False
        self.begin = 0.0
        self.number = 0

    def record(self) -> None:
        """End the submission."""
        event, memory = self._device.record_submitted()
        self.kept.append(memory)
        self.begin = time.monotonic()
        self.event = event

    def done(self) -> bool:
        """Return True if the device has completed the collectives, or they have failed."""
        return self.completed or (self.event is not None and self._device.is_done(self.event))

    def wait(self) -> None:
        """Wait on the host. Raises the error of a communicator that has failed."""
        if not self.completed and self.event is not None:
            self._device.wait_for(self.event)
        self.check()

    def block_stream(self, stream: int) -> None:
        """Have the later work of `stream` begin when the collectives are complete. Raises the error of a communicator
        that has failed."""
        self.check()
        if not self.completed and self.event is not None:
            self._device.block_stream(stream, self.event)

    def follow(self) -> None:
        """Have the work that this thread submits to the device begin when the collectives are complete."""
        if not self.completed and self.event is not None:
            self._device.follow(self.event)

    def check(self) -> None:
        """Raise the error of a communicator that has failed."""
        for one in self._orders:
            one.check()

    def release(self) -> None:
        """Let go of the memory, after the device has completed the collectives."""
        self.completed = True
        self.kept.clear()
        # While a reference is left, a thread may wait for it: it would wait for what the event is recorded for next.
        finalize(self, self._device.reuse_event, self.event).atexit = False


class SubmittedCollectives:
    """Collectives of one communicator that its ranks submit to their devices, in one order, and do not wait for.

    A subclass submits them, and knows how failures of other ranks are found, and how pending work is ended.
    """

    def __init__(self, comm: CommunicatorCore, device: Device) -> None:
        self.device = device
        self._transport = comm.transport
        self._queue = ref(comm.queue)
        self._watched = comm.watch is not None and not comm.transport.survives_deaths
        self._rank, self._size = comm.rank, comm.size
        # The number of the last collective, the same on all ranks.
        self._number = 0
        # The completion of the last collective, and the thread whose stream it is on.
        self._last: Completion | None = None
        self._last_thread: object = None
        self._kept: list[Any] = []
        self._pending: deque[Completion] = deque()
        self._sweeping = threading.Lock()
        # Not the exception: the arrays in its frames would stay alive, and the memory of other ranks open.
        self._failure: MpicollError | str | None = None
        if comm.watch is not None:
            comm.watch.waits.submitted = _monitor.list_pending

    def _find_failure(self) -> MpicollError | None:
        """Return the error of another rank that has failed."""
        raise NotImplementedError

    def _release(self) -> None:
        """End the work that is pending on the device, after the communicator was marked as failed."""
        raise NotImplementedError

    def _check_late_ranks(self, first: Completion) -> None:
        """Raise the error of the first pending collective if a rank that it waits for has died, or is late."""
        raise NotImplementedError

    def _check_work(self) -> None:
        """Raise the error of pending work that has failed and does not end by itself."""

    # --- collectives

    def carry_out(
        self, after: Sequence[StreamEvent], function: Callable[..., None], *args: Any, kept: Any = None
    ) -> Completion:
        """Call `function`, which submits a collective, in queue order, and return its completion on the device. The
        work begins when `after` is done, and keeps `kept`."""
        queue, device = self._queue(), self.device
        completion = Completion(device, (self,), None if queue is None else queue.current, kept)
        self._pending.append(completion)
        _monitor.watch(self)
        with device.submitting(after):
            # Words have to be written in the order of their numbers.
            self.follow_last()
            try:
                function(*args)
            finally:
                completion.kept.append(self._kept)
                completion.number = self._number
                self._kept = []
                self._record(completion)
                self._last, self._last_thread = completion, _this_thread.token
        return completion

    def follow_last(self) -> None:
        """Have the work that this thread submits next begin when the last collective is complete."""
        if self._last is not None and self._last_thread is not _this_thread.token:
            self._last.follow()

    def _record(self, completion: Completion) -> None:
        try:
            completion.record()
        except BaseException as error:
            self._pending.remove(completion)
            self.fail(error)
            raise

    # --- failures

    def check(self) -> None:
        """Raise the error of the communicator if it has failed."""
        if self._failure is None:
            found = self._find_failure()
            if found is None:
                return
            self.fail(found)
        failure = self._failure
        assert failure is not None
        if isinstance(failure, MpicollError):
            raise type(failure)(*failure.args)
        raise CommunicationError(
            f"rank {self._rank} of {self._size}: an earlier collective on the device failed: {failure}; create another"
            " communicator"
        )

    def fail(self, error: BaseException) -> None:
        """Mark the communicator as failed by `error`, then end the work that is pending on the device."""
        if self._failure is None:
            self._failure = (
                type(error)(*error.args) if isinstance(error, MpicollError) else str(error) or type(error).__name__
            )
            queue = self._queue()
            if queue is not None:
                queue.discard_calls()
                queue.match = self._refuse
        self._release()

    def _refuse(self, call: Call) -> None:
        self.check()

    def supervise(self) -> bool:
        """Release what has completed, and look for failures of other ranks. Return True if something is left."""
        self._sweep()
        first = next(iter(self._pending), None)
        if first is None:
            return False
        if first.event is None:
            return True  # the thread that submits it looks itself
        try:
            self.check()
            self._check_work()
            if not self._watched:
                self._check_late_ranks(first)
        except Exception as error:  # noqa: BLE001  raised by later calls
            # Again, for what was submitted meanwhile.
            self.fail(error)
        return True

    @property
    def has_pending(self) -> bool:
        """True if the device may not have completed all collectives."""
        return bool(self._pending)

    def find_pending(self) -> Entry | None:
        """Return the first collective that the device has not completed, with the time of its submission."""
        first = next(iter(self._pending), None)
        if first is None or first.event is None or first.entry is None:
            return None
        return Entry._make(first.entry)._replace(begin=first.begin)

    def _sweep(self) -> None:
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            while self._pending:
                first = self._pending[0]
                if first.event is None:
                    return
                try:
                    if not first.done():
                        return
                except Exception as error:  # noqa: BLE001  raised by later calls
                    self.fail(error)
                # In this order: other threads take it that what is not pending keeps no memory open.
                first.release()
                self._pending.popleft()
        finally:
            self._sweeping.release()

    def drain(self, seconds: float) -> bool:
        """Wait until the device has completed all collectives that have been submitted, at most for that many seconds,
        and let go of their memory. Return True if none is left."""
        limit = time.monotonic() + seconds
        while self.supervise():
            first = next(iter(self._pending), None)
            if (first is not None and first.event is None) or time.monotonic() > limit:
                return False
            time.sleep(1e-4)
        return True


class StreamOrder(SubmittedCollectives):
    """Order of the collectives of one communicator of a node in the streams of its ranks. Created by
    :func:`create`."""

    def __init__(self, comm: CommunicatorCore, arena: Arena, device: Device, workers: Sequence[int]) -> None:
        super().__init__(comm, device)
        transport = comm.transport
        self._arena = arena
        rank, size = arena.rank, arena.size
        working = sorted(set(workers))
        self._working = working
        self._works = rank in working
        self._others = [one for one in range(size) if one != rank]
        self._ready = _offset(rank, _READY)
        self._is_awaited = working != [rank]
        self._sources = [_offset(one, _READY) for one in self._others]
        self._done = _offset(rank, _DONE)
        self._workers = [_offset(one, _DONE) for one in working if one != rank]
        # The words, and one that holds 1 + the rank that has failed.
        self._memory = transport.share((2 * size + 1) * _LINE if rank == 0 else 0)[0]
        values = self._memory[: (2 * size + 1) * _LINE].view(np.uint32)[:: _LINE // 4]
        self._values, self._failed = values[: 2 * size], values[2 * size :].data
        self._words = device.make_words(self._memory)

    # --- trial

    def try_words(self) -> str:
        """Return the reason why the streams of the ranks can't wait for each other; empty if they can. Collective."""
        words, device = self._words, self.device
        failure = self._try(lambda: words.write(self._ready, 1))
        failures = self._transport.allgather_text(failure)
        if not any(failures):
            failures = self._transport.allgather_text(self._try(self._wait_for_others))
        # Streams that still wait are let go.
        self._values[...] = 1
        self._transport.allgather_text("")
        with device.working():
            device.synchronize()
        return next((one for one in failures if one), "")

    def _wait_for_others(self) -> None:
        for one in self._sources:
            self._words.wait(one, 1)

    def _try(self, submit: Callable[[], Any]) -> str:
        """Submit words, and return the reason why they fail within the limit of the trial; empty if they don't."""
        device, name = self.device, f"rank {self._rank} (of this node, {self.device.name})"
        try:
            with device.submitting():
                submit()
                event, _ = device.record_submitted()
            limit = time.monotonic() + _TRIAL
            while not device.is_done(event):
                if time.monotonic() > limit:
                    return f"{name}: its stream does not see the words that other streams write"
                time.sleep(1e-4)
            device.reuse_event(event)
        except Exception as error:  # noqa: BLE001  CUDA's libraries have exceptions of their own
            return f"{name}: {error}"
        return ""

    def set_first_number(self, number: int) -> None:
        """Set the number before that of the first collective. Collective: no rank begins one before all have called
        this."""
        self._number = number
        self._values[2 * self._rank : 2 * self._rank + 2] = number

    # --- collectives

    def begin(self, number: int) -> None:
        """Begin the collective of that `number`, which is the same on all ranks. Raises the error of a communicator
        that has failed."""
        self.check()
        if (number - self._number) % (1 << 32) > _FAR:
            for one in list(self._pending):
                if one.event is not None:
                    one.wait()
            self.set_first_number((number - 1) % (1 << 32))

    def submit(
        self, number: int, load: Callable[[], None], work: Callable[[], None], store: Callable[[], None], kept: Any
    ) -> None:
        """Submit `load`, then `work` on the memory of all ranks, then `store`. All ranks call it, and wait for no rank
        meanwhile."""
        words = self._words
        self._number = number
        self._kept.append(kept)
        try:
            load()
            if self._is_awaited:
                words.write(self._ready, number)
            if self._works:
                for one in self._sources:
                    words.wait(one, number)
                work()
                words.write(self._done, number)
            for one in self._workers:
                words.wait(one, number)
            store()
        except BaseException as error:
            self.fail(error)
            raise

    # --- failures

    def _find_failure(self) -> MpicollError | None:
        failed = self._failed[0]
        if not failed:
            return None
        return CommunicationError(
            f"rank {self._rank} of {self._size} (of this node): rank {failed - 1} failed in a collective after its"
            " begin, as its own error explains; create another communicator"
        )

    def _release(self) -> None:
        """Let the streams of all ranks go on."""
        # No rank waits for this one in a later collective.
        if not self._arena.unusable:
            self._arena.abandon()
        if not self._failed[0]:
            self._failed[0] = 1 + self._rank
        self._values[...] = self._number

    def _check_late_ranks(self, first: Completion) -> None:
        try:
            self._transport.check_peers(0.0, self._find_late_ranks(first))
        except RankFailed:
            # One that was late may have come to it since, and then have ended.
            self._transport.check_peers(0.0, self._find_late_ranks(first))
        limit = self._transport.timeout
        if time.monotonic() - first.begin > limit:
            late = self._find_late_ranks(first)
            missing = rank_list(self._transport.members[one] for one in late) if late else "this rank"
            raise Timeout(f"on the device, the streams of {missing} did not come to it within {limit:g} s")

    def _find_late_ranks(self, first: Completion) -> list[int]:
        """Return the ranks whose words the first pending collective still waits for."""
        behind = (self._values - np.uint32(first.number)).view(np.int32).reshape(-1, 2) < 0
        return [one for one in self._others if behind[one, _READY] or (behind[one, _DONE] and one in self._working)]


def _offset(rank: int, which: int) -> int:
    return (2 * rank + which) * _LINE


def create(comm: CommunicatorCore, arena: Arena, device: Device, workers: Sequence[int]) -> StreamOrder | str:
    """Return the order of the streams of the ranks of `comm`, or the reason why there is none, the same on all ranks.
    Collective. `workers` are the ranks that work for each of them."""
    if comm.transport.survives_deaths and not comm.transport.background:
        return "ranks may die, which no other thread can find out without MPI_THREAD_MULTIPLE"
    failure, order = "", None
    try:
        order = StreamOrder(comm, arena, device, workers)
    except MpicollError as error:
        failure = f"rank {arena.rank} (of this node): {error}"
    failures = [one for one in comm.transport.allgather_text(failure) if one]
    if failures or order is None:
        return failures[0]
    if reason := order.try_words():
        return reason
    order.set_first_number(arena.number)
    comm.transport.allgather_text("")
    return order


class _Monitor:
    """Thread that looks at the collectives of this process that its devices have not completed."""

    def __init__(self) -> None:
        self._active: set[SubmittedCollectives] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = 0

    def watch(self, order: SubmittedCollectives) -> None:
        """Look at the collectives of `order` until none is left."""
        if order in self._active:
            return
        with self._changed:
            if self._thread is None:
                # Registered after the exit of MPI, hence called before it: the streams of others wait for these.
                self._process = os.getpid()
                atexit.register(self.end)
                self._thread = threading.Thread(target=self._run, name="mpicoll-streams", daemon=True)
                self._thread.start()
            self._active.add(order)
            self._changed.notify()

    def list_pending(self) -> list[Entry]:
        """Return the first pending collective of each communicator."""
        with self._changed:
            active = list(self._active)
        return [entry for one in active if (entry := one.find_pending()) is not None]

    def drain(self, seconds: float) -> list[SubmittedCollectives]:
        """Wait for the collectives that have been submitted, at most for that many seconds for each communicator, and
        let go of their memory. Return the communicators that have any left."""
        if os.getpid() != self._process:
            return []  # a child of fork can't use the device, nor may it say that the communicator has failed
        with self._changed:
            active = list(self._active)
        return [one for one in active if not one.drain(seconds)]

    def end(self) -> None:
        """Wait for all collectives, when the process ends."""
        for one in self.drain(_EXIT):
            get_logger().warning("%r ends while collectives on its device are pending", one)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._active:
                    self._changed.wait()
                active = list(self._active)
            for one in active:
                try:
                    left = one.supervise()
                except Exception:  # noqa: BLE001  the thread must go on for the others
                    get_logger().exception("a look at pending collectives failed")
                    left = True
                if not left:
                    with self._changed:
                        self._active.discard(one)
                        if one.has_pending:  # a thread that has added it to `active` before does not do so again
                            self._active.add(one)
            del active, one
            time.sleep(_PERIOD)


_monitor = _Monitor()


def release_memory(seconds: float) -> None:
    """Let go of the memory of all collectives that the devices of this process have been given, once they have
    completed them: at most so many seconds for each communicator."""
    _monitor.drain(seconds)


class Deferral:
    """A block in which this thread's collectives may be left to complete on the device: :attr:`completion` is then
    that of the last one, which follows all others. Elsewhere the host waits for each of them."""

    __slots__ = ("_outer", "completion")

    def __init__(self) -> None:
        self.completion: Completion | None = None

    def __enter__(self) -> Self:
        self._outer, _this_thread.deferral = _this_thread.deferral, self
        return self

    def __exit__(self, *error: object) -> None:
        _this_thread.deferral = self._outer


class Waiting:
    """A block in which the host waits for collectives, also inside of a :class:`Deferral`."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, _this_thread.deferral = _this_thread.deferral, None

    def __exit__(self, *error: object) -> None:
        _this_thread.deferral = self._outer


def complete_or_defer(completion: Completion) -> None:
    """Wait for `completion` on the host, unless this thread defers it."""
    deferral = _this_thread.deferral
    if deferral is None:
        completion.wait()
    else:
        deferral.completion = completion
