"""Ranks for a command that mpirun has not started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def start(main: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, limit: float) -> list[Any]:
    """Call ``main(rank, *arguments)`` on each of `ranks` ranks of a new job, and return what they return.

    Raises SpawnError if one fails or the job takes longer than `limit` seconds, but an error of this library as itself.
    """
    from mpicoll.errors import MpicollError, SpawnError
    from mpicoll.launch import spawn

    try:
        returned: list[Any] = spawn(main, arguments, nprocs=ranks, timeout=limit)
    except SpawnError as error:
        if isinstance(error.__cause__, MpicollError):
            raise error.__cause__ from None
        raise
    return returned
