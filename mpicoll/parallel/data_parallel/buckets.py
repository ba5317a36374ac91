"""Buckets: gradients that are reduced in one message.

A bucket is a flat tensor: the gradients of its parameters, which are views of it, and behind them its flags. There is
one flag for each parameter, which is 1 if this rank has a gradient for it, and one which is 1 if this rank has joined,
that is, has no more data. The flags are reduced with the gradients. So all ranks find out, without another message, for
which parameters there is a gradient on any rank, and whether a rank has joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from mpicoll.collectives.empty import empty
from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import CommunicationError

FIRST_BUCKET = 1 << 20
"""Size in bytes of the first bucket of each dtype, as of torch's DistributedDataParallel: it is complete early."""


class Bucket:
    """Gradients of `parameters`, all of one dtype and device, in memory that the ranks of a node share if possible.

    Created by all ranks together. `indices` are the numbers of the parameters in the model, and `missing` counts those
    whose gradient of this step is not yet complete.
    """

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Parameter], kind: tuple[torch.dtype, torch.device], comm: Any
    ) -> None:
        self.indices = tuple(indices)
        self.parameters = [parameters[index] for index in indices]
        self.missing = len(self.indices)
        self.numel = sum(one.numel() for one in self.parameters)
        self.flat = _allocate(self.numel + len(self.indices) + 1, *kind, comm)
        self.gradients, self.flags = self.flat[: self.numel], self.flat[self.numel :]
        parts = self.gradients.split([one.numel() for one in self.parameters])
        self.views = [_view_like(part, one) for part, one in zip(parts, self.parameters, strict=True)]
        self._present = torch.ones_like(self.flags)
        self._present[-1] = 0
        self._absent: list[int] = []

    @torch.no_grad()
    def fill(self, *, joined: bool) -> None:
        """Write the gradients of this rank, which become views of the bucket, and the flags. Absent gradients, and
        those of a rank that has joined, are zeros."""
        targets, sources, absent = [], [], []
        for number, (one, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = one.grad
            if grad is None or joined:
                view.zero_()
                absent.append(number)
                one.grad = None
            elif grad is not view:
                targets.append(view)
                sources.append(grad if grad.layout is torch.strided else grad.to_dense())
                one.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)
        self.flags.copy_(self._present)
        if absent:
            self.flags[absent] = 0
        if joined:
            self.flags[-1] = 1
        self._absent = absent

    def read(self, *, joined: bool) -> bool:
        """Let parameters without a gradient on this rank have the reduced one if any rank has one. Return True if a
        rank has joined."""
        if self._absent and not joined:
            for number in set(self._absent).difference(self.list_unused()):
                self.parameters[number].grad = self.views[number]
        return bool(self.flags[-1] != 0)

    def list_unused(self) -> list[int]:
        """Return the parameters, by their numbers in the bucket, for which no rank has a gradient; after the
        reduction."""
        if not self._absent:
            return []
        present = self.flags[:-1].cpu()
        return [number for number in self._absent if present[number] == 0]

    def copy_absent(self, errors: Tensor) -> dict[int, Tensor]:
        """Return copies of those of `errors`, one for each element, whose parameters have no gradient on this rank."""
        parts = errors.split([one.numel() for one in self.parameters])
        return {number: parts[number].clone() for number in self._absent}

    def restore_unused(self, errors: Tensor, kept: Mapping[int, Tensor]) -> None:
        """Undo what a step has done to the `errors` of parameters for which no rank has a gradient: what was sent of
        them is dropped. `kept` are copies from before the step."""
        parts = errors.split([one.numel() for one in self.parameters])
        for number in self.list_unused():
            parts[number].copy_(kept[number])

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients by `factor`."""
        self.gradients.mul_(factor)


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, comm: Communicator) -> Tensor:
    if device.type == "cpu":
        try:
            shared: Tensor = empty(numel, dtype, like="torch", comm=comm)
        except CommunicationError:  # on all ranks: the node does not have enough shared memory
            return torch.empty(numel, dtype=dtype)
        return shared
    return torch.empty(numel, dtype=dtype, device=device)


def _view_like(part: Tensor, parameter: Parameter) -> Tensor:
    """Return `part` in the shape of `parameter`, and with its strides if its elements are dense in any order."""
    return part.as_strided(parameter.shape, _strides_in_bucket(parameter))


def describe_order(parameter: Parameter) -> str:
    """Return the strides of the gradient of `parameter` in a bucket as text; nothing if it is contiguous."""
    strides = _strides_in_bucket(parameter)
    is_contiguous = torch.empty_strided(parameter.shape, strides, device="meta").is_contiguous()
    return "" if is_contiguous else f", strides {strides}"


def _strides_in_bucket(parameter: Parameter) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()


def divide(
    order: Iterable[int], parameters: Sequence[Parameter], capacity: int
) -> list[tuple[list[int], tuple[torch.dtype, torch.device]]]:
    """Divide the parameters, by their numbers in `order`, into buckets of one dtype and device.

    A bucket is closed when it has `capacity` bytes, the first one of a dtype and device `FIRST_BUCKET`. Buckets are in
    the order in which they are closed.
    """
    closed: list[tuple[list[int], tuple[torch.dtype, torch.device]]] = []
    pending: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    limit: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in order:
        one = parameters[index]
        kind = one.dtype, one.device
        pending.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + one.nbytes
        if filled[kind] >= limit.get(kind, min(FIRST_BUCKET, capacity)):
            closed.append((pending.pop(kind), kind))
            filled[kind], limit[kind] = 0, capacity
    return [*closed, *((indices, kind) for kind, indices in pending.items())]
