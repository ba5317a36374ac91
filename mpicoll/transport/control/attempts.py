"""Attempts to connect to a rank: when they are due, and how they have failed."""

from __future__ import annotations

import errno
from collections.abc import Iterable


class Attempts:
    """Attempts to connect to one rank at each address of its host.

    The first attempts are due at the time `due`. The pause after a failure is doubled from `pause` seconds to at most
    `longest` seconds.
    """

    def __init__(self, addresses: Iterable[str], due: float, pause: float, longest: float) -> None:
        self._timers = dict.fromkeys(addresses, (due, pause))
        self._longest = longest
        self._failures: dict[str, str] = {}

    @property
    def next_time(self) -> float:
        """The time at which the next attempt is due."""
        return min((due for due, _ in self._timers.values()), default=float("inf"))

    def take_due(self, now: float) -> list[str]:
        """Return the addresses at which an attempt is due. It is not due again before :meth:`postpone`."""
        found = [address for address, (due, _) in self._timers.items() if due <= now]
        for address in found:
            self._timers[address] = float("inf"), self._timers[address][1]
        return found

    def postpone(self, address: str, now: float) -> None:
        """Make the next attempt at `address` due after the pause."""
        pause = self._timers[address][1]
        self._timers[address] = now + pause, min(pause * 2, self._longest)

    def discard_failures(self) -> None:
        """Begin a new round of attempts, of which all have to fail again."""
        self._failures.clear()

    def record_success(self, address: str) -> None:
        """Record that the port at `address` is open."""
        self._failures.pop(address, None)

    def record_failure(self, address: str, error: int | None, *, connecting: bool) -> None:
        """Record the end of an attempt at `address` with the error number `error`.

        `connecting` is True if there was no connection yet.
        """
        if error in (errno.ECONNREFUSED, errno.EPROTO):
            self._failures[address] = "closed"
        elif connecting and error != errno.ECONNRESET:  # which may pass, or become a refusal
            self._failures[address] = "unreachable"

    @property
    def outcome(self) -> str | None:
        """None if there is an address that has not failed; "closed" if all have refused; otherwise "unreachable"."""
        if len(self._failures) < len(self._timers):
            return None
        return "closed" if all(why == "closed" for why in self._failures.values()) else "unreachable"
