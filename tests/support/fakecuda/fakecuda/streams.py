"""Streams whose work waits until somebody waits for it.

A stream is a queue. Its work runs, in order, when the host synchronises the stream or an event recorded behind the
work, or when other work that has to wait for such an event is about to run. So whoever forgets to wait sees memory as
it was before, always. After work that touches memory it must not, its device is lost to the process: nothing runs there
any more, and each call that needs the device fails with the same error. Asking whether a stream or an event is done
lets at most one piece of work run, so that loops that only ask come to an end. With ``FAKECUDA_EAGER_RANDOM=SEED`` in
the environment, work also runs by chance whenever more is given: then memory that is overwritten too early is seen too.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from fakecuda import errors, memory
from fakecuda.errors import CUDARuntimeError
from fakecuda.memory import LOCK

Work: TypeAlias = Callable[[], Any]
"""Runs once; returns False if it can't be done yet, because another rank isn't there: then it is called again."""

Position: TypeAlias = "tuple[Stream, int]"
"""So much of a stream's work."""


class Stream:
    """`given` and `done` count its work. `legacy`: CUDA's null stream, which waits for all `blocking` streams of its
    device, as they do for it."""

    def __init__(self, device: int, *, blocking: bool = True, legacy: bool = False) -> None:
        self.device = device
        self.blocking = blocking and not legacy
        self.legacy = legacy
        self.queue: deque[tuple[Work | None, tuple[Position, ...]]] = deque()
        self.given = 0
        self.done = 0
        self.destroyed = False
        self.capture: Capture | None = None
        self.failed: CUDARuntimeError | None = None
        self._busy = threading.RLock()
        with LOCK:
            self.ptr = next(_pointers)
            _streams[self.ptr] = self

    def give(self, work: Work | None, after: Sequence[Position] = ()) -> None:
        """Work of this stream, which also waits for `after`; None only waits."""
        make_context()
        check_context(self.device)
        with LOCK:
            if self.capture is not None:
                self.capture.work.append(work)
                return
            if self.legacy and capture_beside(self):
                raise CUDARuntimeError(errors.CAPTURE_IMPLICIT)
            behind = [(one, one.given) for one in _peers(self) if one.done < one.given]
            self.queue.append((work, (*after, *behind)))
            self.given += 1
        _by_chance()

    def wait(self, position: int | None = None) -> None:
        """Run what has been given so far, or up to `position`."""
        _host_may_wait()
        check_context(self.device)
        if self.capture is not None:
            raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED)
        self._run(self.given if position is None else position)

    def query(self, position: int | None = None) -> int:
        """CUDA's status: 0 if all work, or that up to `position`, is done. If not, one piece of it may run. An error is
        told again and again, until somebody waits."""
        if is_lost(self.device):
            return _lost[self.device].status
        make_context()
        if self.capture is not None and position is None:
            raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED)
        wanted = self.given if position is None else position
        if self.done < wanted:
            self.advance()
        if self.failed is not None:
            return self.failed.status
        return 0 if self.done >= wanted else errors.NOT_READY

    def advance(self) -> bool:
        """Run the first piece of work, or one that it waits for, if one may run now. Return True if one has run. CUDA's
        errors are kept for whoever waits."""
        try:
            return not _here.running and self._step()
        except CUDARuntimeError as error:
            self.failed = error
            return True

    def _run(self, position: int) -> None:
        before, begin = -1, 0.0
        while self.done < position:
            if self.done != before:
                before, begin = self.done, time.monotonic()
            if not self._step(patient=True):
                if time.monotonic() - begin > float(os.environ.get("FAKECUDA_WAIT_TIMEOUT", "20")):
                    raise CUDARuntimeError(errors.LAUNCH_TIMEOUT, "what a stream waits for does not come")
                time.sleep(1e-4)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failed is not None:
            failed, self.failed = self.failed, None
            raise failed

    def _step(self, *, patient: bool = False) -> bool:
        """Run one piece of work of this stream, or of one that it waits for. Return False if none may run now. A
        thread that waits for another stream keeps nobody from running this one: streams may wait for each other by
        turns."""
        if not self._busy.acquire(blocking=False):
            return False
        try:
            check_context(self.device)
            if not self.queue:
                return False
            work, after = self.queue[0]
            late = next((one for one, position in after if one.done < position), None)
            if late is None:
                for one, _ in after if patient else ():
                    one._raise_failure()
                return self._finish(work)
        finally:
            self._busy.release()
        return late._step(patient=patient) if patient else late.advance()

    def _finish(self, work: Work | None) -> bool:
        finished = True
        _here.running += 1
        try:
            finished = work is None or work() is not False
        except CUDARuntimeError as error:
            if error.status in _FATAL:
                _lost.setdefault(self.device, error)
            raise
        finally:
            _here.running -= 1
            if finished:
                self.queue.popleft()
                self.done += 1
        return finished


