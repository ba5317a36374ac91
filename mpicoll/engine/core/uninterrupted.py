"""Calls that no signal handler ends."""

from __future__ import annotations

import threading
from collections.abc import Callable


def call_uninterrupted(function: Callable[[], None]) -> BaseException | None:
    """Call `function`, in which other ranks wait for this one, and which ends within a bound. Return the exception that
    a signal handler has raised meanwhile, the first one of several.

    Signal handlers run in the main thread, between any two instructions. There `function` is called in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return None
    # An exception may leave it open whether a thread was started: only the first one calls the function.
    calls = [function]
    outcome: list[BaseException | None] = []
    ended = threading.Lock()
    ended.acquire()

    def run() -> None:
        try:
            call = calls.pop()
        except IndexError:
            return
        failure = None
        try:
            call()
        except BaseException as error:  # noqa: BLE001  raised in the main thread
            failure = error
        outcome.append(failure)
        ended.release()

    interrupt: BaseException | None = None
    while not outcome:
        try:
            if calls:
                try:
                    threading.Thread(target=run, name="mpicoll-uninterrupted", daemon=True).start()
                except RuntimeError:  # no thread can be started at interpreter shutdown
                    run()
            # Neither an event nor a join: an exception in their Python code may leave a lock held.
            ended.acquire()
        except BaseException as error:  # noqa: BLE001  raised by the caller, or below
            interrupt = interrupt or error
    if outcome[0] is not None:
        raise interrupt or outcome[0]
    return interrupt
