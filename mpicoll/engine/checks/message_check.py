"""Descriptions that checked messages carry, and reports of messages that were not received."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.diagnostics.flight_recorder import Call, Site
from mpicoll.errors import MpicollError

if TYPE_CHECKING:
    from mpicoll.engine.core.communicator import Communicator

Note: TypeAlias = "dict[str, Any]"
"""``text``, ``dtype``, ``shape``, ``nbytes`` and ``site`` of a call."""

LENGTH = 512
"""Bytes of a note, which precedes the message."""

_ROOM = 64 * 1024
"""Bytes by which a message may be larger than expected and still deliver its note with any MPI library."""

_SPARE = 1 << 28
"""Bytes behind the receive buffer of a message: Open MPI writes all of a message that is too large, even where it
raises an error for it. Untouched pages take no memory."""

_MAGIC = b"\\0mpicoll note 1\\n"

_LINES = 10
"""Maximum number of messages that are named when they were not received."""

_LARGE = 1 << 26
"""Bytes above which an unreceived message is not received to read its note."""

_PATIENCE = 0.5
"""Timeout in seconds for receiving a message that has been announced."""


def note(call: Call, site: Site | None) -> Note:
    """Return the note of a message, or of its receive."""
    return {
        "text": str(call),
        "dtype": call.dtype,
        "shape": list(call.shape or ()),
        "nbytes": call.nbytes,
        "site": None if site is None else str(site),
    }


def with_note(data: Array, about: Note) -> Array:
    """Return a copy of the message `data`, preceded by its note."""
    whole = np.empty(LENGTH + data.size, np.uint8)
    text = _fitting(about).ljust(LENGTH - len(_MAGIC))
    whole[:LENGTH] = np.frombuffer(_MAGIC + text, np.uint8)
    whole[LENGTH:] = data
    return whole


def _fitting(about: Note) -> bytes:
    """Return the encoded note, shortened to fit into its space."""
    for text, site in ((60, 300), (60, 100), (20, 40)):
        shorter = about | {"text": about["text"][:text], "site": about["site"] and about["site"][-site:]}
        whole = about if len(about["text"]) <= text and len(about["site"] or "") <= site else shorter
        data = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
        if len(data) <= LENGTH - len(_MAGIC):
            return data
    return json.dumps(
        {"text": "", "dtype": about["dtype"], "shape": None, "nbytes": about["nbytes"], "site": None}
    ).encode()


def room(nbytes: int) -> Array:
    """Return a receive buffer for a message of `nbytes`, its note, with spare bytes for a larger message."""
    length = LENGTH + nbytes + _ROOM
    return np.empty(length + _SPARE, np.uint8)[:length]


def note_of(data: Array) -> Note | None:
    """Return the note at the beginning of received data; None if there is none."""
    begin = data[:LENGTH].tobytes()
    if not begin.startswith(_MAGIC) or len(begin) < LENGTH:
        return None
    with suppress(ValueError):
        found: Note = json.loads(begin[len(_MAGIC) :])
        return found
    return None


def unreceived(comm: Communicator, limit: int = _LINES) -> list[str]:
    """Receive and describe messages that arrived at this rank and were not received, and receives without a message:
    one line each, for about the first `limit` of them."""
    transport, lines = comm.transport, []
    who = f"rank {comm.rank} of {comm.size} ({comm.name})"
    for source, tag in transport.receiving():
        whence = "any rank" if source is None else f"rank {source}"
        which = "any tag" if tag is None else f"tag {tag}"
        lines.append(f"{who}: nothing came for a receive from {whence}, {which}")
    # A message goes to the first receive that matches it, so no message is unreceived while such receives are pending.
    while len(lines) < limit and (envelope := transport.iprobe(None, None)) is not None:
        data = np.empty(envelope.nbytes if envelope.nbytes <= _LARGE else 0, np.uint8)
        nbytes, about = envelope.nbytes, None
        if data.size == nbytes:
            transport.irecv(data, envelope.source, envelope.tag).wait(_PATIENCE)
            about = note_of(data)
        nbytes -= 0 if about is None else LENGTH
        what = "" if about is None else f": {about['text']} at {about['site']}"
        which = f"a message of {nbytes} bytes from rank {envelope.source}, tag {envelope.tag}"
        lines.append(f"{who}: {which}, was never received{what}")
        if data.size != envelope.nbytes:
            break
    return lines


def warn(comms: Iterable[Communicator]) -> None:
    """Write the lines of :func:`unreceived` for several communicators to stderr, when they are freed."""
    lines: list[str] = []
    for comm in comms:
        with suppress(MpicollError):  # where ranks have died, no more information is available
            lines += unreceived(comm, _LINES + 1)
    more = ["there are more of them"] if len(lines) > _LINES else []
    text = "".join(f"mpicoll: warning: {line}\n" for line in [*lines[:_LINES], *more])
    if text:
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
            sys.stderr.write(text)
            sys.stderr.flush()
