"""Functions of the program that run before a group, or the whole job, is aborted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mpicoll.engine.diagnostics.process_exit import exit_hooks

_log = logging.getLogger("mpicoll")


class AbortHooks:
    """The hooks of one group by their number. When the job is ended, each group's hooks have a bound on their time."""

    def __init__(self) -> None:
        self._by_number: dict[int, Callable[[], object]] = {}

    def add(self, number: int, hook: Callable[[], object]) -> None:
        if not self._by_number:
            exit_hooks.append(self.run)
        self._by_number[number] = hook

    def remove(self, number: int) -> None:
        """Remove the hook of this `number`, if there is one."""
        if self._by_number.pop(number, None) is not None and not self._by_number:
            exit_hooks.remove(self.run)

    def clear(self) -> None:
        for number in list(self._by_number):
            self.remove(number)

    def run(self) -> None:
        """Call the hooks. An error of one is logged, as the others and the abort must go on."""
        for hook in list(self._by_number.values()):
            try:
                hook()
            except Exception:  # noqa: BLE001  the hooks are the program's
                _log.exception("a hook of a group that is aborted failed")
