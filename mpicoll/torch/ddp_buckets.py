"""DDP's buckets in shared memory of the ranks of a node, which are reduced without copies."""

# Without `from __future__ import annotations`: DDP checks the annotations of a hook, and rejects strings.

import logging
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import resolve
from mpicoll.errors import CommunicationError
from mpicoll.torch.groups import communicator

Hook: TypeAlias = "Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]"

_log = logging.getLogger("mpicoll")


def share_buckets(model: Any, hook: Hook = allreduce_hook) -> None:
    """Make `model`, a DistributedDataParallel of an mpicoll group, reduce its buckets in the node's shared memory.

    The memory of each bucket is moved to shared memory when the bucket is first reduced. All ranks must call this
    before the first backward pass, instead of ``model.register_comm_hook``. If the ranks can't share memory, or the
    model is on a GPU, buckets are not moved.

    Args:
        model: the DistributedDataParallel module.
        hook: the communication hook, by default DDP's averaging all-reduce. Its state is the model's process group.

    Raises:
        CommunicatorError: the process group of `model` has another backend.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> mpicoll.torch.share_buckets(model)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
    """
    buckets = _Buckets(resolve(communicator(model.process_group)))

    def reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.move(bucket)
        return hook(group, bucket)

    model.register_comm_hook(model.process_group, reduce)


class _Buckets:
    """Buckets of one model in shared memory."""

    def __init__(self, comm: CommunicatorCore) -> None:
        self._comm = comm
        # The memory is kept for as long as the ranks identify buckets by its addresses.
        self._memory: dict[int, torch.Tensor] = {}
        self._segments: dict[int, int] = {}
        finalize(self, _release, comm, self._segments).atexit = False

    def move(self, bucket: dist.GradBucket) -> None:
        """Move `bucket` to shared memory if its memory is new. Collective in that case."""
        memory, index = bucket.buffer(), bucket.index()
        known = self._memory.get(index)
        if (
            memory.is_cpu
            and self._comm.no_shm_reason is None
            and (known is None or known.data_ptr() != memory.data_ptr())
        ):
            self._comm.queue.run(self._move, Call(f"share_buckets/{index}"), memory, index)

    def _move(self, memory: torch.Tensor, index: int) -> None:
        if self._comm.arena() is None:
            # No rank repeats this call.
            self._memory[index] = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
            return
        number = self._segments.pop(index, None)
        if number is not None:
            self._comm.unregister(number)  # DDP has recreated its buckets
        try:
            fd = memory.untyped_storage()._share_fd_cpu_()[0]
        except RuntimeError as error:
            _log.warning("DDP's bucket of %d bytes can't be moved to shared memory: %s", memory.nbytes, error)
            fd = -1
        whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        try:
            self._segments[index] = self._comm.adopt(whole.numpy(), fd)
        except CommunicationError as error:
            _log.warning("DDP's bucket of %d bytes is not shared among the ranks: %s", memory.nbytes, error)
        self._memory[index] = whole


def _release(comm: CommunicatorCore, numbers: dict[int, int]) -> None:
    for number in numbers.values():
        comm.unregister(number)
