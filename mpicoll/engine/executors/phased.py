"""Operations that are carried out in phases, each of which is an operation of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Protocol, TypeAlias

from mpicoll.engine.core.operation import Operation

BindPhase: TypeAlias = "Callable[[Operation], Callable[[], None]]"
"""Function that chooses an algorithm for the operation of a phase, and binds it."""


class Phases(Protocol):
    """The phases of an operation, bound to their algorithms."""

    def run(self) -> None:
        """Carry out the phases. May be called any number of times, until it fails."""


MakePhases: TypeAlias = "Callable[[Operation, BindPhase], Phases]"
"""Function that makes the phases of an operation. It may be collective."""


class PhasedOperation:
    """Operation in the phases that `make_phases` makes of it; called in queue order, because communicators are created
    at first use."""

    def __init__(self, operation: Operation, bind: BindPhase, make_phases: MakePhases) -> None:
        self._operation = operation
        self._bind = bind
        self._make_phases = make_phases
        # Algorithms of phases are chosen in the first run, on any thread, but all ranks must make the same choice.
        self._context = copy_context()
        self._phases: Phases | None = None

    def __call__(self) -> None:
        self._context.copy().run(self._run)

    def _run(self) -> None:
        if self._phases is None:
            self._phases = self._make_phases(self._operation, self._bind)
        try:
            self._phases.run()
        except BaseException:
            self._phases = None
            raise
