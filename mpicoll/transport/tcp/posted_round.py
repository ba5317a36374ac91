"""The messages of a round that were posted and are completed later."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpicoll.errors import Timeout


class TcpRound:
    """Receives in flight; sends have completed when they are posted.

    `step` returns True if all messages have arrived, and raises if one can't; `withdraw` lets the receives match no
    later messages. `what` describes the round in the error after `timeout` seconds.
    """

    def __init__(self, step: Callable[[], bool], withdraw: Callable[[], None], timeout: float, what: str) -> None:
        self._step, self._withdraw = step, withdraw
        self._timeout, self._what = timeout, what
        self._deadline = time.monotonic() + timeout

    def test(self) -> bool:
        """Return True if all messages have arrived. Raises Timeout if they don't within the timeout of the group."""
        try:
            done = self._step()
            if not done and time.monotonic() > self._deadline:
                raise Timeout(f"{self._what}: nothing within {self._timeout:g} s")
        except BaseException:
            self.discard()
            raise
        return done

    def discard(self) -> None:
        """Withdraw the receives, so that they match no later messages."""
        self._withdraw()