class Event:
    """The work of a stream up to the last record of this event; complete if it was never recorded."""

    def __init__(self, device: int) -> None:
        make_context()
        self.device = device
        self.at: Position | Capture | None = None

    def record(self, stream: Stream) -> None:
        if stream.device != self.device:
            raise CUDARuntimeError(errors.INVALID_HANDLE, f"event of device {self.device}, stream of {stream.device}")
        make_context()
        check_context(self.device)
        if stream.capture is not None:
            self.at = stream.capture
            return
        if any(one.done < one.given for one in _peers(stream)):
            stream.give(None)  # an event is recorded behind what the stream waits for without being told
        self.at = stream, stream.given

    def _position(self) -> Position | None:
        if isinstance(self.at, Capture):
            raise CUDARuntimeError(errors.CAPTURED_EVENT)
        return self.at

    def hold_back(self, stream: Stream) -> None:
        """Work that `stream` is given from now on waits for this event."""
        check_context(self.device)
        if isinstance(self.at, Capture):
            stream.capture = self.at
        elif stream.capture is not None and self.at is not None:
            raise CUDARuntimeError(errors.CAPTURE_ISOLATION)
        elif self.at is not None:
            stream.give(None, [self.at])

    def query(self) -> int:
        """CUDA's status: 0 if it is done."""
        if is_lost(self.device):
            return _lost[self.device].status
        at = self._position()
        return 0 if at is None else at[0].query(at[1])

    def wait(self) -> None:
        at = self._position()
        check_context(self.device)
        if at is not None:
            _host_may_wait()
            at[0]._run(at[1])


GLOBAL, THREAD_LOCAL, RELAXED = range(3)


class Capture:
    """Work that a capturing stream, and those that waited for it, were given."""

    def __init__(self, origin: Stream, mode: int) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.spoilt = False
        self.work: list[Work | None] = []


def begin_capture(stream: Stream, mode: int) -> None:
    if stream.capture is not None or stream.legacy:
        raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED)
    stream.capture = Capture(stream, mode)


def end_capture(stream: Stream) -> list[Work | None]:
    """The work that was captured, in an order in which it may run."""
    capture = stream.capture
    if capture is None or capture.origin is not stream:
        raise CUDARuntimeError(errors.CAPTURE_UNMATCHED)
    with LOCK:
        for one in _streams.values():
            if one.capture is capture:
                one.capture = None
    if capture.spoilt:
        raise CUDARuntimeError(errors.CAPTURE_INVALIDATED)
    return capture.work


def exchange_capture_mode(mode: int) -> int:
    """Set the capture mode of this thread; return the previous mode."""
    before, _here.mode = _here.mode, mode
    return before


