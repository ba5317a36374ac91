"""Garbage collections that begin within a call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import finalize

# Python keeps up to 80 lists, and as many dictionaries, to use them again. Where it takes one, no collection begins.
_MORE_THAN_KEPT = 200


class _Cycle:
    def __init__(self) -> None:
        self.me = self


def make_garbage(finalizer: Callable[[], object]) -> None:
    """Have the next collection call `finalizer`."""
    finalize(_Cycle(), finalizer).atexit = False


@contextmanager
def _collections_restored() -> Iterator[None]:
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if was_enabled:
            gc.enable()
        else:
            gc.disable()


def collect_during(call: Callable[[], object], prepare: Callable[[], object], allocations: int = 100) -> None:
    """Call `call` so that a collection begins at the first object that it allocates, then at the second, and so on.
    Each time, `prepare` makes the garbage before.

    Only before Python 3.12 does a collection begin within a function that is written in C.
    """
    for allocation in range(allocations):
        with _collections_restored():
            gc.disable()
            gc.collect()
            prepare()
            used = [([], {}) for _ in range(_MORE_THAN_KEPT)]  # type: ignore[var-annotated]
            gc.set_threshold(gc.get_count()[0] + allocation)
            gc.enable()
            call()
            del used
            gc.collect(0)
