"""Layout of the flags of an arena: 64-bit words of each rank, and the values that they take."""

from __future__ import annotations

from typing import Any, NoReturn

from mpicoll.errors import CommunicationError

WORDS = 32
"""Words of 8 bytes per rank in the header: more than two cache lines, because processors fetch cache lines in pairs."""

ENDED, SIGNATURES, ROWS, POSTED = (1, 2), (3, 4), (5, 6), (8, 16)
"""Indices within a rank's words: the ends of its last two operations, the signatures of these, the row signatures of
these, and the numbers that it sends to the other ranks at even and odd steps. Word 0 holds the rank's step. A rank can
be ahead of another rank by at most one operation."""

FAILED = 1
"""Bit of a step that marks the rank as failed. Steps advance by two."""

UNUSABLE = 1 << 62
"""Step of a rank that can never be synchronised again."""

FAILED_END = 1 << 31
"""Bit of an operation's end that marks the operation as failed."""

OPERATIONS = (1 << 31) - 1
"""Mask of the operation counter, which wraps modulo one more than this number."""


class UnusableFlags:
    """Replacement for the flags of a rank that can never be synchronised again."""

    def __init__(self, rank: int, size: int) -> None:
        self._who = f"rank {rank} of {size} (of this node)"

    def _raise(self, *args: Any) -> NoReturn:
        raise CommunicationError(
            f"{self._who}: an operation was abandoned, and the ranks are not synchronised any more; create another"
            " communicator"
        )

    __getitem__ = __setitem__ = _raise
