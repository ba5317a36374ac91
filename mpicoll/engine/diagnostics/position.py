"""The progress of an operation, as its executor publishes it.

The cost per operation is negligible: its executor registers in the :class:`Executing` of its queue when it begins, and
stores at most one attribute for each round. The texts are made only when the position is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpicoll.named_tuple import NamedTuple


class Position(NamedTuple):
    """A place within an operation.

    `where` is its description, `waits_for` are the ranks of the job that it waits for at this moment, and `polls`
    is True if the wait checks from time to time if the operation can still complete, and raises if not.
    """

    where: str = ""
    waits_for: tuple[int, ...] = ()
    polls: bool = False

    def position(self, members: Sequence[int]) -> Position:
        """Return the position itself, as the executor of an operation that has a single position."""
        return self


class Executor(Protocol):
    """An executor of an operation. Its position may be requested by another thread at any time."""

    def position(self, members: Sequence[int]) -> Position:
        """Return the progress of the operation. `members` are the ranks of its communicator as ranks of the job."""


class Executing:
    """The executor of a queue's operation.

    An executor that begins within another one replaces it, and restores it at its end.
    """

    __slots__ = ("executor",)

    def __init__(self) -> None:
        self.executor: Executor | None = None

    def position(self, members: Sequence[int]) -> Position:
        """Return the progress of the operation, as published by its executor."""
        executor = self.executor
        return Position() if executor is None else executor.position(members)
