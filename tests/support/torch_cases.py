"""Collectives of torch.distributed on tensors of a device, played or real, whose values are late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


class Device(Protocol):
    """The device of the tensors."""

    def late(self, values: torch.Tensor) -> Any:
        """A tensor that has other values until what the current stream was given is done."""

    def now(self, tensor: Any) -> torch.Tensor:
        """Return the current values, without waiting for the current stream."""


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count) % 50 + 100 * (rank + 1)).view(shape).to(dtype)


def room(device: Device, shape: Sequence[int], layout: str, dtype: torch.dtype = torch.float32) -> Any:
    """An output that still has work to come, which belongs before what is written by a collective."""
    if layout == "contiguous":
        return device.late(torch.full(tuple(shape), -5).to(dtype))
    return device.late(torch.full(tuple(reversed(shape)), -5).to(dtype)).permute(*reversed(range(len(shape))))


class Case:
    """Calls a collective of torch.distributed: what it is given is late. `filled` are its outputs, `wanted` what must
    be in them."""

    def __init__(self, group: Any, device: Device, layout: str, dtype: torch.dtype = torch.float32) -> None:
        self.group, self.device, self.layout, self.dtype = group, device, layout, dtype
        self.rank, self.size = group.rank(), group.size()
        self.filled: list[Any] = []
        self.wanted: list[torch.Tensor] = []

    def of(self, rank: int, *shape: int) -> torch.Tensor:
        return numbers(rank, *shape, dtype=self.dtype)

    def mine(self, *shape: int) -> Any:
        values = self.of(self.rank, *shape)
        return (
            self.device.late(values) if self.layout == "contiguous" else self.device.late(values.t().contiguous()).t()
        )

    def expect(self, filled: Any, wanted: torch.Tensor) -> Any:
        self.filled.append(filled)
        self.wanted.append(wanted.to(self.dtype))
        return filled

    def outputs(self, *wanted: torch.Tensor) -> list[Any]:
        return [self.expect(room(self.device, one.shape, self.layout, self.dtype), one) for one in wanted]

    def total(self, *shape: int) -> torch.Tensor:
        return torch.stack([self.of(rank, *shape).double() for rank in range(self.size)]).sum(0)

    def __call__(self, name: str, async_op: bool) -> Any:
        return getattr(self, name)({"group": self.group, "async_op": async_op})

    def all_reduce(self, how: Any) -> Any:
        return dist.all_reduce(self.expect(self.mine(4, 6), self.total(4, 6)), **how)

    def all_reduce_avg(self, how: Any) -> Any:
        mean = self.total(4, 6) / self.size
        return dist.all_reduce(self.expect(self.mine(4, 6), mean), ReduceOp.AVG, **how)

    def all_reduce_max(self, how: Any) -> Any:
        return dist.all_reduce(self.expect(self.mine(4, 6), self.of(self.size - 1, 4, 6)), ReduceOp.MAX, **how)

    def all_reduce_coalesced(self, how: Any) -> Any:
        tensors = [self.expect(self.mine(4, n), self.total(4, n)) for n in (1, 7)]
        return dist.all_reduce_coalesced(tensors, **how)

    def reduce(self, how: Any) -> Any:
        root = self.size - 1
        tensor = self.mine(4, 6)
        self.expect(tensor, self.total(4, 6) if self.rank == root else self.of(self.rank, 4, 6))
        return dist.reduce(tensor, group_dst=root, **how)

    def broadcast(self, how: Any) -> Any:
        return dist.broadcast(self.expect(self.mine(4, 6), self.of(0, 4, 6)), group_src=0, **how)

    def all_gather(self, how: Any) -> Any:
        return dist.all_gather(self.outputs(*(self.of(r, 4, 6) for r in range(self.size))), self.mine(4, 6), **how)

    def all_gather_uneven(self, how: Any) -> Any:
        outputs = self.outputs(*(self.of(r, r + 1, 3) for r in range(self.size)))
        return dist.all_gather(outputs, self.mine(self.rank + 1, 3), **how)

    def all_gather_single(self, how: Any) -> Any:
        (output,) = self.outputs(torch.cat([self.of(r, 4, 6) for r in range(self.size)]))
        return dist.all_gather_into_tensor(output, self.mine(4, 6), **how)

    def gather(self, how: Any) -> Any:
        outputs = self.outputs(*(self.of(r, 4, 6) for r in range(self.size))) if self.rank == 0 else None
        return dist.gather(self.mine(4, 6), outputs, group_dst=0, **how)

    def scatter(self, how: Any) -> Any:
        (output,) = self.outputs(self.of(self.rank + 5, 4, 6))
        inputs = [self.device.late(self.of(r + 5, 4, 6)) for r in range(self.size)] if self.rank == 0 else None
        return dist.scatter(output, inputs, group_src=0, **how)

    def reduce_scatter(self, how: Any) -> Any:
        (output,) = self.outputs(self.total(self.rank + 1, 6))
        return dist.reduce_scatter(output, [self.mine(r + 1, 6) for r in range(self.size)], **how)

    def reduce_scatter_single(self, how: Any) -> Any:
        (output,) = self.outputs(self.total(4 * self.size, 6)[4 * self.rank : 4 * self.rank + 4])
        return dist.reduce_scatter_tensor(output, self.mine(4 * self.size, 6), **how)

    def all_to_all(self, how: Any) -> Any:
        inputs = [self.device.late(self.of(10 * self.rank + r, self.rank + 1, 2)) for r in range(self.size)]
        outputs = self.outputs(*(self.of(10 * r + self.rank, r + 1, 2) for r in range(self.size)))
        return dist.all_to_all(outputs, inputs, **how)

    def all_to_all_single(self, how: Any) -> Any:
        parts = [self.of(r, 2 * self.size, 3)[2 * self.rank : 2 * self.rank + 2] for r in range(self.size)]
        (output,) = self.outputs(torch.cat(parts))
        return dist.all_to_all_single(output, self.mine(2 * self.size, 3), **how)

    def check(self) -> None:
        """That all is there, whichever stream looks."""
        for filled, wanted in zip(self.filled, self.wanted, strict=True):
            torch.testing.assert_close(self.device.now(filled), wanted, rtol=0, atol=0)


_OTHERS = ("of", "mine", "expect", "outputs", "total", "check")

NAMES = sorted(name for name in vars(Case) if not name.startswith("_") and name not in _OTHERS)
