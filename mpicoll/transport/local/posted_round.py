"""The messages of a round that were posted and are completed later, between ranks that are threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpicoll.errors import Timeout
from mpicoll.transport.base import Envelope, Message, round_size_error


class _PendingReceive(Protocol):
    def test(self) -> Envelope | None: ...
    def wait(self, timeout: float | None) -> Envelope: ...
    def withdraw(self) -> None: ...


class LocalRound:
    """Receives in flight, and sends, which complete when they are posted. `send` carries out these."""

    def __init__(
        self,
        rank: int,
        timeout: float,
        recvs: Sequence[Message],
        pending: Sequence[_PendingReceive],
        send: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._recvs, self._pending = recvs, pending
        self._guard(send)

    def test(self) -> bool:
        """Return True if all messages have arrived. Raises Timeout if they don't within the transport's bound."""
        return self._guard(self._test)

    def wait(self) -> None:
        """Return when all messages have arrived."""
        self._guard(lambda: self._complete(lambda one: one.wait(None)))

    def discard(self) -> None:
        """Withdraw the receives, so that they match no later messages."""
        for one in self._pending:
            one.withdraw()

    def _test(self) -> bool:
        done = self._complete(lambda one: one.test())
        if not done and time.monotonic() > self._deadline:
            sources = [
                source for one, (source, _) in zip(self._pending, self._recvs, strict=True) if one.test() is None
            ]
            if not sources:  # the last one has just arrived
                return self._complete(lambda one: one.test())
            missing = sources[0]
            raise Timeout(
                f"rank {self._rank} waits for a message from rank {missing}: nothing within {self._timeout:g} s"
            )
        return done

    def _complete(self, step: Callable[[_PendingReceive], Envelope | None]) -> bool:
        for one, (source, data) in zip(self._pending, self._recvs, strict=True):
            got = step(one)
            if got is None:
                return False
            if got.nbytes != data.size:
                raise round_size_error(self._rank, source, data.size, got.nbytes)
        return True

    def _guard(self, step: Callable[[], bool | None]) -> bool:
        try:
            return bool(step())
        except BaseException:
            self.discard()
            raise
