"""Words of memory that streams write, and for which streams wait: CUDA's stream memory operations.

A stream that waits for a word blocks itself alone. Work is late here as always, but what a host waits for may depend on
words that other streams write, in this process or another one, whose hosts wait for nothing. So a thread of each
process stands in for the device: it runs the streams that have words to write, up to the last of these, as long as a
host anywhere waits for a word. With ``FAKECUDA_MEMORY_OPERATIONS=0`` the driver refuses them, as old ones do.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from fakecuda import errors, memory
from fakecuda.errors import CUDARuntimeError
from fakecuda.memory import LOCK
from fakecuda.streams import Stream, is_lost

_AT_LEAST = 0
"""Flag of a wait: until the word is at least the value, in cyclic order."""

_PERIOD, _RECENT = 2e-4, 0.02
"""Seconds between two looks for hosts that wait, and in which one has waited that is still taken to."""

_writers: dict[Stream, int] = {}
"""The streams that have words to write, and the position of the last of these in their work."""

_has_writers = threading.Event()
_started: list[threading.Thread] = []


def _share_stamp() -> Any:
    """The time at which a host of any process has waited for a word last."""
    path = Path(tempfile.gettempdir()) / f"fakecuda-waiting-{os.getuid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        return np.frombuffer(mmap.mmap(file, mmap.PAGESIZE), np.float64, 1)
    finally:
        os.close(file)


_stamp = _share_stamp()


def _check(address: int, flags: int) -> None:
    if os.environ.get("FAKECUDA_MEMORY_OPERATIONS", "1") == "0":
        raise CUDARuntimeError(errors.NOT_SUPPORTED)
    if address % 4 or not (memory.find(address, 4) or memory.pinned(address, 4)) or flags:
        raise CUDARuntimeError(errors.INVALID_VALUE, f"word at {address:#x}, flags {flags}")


def _word(address: int) -> Any:
    return memory.array_at(memory.working(address, 4), (1,), np.uint32)


def write(stream: Stream, address: int, value: int, flags: int) -> None:
    """cuStreamWriteValue32."""
    _check(address, flags)

    def work() -> None:
        _word(address)[0] = value

    stream.give(work)
    if stream.capture is None:
        with LOCK:
            _writers[stream] = stream.given
            if not _started:
                _started.append(threading.Thread(target=_serve, name="fakecuda-device", daemon=True))
                _started[0].start()
        _has_writers.set()


def wait(stream: Stream, address: int, value: int, flags: int) -> None:
    """cuStreamWaitValue32, until the word is at least `value`."""
    _check(address, flags & ~_AT_LEAST)

    def work() -> bool:
        if (int(_word(address)[0]) - value) % (1 << 32) < 1 << 31:
            return True
        _stamp[0] = time.monotonic()
        return False

    stream.give(work)


def _serve() -> None:
    while True:
        _has_writers.wait()
        with LOCK:
            for stream, position in list(_writers.items()):
                if stream.done >= position or is_lost(stream.device):
                    del _writers[stream]
            if not _writers:
                _has_writers.clear()
                continue
            waiting = list(_writers.items())
        if 0 <= time.monotonic() - _stamp[0] < _RECENT:
            for stream, position in waiting:
                _advance(stream, position)
        time.sleep(_PERIOD)


def _advance(stream: Stream, position: int) -> None:
    """Run the stream up to `position`, as far as it may run now."""
    before = -1
    while stream.done < position and stream.done != before:
        before = stream.done
        stream.advance()
