"""Pulls that have been started: the class Pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.transport.base import Pending


class Pull:
    """Weights on their way to a worker."""

    def __init__(self, finish: Callable[[Pull], None], model: Any) -> None:
        self._finish = finish
        self._done = False
        self.model = model
        self.memory: dict[tuple[int, int], Array] = {}
        self.rows: dict[tuple[int, int], Array] = {}
        self.pending: dict[tuple[int, int], Pending] = {}

    def wait(self) -> None:
        """Wait for the weights, and write them into the model. May be called again.

        Raises:
            RankFailed, CommunicationError, Timeout: as ``push_gradients`` of the worker.
        """
        if not self._done:
            self._finish(self)
            self._done = True
