"""Compression of gradients, with error feedback: what a step leaves out is added to the gradient of the next one.

Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from mpicoll.collectives.allgather import allgather_init
from mpicoll.collectives.allreduce import allreduce_init
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError
from mpicoll.parallel.data_parallel.buckets import Bucket
from mpicoll.parallel.data_parallel.exchange import DenseExchange, Exchange, Waits
from mpicoll.parallel.data_parallel.power_sgd import PowerSGDExchange

MakeExchange: TypeAlias = "Callable[[Bucket, str, Communicator], Exchange]"


class Compressor:
    """A way to reduce buckets, made by :class:`Compression`. `name` contains its options."""

    def __init__(self, name: str, make: MakeExchange) -> None:
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """Ways to compress gradients for :class:`DistributedOptimizer`; n is the number of elements of a bucket.

    All but ``none`` keep a rank's error of a step and add it to its gradient of the next one, in memory of the size of
    the gradients. They save bytes and cost time: they pay where the connection between ranks is slow, not in shared
    memory.

    ===================  ==========================================================================================
    ``none``             the gradients as they are
    ``fp16``, ``bf16``   16 bits for each element, accumulated in float32; buckets of 16 bits are not compressed
    ``top_k(density)``   the ``density`` · n elements of largest magnitude, values and indices, gathered
    ``power_sgd(rank)``  a factorisation of low rank of each matrix (n·m elements become rank · (n+m))
    ===================  ==========================================================================================

    Example:
        ::

            optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
            optimizer = DistributedOptimizer(optimizer, compression=Compression.top_k(0.05))
    """

    none = Compressor("none", DenseExchange)
    fp16 = Compressor("fp16", lambda bucket, op, comm: _make_half(bucket, op, comm, torch.float16))
    bf16 = Compressor("bf16", lambda bucket, op, comm: _make_half(bucket, op, comm, torch.bfloat16))

    @staticmethod
    def top_k(density: float = 0.01) -> Compressor:
        """Return the compression to the `density` (a part of 1) of the elements that have the largest magnitude."""
        if not 0 < density <= 1:
            raise ArgumentError(f"top_k: density must be in (0, 1], got {density}")
        return Compressor(f"top_k({density})", lambda bucket, op, comm: TopKExchange(bucket, op, comm, density))

    @staticmethod
    def power_sgd(rank: int = 1, *, start: int = 10) -> Compressor:
        """Return PowerSGD of the given `rank`, which compresses from step number `start` on.

        Vogels et al. 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
        """
        if rank < 1 or start < 0:
            raise ArgumentError(f"power_sgd: rank must be at least 1 and start at least 0, got {rank} and {start}")
        return Compressor(
            f"power_sgd({rank}, start={start})",
            lambda bucket, op, comm: PowerSGDExchange(bucket, op, comm, rank, start),
        )


def _make_half(bucket: Bucket, op: str, comm: Communicator, dtype: torch.dtype) -> Exchange:
    if bucket.flat.element_size() <= 2 or bucket.flat.is_complex():
        return DenseExchange(bucket, op, comm)
    return HalfExchange(bucket, op, comm, dtype)


class HalfExchange:
    """All-reduce in a dtype of 16 bits. Values beyond its range become infinite, which an AMP scaler detects."""

    def __init__(self, bucket: Bucket, op: str, comm: Communicator, dtype: torch.dtype) -> None:
        self._bucket = bucket
        self._error = torch.zeros_like(bucket.gradients)
        self._sent = torch.empty_like(bucket.flat, dtype=dtype)
        self._plan = allreduce_init(self._sent, op, out=self._sent, comm=comm)
        self.nbytes = self._sent.nbytes

    @torch.no_grad()
    def start(self) -> Waits:
        gradients = self._bucket.gradients
        kept = self._bucket.copy_absent(self._error)
        gradients.add_(self._error)
        self._sent.copy_(self._bucket.flat)
        torch.sub(gradients, self._sent[: self._bucket.numel], out=self._error)
        # The error of what is not finite can't be sent later.
        self._error.nan_to_num_(0, 0, 0)
        self._plan.start()
        yield self._plan.wait
        self._bucket.flat.copy_(self._sent)
        self._bucket.restore_unused(self._error, kept)


class TopKExchange:
    """All-gather of the largest elements of each rank, which every rank adds in the order of ranks."""

    def __init__(self, bucket: Bucket, op: str, comm: Communicator, density: float) -> None:
        self._bucket = bucket
        self._scale = 1 / comm.size if op == "avg" else 1.0
        # Sums and errors of 16-bit gradients are in float32.
        wide = torch.promote_types(bucket.flat.dtype, torch.float32)
        self._error = torch.zeros_like(bucket.gradients, dtype=wide)
        is_wide = bucket.flat.dtype is wide
        self._sum = bucket.gradients if is_wide else torch.empty_like(bucket.gradients, dtype=wide)
        self._count = min(bucket.numel, math.ceil(density * bucket.numel))
        self._flags = torch.empty_like(bucket.flags)
        index = torch.int32 if bucket.numel < 1 << 31 else torch.int64
        self._parts = (self._count, bucket.flat.dtype), (self._count, index), (len(bucket.flags), torch.uint8)
        self._alignment = max(8, bucket.flat.element_size())
        self.nbytes = sum(self._align(count * dtype.itemsize) for count, dtype in self._parts)
        self._sent = torch.zeros(self.nbytes, dtype=torch.uint8, device=bucket.flat.device)
        self._received = self._sent.new_empty(comm.size * self.nbytes)
        self._plan = allgather_init(self._sent, out=self._received, comm=comm)

    @torch.no_grad()
    def start(self) -> Waits:
        kept = self._bucket.copy_absent(self._error)
        self._error.add_(self._bucket.gradients)
        chosen = self._error.abs().topk(self._count, sorted=False).indices
        values, indices, flags = self._split(self._sent)
        values.copy_(self._error[chosen])
        indices.copy_(chosen)
        flags.copy_(self._bucket.flags.real)
        self._error[chosen] -= values
        # An element that is not finite would stay.
        self._error.nan_to_num_(0, 0, 0)
        self._plan.start()
        yield self._plan.wait
        self._sum.zero_()
        self._bucket.flags.zero_()
        for message in self._received.split(self.nbytes):
            values, indices, flags = self._split(message)
            self._sum.index_add_(0, indices, values.to(self._sum.dtype))
            self._bucket.flags.add_(flags)
        self._sum.mul_(self._scale)
        if self._sum is not self._bucket.gradients:
            self._bucket.gradients.copy_(self._sum)
        self._bucket.restore_unused(self._error, kept)

    def _split(self, message: Tensor) -> list[Tensor]:
        parts, start = [], 0
        for count, dtype in self._parts:
            parts.append(message[start : start + count * dtype.itemsize].view(dtype))
            start += self._align(count * dtype.itemsize)
        return parts

    def _align(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment
