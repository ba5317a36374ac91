"""DDP's communication hook that compresses gradients between nodes."""

# Without `from __future__ import annotations`: DDP checks the annotations of a hook, and rejects strings.

from typing import Any

import torch
import torch.distributed as dist

from mpicoll.collectives import allreduce
from mpicoll.collectives.compression import check_compression_name
from mpicoll.engine import dispatch
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.compression_memory import CompressionMemory
from mpicoll.engine.dispatch import Task
from mpicoll.errors import CommunicatorError
from mpicoll.torch.groups import communicator, find_operations


class CompressionState:
    """State of :func:`compression_hook` for one model: what its buckets have left out.

    Args:
        process_group: the process group of the model, of mpicoll; None is the default group.
        compression: ``"int8"`` or ``"bf16"``, as of :func:`mpicoll.allreduce`, the same on all ranks.
        feedback: True to add what a step leaves out of a bucket to the bucket of the next step (error feedback), in
            memory of up to twice the size of the gradients divided by the number of ranks of a node.

    Raises:
        ArgumentError: there is no such compression.
        CommunicatorError: the process group has another backend.

    Example:
        >>> mpicoll.torch.CompressionState(compression="int8", feedback=False).compression
        'int8'
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, compression: str = "int8", *, feedback: bool = True
    ) -> None:
        self.compression = check_compression_name("CompressionState", compression)
        self.feedback = feedback
        communicator(process_group)  # raises the error for other groups
        group = dist.group.WORLD if process_group is None else process_group
        operations = find_operations(group)
        if operations is None:
            raise CommunicatorError("CompressionState: there is no process group; call init_process_group before")
        self._operations = operations
        self._memories: dict[int, CompressionMemory] = {}

    def average(self, bucket: dist.GradBucket) -> Any:
        """Start the averaging of `bucket` in place, and return its Work."""
        tensor, index = bucket.buffer(), bucket.index()
        memory = self._memories.get(index)
        if memory is None:
            memory = self._memories[index] = CompressionMemory(self.compression, feedback=self.feedback)

        def prepare(comm: CommunicatorCore) -> Task:
            return dispatch.make_task(allreduce.prepare(comm, tensor, "avg", tensor, None, memory))

        return self._operations.start("all_reduce", prepare, [tensor])


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, with messages between nodes that are compressed.

    It is for ``model.register_comm_hook(state, compression_hook)``, where all ranks register it, and for float32
    gradients on the CPU. On one node nothing is compressed.

    Raises:
        DTypeError, DeviceError: the gradients are of another dtype, or on a device.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model.register_comm_hook(mpicoll.torch.CompressionState(compression="bf16"), mpicoll.torch.compression_hook)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
    """
    future: torch.futures.Future[torch.Tensor] = state.average(bucket).get_future().then(_take_tensor)
    return future


def _take_tensor(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
