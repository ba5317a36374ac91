"""DDP's buckets in memory that all ranks of a node reach, where they are reduced without copies."""

# Without `from __future__ import annotations`: DDP looks at the annotations of a hook, and wants no strings.

import logging
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicationError
from mpicoll.torch.groups import communicator

Hook: TypeAlias = "Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]"

_log = logging.getLogger("mpicoll")


def share_buckets(model: Any, hook: Hook = allreduce_hook) -> None:
    """Let `model`, a DistributedDataParallel of an mpicoll group, reduce its buckets in memory that all ranks of the
    node reach: the memory of each bucket is moved there when it is first reduced.

    To be called by all ranks, before the first backward pass, in the place of ``model.register_comm_hook``: `hook` is
    the communication hook (DDP's own averaging all-reduce unless another is given), whose state is the model's process
    group. Where the ranks can't share memory, or the model is on a GPU, nothing else changes. Raises CommunicatorError
    for groups of other backends.
    """
    buckets = _Buckets(communicator(model.process_group))

    def reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.move(bucket)
        return hook(group, bucket)

    model.register_comm_hook(model.process_group, reduce)


class _Buckets:
    """The buckets of one model that all ranks reach."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # The memory is kept for as long as the ranks take its addresses for it.
        self._known: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}
        finalize(self, _forget, comm, self._numbers).atexit = False

    def move(self, bucket: dist.GradBucket) -> None:
        """Collective, when the memory of `bucket` is a new one."""
        memory, index = bucket.buffer(), bucket.index()
        known = self._known.get(index)
        if (
            memory.is_cpu
            and self._comm.unshared is None
            and self._comm.lost is None
            and (known is None or known.data_ptr() != memory.data_ptr())
        ):
            self._comm.progress.run(self._move, Call(f"share_buckets/{index}"), memory, index)

    def _move(self, memory: torch.Tensor, index: int) -> None:
        if self._comm.arena() is None:
            return
        number = self._numbers.pop(index, None)
        if number is not None:
            self._comm.forget(number)  # DDP has made its buckets anew
        try:
            fd = memory.untyped_storage()._share_fd_cpu_()[0]
        except RuntimeError as error:
            _log.warning("DDP's bucket of %d bytes can't be moved to shared memory: %s", memory.nbytes, error)
            fd = -1
        whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        try:
            self._numbers[index] = self._comm.adopt(whole.numpy(), fd)
        except CommunicationError as error:
            _log.warning("DDP's bucket of %d bytes is not shared among the ranks: %s", memory.nbytes, error)
        self._known[index] = whole


def _forget(comm: Communicator, numbers: dict[int, int]) -> None:
    for number in numbers.values():
        comm.forget(number)
