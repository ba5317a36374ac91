"""Waits of an arena for the flags of other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mpicoll.engine.diagnostics.position import Executing, Executor, Position
from mpicoll.transport.base import Transport
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from typing_extensions import Self


_SHORTEST_SLEEP, _LONGEST_SLEEP = 1e-4, 1e-3
"""Bounds in seconds of a sleep, which lasts as long as the wait before it. A flag ends it, so what it delays is only
the detection of failures, and the messages of MPI that this rank has to keep moving."""

CheckWait: TypeAlias = "Callable[[], None]"
"""Function that raises CommunicationError if the running operation can never complete."""


class ArenaWait:
    """Wait for late ranks. ``sleep(seconds)`` returns when the first one has stored its flag, or earlier. While the
    context is entered, `executing` publishes the ranks that `late` returns."""

    __slots__ = ("_begin", "_check_wait", "_executing", "_late", "_outer", "_transport", "sleep")

    def __init__(
        self,
        transport: Transport,
        executing: Executing,
        check_wait: CheckWait | None,
        late: Callable[[], Sequence[int]],
        sleep: Callable[[float], None],
    ) -> None:
        self._transport = transport
        self._executing = executing
        self._check_wait = check_wait
        self._late = late
        self.sleep = sleep
        self._outer: Executor | None = None
        self._begin = time.monotonic()

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
        """Look for failures, then sleep, between two reads of the flags of `peers`.

        Raises RankFailed if one of them has died, Timeout if they are late, CommunicationError if the operation can
        never complete.
        """
        waited = time.monotonic() - self._begin
        self._transport.check_peers(waited, peers)
        if self._check_wait is not None:
            self._check_wait()
        self.sleep(min(max(_SHORTEST_SLEEP, waited), _LONGEST_SLEEP))