def not_while_capturing() -> None:
    """For calls that CUDA thinks unsafe: they fail while somebody captures who has not asked to be spared, and spoil
    the capture."""
    with LOCK:
        captures = [one.capture for one in _streams.values() if one.capture is not None]
    for one in captures:
        mine = one.thread == threading.get_ident() and one.mode != RELAXED
        if (mine and _here.mode != RELAXED) or (one.mode == GLOBAL and _here.mode == GLOBAL):
            one.spoilt = True
            raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED, "another call during a capture")


class _Here(threading.local):
    """Of a thread: its current device and whether that has a context, how deep it is in running work, which captures it
    heeds, its per-thread default streams."""

    def __init__(self) -> None:
        self.device = 0
        self.bound = False
        self.running = 0
        self.mode = GLOBAL
        self.streams: dict[int, Stream] = {}

    @property
    def device(self) -> int:
        return self._device if self._selections == _selections else 0

    @device.setter
    def device(self, index: int) -> None:
        self._device, self._selections = index, _selections


_selections = 0
"""How many times all threads have lost the device that they had selected."""

_here = _Here()
_streams: dict[int, Stream] = {}
_events: dict[int, Event] = {}
_pointers = itertools.count(0x5500_0000, 0x40)
_legacy: dict[int, Stream] = {}
contexts: set[int] = set()
"""The devices on which this process has a context, which takes some of their memory."""
_lost: dict[int, CUDARuntimeError] = {}
"""The devices whose context is lost, and the error of the work that did it."""

_FATAL = frozenset({errors.ILLEGAL_ADDRESS, errors.MISALIGNED})

_forked = False
_chance: tuple[str, random.Random] = ("", random.Random(0))


def _in_child() -> None:
    global _forked  # noqa: PLW0603
    _forked = True


os.register_at_fork(after_in_child=_in_child)


def _only_here() -> None:
    if _forked:
        raise CUDARuntimeError(errors.INITIALIZATION, "CUDA can't be used in a forked process")


def make_context() -> None:
    """Make the context of the current device, as each runtime call does that needs the device."""
    _bind_context()
    check_context(_here.device)


def _bind_context() -> None:
    _only_here()
    contexts.add(_here.device)
    _here.bound = True


def check_context(index: int) -> None:
    """Raise the error of the work by which this process has lost the device."""
    lost = _lost.get(index)
    if lost is not None:
        raise CUDARuntimeError(lost.status, f"earlier, by which device {index} is lost: {lost.detail}")


def is_lost(index: int) -> bool:
    """Return True if this process has lost the device."""
    return index in _lost


def recover() -> None:
    """Give this process back the devices that it has lost, without their pending work. Only a new process could on
    hardware."""
    with LOCK:
        for one in _streams.values():
            if one.device in _lost:
                one.queue.clear()
                one.done, one.failed = one.given, None
        _lost.clear()


def deselect_devices() -> None:
    """Make the first device the current one of all threads, as in a new process: there may be no others any more."""
    global _selections  # noqa: PLW0603
    _selections += 1


def has_context() -> bool:
    """Return True if this thread has a current context, as the driver's own functions need it."""
    return _here.bound


def _host_may_wait() -> None:
    make_context()
    if _here.running:
        raise CUDARuntimeError(errors.NOT_PERMITTED, "from within the work of a stream")


def _peers(stream: Stream) -> Iterator[Stream]:
    """The streams with which it synchronises without being told."""
    if stream.legacy:
        for pointer, one in list(_streams.items()):
            if one.device == stream.device and one.blocking:
                yield one
            if one.destroyed and not one.queue:
                del _streams[pointer]
    elif stream.blocking and stream.device in _legacy:
        yield _legacy[stream.device]


def capture_beside(stream: Stream) -> bool:
    """Return True if a stream is capturing that the legacy default stream would wait for."""
    return any(one.capture for one in _peers(stream))


