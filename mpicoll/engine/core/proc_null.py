"""The null process."""

from __future__ import annotations

from enum import IntEnum


class _ProcNull(IntEnum):
    """Null process: sending to it has no effect, and receiving from it completes at once and receives nothing."""

    # The value of MPI's standard ABI; unlike -1, a wrong rank + 1 or rank - 1 does not yield it.
    PROC_NULL = -3

    def __repr__(self) -> str:
        return "mpicoll.PROC_NULL"


PROC_NULL = _ProcNull.PROC_NULL
