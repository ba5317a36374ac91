"""State of a batch on one stage, and the division of its tensors into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from mpicoll.errors import ArgumentError, DTypeError
from mpicoll.parallel.pipeline.schedules import Action

LEAF_TYPES = (Tensor, type(None), bool, int, float, str)
"""Types of leaves in the tuples, lists and dicts that parts pass to each other."""


@dataclass(slots=True)
class SavedTensors:
    """Tensors that require grad, which a forward keeps for its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(slots=True)
class Batch:
    """State of a batch in the pipeline on one stage; micro-batches by number.

    `mark` is part of every message, and detects stages that run different operations.
    """

    mark: str
    actions: Sequence[Action]
    inputs: Sequence[Any]
    targets: Sequence[Any]
    weights: Sequence[float]
    train: bool
    saved: dict[tuple[int, int], SavedTensors] = field(default_factory=dict)
    weight_backwards: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    outputs: dict[int, Any] = field(default_factory=dict)


def find_tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def detach(value: Any) -> Any:
    """Return `value` for another part of the model on this stage, detached as if received from another stage."""
    return tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), value)


def split_batch(value: Any, count: int) -> list[Any]:
    """Divide the tensors in `value` into parts for `count` micro-batches; each gets all else whole."""
    leaves, structure = tree_flatten(value)
    columns = [one.tensor_split(count) if isinstance(one, Tensor) else [one] * count for one in leaves]
    return [tree_unflatten(row, structure) for row in zip(*columns, strict=True)]


def concatenate_outputs(values: Sequence[Any], where: str) -> Any:
    """Concatenate the tensors of `values`, which have one structure, along axis 0. `where` names the stage."""
    if len(values) == 1:
        return values[0]
    flat = [tree_flatten(value) for value in values]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        kinds = [str(tree_map(lambda leaf: type(leaf).__name__, value)).replace("'", "") for value in values]
        raise ArgumentError(
            "predict: outputs of micro-batches can be concatenated only if all have one structure, got"
            f" {_list_different(kinds)}; pass micro_batches=1 {where}"
        )
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_join_leaves(row, where) for row in rows], structure)


def _join_leaves(parts: Sequence[Any], where: str) -> Any:
    if all(isinstance(one, Tensor) for one in parts):
        return torch.cat(list(parts))
    for one in parts:
        if not isinstance(one, LEAF_TYPES):
            raise DTypeError(
                f"predict: a {type(one).__name__} in the output of the last part can't be concatenated with those of"
                " other micro-batches; return tuples, lists and dicts of tensors, or pass micro_batches=1 " + where
            )
    values = [f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one) for one in parts]
    if len(set(values)) > 1:
        raise ArgumentError(
            "predict: numbers, strings and None in the output of the last part must be the same for all micro-batches,"
            f" got {_list_different(values)}; return tensors, or pass micro_batches=1 {where}"
        )
    return parts[0]


def _list_different(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(values))
    return ", ".join(different[:4]) + ", ..." * (len(different) > 4)
