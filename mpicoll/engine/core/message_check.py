"""Headers of checked messages, and reports of messages that were not received."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.diagnostics.flight_recorder import Call, CallSite
from mpicoll.errors import MpicollError
from mpicoll.transport.base import Transport

Header: TypeAlias = "dict[str, Any]"
"""``text``, ``dtype``, ``shape``, ``nbytes`` and ``site`` of a call."""

LENGTH = 512
"""Bytes of a header, which precedes the message."""

_EXCESS = 64 * 1024
"""Bytes by which a message may be larger than expected and still deliver its header with any MPI library."""

_SPARE = 1 << 28
"""Bytes behind the receive buffer of a message: Open MPI writes all of a message that is too large, even where it
raises an error for it. Untouched pages take no memory."""

_MAGIC = b"\\0mpicoll note 1\\n"

_LINES = 10
"""Maximum number of messages that are named when they were not received."""

_LARGE = 1 << 26
"""Bytes above which an unreceived message is not received to read its header."""

_TIMEOUT = 0.5
"""Timeout in seconds for receiving a message that has been announced."""


def make_header(call: Call, site: CallSite | None) -> Header:
    """Return the header of a message, or the one that its receive expects."""
    return {
        "text": str(call),
        "dtype": call.dtype,
        "shape": list(call.shape or ()),
        "nbytes": call.nbytes,
        "site": None if site is None else str(site),
    }


def add_header(data: Array, header: Header) -> Array:
    """Return a copy of the message `data`, preceded by its header."""
    whole = np.empty(LENGTH + data.size, np.uint8)
    text = _encode(header).ljust(LENGTH - len(_MAGIC))
    whole[:LENGTH] = np.frombuffer(_MAGIC + text, np.uint8)
    whole[LENGTH:] = data
    return whole


def _encode(header: Header) -> bytes:
    """Return the encoded header, shortened to fit into LENGTH bytes."""
    for text, site in ((60, 300), (60, 100), (20, 40)):
        shorter = header | {"text": header["text"][:text], "site": header["site"] and header["site"][-site:]}
        whole = header if len(header["text"]) <= text and len(header["site"] or "") <= site else shorter
        data = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
        if len(data) <= LENGTH - len(_MAGIC):
            return data
    return json.dumps(
        {"text": "", "dtype": header["dtype"], "shape": None, "nbytes": header["nbytes"], "site": None}
    ).encode()


def receive_buffer(nbytes: int) -> Array:
    """Return a receive buffer for a message of `nbytes` and its header, with spare bytes for a larger message."""
    length = LENGTH + nbytes + _EXCESS
    return np.empty(length + _SPARE, np.uint8)[:length]


def header_of(data: Array) -> Header | None:
    """Return the header at the beginning of received data; None if there is none."""
    begin = data[:LENGTH].tobytes()
    if not begin.startswith(_MAGIC) or len(begin) < LENGTH:
        return None
    with suppress(ValueError):
        found: Header = json.loads(begin[len(_MAGIC) :])
        return found
    return None


def unmatched_messages(transport: Transport, name: str, limit: int = _LINES) -> list[str]:
    """Receive and describe messages that arrived at this rank and were not received, and receives without a message,
    on the communicator `name` of `transport`: one line each, for about the first `limit` of them."""
    lines = []
    this = f"rank {transport.rank} of {transport.size} ({name})"
    for source, tag in transport.list_posted_receives():
        peer = "any rank" if source is None else f"rank {source}"
        which = "any tag" if tag is None else f"tag {tag}"
        lines.append(f"{this}: no message arrived for a receive from {peer}, {which}")
    # A message goes to the first receive that matches it, so no message is unreceived while such receives are pending.
    while len(lines) < limit and (envelope := transport.iprobe(None, None)) is not None:
        data = np.empty(envelope.nbytes if envelope.nbytes <= _LARGE else 0, np.uint8)
        nbytes, header = envelope.nbytes, None
        if data.size == nbytes:
            transport.irecv(data, envelope.source, envelope.tag).wait(_TIMEOUT)
            header = header_of(data)
        nbytes -= 0 if header is None else LENGTH
        what = "" if header is None else f": {header['text']} at {header['site']}"
        which = f"a message of {nbytes} bytes from rank {envelope.source}, tag {envelope.tag}"
        lines.append(f"{this}: {which}, was never received{what}")
        if data.size != envelope.nbytes:
            break
    return lines


def warn_of_unmatched_messages(communicators: Iterable[tuple[Transport, str]]) -> None:
    """Write the lines of :func:`unmatched_messages` for communicators, given by transport and name, to stderr, when
    they are freed."""
    lines: list[str] = []
    for transport, name in communicators:
        with suppress(MpicollError):  # where ranks have died, no more information is available
            lines += unmatched_messages(transport, name, _LINES + 1)
    more = ["there are more of them"] if len(lines) > _LINES else []
    text = "".join(f"mpicoll: warning: {line}\n" for line in [*lines[:_LINES], *more])
    if text:
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
            sys.stderr.write(text)
            sys.stderr.flush()
