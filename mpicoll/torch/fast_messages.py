"""Messages like earlier ones, which are started by the extension in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpicoll.collectives.message_buffers import may_be_announced
from mpicoll.collectives.repeated_messages import StartedMessage, repeat_started
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.request import Request
from mpicoll.torch.work import Work, WorkHandle, run_in_thread
from mpicoll.transport.base import Route

if TYPE_CHECKING:
    from mpicoll._shm import PendingMessage


class MessageWork(Work):
    """Work of a message that the extension has started.

    The thread that waits for it completes it. Other threads make progress on it only while no thread waits.
    """

    # A method in Python would double the time that it takes to make an object.
    __init__ = dist.Work.__init__

    bound = None
    _error = None
    _future = None
    _schedule = staticmethod(run_in_thread)
    _message: PendingMessage
    _queue: OperationQueue

    @property
    def handle(self) -> WorkHandle:
        return StartedMessage(self._queue, self._message)

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [self._message.array]

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout or self.bound is not None:
            return Work.wait(self, timeout)
        try:
            self._message.wait()
        except BaseException as error:
            if self._message.test():
                self._error = error
            raise
        return True

    @property
    def _source(self) -> Any:
        return None if self._message.sends else lambda: self._message.source


def _bind_work(queue: OperationQueue) -> Callable[[PendingMessage], MessageWork]:
    """Return the function that returns the Work of a message."""

    def make_work(message: PendingMessage) -> MessageWork:
        work: MessageWork = MessageWork()
        work._message, work._queue = message, queue
        return work

    return make_work


class FastMessages:
    """Messages of a group, of plain CPU tensors.

    ``start(None, sent, received, name, peer, tag)`` starts a message like an earlier one, and returns its MessageWork;
    None, before anything has been sent, if the general path must start it. The name is "isend_work" for the tensor
    `sent`, "irecv_work" for the tensor `received`; the other tensor is None.
    """

    def __init__(self, comm: CommunicatorCore) -> None:
        self._comm = comm
        self.start = comm.queue.run_repeated

    def repeat(self, name: str, tensor: torch.Tensor, peer: int | None, tag: int, request: Request) -> None:
        """Have later messages like that of `request` started by the extension, if there has been one before. The name
        is "isend" or "irecv"."""
        comm = self._comm
        if comm.queue.calls is None or comm.checks.calls or type(tensor) is not torch.Tensor:
            return
        if name == "irecv" and may_be_announced(comm, tensor.nbytes):
            return
        key = f"{name}_work", tensor.dtype, tensor.shape, peer, tag
        if key not in comm.call_cache:
            comm.cache_call(key, True)
        elif tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
            _, call = request.awaited
            source, result = (tensor, None) if name == "isend" else (None, tensor)
            repeat_started(comm, (key[0], peer, tag), source, result, call, Route(peer, tag), _bind_work(comm.queue))
