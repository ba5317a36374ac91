"""Waits outside of a queue's operations that the watchdog knows."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from mpicoll.engine.diagnostics.flight_recorder import EntryTuple, Wait
from mpicoll.engine.diagnostics.watchdog import Watchdog

if TYPE_CHECKING:
    from typing_extensions import Self


class RegisteredWait:
    """Wait of this thread, registered with the watch while the context is entered. A wait that `polls` calls
    :meth:`check` periodically."""

    __slots__ = ("_outer", "_polls", "_watch", "entry")

    def __init__(self, watch: Watchdog | None, entry: EntryTuple, *, polls: bool = True) -> None:
        self._watch = watch
        self.entry = entry
        self._polls = polls
        self._outer: Wait | None = None

    def __enter__(self) -> Self:
        if self._watch is not None:
            active, ident = self._watch.active, get_ident()
            self._outer = active.get(ident)
            active[ident] = (self.entry, False, self._polls)
        return self

    def check(self) -> None:
        """Raise CommunicationError if the wait can never complete; to be called periodically."""
        if self._watch is not None:
            self._watch.check(self.entry)

    def __exit__(self, *args: object) -> None:
        if self._watch is not None:
            active, ident = self._watch.active, get_ident()
            if self._outer is None:
                del active[ident]
            else:
                active[ident] = self._outer
