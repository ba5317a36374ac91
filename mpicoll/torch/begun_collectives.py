"""Asynchronous collectives like earlier ones, which are begun by the extension in the caller's thread."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.torch.callback_comms import CallbackQueue
from mpicoll.torch.work import CallbackScheduler, Work, WorkHandle

UNSET_TIMEOUT = timedelta(0)
"""Upper bound of unset timeouts: without a timeout torch's options hold a negative value."""


class CollectiveWork(Work):
    """Work of a collective that the extension has begun."""

    # A method in Python would double the time that it takes to make an object.
    __init__ = dist.Work.__init__

    bound = None
    outputs: list[torch.Tensor]
    handle: WorkHandle
    _error = None
    _future = None
    _source = None
    _schedule: CallbackScheduler


class BegunCollectives:
    """Collectives of a group, of plain CPU tensors. Callbacks of their futures run in `callbacks`."""

    def __init__(self, comm: CommunicatorCore, callbacks: CallbackQueue) -> None:
        self._begin = comm.queue.begin_repeated
        self._schedule = callbacks.submit

    def start(
        self,
        outputs: list[torch.Tensor],
        opts: Any,
        tensor: torch.Tensor,
        output: torch.Tensor | None,
        name: str,
        op: str | None = None,
        root: int | None = None,
    ) -> Work | None:
        """Begin a collective like an earlier one, of the functions in :mod:`mpicoll.torch.c10d_collectives`, and return
        its Work; None, before anything has been done, if there was none or it can't be begun now.

        Args:
            outputs: what the Work returns.
            opts: c10d's options.
            tensor, output: the arrays; no output where this rank receives nothing.
            name: the function; `op` and `root` are its arguments, by the names of the native collective.
        """
        # With the key that the first call of the kind was cached by.
        begun = self._begin(None, tensor, output, name, op, root, None)
        if begun is None:
            return None
        work: CollectiveWork = CollectiveWork()
        work.handle, work.outputs, work._schedule = begun, outputs, self._schedule
        if opts.timeout > UNSET_TIMEOUT:
            work.bound = opts.timeout.total_seconds()
        return work
