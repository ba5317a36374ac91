"""Reduction of one bucket, as a generator of the waits that it consists of.

``start()`` begins the first collective. It yields a function that waits for it; when it is resumed it goes on with what
follows, and ends when the bucket holds the result. So the collectives of several buckets are in flight together, in an
order that is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.nn import Parameter

from mpicoll.collectives.allreduce import allreduce_init, iallreduce
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.request import Request
from mpicoll.parallel.data_parallel.buckets import Bucket
from mpicoll.torch import sparse

Waits: TypeAlias = "Iterator[Callable[[], Any]]"

_SMALL_BYTES = 64 << 10
"""Bytes of a bucket on the CPU up to which the calls that begin and await its reduction carry it out: to wake the
thread of the queue, which then competes for the interpreter lock, would take longer."""


class Exchange(Protocol):
    """Reduction of one bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank passes to collectives in a step."""

    def start(self) -> Waits:
        """Reduce the bucket in place."""


class DenseExchange:
    """All-reduce of the bucket itself."""

    def __init__(self, bucket: Bucket, op: str, comm: Communicator) -> None:
        self.nbytes = bucket.flat.nbytes
        self._reduce = partial(iallreduce, bucket.flat, op, out=bucket.flat, comm=comm)
        is_small = bucket.flat.is_cpu and self.nbytes <= _SMALL_BYTES
        self._plan = None if is_small else allreduce_init(bucket.flat, op, out=bucket.flat, comm=comm)

    def start(self) -> Waits:
        if self._plan is None:
            yield self._reduce().wait
        else:
            self._plan.start()
            yield self._plan.wait


class SparseBucket:
    """Gradient of one parameter with sparse gradients, such as the weights of an embedding.

    The gradients of all ranks are gathered, entries only. All ranks agreed on `sparse_dim`, the number of dimensions of
    an entry's index.
    """

    def __init__(self, index: int, parameter: Parameter, sparse_dim: int, op: str, comm: Communicator) -> None:
        self.indices = (index,)
        self.parameters = [parameter]
        self.missing = 1
        self._sparse_dim = sparse_dim
        self._op = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        self._core = core_of(comm)
        self._sum = torch.empty(0)
        self.nbytes = 0

    def fill(self, *, joined: bool) -> None:
        """Take the gradient of this rank; without one, no entries."""
        one = self.parameters[0]
        grad = None if joined or one.grad is None else one.grad.detach()
        if grad is None:
            dense_shape = one.shape[self._sparse_dim :]
            indices = torch.empty(self._sparse_dim, 0, dtype=torch.int64, device=one.device)
            values = torch.empty(0, *dense_shape, dtype=one.dtype, device=one.device)
            grad = torch.sparse_coo_tensor(indices, values, one.shape, check_invariants=False)
        elif grad.layout is torch.strided:
            grad = grad.to_sparse(self._sparse_dim)
        self._sum = grad.coalesce()
        self.nbytes = self._sum.indices().nbytes + self._sum.values().nbytes

    def start(self) -> Waits:
        task = sparse.all_reduce(self._core, self._sum, self._op)
        yield Request(self._core.queue.submit(task, task.call), lambda: None).wait

    def read(self, *, joined: bool) -> bool:
        """Let the parameter have the reduced gradient, or none if it has no entries. Return False: other buckets have
        the flag of ranks that have joined."""
        if not joined:
            self.parameters[0].grad = self._sum if self._sum.values().numel() else None
        return False

    def scale(self, factor: float) -> None:
        """Multiply the gradient by `factor`."""
        self._sum.mul_(factor)
