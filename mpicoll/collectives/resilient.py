"""resilient: a loop that continues after the death of ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.objects import bcast_object
from mpicoll.engine.core import state_copy
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.world import CommLike, as_communicator
from mpicoll.errors import ArgumentError, CommunicatorError, RankFailed
from mpicoll.logs import get_logger
from mpicoll.wording import count, inflect, rank_list

S = TypeVar("S")


def resilient(
    step: Callable[[S, int, Any], S | None],
    state: S,
    steps: int,
    *,
    comm: CommLike = None,
    every: int = 1,
    setup: Callable[[Communicator], Any] | None = None,
) -> S:
    """Run ``state = step(state, number, comm)`` for each number from 0 to `steps` - 1, on the surviving ranks.

    When a rank dies, the survivors abandon the current step, :meth:`~mpicoll.Communicator.shrink` the communicator,
    find the latest copy of the state on any of them, broadcast it, and continue with the next step. Therefore each step
    takes effect exactly once as long as one rank survives; no file is needed. This requires a job that survives the
    death of a rank (``mpirun --with-ft ulfm`` of Open MPI 5). In other jobs it is a plain loop.

    Exceptions of `step` and `setup` other than RankFailed are raised, unless a rank has just died, which may cause any
    exception.

    Costs a copy of the state for each `every` steps, in memory and time, and one agreement at the end; after a death
    some milliseconds, and a broadcast of the state.

    Args:
        step: changes the state in place and returns None, or returns a new state. It must derive all values that differ
            between ranks, such as the rank's part of the data, from ``number``, ``comm.rank`` and ``comm.size``, as
            these change, and random numbers from ``number``. Effects outside of the state (printing, writing) occur
            again if a step is repeated.
        state: the same on all ranks, before and after each step: numpy arrays, numbers, torch tensors, modules and
            optimizers (objects with ``state_dict`` and ``load_state_dict``), anything that can be pickled, and dicts,
            lists and tuples of these. After a death it is restored in place if possible, and the gradients of torch's
            parameters are set to None.
        steps: the number of steps, the same on all ranks, as are all arguments.
        comm: the communicator. If it is the default, :func:`mpicoll.world` is the communicator of the survivors
            afterwards.
        every: the number of steps between two copies of the state, to which survivors roll back: with a larger number
            the state is copied less often, and more steps are repeated.
        setup: is called as ``setup(comm)`` at the start and after each death. It creates the objects that depend on the
            communicator, such as groups. Its result is passed to `step` instead of `comm`.

    Returns:
        The state after the last step.

    Raises:
        ArgumentError: `steps` or `every` is out of range, or `step` or `setup` is not a function.

    Example:
        >>> mpicoll.resilient(lambda total, number, comm: total + number, 0, steps=4)
        6
    """
    if steps < 0 or every < 1:
        raise ArgumentError(f"resilient: steps must be at least 0 and every at least 1, got {steps} and {every}")
    for name, function in (("step", step), ("setup", setup)):
        if not callable(function) and (name == "step" or function is not None):
            raise ArgumentError(f"resilient: {name} must be a function, got {function!r}")
    last: S = _Loop(step, state, steps, as_communicator(comm), every, setup).run()
    return last


class _Loop:
    def __init__(
        self,
        step: Callable[[Any, int, Any], Any],
        state: Any,
        steps: int,
        comm: Communicator,
        every: int,
        setup: Callable[[Communicator], Any] | None,
    ) -> None:
        self._step = step
        self._state = state
        self._steps = steps
        self._comm = comm
        self._every = every
        self._setup = setup
        self._checkpoint = 0, state_copy.take_snapshot(state)
        self._members = comm.members

    def run(self) -> Any:
        recovering = False
        while True:
            # No rank returns before all have completed, since it may be the only rank with the state of the last step.
            finished = self._attempt(recovering=recovering)
            if self._comm.agree(finished):
                return self._state
            self._comm = self._comm.shrink()
            recovering = True

    def _attempt(self, *, recovering: bool) -> bool:
        """Run the remaining steps. Return False if a rank has died."""
        try:
            if recovering:
                self._recover()
            self._run_steps()
        except Exception as error:
            if not self._is_rank_failure(error):
                raise
            # Its frames keep objects alive that setup recreates.
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    def _is_rank_failure(self, error: BaseException) -> bool:
        if isinstance(error, RankFailed):
            return True
        try:
            return self._comm.failed()
        except CommunicatorError:  # the communicator was freed, so the error has another cause
            return False

    def _recover(self) -> None:
        comm = self._comm
        completed = allgather(np.array([self._checkpoint[0]]), comm=comm).reshape(-1)
        source = int(completed.argmax())
        self._checkpoint = bcast_object(self._checkpoint if comm.rank == source else None, source, comm=comm)
        if comm.rank == 0:
            dead = sorted(set(self._members) - set(comm.members))
            get_logger().warning(
                "%s of the job %s died; %s with step %d",
                rank_list(dead),
                inflect(dead, "has", "have"),
                f"{count(comm.size, 'rank')} {'continues' if comm.size == 1 else 'continue'}",
                self._checkpoint[0],
            )
        self._members = comm.members
        self._state = state_copy.restore(self._checkpoint[1], self._state)

    def _run_steps(self) -> None:
        number = self._checkpoint[0]
        context = self._comm if self._setup is None else self._setup(self._comm)
        while number < self._steps:
            returned = self._step(self._state, number, context)
            if returned is not None:
                self._state = returned
            number += 1
            if number % self._every == 0 or number == self._steps:
                self._checkpoint = number, state_copy.take_snapshot(self._state)
