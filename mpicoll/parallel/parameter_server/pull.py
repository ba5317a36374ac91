"""Pulls that have been started: the class Pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.transport.base import Pending


class Pull:
    """Weights on their way to a worker.

    Example:
        >>> def program():
        ...     if mpicoll.world().rank == 0:
        ...         rule = mpicoll.parallel.parameter_server.SGD(lr=0.5)
        ...         return mpicoll.parallel.parameter_server.ParameterServer(rule).run()
        ...     weights = np.zeros(2)
        ...     with mpicoll.parallel.parameter_server.Worker({"w": weights}) as worker:
        ...         worker.push_gradients({"w": np.ones(2)})
        ...         worker.pull_weights(wait=False).wait()
        ...     return weights.tolist()
        >>> mpicoll.run_local(program, 2)
        [None, [-0.5, -0.5]]
    """

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
