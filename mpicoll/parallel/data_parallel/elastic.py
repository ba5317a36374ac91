"""Training that continues after the death of ranks, with the names of Horovod's elastic mode.

:func:`mpicoll.resilient` repeats a step; this repeats the rest of a training function, from its last commit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.objects import bcast_object
from mpicoll.collectives.resilient import resilient
from mpicoll.engine.core import state_copy
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError
from mpicoll.parallel.data_parallel.optimizer import DistributedOptimizer

P = ParamSpec("P")
R = TypeVar("R")


class TorchState:
    """State of a training: a model, an optimizer, and other values, which are attributes.

    Args:
        model: a module, or any object with ``state_dict`` and ``load_state_dict``.
        optimizer: likewise, such as a :class:`~mpicoll.parallel.DistributedOptimizer`, which :func:`run` adapts to the
            ranks that are left.
        values: numbers, arrays, tensors, objects with a ``state_dict``, such as learning rate schedules, and anything
            that can be pickled.

    Raises:
        ArgumentError: a value has the name of a method.

    Example:
        >>> state = mpicoll.parallel.data_parallel.elastic.TorchState(torch.nn.Linear(4, 2), epoch=0)
        >>> state.epoch += 1
        >>> state.commit()
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        named = {"model": model, "optimizer": optimizer, **values}
        taken = sorted(name for name in values if name.startswith("_") or hasattr(type(self), name))
        if taken:
            raise ArgumentError(f"TorchState: {', '.join(taken)} can't be the name of a value; choose another one")
        self._names = tuple(named)
        self._commits = 0
        self._comm: Communicator | None = None
        vars(self).update(named)
        self._saved = state_copy.take_snapshot(self._collect())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"TorchState has no value {name!r}; pass it to TorchState")

    def commit(self) -> None:
        """Copy the values, in memory. All ranks commit at the same point of the training; no message is sent."""
        self._saved = state_copy.take_snapshot(self._collect())
        self._commits += 1

    def restore(self) -> None:
        """Return to the last commit of this rank, or to the initial values. Gradients are set to None."""
        vars(self).update(state_copy.restore(self._saved, self._collect()))

    def sync(self, group: Any = None) -> None:
        """Restore the latest commit of any rank on all ranks of `group`, by default all ranks. Collective."""
        commits = allgather(np.array([self._commits]), comm=group).reshape(-1)
        source = int(commits.argmax())
        self._saved, self._commits = bcast_object((self._saved, self._commits), source, comm=group)
        self.restore()

    def reset(self, comm: Communicator) -> None:
        """Continue on the ranks of `comm`: the optimizer, and all values by :meth:`sync`. Collective over them."""
        if self._comm is not None:
            for one in self._collect().values():
                if isinstance(one, DistributedOptimizer):
                    one.reset(comm)
        self._comm = comm
        self.sync(comm)

    def _collect(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self._names}


def run(function: Callable[Concatenate[TorchState, P], R]) -> Callable[Concatenate[TorchState, P], R]:
    """Return `function` as one that is called again, on the ranks that are left, when ranks have died.

    ``function(state, ...)`` trains from ``state`` on, and calls ``state.commit()`` now and then. Before each call, also
    the first one, all ranks restore the latest commit. It must derive what differs between ranks from
    :func:`mpicoll.world`, which changes. Effects outside of the state may occur twice. Its result must be picklable.

    This is :func:`mpicoll.resilient` of one step, so it needs a job that survives the death of a rank (``mpirun
    --with-ft ulfm`` of Open MPI 5). In other jobs `function` is called once.

    Example:
        >>> @mpicoll.parallel.data_parallel.elastic.run
        ... def train(state, epochs):
        ...     while state.epoch < epochs:
        ...         state.epoch += 1
        ...         state.commit()
        ...     return state.epoch
        >>> train(mpicoll.parallel.data_parallel.elastic.TorchState(epoch=0), 3)
        3
    """

    @functools.wraps(function)
    def call(state: TorchState, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def attempt(previous: dict[str, Any], number: int, context: Any) -> dict[str, Any]:
            result = function(state, *args, **kwargs)
            # Where another rank dies now, this is what the others restore.
            state.commit()
            return {"result": result}

        last: dict[str, Any] = resilient(attempt, {"result": None}, 1, setup=state.reset)
        result: R = last["result"]
        return result

    return call