def _by_chance() -> None:
    """Let some work run that need not run yet."""
    global _chance  # noqa: PLW0603
    seed = os.environ.get("FAKECUDA_EAGER_RANDOM", "")
    if not seed or _here.running:
        return
    with LOCK:
        if _chance[0] != seed:
            _chance = seed, random.Random(seed)
        pick = _chance[1]
        waiting = [one for one in _streams.values() if one.queue and one.capture is None]
        chosen = [pick.choice(waiting) for _ in range(pick.choice([0, 0, 1, 1, 2, 5]))] if waiting else []
    for one in chosen:
        one.advance()


def device() -> int:
    """This thread's current device."""
    return _here.device


def use_device(index: int) -> None:
    if index != _here.device or not _here.bound:
        check_device(index)  # not each time, as it asks the environment
    _here.device = index
    _bind_context()


def check_device(index: int) -> None:
    if not 0 <= index < len(memory.visible()):
        raise CUDARuntimeError(errors.INVALID_DEVICE, f"device {index} of {len(memory.visible())}")


def stream_at(pointer: int) -> Stream:
    """The stream that CUDA knows by `pointer`: 0 or 1 the legacy default stream of the current device, 2 that of this
    thread."""
    if pointer in (0, 1):
        with LOCK:
            if _here.device not in _legacy:
                _legacy[_here.device] = Stream(_here.device, legacy=True)
            return _legacy[_here.device]
    if pointer == 2:
        if _here.device not in _here.streams:
            _here.streams[_here.device] = Stream(_here.device)
        return _here.streams[_here.device]
    stream = _streams.get(pointer)
    if stream is None or stream.destroyed:
        raise CUDARuntimeError(errors.INVALID_HANDLE, f"stream {pointer:#x}")
    return stream


def create_event() -> int:
    """The pointer of a new event of the current device."""
    with LOCK:
        pointer = next(_pointers)
    _events[pointer] = Event(_here.device)
    return pointer


def destroy_event(pointer: int) -> None:
    event_at(pointer)
    del _events[pointer]


def event_at(pointer: int) -> Event:
    """The event that CUDA knows by `pointer`."""
    if pointer not in _events:
        raise CUDARuntimeError(errors.INVALID_HANDLE, f"event {pointer:#x}")
    return _events[pointer]


def destroy(stream: Stream) -> None:
    """Its work is still to be done."""
    stream.destroyed = True
    with LOCK:
        if not stream.queue:
            _streams.pop(stream.ptr, None)


def wait_for_device(index: int) -> None:
    """cudaDeviceSynchronize."""
    with LOCK:
        streams = [one for one in _streams.values() if one.device == index]
    if any(one.capture for one in streams):
        raise CUDARuntimeError(errors.CAPTURE_UNSUPPORTED)
    _host_may_wait()
    for one in streams:
        one._run(one.given)


def has_work(index: int) -> bool:
    """Return True if a stream of the device has pending work."""
    return any(one.done < one.given for one in list(_streams.values()) if one.device == index)


def launch(stream: Stream, work: Work, devices: Sequence[int] = ()) -> None:
    """A kernel on arrays of `devices`, which runs on the current device."""
    if stream.device != _here.device:
        raise CUDARuntimeError(
            errors.INVALID_HANDLE, f"stream of device {stream.device}, current device {_here.device}"
        )
    for one in devices:
        if not memory.can_reach(_here.device, one):
            raise CUDARuntimeError(errors.ILLEGAL_ADDRESS, f"memory of device {one} on device {_here.device}")

    def kernel() -> Any:
        memory.kernel.device = stream.device
        try:
            return work()
        finally:
            memory.kernel.device = None

    stream.give(kernel)


@contextmanager
def on_device(index: int) -> Iterator[None]:
    before = device()
    use_device(index)
    try:
        yield
    finally:
        use_device(before)


def running() -> bool:
    """Return True if this thread runs the work of a stream, or holds the lock: then the host can't wait here."""
    return bool(_here.running) or LOCK._is_owned()  # type: ignore[attr-defined]
