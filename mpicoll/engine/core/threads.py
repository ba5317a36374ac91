"""The threads of a rank that work on one large array."""

from __future__ import annotations

from mpicoll.config import MAX_THREADS, config
from mpicoll.transport.base import Transport


def count_threads(transport: Transport) -> int:
    """Return the number of threads of this rank that work on a large array, with the calling one."""
    setting = config().threads
    return min(MAX_THREADS, transport.count_cores()) if setting == "auto" else setting
