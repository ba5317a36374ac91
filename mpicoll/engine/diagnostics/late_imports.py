"""Imports that the watchdog makes when a job has run for a moment."""

from __future__ import annotations

import threading

from mpicoll.logs import get_logger

_IMPORT_TIMEOUT = 1.0
"""Most seconds that a fork waits for imports: one thread may import a module that waits for the thread that forks."""

_importing = threading.Lock()
"""Held during the imports and during forks. A forked child would wait without limit for a module that a thread of its
parent has imported only in part."""

_forking = threading.local()


def load_analysis() -> None:
    """Import what analyses the states of the ranks, and writes reports.

    A job that ends well does not need it, so that it is not imported at the start. The watchdog calls this when the job
    has run for a moment: when a rank fails, there may be no file descriptors left by which modules could be read.
    """
    with _importing:
        from mpicoll.engine.diagnostics import rank_state, report_file  # noqa: F401

        get_logger()


def prevent_imports() -> None:
    """Let no import begin before a fork, and wait for one that is under way."""
    _forking.has_lock = _importing.acquire(timeout=_IMPORT_TIMEOUT)


def allow_imports() -> None:
    """Allow imports after a fork, in the parent and in the child."""
    if _forking.has_lock:
        _importing.release()
