"""A bound on calls that block inside the MPI library, where no exception can reach them."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Protocol
from weakref import WeakSet


class Watched(Protocol):
    """Something that waits for one thing at a time."""

    current: tuple[Any, ...] | None

    def drain(self, timeout: float) -> bool:
        """Wait until there is nothing left to do; whether that came about."""

    def refuse(self) -> None:
        """Raise CommunicatorError from now on."""


class Watch:
    """Ends the job when something has been waiting for longer than `timeout` seconds.

    Who waits says so in ``current`` (a queue of collectives) or in ``active``, by thread: a tuple made for this call,
    whose parts say what it is. The tuples are compared by identity, so to be watched costs two assignments.

    `interrupts`, from :func:`listen_for_signals`, lets it end the job when Ctrl-C can't interrupt who waits.
    """

    def __init__(self, timeout: float, abort: Callable[[int], None], interrupts: int | None = None) -> None:
        self.active: dict[int, tuple[Any, ...]] = {}
        self._interrupts = interrupts
        self._interrupted: tuple[float, set[int]] | None = None
        self._queues: WeakSet[Watched] = WeakSet()
        self._lock = threading.Lock()
        self._timeout = timeout
        self._abort = abort
        threading.Thread(target=self._run, name="mpicoll-watch", daemon=True).start()

    def add(self, queue: Watched) -> None:
        """Watch `queue` for as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def queues(self) -> list[Watched]:
        """All queues that are watched."""
        with self._lock:
            return list(self._queues)

    def _run(self) -> None:
        since: dict[int, tuple[tuple[Any, ...], float]] = {}
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            now = time.monotonic()
            waiting = [*self.active.copy().values(), *(one.current for one in self.queues())]
            # The tuples are kept while they are watched, so that no other takes over the identity of one of them.
            since = {id(what): since.get(id(what), (what, now)) for what in waiting if what is not None}
            for what, begin in since.values():
                if now - begin > self._timeout:
                    self._end(
                        f"{_text(what)} has been waiting for more than {self._timeout:g} s (MPICOLL_TIMEOUT); the job"
                        " is ended. A rank may have died, left early or called another operation."
                    )
            self._heed_interrupt(now, since)

    def _heed_interrupt(self, now: float, since: dict[int, tuple[tuple[Any, ...], float]]) -> None:
        """Python can't interrupt a call that blocks inside MPI; so end the job if one outlasts an interrupt."""
        if self._interrupts is None:
            return
        with suppress(BlockingIOError):
            if signal.SIGINT in os.read(self._interrupts, 4096):
                self._interrupted = now, set(since)
        if self._interrupted is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        when, waiting = self._interrupted
        stuck = waiting & set(since)
        if not stuck:
            self._interrupted = None
        elif now - when >= _AFTER_INTERRUPT:
            self._end(f"interrupted, but {_text(since[stuck.pop()][0])} goes on waiting; the job is ended.")

    def _end(self, why: str) -> None:
        sys.stderr.write(f"mpicoll: {why} Stacks of this rank:\n")
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        self._abort(1)


_AFTER_INTERRUPT = 2.0
"""Seconds that an interrupted call has to return to Python."""


def _text(what: tuple[Any, ...]) -> str:
    return " ".join(map(str, what))


def listen_for_signals() -> int | None:
    """Where the numbers of signals can be read as they come, even while the main thread is blocked outside Python; None
    if somebody else listens there, or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    taken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if taken == -1:
        return reader
    signal.set_wakeup_fd(taken)
    os.close(reader)
    os.close(writer)
    return None


def abort_on_failure(abort: Callable[[int], None]) -> None:
    """Let an uncaught exception, or ``sys.exit`` with a status other than 0, end the whole job: the other ranks would
    wait for this one for ever."""
    previous = sys.excepthook
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        previous(kind, error, traceback)
        if os.getpid() != owner:
            return  # a forked child, whose end concerns nobody
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed collects what earlier hooks write, to show it when they have returned.
            sys.__stderr__.write(sys.stderr.getvalue())
            sys.__stderr__.flush()
        abort(1)

    sys.excepthook = hook
    sys.exit = _exit

    def left() -> None:
        if _Exit.status and os.getpid() == owner:
            sys.stdout.flush()
            sys.stderr.write(f"mpicoll: this rank left by sys.exit with status {_Exit.status}; the job is ended\n")
            sys.stderr.flush()
            abort(_Exit.status)

    atexit.register(left)


class _Exit(SystemExit):
    """What ``sys.exit`` raises.

    Python tells nobody with which status it ends; but the exception that ends it is the one that is dropped when no
    Python code is left to run."""

    status = 0

    def __del__(self) -> None:
        try:
            sys._getframe(1)  # noqa: SLF001  there is no other way to ask
        except ValueError:
            if threading.current_thread() is not threading.main_thread():
                return
            _Exit.status = self.code if isinstance(self.code, int) else int(self.code is not None)


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    raise _Exit(status)
