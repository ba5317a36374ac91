"""Weights of a server as torch parameters, which a torch optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpicoll.errors import ArgumentError
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.parallel.parameter_server.plan import Bucket, Part, TensorSpec

_NEEDS_CLOSURE = ("LBFGS",)
_NEEDS_SHAPES = ("Adafactor", "Muon")
"""Optimizers whose update of an element depends on the row or the matrix to which it belongs."""


class TorchUpdater:
    """Parameters that are the parts of a server, in the memory of its buckets. A part that is a whole tensor has its
    shape, others are flat; those of sparse buckets are rows."""

    def __init__(
        self,
        make_optimizer: Callable[[Any], Any],
        make_scheduler: Callable[[Any], Any] | None,
        specs: Sequence[TensorSpec],
        buckets: Sequence[Bucket],
        memories: Sequence[Array],
    ) -> None:
        self.parameters: list[list[nn.Parameter]] = []
        self._buckets = buckets
        self._specs = specs
        named: list[tuple[str, nn.Parameter]] = []
        cut = False
        for bucket, memory in zip(buckets, memories, strict=True):
            weights = self.view(memory, bucket.dtype)
            self.parameters.append([])
            for part in bucket.parts:
                spec, count = specs[part.tensor], part.stop - part.start
                flat = weights[part.offset : part.offset + count]
                if bucket.sparse:
                    flat = flat.view(-1, *spec.shape[1:])
                elif count == spec.size:
                    flat = flat.view(spec.shape)
                else:
                    cut = True
                # Of a tensor that several buckets of this server share, each part is a parameter.
                parameter = nn.Parameter(flat)
                self.parameters[-1].append(parameter)
                named.append((f"{spec.name}[{part.start}:{part.stop}]" if count < spec.size else spec.name, parameter))
        # An optimizer refuses to have no parameters, as on a server of a very small model.
        self.optimizer: Any = make_optimizer(named) if named else None
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        self._group_of = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
        self.scheduler = None if make_scheduler is None or self.optimizer is None else make_scheduler(self.optimizer)
        if self.optimizer is not None:
            _check_optimizer(self.optimizer, cut=cut)
            left_out = [name for name, one in named if id(one) not in self._group_of]
            if left_out:
                raise ArgumentError(
                    f"ParameterServer: the optimizer does not have {left_out[0]!r}; it must have all parameters that it"
                    " gets: on the workers, set requires_grad of those to False that are not to be updated"
                )

    def list_parts(self) -> list[tuple[TensorSpec, Part, nn.Parameter]]:
        """Return the tensor, the part of it and the parameter of each part."""
        return [
            (self._specs[part.tensor], part, parameter)
            for bucket, parameters in zip(self._buckets, self.parameters, strict=True)
            for part, parameter in zip(bucket.parts, parameters, strict=True)
        ]

    def spec_of(self, parameter: nn.Parameter) -> TensorSpec:
        """Return the tensor of which `parameter` is a part."""
        return next(spec for spec, _, one in self.list_parts() if one is parameter)

    @staticmethod
    def view(memory: Array, dtype: str) -> Tensor:
        """Return `memory`, which is bytes, as a tensor of `dtype`."""
        if not memory.size:
            # Torch refuses to view the strides of an empty array.
            return torch.empty(0, dtype=getattr(torch, dtype))
        return torch.from_numpy(memory).view(getattr(torch, dtype))

    @staticmethod
    def cast(values: Tensor, dtype: str) -> Tensor:
        """Return `values` in `dtype`."""
        return values.to(getattr(torch, dtype))

    @staticmethod
    def add(total: Tensor, more: Tensor) -> None:
        total += more

    @staticmethod
    def scale(gradient: Tensor, factor: float) -> None:
        gradient *= factor

    @staticmethod
    def sum_of_squares(gradient: Tensor) -> float:
        return float(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float64)) ** 2)

    @staticmethod
    def join(pieces: list[Tensor]) -> Tensor:
        """Return a copy of the pieces, one after the other."""
        return torch.cat(pieces)

    def update(self, index: int, gradient: Tensor) -> None:
        """Update bucket `index`."""
        parameters = self.parameters[index]
        for part, parameter in zip(self._buckets[index].parts, parameters, strict=True):
            parameter.grad = gradient[part.offset : part.offset + part.stop - part.start].view(parameter.shape)
        self._step(parameters)

    def add_rows(self, index: int, pieces: list[tuple[Array, Tensor]]) -> tuple[Array, Tensor]:
        """Return the distinct rows of `pieces`, which are rows and values, and the sums of their values in order."""
        rows, places = np.unique(np.concatenate([rows for rows, _ in pieces]), return_inverse=True)
        values = torch.cat([values for _, values in pieces]).view(-1, self._buckets[index].row)
        total = torch.zeros(len(rows), values.shape[1], dtype=values.dtype)
        return rows, total.index_add_(0, torch.from_numpy(places.reshape(-1)), values)

    def update_rows(self, index: int, rows: Array, values: Tensor) -> None:
        """Update some rows of bucket `index`."""
        (parameter,) = self.parameters[index]
        values = values.view(len(rows), *parameter.shape[1:])
        gradient = torch.sparse_coo_tensor(
            torch.from_numpy(rows)[None], values, parameter.shape, check_invariants=True, is_coalesced=True
        )
        parameter.grad = gradient
        self._step([parameter])

    def _step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the optimizer update `parameters`, the only ones that have gradients."""
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        # A step looks at all of its parameters, and there is one for each bucket.
        for group in groups:
            group["params"] = []
        for parameter in parameters:
            groups[self._group_of[id(parameter)]]["params"].append(parameter)
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        for parameter in parameters:
            parameter.grad = None

    def end_step(self) -> None:
        """Let the scheduler make a step."""
        if self.scheduler is not None:
            self.scheduler.step()


def _check_optimizer(optimizer: Any, *, cut: bool) -> None:
    name = type(optimizer).__name__
    if name in _NEEDS_CLOSURE:
        raise ArgumentError(
            f"ParameterServer: {name} calls the loss function, which a server does not have; use another optimizer"
        )
    if cut and name in _NEEDS_SHAPES:
        raise ArgumentError(
            f"ParameterServer: the updates of {name} depend on the shapes of tensors, which are cut into flat pieces;"
            " pass whole_tensors=True"
        )
