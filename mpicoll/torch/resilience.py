"""resilient: training that continues after the death of ranks, with torch's process groups."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.collectives import resilient as native
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.world import world
from mpicoll.errors import ArgumentError
from mpicoll.torch.groups import find_operations, get_default_group

S = TypeVar("S")


def resilient(
    step: Callable[[S, int, Any], S | None],
    state: S,
    steps: int,
    *,
    every: int = 1,
    setup: Callable[[Communicator], Any] | None = None,
) -> S:
    """Run :func:`mpicoll.resilient` for programs that use torch's process groups.

    After the death of a rank the default process group is recreated from the survivors, with the same backend and
    timeout::

        def step(state, number, parallel):
            images, digits = batch(number, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            cross_entropy(parallel(images), digits).backward()
            optimizer.step()

        state = {"model": model, "optimizer": optimizer}
        dist.resilient(step, state, steps, setup=lambda comm: DistributedDataParallel(model))

    The program must keep no other reference to the result of `setup`: an old DistributedDataParallel continues to
    reduce gradients until it is deleted. Other process groups are destroyed as well, so create those in `setup` too.

    Args:
        step: called with the state, the number of the step, and the result of `setup`, by default the communicator.
        state: as of :func:`mpicoll.resilient`.
        steps: as of :func:`mpicoll.resilient`.
        every: as of :func:`mpicoll.resilient`.
        setup: called with the communicator; creates the objects that depend on the process group.

    Returns:
        The state after the last step.

    Raises:
        ArgumentError: the default process group is not an mpicoll group of all ranks.

    All other errors are those of :func:`mpicoll.resilient`.

    Example:
        >>> mpicoll.torch.resilient(lambda state, step, setup: state + step, 0, 4)  # on one rank
        6
    """
    group = get_default_group()
    operations = find_operations(group)
    if operations is None or operations.comm.size != world().size:
        raise ArgumentError(
            "resilient: the default process group must have the backend mpicoll and contain all ranks; call"
            " init_process_group() of mpicoll.torch first"
        )
    return native.resilient(step, state, steps, every=every, setup=_Setup(group, operations.comm.timeout, setup))


class _Setup:
    """Provider of a default process group of the communicator's ranks."""

    def __init__(self, group: Any, timeout: float, setup: Callable[[Communicator], Any] | None) -> None:
        self._backend = _get_backend(group)
        self._timeout = timedelta(seconds=timeout)
        self._comm = world()
        self._setup = setup

    def __call__(self, comm: Communicator) -> Any:
        if comm is not self._comm:
            self._recreate_group()
            self._comm = comm
        return comm if self._setup is None else self._setup(comm)

    def _recreate_group(self) -> None:
        # Objects that use the old group are in reference cycles.
        gc.collect()
        if dist.is_initialized():
            for group in list(c10d._world.pg_map):
                operations = find_operations(group)
                if operations is not None:
                    operations.abort()
            dist.destroy_process_group()
        dist.init_process_group(self._backend, timeout=self._timeout)


def _get_backend(group: Any) -> str:
    return str(c10d._world.pg_backend_config.get(group) or "mpicoll")
