"""A bound on calls that block inside the MPI library, where no exception can reach them."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


class Watch:
    """Remembers what each thread is waiting for, and ends the job when one waits for longer than `timeout` seconds.

    A thread that blocks announces it by ``active[ident] = what`` (a tuple made for this call, whose parts say what it
    is) and takes it back afterwards; the entries are compared by identity, so the cost is two dictionary operations.
    """

    def __init__(self, timeout: float, abort: Callable[[int], None]) -> None:
        self.active: dict[int, tuple[Any, ...]] = {}
        self._timeout = timeout
        self._abort = abort
        threading.Thread(target=self._run, name="mpicoll-watch", daemon=True).start()

    def _run(self) -> None:
        seen: dict[int, tuple[tuple[Any, ...], float]] = {}
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            now = time.monotonic()
            for ident, what in list(self.active.items()):
                since = seen[ident][1] if ident in seen and seen[ident][0] is what else now
                seen[ident] = (what, since)
                if now - since > self._timeout:
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
