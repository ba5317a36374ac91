"""Thread that looks after what the extension has started and no thread waits for: it makes progress on messages, and
hands begun collectives over to the threads of their queues.

A message that is waited for at once costs no hand-over to this thread: it sleeps in the extension, without the
interpreter lock, until a message has been left alone for about a millisecond.
"""

from __future__ import annotations

import atexit
import functools
import threading

from mpicoll.extension import (
    await_unattended_message,
    hand_over_begun_calls,
    set_progress,
    stop_progress,
    test_pending_messages,
)

_SECONDS_TO_END = 5.0
"""Bound in seconds of the wait for the end of the thread."""

_threads: list[threading.Thread] = []
"""The last thread that was started."""


@functools.cache
def enable_progress() -> bool:
    """Have a thread make progress on messages that are left alone, until MPI is finalized. MPI has been loaded.

    Return False if the extension is missing.
    """
    if not set_progress(_start):
        return False
    # Registered after MPI was loaded, hence called before MPI is finalized.
    atexit.register(_stop)
    return True


def _start() -> None:
    thread = threading.Thread(target=_run, name="mpicoll-messages", daemon=True)
    _threads[:] = [thread]
    thread.start()


def _run() -> None:
    while await_unattended_message():
        test_pending_messages()
        hand_over_begun_calls()


def _stop() -> None:
    stop_progress()
    for thread in _threads:
        thread.join(_SECONDS_TO_END)
