"""Waits of an arena for the flags of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpicoll.engine.diagnostics.position import Executing, Executor, Position
from mpicoll.transport.base import Transport
from mpicoll.transport.waiting import Backoff
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from typing_extensions import Self


_YIELDS = 3000
"""Yields of the core after which a late rank is treated as possibly failed."""

_YIELDS_PER_CHECK = 64
"""Yields between two checks of the peers, which also let MPI make progress. The yields take long where the cores are
busy."""

CheckWait: TypeAlias = "Callable[[], None]"
"""Function that raises CommunicationError if the running operation can never complete."""


class ArenaWait:
    """Wait for late ranks, which polls their flags. While the context is entered, `executing` publishes the ranks that
    `late` returns."""

    __slots__ = ("_backoff", "_check_wait", "_executing", "_late", "_outer", "_transport")

    def __init__(
        self,
        transport: Transport,
        executing: Executing,
        check_wait: CheckWait | None,
        late: Callable[[], Sequence[int]],
    ) -> None:
        self._transport = transport
        self._executing = executing
        self._check_wait = check_wait
        self._late = late
        self._outer: Executor | None = None
        self._backoff = Backoff(_YIELDS)

    def __enter__(self) -> Self:
        self._outer, self._executing.executor = self._executing.executor, self
        return self

    def __exit__(self, *args: object) -> None:
        self._executing.executor = self._outer

    def position(self, members: Sequence[int]) -> Position:
        """Return the position of this rank and the ranks that it waits for."""
        late = tuple(sorted(members[peer] for peer in self._late()))
        return Position(f"shared memory{(late and f': waits for {rank_list(late)}') or ''}", late, polls=True)

    def pause(self, peers: Sequence[int]) -> None:
        """Yield the core or sleep, between two reads of the flags of `peers`.

        Raises RankFailed if one of them has died, Timeout if they are late, CommunicationError if the operation can
        never complete.
        """
        backoff = self._backoff
        if backoff.yield_core():
            if backoff.yields % _YIELDS_PER_CHECK == 0:
                self._transport.check_peers(0.0, peers)
            return
        self._transport.check_peers(time.monotonic() - backoff.begin, peers)
        if self._check_wait is not None:
            self._check_wait()
        backoff.sleep()
