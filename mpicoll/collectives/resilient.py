"""resilient: a loop that continues after the death of ranks."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpicoll.collectives.allgather import allgather
from mpicoll.collectives.bcast import bcast
from mpicoll.engine.core import state_copy
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import ArgumentError, CommunicatorError, RankFailed

S = TypeVar("S")

_log = logging.getLogger("mpicoll")


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

    `state` must be the same on all ranks, before and after each step: numpy arrays, numbers, torch tensors, modules and
    optimizers (objects with ``state_dict`` and ``load_state_dict``), anything that can be pickled, and dicts, lists and
    tuples of these. `step` may change it in place and return None, or return a new state. After a death the state is
    restored in place if possible. In each step, `step` must derive all values that differ between ranks, such as the
    rank's part of the data, from ``number``, ``comm.rank`` and ``comm.size``, as these change, and random numbers from
    ``number``. Effects outside of `state` (printing, writing) occur again if a step is repeated.

    `setup`, if given, is called as ``setup(comm)`` at the start and after each death. Its result is passed to `step`
    instead of `comm`. It creates the objects that depend on the communicator, such as groups. `every` is the number of
    steps between two copies of the state, to which survivors roll back: with a larger number the state is copied less
    often, and more steps are repeated. All ranks must pass the same arguments. If `comm` is the default,
    :func:`mpicoll.world` is the communicator of the survivors afterwards.

    Returns the state after the last step. Exceptions other than RankFailed are raised, unless a rank has just died,
    which may cause any exception. Raises ArgumentError for `steps` or `every` out of range.

    Costs a copy of the state for each `every` steps, in memory and time, and one agreement at the end; after a death
    some milliseconds, and a broadcast of the state.
    """
    if steps < 0 or every < 1:
        raise ArgumentError(f"resilient: steps must be at least 0 and every at least 1, got {steps} and {every}")
    last: S = _Loop(step, state, steps, resolve(comm), every, setup).run()
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
        self._kept = 0, state_copy.taken(state)
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
            self._go_on()
        except Exception as error:
            if not self._because_of_a_death(error):
                raise
            # Its frames keep objects alive that setup recreates.
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    def _because_of_a_death(self, error: BaseException) -> bool:
        if isinstance(error, RankFailed):
            return True
        try:
            return self._comm.failed()
        except CommunicatorError:  # the communicator was freed, so the error has another cause
            return False

    def _recover(self) -> None:
        comm = self._comm
        done = allgather(np.array([self._kept[0]]), comm=comm).reshape(-1)
        source = int(done.argmax())
        own = state_copy.packed(self._kept[1]) if comm.rank == source else np.empty(0, np.uint8)
        size = int(bcast(np.array(own.size), root=source, comm=comm))
        data = bcast(own if comm.rank == source else np.empty(size, np.uint8), root=source, comm=comm)
        if comm.rank != source:
            self._kept = int(done[source]), state_copy.unpacked(data)
        if comm.rank == 0:
            gone = sorted(set(self._members) - set(comm.members))
            _log.warning(
                "rank %s of the job has died; %d ranks go on with step %d",
                ", ".join(map(str, gone)),
                comm.size,
                self._kept[0],
            )
        self._members = comm.members
        self._state = state_copy.put_back(self._kept[1], self._state)

    def _go_on(self) -> None:
        number = self._kept[0]
        context = self._comm if self._setup is None else self._setup(self._comm)
        while number < self._steps:
            returned = self._step(self._state, number, context)
            if returned is not None:
                self._state = returned
            number += 1
            if number % self._every == 0 or number == self._steps:
                self._kept = number, state_copy.taken(self._state)
