"""Trials of algorithms in the first calls of a kind, and the choice that they lead to.

A class without a clock and without messages: what it decides follows from the number of calls and from the times on
which the ranks have agreed, so that all ranks decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_MARGIN = 0.05
"""Fraction by which another algorithm must be faster than the present one to replace it."""

_SLOW, _LONG_SLOW = 1.5, 1.2
"""Ratio to the best time from which an algorithm is not tried further, and that for long calls."""

_HOPELESS, _SETUP = 3.0, 0.01
"""Ratio to the best time, and time in seconds, from which an algorithm is tried only once. The first use of an
algorithm may make connections, which takes less than that time, and single calls take twice as long at times."""

_LONG = 0.01
"""Seconds of a long call. The less of two times differs little from call to call there, and trials cost most."""

_DRIFT = 1.5
"""Ratio to the time of the trials, up or down, from which all algorithms are tried again."""

_FIRST_INTERVAL, _LAST_INTERVAL = 256, 4096
"""Calls until the algorithm is first timed again, and the largest number of calls between that."""

_CHECKS = 3
"""Calls by which it is found whether times have drifted."""

_ALL, _AGAIN, _LAST, _CHECK = range(4)
"""Stages: all algorithms, those that are not hopeless, those that are not slow, the chosen one after a while."""


class Trials:
    """Trials of the algorithms `names`, the first of which is taken without them.

    The first call is not timed. The following ones try all algorithms in turn: all of them once, those that are not
    hopeless again, and those that can still be the best twice more. Then the fastest stays, by its mean time without
    the slowest quarter: other programs may have disturbed that; but some algorithms are fast in one call and slow in
    the next one, as those that poll where others need the core. If `watched`, it is timed again after some hundred
    calls, and all are tried again if its time has changed much.

    Each call is made in this order: if :attr:`meets`, the ranks exchange :attr:`seconds` and call :meth:`agree` with
    the largest; :meth:`begin` returns the algorithm of the call; :meth:`end` gets the time that it has taken.
    """

    def __init__(self, names: Sequence[str], *, watched: bool = False) -> None:
        self.names = tuple(names)
        self.watched = watched
        self.winner = self.names[0]
        # The agreed times of each algorithm in seconds, by the trials so far; those of the latest trials stay.
        self._times: dict[str, list[float]] = {}
        self.calls = 0
        # Time of the latest call on this rank.
        self.seconds = 0.0
        self._timed: str | None = None
        self._interval = _FIRST_INTERVAL
        self._since = 0
        self._stage = 0
        self._checked: list[float] = []
        self._waiting = deque(self.names if len(self.names) > 1 else ())

    @property
    def typical(self) -> dict[str, float]:
        """The time of each algorithm in seconds, by the trials so far."""
        return {name: _find_mean(times) for name, times in self._times.items()}

    @property
    def settled(self) -> bool:
        """True if no trial is due, and no time remains to be agreed on."""
        return not self._waiting and self._timed is None

    @property
    def final(self) -> bool:
        """True if the choice will never change."""
        return self.settled and (not self.watched or len(self.names) == 1)

    @property
    def meets(self) -> bool:
        """True if the ranks exchange times before the next call: the one before was timed, or this one will be."""
        return self._timed is not None or bool(self._waiting and self.calls)

    def agree(self, seconds: float) -> None:
        """Take the time of the rank on which the latest call has taken longest; infinity if it has failed on one."""
        name, self._timed = self._timed, None
        if name is None:
            return
        if self._stage == _CHECK:
            self._checked.append(seconds)
        else:
            self._times.setdefault(name, []).append(seconds)
        if not self._waiting:
            self._end_stage()

    def begin(self) -> str:
        """Begin a call and return its algorithm."""
        self.calls += 1
        if self._waiting and self.calls > 1:
            self._timed = self._waiting.popleft()
            return self._timed
        if self.settled and self.watched and len(self.names) > 1:
            self._since += 1
            if self._since >= self._interval:
                self._since = 0
                self._begin_stage(_CHECK, [self.winner] * _CHECKS)
        return self.winner

    def end(self, seconds: float) -> None:
        """End the call, which has taken `seconds` on this rank: infinity if it has failed."""
        self.seconds = seconds

    def _begin_stage(self, stage: int, names: Sequence[str]) -> None:
        self._stage = stage
        self._waiting.extend(names)

    def _end_stage(self) -> None:
        if self._stage == _CHECK:
            self._end_check()
            return
        least = {name: min(times) for name, times in self._times.items()}
        best = min(least.values())
        if self._stage == _ALL:
            limit = max(_HOPELESS * best, _SETUP)
            self._begin_stage(_AGAIN, [name for name, one in least.items() if one <= limit] or self.names)
            return
        limit = (_SLOW if best < _LONG else _LONG_SLOW) * best
        fast = [name for name, one in least.items() if one <= limit]
        if self._stage == _AGAIN and len(fast) > 1:
            self._begin_stage(_LAST, [*fast, *fast])
            return
        self._settle()

    def _settle(self) -> None:
        seconds = self.typical
        fastest = min(self.names, key=lambda name: seconds[name])
        if seconds[fastest] < (1 - _MARGIN) * seconds[self.winner]:
            self._interval = _FIRST_INTERVAL
            self.winner = fastest

    def _end_check(self) -> None:
        now, before = min(self._checked), min(self._times[self.winner])
        self._checked.clear()
        # Times that keep changing, and always lead to the same choice, are looked at less and less often.
        self._interval = min(2 * self._interval, _LAST_INTERVAL)
        if not before / _DRIFT <= now <= before * _DRIFT:
            self._times = {}
            self._begin_stage(_ALL, self.names)


def _find_mean(times: Sequence[float]) -> float:
    """Return the mean without the slowest quarter; of two times it is the lesser one."""
    kept = sorted(times)[: len(times) - (len(times) + 2) // 4]
    return sum(kept) / len(kept)
