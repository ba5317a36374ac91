"""Values for the entries of a checkpoint, which DCP overwrites, and their transfer to the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mpicoll.errors import ArgumentError, ShapeError
from mpicoll.parallel.checkpoint.state import (
    Sharding,
    Shardings,
    iterate_optimizer_parameters,
    list_options,
    to_dtensor,
)
from mpicoll.wording import shorten

_Entries: TypeAlias = Mapping[str, STORAGE_TYPES]


def check_entries(wanted: Mapping[str, Any], entries: _Entries) -> None:
    """Raise unless the tensors `wanted` can be loaded. DCP checks the other values."""
    tensors = {f"model.{name}": value for name, value in wanted.items() if isinstance(value, Tensor)}
    missing = [key for key in tensors if not isinstance(entries.get(key), TensorStorageMetadata)]
    if missing:
        raise ArgumentError(f"load: the checkpoint does not contain {', '.join(shorten(missing, most=5))}")
    other = [
        f"{key} of shape {tuple(found.size)}, but the model has shape {tuple(value.shape)}"
        for key, value in tensors.items()
        if isinstance(found := entries[key], TensorStorageMetadata) and found.size != value.shape
    ]
    if other:
        raise ShapeError(f"load: the checkpoint has {', '.join(shorten(other, most=5))}")


def make_optimizer_template(
    named: Mapping[str, Any], shardings: Shardings, optimizer: Optimizer, entries: _Entries
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the states of the parameters of `optimizer`, values to be overwritten by DCP.

    The options determine the state: where all options are present, the state is that of this class of optimizer.
    """
    prefix = "optimizer.state."
    states: dict[str, list[str]] = {}
    for key in entries:
        if key.startswith(prefix):
            name, _, entry = key.removeprefix(prefix).rpartition(".")
            states.setdefault(name, []).append(entry)
    options: dict[str, Any] = {}
    template: dict[str, Any] = {}
    missing = []
    for _, name, param, group in iterate_optimizer_parameters(named, optimizer):
        for option in list_options(group):
            key = f"param_groups.{name}.{option}"
            if f"optimizer.{key}" not in entries:
                missing.append(f"optimizer.{key}")
            else:
                options[key] = _make_template_entry(entries[f"optimizer.{key}"])
        saved = entries.get(f"model.{name}")
        for entry in states.get(name, []):
            template[f"state.{name}.{entry}"] = _make_template_entry(
                entries[f"{prefix}{name}.{entry}"], param, shardings.get(name), saved
            )
    if missing:
        raise ArgumentError(
            f"load: the checkpoint does not contain {', '.join(shorten(missing, most=5))}; it was saved with another"
            " class of"
            f" optimizer than {type(optimizer).__name__}, or with other parameters"
        )
    return options, template


def _make_template_entry(
    found: STORAGE_TYPES,
    param: Tensor | None = None,
    sharding: Sharding | None = None,
    saved: STORAGE_TYPES | None = None,
) -> Any:
    """Return a value for DCP to overwrite.

    It is a tensor like `param`, with its layout, if the entry has the full shape of `param`. An entry with the dtype of
    the `saved` parameter gets that of `param`, as optimizers require.
    """
    if not isinstance(found, TensorStorageMetadata):
        return None
    dtype = found.properties.dtype
    if param is not None and found.size == (param.shape if sharding is None else sharding.full_shape(param.shape)):
        if isinstance(saved, TensorStorageMetadata) and dtype == saved.properties.dtype:
            dtype = param.dtype
        return to_dtensor(torch.empty_like(param, dtype=dtype), sharding)
    return torch.empty(found.size, dtype=dtype)


def merge_options(
    named: Mapping[str, Any], optimizer: Optimizer, loaded: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return the options of each parameter group, of those `loaded` for each of its parameters."""
    of_group: dict[int, dict[str, Any]] = {}
    for number, name, _, group in iterate_optimizer_parameters(named, optimizer):
        options = {option: loaded[f"param_groups.{name}.{option}"] for option in list_options(group)}
        for option, value in of_group.setdefault(number, options).items():
            if not bool(options[option] == value):
                raise ArgumentError(
                    f"load: the checkpoint has {option}={options[option]!r} for {name!r} and {value!r} for other"
                    f" parameters of group {number}; use the same parameter groups as when it was saved"
                )
    return of_group


def restore_optimizer(
    named: Mapping[str, Any],
    optimizer: Optimizer,
    loaded: Mapping[str, Any],
    of_group: Mapping[int, Mapping[str, Any]],
) -> None:
    """Give `optimizer` the `loaded` states of its parameters, and the options `of_group`."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        name, _, entry = key.removeprefix("state.").rpartition(".")
        states.setdefault(name, {})[entry] = value.to_local() if isinstance(value, DTensor) else value
    for number, name, param, _ in iterate_optimizer_parameters(named, optimizer):
        options = of_group[number]
        state = states.get(name, {})
        if options.get("capturable") or options.get("fused"):  # which keep the number of steps beside the parameter
            state = {entry: value.to(param.device) for entry, value in state.items()}
        optimizer.state.pop(param, None)
        if state:
            optimizer.state[param] = state
    for number, options in of_group.items():
        optimizer.param_groups[number].update(options)
