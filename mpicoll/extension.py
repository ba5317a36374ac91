"""The extension in C, mpicoll._shm, and what replaces it where it is missing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll._shm import QueueLock

REMEDY = (
    "with a C compiler and Python's headers (apt-get install gcc python3-dev), install mpicoll again: with the options"
    " --force-reinstall --no-deps --no-cache-dir of pip"
)
"""What brings the extension. Without the last option pip would use the wheel that it built before."""


@functools.cache
def _load() -> ModuleType | str:
    try:
        from mpicoll import _shm
    except ImportError as error:
        return str(error)
    return _shm


def find_missing_reason() -> str | None:
    """Return why the extension can't be imported; None if it can."""
    found = _load()
    return found if isinstance(found, str) else None


def find_fold() -> Callable[[str, str, Sequence[Any], Any], None] | None:
    """Return the reduction of host memory in C, ``fold(op, dtype, parts, out)``; None if the extension is missing."""
    found = _load()
    return None if isinstance(found, str) else found.fold


class PythonQueueLock:
    """The lock of a communicator's operations, and the number of collectives begun."""

    __slots__ = ("_lock", "acquire", "locked", "number", "release")

    # No call holds it in the extension.
    call, thread = None, 0

    def __init__(self) -> None:
        self._lock = lock = threading.Lock()
        self.number = 0
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()


def make_queue_lock() -> QueueLock | PythonQueueLock:
    """Return the lock of a communicator's operations."""
    found = _load()
    lock: QueueLock | PythonQueueLock = PythonQueueLock() if isinstance(found, str) else found.QueueLock()
    return lock


def list_records() -> list[Any]:
    """Return the last operations that the extension has recorded, in the order in which they ended."""
    found = _load()
    return [] if isinstance(found, str) else list(found.list_records())


def check_rules(function: Callable[[], Any]) -> None:
    """Have the extension leave calls to Python where `function` returns a true value."""
    found = _load()
    if not isinstance(found, str):
        found.check_rules(function)


def set_torch_access(tensor: type) -> bool:
    """Have the extension find the memory of tensors. Return False if that is not possible."""
    found = _load()
    return not isinstance(found, str) and bool(found.set_torch_access(tensor))


def set_recording(flag: bool) -> None:
    """Let the extension record the calls that it carries out, or have it leave all calls to Python."""
    found = _load()
    if not isinstance(found, str):
        found.set_recording(flag)
