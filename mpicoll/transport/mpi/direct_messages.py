"""Messages that the extension carries out by the functions of the MPI library that mpi4py has loaded.

The extension is not linked with an MPI library. It finds the functions as mpi4py's module does, and learns from mpi4py
what differs between libraries: handles, and the places of fields.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.extension import find_missing_reason, list_pending_messages, test_pending_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpicoll._shm import BackgroundMessages, Conclude, LineEnd, MessageCall, PendingMessage
    from mpicoll.transport.base import Route, Traffic

_MARKS = 0x12345678, 0x23456789, 0x3456789A
"""Values of the fields of a status, by which their places are found."""


def bind_messages(
    comm: MPI.Intracomm,
    traffic: Traffic,
    sent: Route | None,
    received: Route | None,
    active: dict[int, Any] | None,
    conclude: Conclude,
    wrap: Callable[[PendingMessage], Any] | None,
    accept: Callable[[Any, int], int] | None,
) -> MessageCall | None:
    """Return what sends and receives messages on `comm` in the extension, or starts them if `wrap` is given; None if
    that can't be done.

    `conclude`, `wrap` and `accept` are those of :class:`mpicoll._shm.MessageCall`, and the other arguments are those of
    :meth:`mpicoll.transport.base.Transport.bind_messages`.
    """
    if not find_functions():
        return None
    from mpicoll._shm import MessageCall

    leaving = arriving = None
    if sent is not None:
        assert sent.peer is not None
        assert sent.tag is not None
        leaving = sent.peer, sent.tag, traffic.sends[sent.peer, sent.tag]
    if received is not None:
        source = MPI.ANY_SOURCE if received.peer is None else received.peer
        tag = MPI.ANY_TAG if received.tag is None else received.tag
        arriving = source, tag, traffic.receives
    return MessageCall(MPI._handleof(comm), leaving, arriving, active, conclude, wrap, accept)


def bind_line_end(
    comm: MPI.Intracomm,
    traffic: Traffic,
    values: tuple[int, Any, int, tuple[int, ...], tuple[int, ...], int],
    make_error: Callable[[int], Exception],
    adopt: Callable[..., Any],
) -> LineEnd | None:
    """Return an end of a line on `comm`; None if that can't be made.

    `values` are the arguments of :meth:`mpicoll.transport.base.Transport.bind_line_end`, the others those of
    :class:`mpicoll._shm.LineEnd`.
    """
    if not find_functions():
        return None
    from mpicoll._shm import LineEnd

    handle, counters = MPI._handleof(comm), (traffic.sends, traffic.receives)
    return LineEnd(handle, MPI.ANY_TAG, *values, *counters, make_error, adopt)


def bind_background_messages(comm: MPI.Intracomm, traffic: Traffic, peers: Sequence[int]) -> BackgroundMessages | None:
    """Return what moves messages to and from `peers` on `comm` in a thread; None if that can't be done."""
    if not find_functions():
        return None
    from mpicoll._shm import BackgroundMessages

    return BackgroundMessages(MPI._handleof(comm), tuple(peers), traffic.sends, traffic.receives)


def list_started_receives(comm: MPI.Intracomm) -> list[tuple[int | None, int | None]]:
    """Return source and tag (None: any) of the receives that the extension has started on `comm` and for which no
    message has arrived."""
    if not list_pending_messages():
        return []
    test_pending_messages()
    return [
        (None if source == MPI.ANY_SOURCE else source, None if tag == MPI.ANY_TAG else tag)
        for handle, kind, source, tag in list_pending_messages()
        if kind == "recv" and handle == MPI._handleof(comm)
    ]


@cache
def find_functions() -> bool:
    """Have the extension find the functions of the MPI library. Return False if that is not possible."""
    sizes = {MPI._sizeof(kind) for kind in (MPI.Comm, MPI.Datatype, MPI.Request, MPI.Message)}
    places = _find_status_fields()
    # The size of a message is read as an MPI_Count.
    if find_missing_reason() is not None or len(sizes) != 1 or places is None or MPI.COUNT.Get_size() != 8:
        return False
    from mpicoll._shm import set_mpi

    return set_mpi(MPI.__file__, sizes.pop(), MPI._sizeof(MPI.Status), *places, MPI._handleof(MPI.BYTE))


def _find_status_fields() -> tuple[int, int, int] | None:
    """Return the places of source, tag and error in a status, in bytes; None if they can't be found."""
    status = MPI.Status()
    status.Set_source(_MARKS[0])
    status.Set_tag(_MARKS[1])
    status.Set_error(_MARKS[2])
    memory = ctypes.string_at(MPI._addressof(status), MPI._sizeof(status))
    marks = [struct.pack("i", mark) for mark in _MARKS]
    if any(memory.count(mark) != 1 for mark in marks):
        return None
    return memory.index(marks[0]), memory.index(marks[1]), memory.index(marks[2])
