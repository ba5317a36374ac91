"""A limit on the time of code that may hold the interpreter lock."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MONOTONIC, _NOTIFY_BY_SIGNAL = 1, 0


@contextmanager
def time_limit(seconds: float, stderr: int) -> Iterator[None]:
    """End this process after `seconds` within the block, with its stacks written to the descriptor `stderr`.

    The timer is one of POSIX, which needs no Python code. The timer of faulthandler, of which there is one only,
    belongs to the program, such as pytest. There is no limit without such a timer, or if the program uses all real-time
    signals.
    """
    timers = _find_timers()
    unused = (one for one in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(one) == signal.SIG_DFL)
    number = next(unused, 0)
    # A sigevent: a value of 8 bytes, the signal, the kind of notification, and 48 bytes that are not used.
    event = (ctypes.c_int * 16)(0, 0, number, _NOTIFY_BY_SIGNAL)
    timer = ctypes.c_void_p()
    if number == 0 or timers is None or timers.timer_create(_MONOTONIC, event, ctypes.byref(timer)) != 0:
        yield
        return
    faulthandler.register(number, file=stderr, chain=True)  # then the default action, which ends the process
    whole = int(seconds)
    timers.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9)), None)
    try:
        yield
    finally:
        timers.timer_delete(timer)
        faulthandler.unregister(number)


def _find_timers() -> ctypes.CDLL | None:
    """Return the library that has POSIX's timers: the C library, before glibc 2.34 another one."""
    for name in (None, "librt.so.1"):
        with suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "timer_create"):
                return library
    return None
