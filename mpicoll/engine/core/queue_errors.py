"""Errors of the operations of a queue."""

from __future__ import annotations

import threading

from mpicoll.engine.diagnostics.flight_recorder import Call, EntryTuple, Group
from mpicoll.engine.diagnostics.watchdog import MIN_REPORTED_TIMEOUT, Watchdog
from mpicoll.errors import CommunicatorError, Timeout, TruncationError


def describe_error(error: BaseException) -> str:
    """Return the name of the exception's class, and its text if that can be made."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001  it is the program's code that makes the text
        return name


def name_and_number(entry: EntryTuple) -> str:
    """Return the call of an entry, and its number."""
    return f"{entry[2]} number {entry[1]}"


def timeout_error(
    watch: Watchdog | None, group: Group, what: str, seconds: float, after: str = "; it is still pending"
) -> Timeout:
    """Return the Timeout for `what`, which has not completed within `seconds`. From half a second on, all ranks are
    queried for their positions."""
    text = f"{what} on {group}, rank {group.rank}: not complete within the timeout of {seconds:g} s{after}"
    return Timeout(_add_report(watch, text, seconds))


def deadline_error(watch: Watchdog | None, entry: EntryTuple, error: Timeout) -> Timeout:
    """Return the Timeout for a collective that has exceeded the communicator's timeout."""
    group = entry[0]
    shown = Timeout(
        _add_report(watch, f"{name_and_number(entry)} on {group}, rank {group.rank}: {error}", group.timeout)
    )
    shown.__cause__ = error
    return shown


def _add_report(watch: Watchdog | None, text: str, seconds: float) -> str:
    words = "" if watch is None or seconds < MIN_REPORTED_TIMEOUT else watch.reporter.request(text)
    return f"{text}\n{words}" if words else text


def size_error(entry: EntryTuple, error: TruncationError) -> TruncationError:
    """Return the exception for a collective that received more or less data than this rank expects."""
    group = entry[0]
    shown = TruncationError(
        f"{name_and_number(entry)} on {group.name}, rank {group.rank} of {len(group.members)}: {error}. Pass the same"
        " shape and dtype on all ranks, or counts= where their blocks differ; MPICOLL_CHECK=1 reports what"
        " each rank passes"
    )
    shown.__cause__ = error
    return shown


def nested_call_error(group: Group, call: str, outer: str) -> CommunicatorError:
    """Return the exception for a `call` within the operation `outer` of the same thread and communicator."""
    return CommunicatorError(
        f"{call} on {group}, rank {group.rank}: called in the middle of {outer} on the same"
        f" communicator and thread ({threading.current_thread().name}), which can't go on before this call returns."
        " A signal handler, a function passed as op or a callback may use another communicator, such as one made by"
        " Communicator.duplicate() beforehand; or call this after the operation"
    )


def concurrent_call_error(group: Group, call: Call, thread: int | None, other: str) -> CommunicatorError:
    """Return the exception for a `call` during the call `other` of another `thread` (None: unknown)."""
    return CommunicatorError(
        f"{call} on {group}, rank {group.rank}: thread {threading.current_thread().name} calls it"
        f" while {_describe_thread(thread)} is in {other} on the same communicator, so other ranks"
        " might run the two in another order. Give each thread a communicator of its own"
        " (Communicator.duplicate() or split(0), called beforehand in one thread), or call both in one thread,"
        " in the background if they should overlap (iallreduce and similar functions)"
    )


def _describe_thread(ident: int | None) -> str:
    """Return the name of the thread `ident`; if unknown, the names of the program's threads except this one."""
    from mpicoll.engine.diagnostics.stacks import thread_names  # late: correct programs do not need it

    threads = thread_names()
    known = [threads[ident]] if ident in threads else []
    this = threading.get_ident()
    ours = ("mpicoll-callback", "mpicoll-rank-")
    names = known or sorted(
        name
        for one, name in threads.items()
        if one != this and (not name.startswith("mpicoll-") or name.startswith(ours))
    )
    return f"thread {names[0]}" if len(names) == 1 else f"another thread (of {', '.join(names) or 'unknown name'})"
