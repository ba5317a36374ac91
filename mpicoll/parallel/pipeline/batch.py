"""State of a batch on one stage, and the division of its tensors into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from mpicoll.parallel.pipeline.schedules import Action


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
    """Divide `value` into parts for `count` micro-batches."""
    leaves, structure = tree_flatten(value)
    columns = [one.tensor_split(count) if isinstance(one, Tensor) else [one] * count for one in leaves]
    return [tree_unflatten(row, structure) for row in zip(*columns, strict=True)]


def concatenate_outputs(values: Sequence[Any]) -> Any:
    """Concatenate the tensors of `values`, which have one structure, along axis 0."""
    flat = [tree_flatten(value) for value in values]
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    leaves = [torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0] for parts in rows]
    return tree_unflatten(leaves, flat[0][1])
