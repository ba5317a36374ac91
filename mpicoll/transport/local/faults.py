"""Faults that are injected into the messages of ranks that are threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


class Killed(BaseException):
    """The exception that ends the thread of a rank killed by a fault.

    It is not an Exception, so that no handler of the program catches it.
    """


@dataclass(frozen=True, slots=True)
class Delay:
    """Messages from `source` to `dest` (None: any) arrive `seconds` later; later ones never overtake them."""

    seconds: float
    source: int | None = None
    dest: int | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Of the messages from `source` to `dest` (None: any), the `nth` and the `count` - 1 after it are lost.

    Messages are counted from 0 for each pair of ranks.
    """

    source: int | None = None
    dest: int | None = None
    nth: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Kill:
    """`rank` dies when it is about to send its `nth` message, counted from 0."""

    rank: int
    nth: int = 0


Fault: TypeAlias = Delay | Drop | Kill


class FaultInjector:
    """Applies faults to messages, which it counts."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self.delays = any(isinstance(fault, Delay) for fault in faults)
        """True if messages may arrive later than they are sent."""
        self._sent_between: Counter[tuple[int, int]] = Counter()
        self._sent_by: Counter[int] = Counter()
        self._last_arrival: dict[tuple[int, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._faults)

    def arrival(self, source: int, dest: int, now: float) -> float | None:
        """Return the time at which the next message from `source` to `dest`, sent `now`, arrives; None if it is lost.

        Raises Killed if `source` dies before it sends the message.
        """
        pair = source, dest
        nth, nth_of_source = self._sent_between[pair], self._sent_by[source]
        self._sent_between[pair] += 1
        self._sent_by[source] += 1
        for fault in self._faults:
            if isinstance(fault, Kill):
                if fault.rank == source and fault.nth <= nth_of_source:
                    raise Killed(f"rank {source} was killed before its message {nth_of_source}")
            elif fault.source in (None, source) and fault.dest in (None, dest):
                if isinstance(fault, Delay):
                    now += fault.seconds
                elif fault.nth <= nth < fault.nth + fault.count:
                    return None
        now = self._last_arrival[pair] = max(now, self._last_arrival.get(pair, 0.0))
        return now
