"""Torch modules, as a worker handles them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mpicoll.errors import ArgumentError, DTypeError
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.parallel.parameter_server.plan import Bucket, Part, TensorSpec

Key: TypeAlias = tuple[int, int]
"""A server and a bucket of it."""


class ModuleModel:
    """Model of the parameters of a torch module that need gradients, which pulls write to. Hooks send the gradients of
    a bucket once backward has computed the last one."""

    def __init__(self, module: nn.Module, sparse: Collection[str]) -> None:
        if not isinstance(module, nn.Module):
            raise DTypeError(
                f"Worker: the model must be a dict of numpy arrays or a torch module, got {type(module).__name__}"
            )
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        embeddings = [one for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
        found = {id(one.weight) for one in embeddings if one.sparse}
        self._set(named, {*sparse, *(name for name, one in named.items() if id(one) in found)})

    def _set(self, named: Mapping[str, Tensor], sparse: Collection[str]) -> None:
        self._parameters = list(named.values())
        self.specs = tuple(
            TensorSpec(
                name, tuple(one.shape), str(one.dtype).removeprefix("torch."), one.element_size(), name in sparse
            )
            for name, one in named.items()
        )
        self._handles: list[Any] = []

    # --- gradients

    def attach(
        self,
        keys: Sequence[Key],
        bucket_of: Callable[[Key], Bucket],
        send: Callable[[Key, Sequence[Any]], None],
        backward_passes: int,
    ) -> None:
        """Call `send` with the bucket and all gradients when the last gradient of a bucket has been accumulated."""
        self._buckets_of: list[list[Key]] = [[] for _ in self._parameters]
        self._sizes: dict[Key, int] = {}
        for key in keys:
            bucket = bucket_of(key)
            if not bucket.sparse:
                tensors = {part.tensor for part in bucket.parts}
                self._sizes[key] = len(tensors)
                for tensor in tensors:
                    self._buckets_of[tensor].append(key)
        self._send = send
        self._passes = backward_passes
        # Backward of several devices runs on several threads.
        self._lock = threading.Lock()
        self._reset()
        for index, parameter in enumerate(self._parameters):
            if self._buckets_of[index]:
                hook = self._make_hook(index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            with self._lock:
                self._counts[index] += 1
                if self._counts[index] > self._passes:
                    raise ArgumentError(
                        f"Worker: backward has computed the gradient of {self.specs[index].name!r}"
                        f" {self._counts[index]} times since the last push_gradients; call it after each"
                        f" {self._passes} backward passes, or set backward_passes="
                    )
                if self._counts[index] == self._passes:
                    for key in self._buckets_of[index]:
                        self._missing[key] -= 1
                        if not self._missing[key]:
                            self._send(key, self._flat_gradients())

        return hook

    def _reset(self) -> None:
        self._missing = self._sizes.copy()
        self._counts = [0] * len(self._parameters)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _flat_gradients(self) -> Sequence[Any]:
        return _FlatGradients(self._parameters)

    def make_gradients(self, gradients: Any) -> list[Any]:
        """Return the gradient of each parameter: flat, None for zeros, or rows and values if it is sparse."""
        if gradients is not None:
            raise ArgumentError(
                "push_gradients: pass nothing; the gradients of a torch module are its parameters' .grad"
            )
        found: list[Any] = []
        for spec, flat in zip(self.specs, self._flat_gradients(), strict=True):
            if flat is None or not spec.sparse:
                found.append(flat)
                continue
            gradient = flat.coalesce() if flat.is_sparse else flat.view(spec.shape).to_sparse(1).coalesce()
            rows = gradient.indices()[0].cpu().numpy()
            found.append((rows, gradient.values().reshape(len(rows), spec.row)))
        return found

    def clear_gradients(self) -> None:
        """Set all gradients to None, and wait for those of the next step."""
        for parameter in self._parameters:
            parameter.grad = None
        self._reset()

    def store_gradient(self, gradient: Tensor, part: Part, memory: Array) -> None:
        """Copy a part of a flat gradient into `memory`, which is bytes."""
        if gradient.is_sparse:
            raise ArgumentError(
                f"Worker: the gradient of {self.specs[part.tensor].name!r} is sparse; name it in sparse= of the worker"
            )
        self._view(part, memory).copy_(gradient[part.start : part.stop])

    def split_rows(self, gradient: Any) -> tuple[Array, Array]:
        """Return the rows of a sparse gradient, and the bytes of the values of each."""
        rows, values = gradient
        # A tensor of one column may have any stride and count as contiguous, and a view as bytes needs stride 1.
        flat = values.cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        return rows, flat.view(torch.uint8).numpy().reshape(len(rows), values.shape[1] * values.element_size())

    def sum_of_squares(self, gradient: Any) -> float:
        """Return the sum of the squares of a gradient."""
        values = gradient[1] if isinstance(gradient, tuple) else gradient
        return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float64)) ** 2)

    # --- weights

    def read_weights(self, part: Part, memory: Array) -> None:
        """Copy a part of the model into `memory`."""
        flat = self._parameters[part.tensor].detach().reshape(-1)
        self._view(part, memory).copy_(flat[part.start : part.stop])

    def write_weights(self, part: Part, memory: Array) -> None:
        """Copy `memory` into a part of the model."""
        parameter = self._parameters[part.tensor].detach()
        values = self._view(part, memory)
        if parameter.is_contiguous():
            parameter.view(-1)[part.start : part.stop].copy_(values)
        else:
            flat = parameter.reshape(-1)
            flat[part.start : part.stop] = values
            parameter.copy_(flat.view(parameter.shape))

    def write_rows(self, tensor: int, rows: Array, memory: Array) -> None:
        """Copy `memory` into some rows of a tensor."""
        if not len(rows):
            return  # Torch refuses to view the strides of an empty array.
        parameter = self._parameters[tensor].detach()
        values = torch.from_numpy(memory).view(parameter.dtype).view(len(rows), *parameter.shape[1:])
        parameter[torch.from_numpy(rows).to(parameter.device)] = values.to(parameter.device)

    def _view(self, part: Part, memory: Array) -> Tensor:
        return torch.from_numpy(memory).view(self._parameters[part.tensor].dtype)

    def copy(self) -> ModuleModel:
        """Return a model of the same tensors, in other memory."""
        copy = object.__new__(ModuleModel)
        named = {
            spec.name: one.detach().clone(memory_format=torch.contiguous_format)
            for spec, one in zip(self.specs, self._parameters, strict=True)
        }
        copy._set(named, {spec.name for spec in self.specs if spec.sparse})
        return copy

    def as_dict(self) -> dict[str, Any]:
        """Return the tensors by their names."""
        return {spec.name: one for spec, one in zip(self.specs, self._parameters, strict=True)}


class _FlatGradients(Sequence[Any]):
    """The gradients of parameters as flat tensors; None if there is none."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        gradient = self._parameters[index].grad
        return gradient if gradient is None or gradient.is_sparse else gradient.reshape(-1)
