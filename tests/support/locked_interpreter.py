"""A program whose main thread holds the interpreter lock when it gets SIGTERM, which ends it within 0.3 seconds; with
the argument ``cancelled``, one that cancels this limit, and ends by itself."""

from __future__ import annotations

import os
import signal
import sys
import time

from mpicoll import extension
from mpicoll.engine.diagnostics import signals


def hold_interpreter_lock() -> None:
    sum(range(10**11))


signals._SIGTERM_LIMIT = 0.3
assert signals.listen_for_signals("rank 2 of 3") is not None
os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1:] == ["cancelled"]:
    extension.cancel_sigterm_limit()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.6)
else:
    hold_interpreter_lock()
