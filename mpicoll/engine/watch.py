"""A bound on calls that block inside the MPI library, where no exception can reach them."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet


class Watched(Protocol):
    """Something that waits for one thing at a time."""

    current: tuple[Any, ...] | None

    def drain(self, timeout: float) -> bool:
        """Wait until there is nothing left to do; whether that came about."""


class Watch:
    """Ends the job when something has been waiting for longer than `timeout` seconds.

    Who waits says so in ``current`` (a queue of collectives) or in ``active``, by thread: a tuple made for this call,
    whose parts say what it is. The tuples are compared by identity, so to be watched costs two assignments.
    """

    def __init__(self, timeout: float, abort: Callable[[int], None]) -> None:
        self.active: dict[int, tuple[Any, ...]] = {}
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
                    self._expire(what)

    def _expire(self, what: tuple[Any, ...]) -> None:
        sys.stderr.write(
            f"mpicoll: {' '.join(str(part) for part in what)} has been waiting for more than {self._timeout:g} s"
            " (MPICOLL_TIMEOUT); the job is ended. A rank may have died, left early or called another operation."
            " Stacks of this rank:\n"
        )
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stderr.flush()
        self._abort(1)


def abort_on_uncaught(abort: Callable[[int], None]) -> None:
    """Let an uncaught exception end the whole job: the other ranks would wait for this one for ever."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        previous(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        abort(1)

    sys.excepthook = hook
