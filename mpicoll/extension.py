"""The extension in C, mpicoll._shm, and what replaces it where it is missing."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpicoll.logs import get_logger

if TYPE_CHECKING:
    from mpicoll._shm import Calls, QueueLock, WindowMemory

F = TypeVar("F", bound="Callable[..., Any]")

REMEDY = (
    "with a C compiler and Python's headers (apt-get install gcc python3-dev), install mpicoll again: with the options"
    " --force-reinstall --no-deps --no-cache-dir of pip"
)
"""Commands that install the extension. Without the last option pip would use the wheel that it built before."""


INTERFACE = 18
"""Number of the interface between the extension and the package, as in ``csrc/module.c``. It grows with each change of
names or arguments that the package depends on."""


@functools.cache
def _load() -> ModuleType | str:
    try:
        from mpicoll import _shm
    except ImportError as error:
        return str(error)
    if getattr(_shm, "INTERFACE", None) != INTERFACE:
        # Only in a checkout: it was compiled before the sources changed.
        reason = f"{_shm.__file__} was compiled from other sources; compile it: python setup.py build_ext --inplace"
        get_logger().warning("without the extension in C: %s", reason)
        return reason
    return _shm


def find_missing_reason() -> str | None:
    """Return why the extension can't be imported; None if it can."""
    found = _load()
    return found if isinstance(found, str) else None


def find_fold() -> Callable[[str, str, Sequence[Any], Any], None] | None:
    """Return the reduction of host memory in C, ``fold(op, dtype, parts, out)``; None if the extension is missing."""
    found = _load()
    return None if isinstance(found, str) else found.fold


def find_compression() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """Return ``compress`` and ``decompress`` in C (see :mod:`mpicoll.buffers.compression`); None if the extension is
    missing."""
    found = _load()
    return None if isinstance(found, str) else (found.compress, found.decompress)


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


def make_calls(lock: Any, queue: Any, pending: Any, group: Any) -> Calls | None:
    """Return the repeated calls of a queue of operations; None if the extension is missing."""
    found = _load()
    if isinstance(found, str):
        return None
    calls: Calls = found.Calls(lock, queue, pending, group)
    return calls


def find_window_memory() -> type[WindowMemory] | None:
    """Return the type of the memory of windows on one node; None if the extension is missing."""
    found = _load()
    return None if isinstance(found, str) else found.WindowMemory


def make_function(function: F, name: str, key: tuple[str, ...], given: Any, *, begins: bool = False) -> F:
    """Return a function that carries out, or `begins`, calls like earlier ones in the extension, and all others by
    `function`; or `function` itself if the extension is missing. See :class:`mpicoll._shm.Function`."""
    found = _load()
    if isinstance(found, str):
        return function
    plain = cast(FunctionType, function)
    code, named = plain.__code__, plain.__kwdefaults__ or {}
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    last = code.co_varnames[: code.co_argcount][-len(plain.__defaults__ or ()) :]
    defaults = dict(zip(last, plain.__defaults__ or (), strict=False)) | named
    made = found.Function(function, parameters, code.co_argcount, defaults, name, key, given, begins)
    return cast(F, functools.update_wrapper(made, function))


def set_communicator_type(kind: type) -> None:
    """Have the extension find the repeated calls of a communicator, which is a `kind`."""
    found = _load()
    if not isinstance(found, str):
        found.set_communicator_type(kind)


def set_world(queue: Any) -> None:
    """Have the extension carry out calls without a communicator in `queue`; None: have it leave them to Python."""
    found = _load()
    if not isinstance(found, str):
        found.set_world(queue)


def list_pending_messages() -> list[tuple[int, str, int, int]]:
    """Return the messages that the extension has started and that have not completed: the handle of the communicator,
    "send" or "recv", and MPI's rank and tag."""
    found = _load()
    return [] if isinstance(found, str) else found.list_pending_messages()


def test_pending_messages() -> None:
    """Make progress on the messages that the extension has started."""
    found = _load()
    if not isinstance(found, str):
        found.test_pending_messages()


def hand_over_begun_calls() -> None:
    """Have the queues complete the calls that the extension has begun and that are left alone."""
    found = _load()
    if not isinstance(found, str):
        found.hand_over_begun_calls()


def set_progress(start: Callable[[], object]) -> bool:
    """Have `start` called when messages are left alone; see ``mpicoll._shm.set_progress``. Return False if the
    extension, which starts such messages, is missing."""
    found = _load()
    if isinstance(found, str):
        return False
    found.set_progress(start)
    return True


def await_unattended_message() -> bool:
    """Return True when a message has been left alone, False if there is none for long."""
    found = _load()
    return not isinstance(found, str) and bool(found.await_unattended_message())


def stop_progress() -> None:
    """Have the thread that makes progress end."""
    found = _load()
    if not isinstance(found, str):
        found.stop_progress()


class PythonRecorder:
    """The last operations of this process that have ended."""

    def __init__(self, length: int) -> None:
        self._records: deque[Any] = deque(maxlen=length)
        self.end_entry, self.clear_records = self._records.append, self._records.clear

    def begin_entry(self, entry: Any) -> None:
        """Do nothing: operations are recorded when they end."""

    def list_records(self, direct: bool) -> list[Any]:
        """Return the last operations that have ended; none if `direct`."""
        return [] if direct else list(self._records.copy())

    def name_job(self, name: str) -> None:
        """Do nothing: other processes can't read the records."""

    def mark_left(self) -> None:
        """Do nothing: other processes can't read the records."""


def make_recorder(length: int) -> Any:
    """Return the recorder of the operations of this process: the extension, else one of `length` operations."""
    found = _load()
    return PythonRecorder(length) if isinstance(found, str) else found


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


def limit_sigterm(seconds: float, stack: int, output: int, text: str) -> None:
    """Have the extension end this process by SIGTERM if Python does not handle one within `seconds`, after it has
    written `text` and the contents of the pipe `stack` to `output`."""
    found = _load()
    if not isinstance(found, str):
        with suppress(OSError):  # timers are forbidden
            found.limit_sigterm(seconds, stack, output, text)


def cancel_sigterm_limit() -> None:
    """Cancel the limit of :func:`limit_sigterm`, because Python handles SIGTERM."""
    found = _load()
    if not isinstance(found, str):
        found.cancel_sigterm_limit()
