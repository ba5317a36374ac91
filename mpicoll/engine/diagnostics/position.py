"""How far an operation has come, as what carries it out publishes it.

An operation costs next to nothing for this: its executor enters itself into the :class:`Executing` of its queue when it
begins, and stores at most one attribute for each round. The words are made only when somebody asks for the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """A place within an operation: `where` in words, the ranks of the job that are waited for at this moment, and
    whether the wait `polls`: it checks now and then whether the operation can still complete, and raises if not."""

    where: str = ""
    waits_for: tuple[int, ...] = ()
    polls: bool = False

    def position(self, members: Sequence[int]) -> Position:
        """Return the position itself: of an executor that stays in one place."""
        return self


class Executor(Protocol):
    """What carries out an operation. Its position may be asked for by another thread at any time."""

    def position(self, members: Sequence[int]) -> Position:
        """Return how far the operation has come. `members` are the ranks of its communicator as ranks of the job."""


class Executing:
    """Holds what carries out the operation of a queue. An executor that begins within another one takes its place, and
    puts it back at its end."""

    __slots__ = ("executor",)

    def __init__(self) -> None:
        self.executor: Executor | None = None

    def position(self, members: Sequence[int]) -> Position:
        """Return how far the operation has come, as far as its executor says."""
        executor = self.executor
        return Position() if executor is None else executor.position(members)
