"""The file in which the ranks of a node record their operations, for each other and for ``mpicoll doctor --job``.

It has no name. Each rank keeps a descriptor of it, by which other processes of the same user open it, also when another
rank has been killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mpicoll.transport import shm

LABEL = "mpicoll-records"
"""A part of the name of the file in lists of a process's descriptors."""

TRIAL_BYTES = 8
"""Bytes that a rank shares to find out if it can, when it shares no records."""


class _Current:
    """The file to which this process writes, if there is one."""

    fd = -1
    size = 0


def share(
    exchange: Callable[[object], Sequence[object]], rank: int, size: int, place: tuple[int, int], *, named: bool
) -> str:
    """Record the operations of the `size` ranks of a node in one file from now on. Collective. Return why the ranks
    can't share memory, else "".

    `exchange` and `rank` are as in :func:`mpicoll.transport.shm.share`; `place` is the rank of this process in its job,
    and the number of ranks of the job. A process that shares a file with at least as many ranks already keeps that one.
    """
    from mpicoll._shm import AREA_BYTES, place_records  # all ranks have the extension

    kept: list[int] = []
    is_larger = size > _Current.size
    nbytes = AREA_BYTES * size if rank == 0 and is_larger else TRIAL_BYTES
    memories, failure = shm.share(nbytes, exchange, rank, named=named, label=LABEL, kept=kept)
    if memories is not None and kept and is_larger and memories[0].nbytes >= AREA_BYTES * size:
        place_records(memories[0][rank * AREA_BYTES : (rank + 1) * AREA_BYTES].data, *place)
        _Current.fd, _Current.size, kept = kept[0], size, [_Current.fd] if _Current.fd >= 0 else []
    for fd in kept:
        os.close(fd)
    return failure
