"""Models of numpy arrays, as a worker handles them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpicoll.errors import ArgumentError, DTypeError, ShapeError
from mpicoll.parallel.parameter_server.messages import Array
from mpicoll.parallel.parameter_server.plan import Part, TensorSpec


class ArrayModel:
    """Model of numpy arrays by their names, which pulls write to."""

    def __init__(self, arrays: Mapping[str, Any], sparse: Collection[str]) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
                raise DTypeError(
                    f"Worker: {name!r} must be a numpy array of real floating-point numbers, got"
                    f" {array.dtype if isinstance(array, np.ndarray) else type(array).__name__}"
                )
            if not (array.flags.c_contiguous and array.flags.writeable and array.dtype.isnative):
                raise ArgumentError(
                    f"Worker: array {name!r} must be contiguous, writable and in native byte order; pass a copy"
                )
        self._arrays = list(arrays.values())
        self._names = list(arrays)
        self.specs = tuple(
            TensorSpec(name, array.shape, array.dtype.name, array.itemsize, name in sparse)
            for name, array in arrays.items()
        )

    def make_gradients(self, gradients: Any) -> list[Any]:
        """Return the gradient of each tensor: a flat array, None for zeros, or rows and values if it is sparse."""
        if not isinstance(gradients, Mapping):
            raise ArgumentError(
                "push_gradients: pass a dict of the gradients by the names of the arrays, got"
                f" {type(gradients).__name__}"
            )
        unknown = sorted(set(gradients) - set(self._names))
        if unknown:
            raise ArgumentError(f"push_gradients: the model has no array {unknown[0]!r}; it has {self._names}")
        return [self._make_gradient(spec, gradients.get(spec.name)) for spec in self.specs]

    def _make_gradient(self, spec: TensorSpec, gradient: Any) -> Any:
        if gradient is None:
            return None
        if not spec.sparse:
            flat = np.asarray(gradient, spec.dtype, order="C")
            if flat.shape != spec.shape:
                raise ShapeError(
                    f"push_gradients: the gradient of {spec.name!r} must have shape {spec.shape}, got {flat.shape}"
                )
            return flat.reshape(-1)
        if not isinstance(gradient, tuple) or len(gradient) != 2:
            raise ArgumentError(
                f"push_gradients: the gradient of {spec.name!r}, which is sparse, must be (rows, values)"
            )
        rows, values = np.asarray(gradient[0], np.int64), np.asarray(gradient[1], spec.dtype, order="C")
        if rows.ndim != 1 or values.shape != (len(rows), *spec.shape[1:]):
            raise ShapeError(
                f"push_gradients: the gradient of {spec.name!r} must be rows of shape (n,) and values of shape"
                f" {('n', *spec.shape[1:])}, got {rows.shape} and {values.shape}"
            )
        check_rows("push_gradients", spec, rows)
        return rows, values.reshape(len(rows), spec.row)

    def store_gradient(self, gradient: Array, part: Part, memory: Array) -> None:
        """Copy a part of a flat gradient into `memory`, which is bytes."""
        memory.view(gradient.dtype)[:] = gradient[part.start : part.stop]

    def split_rows(self, gradient: Any) -> tuple[Array, Array]:
        """Return the rows of a sparse gradient, and the bytes of the values of each."""
        rows, values = gradient
        return rows, values.view(np.uint8)

    def sum_of_squares(self, gradient: Any) -> float:
        """Return the sum of the squares of a gradient; rows that are named twice count as their sum."""
        if isinstance(gradient, tuple):
            rows, places = np.unique(gradient[0], return_inverse=True)
            total = np.zeros((len(rows), gradient[1].shape[1]))
            np.add.at(total, places.reshape(-1), gradient[1])
            gradient = total
        return float(np.square(gradient, dtype=np.float64).sum())

    def read_weights(self, part: Part, memory: Array) -> None:
        """Copy a part of the model into `memory`."""
        memory[:] = self._part(part).view(np.uint8)

    def write_weights(self, part: Part, memory: Array) -> None:
        """Copy `memory` into a part of the model."""
        self._part(part)[:] = memory.view(self.specs[part.tensor].dtype)

    def write_rows(self, tensor: int, rows: Array, memory: Array) -> None:
        """Copy `memory` into some rows of a tensor."""
        table = self._arrays[tensor]
        table[rows] = memory.view(table.dtype).reshape(len(rows), *table.shape[1:])

    def clear_gradients(self) -> None:
        """Do nothing: the program passes the gradients of each step."""

    def detach(self) -> None:
        """Do nothing: nothing calls the worker."""

    def copy(self) -> ArrayModel:
        """Return a model of the same tensors."""
        arrays = {spec.name: array.copy() for spec, array in zip(self.specs, self._arrays, strict=True)}
        return ArrayModel(arrays, [spec.name for spec in self.specs if spec.sparse])

    def as_dict(self) -> dict[str, Any]:
        """Return the tensors by their names."""
        return {spec.name: array for spec, array in zip(self.specs, self._arrays, strict=True)}

    def _part(self, part: Part) -> Array:
        flat: Array = self._arrays[part.tensor].reshape(-1)
        return flat[part.start : part.stop]


def check_rows(operation: str, spec: TensorSpec, rows: Array) -> None:
    """Raise ShapeError if `rows` are not all rows of the tensor."""
    if rows.size and not (rows.min() >= 0 and rows.max() < spec.shape[0]):
        raise ShapeError(
            f"{operation}: rows of {spec.name!r} must be in [0, {spec.shape[0]}), got {rows.min()} to {rows.max()}"
        )
