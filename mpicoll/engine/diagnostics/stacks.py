"""The stacks of the threads of this process, taken while they run.

faulthandler writes them in one call, during which no other thread runs Python code. Frame objects of other threads, as
``sys._current_frames()`` returns them, must not be used: a frame that is about to return may be deallocated while it is
read, which crashes CPython 3.11.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import site
import threading
import traceback
from collections.abc import Iterable, Sequence

from mpicoll.engine.diagnostics.flight_recorder import CallSite, is_framework_file, is_own_file

_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  a string that others begin with
_INSTALLED = tuple(f"{folder}{os.sep}" for folder in site.getsitepackages())

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def take_stacks() -> dict[int, list[CallSite]]:
    """Return the innermost 100 frames of each thread by its identifier, the innermost one first; of 100 threads at
    most. Raises OSError if there are no file descriptors left."""
    fd = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        text = os.pread(fd, os.lseek(fd, 0, os.SEEK_CUR), 0).decode("ascii", "replace")
    finally:
        os.close(fd)
    found: dict[int, list[CallSite]] = {}
    stack: list[CallSite] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stack = found.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.fullmatch(line):
            stack.append(CallSite(_unescape(frame[1]), int(frame[2]), _unescape(frame[3])))
    return found


def _unescape(name: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), name)


def thread_names() -> dict[int, str]:
    """Return the names of the threads that Python has registered, by identifier."""
    # Not threading.enumerate(), which takes a lock: a signal handler may have interrupted the thread that holds it.
    threads: dict[int, threading.Thread] = dict(threading._active)  # type: ignore[attr-defined]  # noqa: SLF001
    return {ident: thread.name for ident, thread in threads.items()}


def traceback_of_main_thread() -> str:
    """Return what Python's traceback of the main thread would be, its innermost line last."""
    stack = take_stacks().get(threading.main_thread().ident or 0, [])
    lines = [(frame.file, frame.line, frame.function, source_line(frame)) for frame in reversed(stack)]
    return "".join(traceback.StackSummary.from_list(lines).format())


def source_line(frame: CallSite) -> str:
    """Return the line of code, or nothing if its file can't be read."""
    return linecache.getline(frame.file, frame.line).strip()


def program_site(stack: Iterable[CallSite]) -> CallSite | None:
    """Return the innermost line of the program, or that of an installed library if there is none.

    Returns None for a thread that runs neither, such as a background thread of this package.
    """
    outside = [frame for frame in stack if not is_own_file(frame.file)]
    direct = [frame for frame in outside if not is_framework_file(frame.file)]
    own = (frame for frame in direct if not frame.file.startswith((_STANDARD, *_INSTALLED)))
    installed = (frame for frame in direct or outside if frame.file.startswith(_INSTALLED))
    return next(own, next(installed, None))


def call_site_in(stack: Sequence[CallSite]) -> CallSite | None:
    """Return the line of the program that called this package, in the stack of a thread that executes an operation.

    A function of the program that the operation calls lies further in, and is skipped.
    """
    first = next((number for number, frame in enumerate(stack) if is_own_file(frame.file)), 0)
    return program_site(stack[first:])


def runs_program(stack: Iterable[CallSite]) -> bool:
    """Return True if a frame belongs neither to this package nor to the standard library."""
    return any(
        not is_own_file(frame.file)
        and (frame.file.startswith(_INSTALLED) or not frame.file.startswith((_STANDARD, "<frozen ")))
        for frame in stack
    )


def is_idle(stack: Sequence[CallSite]) -> bool:
    """Return True if a thread can do nothing by itself.

    Such a thread can be woken only by other threads of this process, as when it waits without a bound for an event
    or for work; or it is known to do nothing that matters.
    """
    if not stack:
        return False
    file, function = stack[0].file, stack[0].function
    if file == threading.__file__ and function == "wait":
        return source_line(stack[0]) == _UNBOUNDED
    return (file.endswith(_POOL) and function == "_worker") or any(_MONITOR in frame.file for frame in stack)


_UNBOUNDED = "waiter.acquire()"
"""The line of threading.Condition.wait that blocks where it was given no timeout."""

_POOL, _MONITOR = "/concurrent/futures/thread.py", "/tqdm/_monitor.py"
