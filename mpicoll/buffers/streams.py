"""Streams of the caller that have to be waited for before memory may be touched."""

from __future__ import annotations

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import StreamEvent
from mpicoll.buffers.pair import parts_of


def list_streams(*buffers: Buffer | None) -> set[int | None]:
    """Return the streams on which the caller may use `buffers` that lie on a device, and None if only the host can make
    them wait."""
    return {part.library.find_stream(part) for one in buffers if one is not None for part in parts_of(one)}


def record_events(*buffers: Buffer | None) -> tuple[StreamEvent, ...]:
    """Record an event on the stream of each of `buffers` that lies on a device: when all of them are done, the memory
    may be touched."""
    recorded = (part.library.record_event(part) for one in buffers if one is not None for part in parts_of(one))
    return tuple(event for event in recorded if event is not None)
