"""Deadlines of many things, of which few are due at a time."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_FEW = 64
"""Outdated entries that are kept in any case."""


class Deadlines(Generic[Key]):
    """The deadline of each key. A key without one is never due.

    A heap, in which entries that were replaced or removed remain until they are at its top, or are most of it: each
    method takes O(log n) for n keys, on average.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0  # tells entries apart that have the same time, as keys can't be compared

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: Key, time: float) -> None:
        """Set the deadline of `key`, in place of the one that it has. If it is infinite, `key` has none."""
        self.remove(key)
        if time == float("inf"):
            return
        self._count += 1
        self._entries[key] = time, self._count
        heapq.heappush(self._heap, (time, self._count, key))

    def get(self, key: Key) -> float:
        """Return the deadline of `key`."""
        return self._entries.get(key, (float("inf"), 0))[0]

    def remove(self, key: Key) -> None:
        """Remove the deadline of `key`, if it has one."""
        if self._entries.pop(key, None) is not None and len(self._heap) > 2 * len(self._entries) + _FEW:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    @property
    def next_time(self) -> float:
        """The earliest deadline."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def take_due(self, now: float) -> list[Key]:
        """Remove and return the keys whose deadlines are not after `now`, earliest first."""
        due = []
        while (key := self.take_first(now)) is not None:
            due.append(key)
        return due

    def take_first(self, now: float) -> Key | None:
        """Remove and return the key with the earliest deadline if that is not after `now`, otherwise None."""
        if self.next_time > now or not self._heap:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._entries[key]
        return key

    def _is_valid(self, entry: tuple[float, int, Key]) -> bool:
        return self._entries.get(entry[2], (0.0, 0))[1] == entry[1]
