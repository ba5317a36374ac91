"""resilient: training that goes on when ranks die, with torch's process groups."""

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
from mpicoll.torch.groups import default_group
from mpicoll.torch.process_group import ProcessGroupMpicoll

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
    timeout. `setup` creates the objects that depend on the group, and its result is passed to `step`::

        def step(state, number, parallel):
            images, digits = batch(number, dist.get_rank(), dist.get_world_size())
            optimizer.zero_grad()
            cross_entropy(parallel(images), digits).backward()
            optimizer.step()

        state = {"model": model, "optimizer": optimizer}
        dist.resilient(step, state, steps, setup=lambda comm: DistributedDataParallel(model))

    The program must keep no other reference to the result of `setup`: an old DistributedDataParallel goes on reducing
    gradients until it is deleted. Other process groups are destroyed as well, so create those in `setup` too. All other
    arguments, the result and the errors are those of :func:`mpicoll.resilient`; also raises ArgumentError if the
    default process group is not an mpicoll group of all ranks.
    """
    group = default_group()
    if group is None or group.comm.size != world().size:
        raise ArgumentError(
            "resilient: the default process group must be mpicoll's, of all ranks; call"
            " init_process_group() of mpicoll.torch first"
        )
    return native.resilient(step, state, steps, every=every, setup=_Setup(group, setup))


class _Setup:
    """Provider of a default process group of the communicator's ranks."""

    def __init__(self, group: ProcessGroupMpicoll, then: Callable[[Communicator], Any] | None) -> None:
        self._backend = _backend_of(group)
        self._timeout: timedelta = group.options._timeout
        self._comm = world()
        self._then = then

    def __call__(self, comm: Communicator) -> Any:
        if comm is not self._comm:
            self._renew()
            self._comm = comm
        return comm if self._then is None else self._then(comm)

    def _renew(self) -> None:
        # Objects that use the old group are in reference cycles.
        gc.collect()
        if dist.is_initialized():
            for group in list(c10d._world.pg_map):
                if isinstance(group, ProcessGroupMpicoll):
                    group.abort()
            dist.destroy_process_group()
        dist.init_process_group(self._backend, timeout=self._timeout)


def _backend_of(group: ProcessGroupMpicoll) -> str:
    return str(c10d._world.pg_backend_config.get(group) or "mpicoll")
