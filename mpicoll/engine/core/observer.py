"""Observers of the operations of a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mpicoll.engine.diagnostics.flight_recorder import Call, EntryTuple


class Observer(Protocol):
    """Observer of operations, called before and after each operation in queue order.

    ``needs_call_sites`` requests the call sites. ``needs_every_operation`` requires each call to be prepared again, so
    that `function` is a :class:`~mpicoll.engine.dispatch.Task` where it is a collective on arrays. An observer that
    ``compares_calls`` ensures that all ranks call the same operation.
    """

    needs_call_sites: bool
    needs_every_operation: bool
    compares_calls: bool

    def before(self, entry: EntryTuple, function: Callable[..., Any], interrupts: list[BaseException]) -> None:
        """Observe an operation before it runs. May raise, on all ranks alike, instead of running the operation. Adds
        exceptions of signal handlers to `interrupts`, which the caller raises when the operation has ended."""

    def after(self, entry: EntryTuple, function: Callable[..., Any], interrupts: list[BaseException]) -> None:
        """Observe an operation after it has been carried out, in the same way."""


def accept_any_call(call: Call) -> None:
    """Accept `call` without comparing it across the ranks."""
