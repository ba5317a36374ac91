"""The model of a worker: numpy arrays, or a torch module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mpicoll.errors import ArgumentError
from mpicoll.parallel.parameter_server.arrays import ArrayModel

if TYPE_CHECKING:
    from mpicoll.parallel.parameter_server.module import ModuleModel


def make_model(model: Any, sparse: Collection[str]) -> ArrayModel | ModuleModel:
    """Return the model of a worker. Raises ArgumentError if `sparse` does not fit it."""
    if isinstance(model, Mapping):
        made: ArrayModel | ModuleModel = ArrayModel(model, sparse)
    else:
        from mpicoll.parallel.parameter_server.module import ModuleModel

        made = ModuleModel(model, sparse)
    _check_sparse(made, sparse)
    return made


def _check_sparse(model: ArrayModel | ModuleModel, sparse: Collection[str]) -> None:
    names = [spec.name for spec in model.specs]
    if len(set(names)) != len(names):
        raise ArgumentError(f"Worker: the names of the tensors must differ, got {names}")
    unknown = sorted(set(sparse) - set(names))
    if unknown:
        raise ArgumentError(f"Worker: sparse= names {unknown[0]!r}, which is no tensor of the model: {names}")
    scalar = [spec.name for spec in model.specs if spec.sparse and not spec.shape]
    if scalar:
        raise ArgumentError(f"Worker: {scalar[0]!r} in sparse= has no rows")
