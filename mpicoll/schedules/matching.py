"""Message matching of all ranks of an algorithm; the rounds of a rank are built only when the rank enters them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from mpicoll.schedules.model import Algorithm, Round


class Match(NamedTuple):
    """Send number `i` of the current round of `source` and receive number `j` of the current round of `to`."""

    source: int
    i: int
    to: int
    j: int


class Exchange:
    """The state of all ranks: each is in one round, with all of its messages posted, and matched messages counted off.

    Sends are synchronous: a rank leaves its round only when each of its messages has met its counterpart.
    """

    def __init__(self, algorithm: Algorithm, size: int, root: int, segments: int) -> None:
        self._steps: list[Iterator[Round]] = [algorithm.steps(rank, size, root, segments) for rank in range(size)]
        self._size = size
        self._sends: dict[int, deque[tuple[int, int]]] = {}
        self._recvs: dict[int, deque[tuple[int, int]]] = {}
        self.round = [Round()] * size
        """Current round of each rank, or its last one."""
        self.index = [-1] * size
        """Number of the current round of each rank."""
        self.open = [0] * size
        """Number of messages of the current round of each rank that are not closed."""
        self.done = [False] * size

    def enter(self, rank: int) -> bool:
        """Advance `rank` to its next round; return False if there is none."""
        now = next(self._steps[rank], None)
        if now is None:
            self.done[rank] = True
            return False
        self.round[rank] = now
        self.index[rank] += 1
        self.open[rank] = len(now.sends) + len(now.recvs)
        return True

    def post(self, rank: int) -> list[Match]:
        """Post the messages of the round of `rank`; return the matches that this completes."""
        now = self.round[rank]
        met = []
        for i, send in enumerate(now.sends):
            key = rank * self._size + send.to
            if other := self._take(self._recvs, key):
                met.append(Match(rank, i, *other))
            else:
                self._sends.setdefault(key, deque()).append((rank, i))
        for j, recv in enumerate(now.recvs):
            key = recv.source * self._size + rank
            if other := self._take(self._sends, key):
                met.append(Match(*other, rank, j))
            else:
                self._recvs.setdefault(key, deque()).append((rank, j))
        return met

    def close(self, match: Match) -> Iterator[int]:
        """Count `match` off; yield the ranks whose round this completes."""
        for rank in (match.source, match.to):
            self.open[rank] -= 1
            if not self.open[rank]:
                yield rank

    def waiting(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the unmatched sends and receives, as pairs of rank and number in the round."""
        sends = sorted(pair for queue in self._sends.values() for pair in queue)
        recvs = sorted(pair for queue in self._recvs.values() for pair in queue)
        return sends, recvs

    @staticmethod
    def _take(queues: dict[int, deque[tuple[int, int]]], key: int) -> tuple[int, int] | None:
        queue = queues.get(key)
        if not queue:
            return None
        first = queue.popleft()
        if not queue:
            del queues[key]
        return first
