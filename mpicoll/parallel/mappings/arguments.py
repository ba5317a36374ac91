"""Validation of the arguments of mappings."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import DTypeError, ShapeError
from mpicoll.parallel.groups import communicator, describe_rank

_Checked: TypeAlias = "tuple[Communicator, int, tuple[int, ...] | None]"


def check_whole(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> _Checked:
    """Check the arguments for a tensor to be divided; return communicator, dimension and sizes."""
    comm = resolve_communicator(operation, x, group)
    dim = normalize_dim(operation, x, dim, comm)
    if sizes is None:
        remedy = "pass the extents that the ranks get as sizes" if operation == "split" else "pad it"
        check_equal(operation, x, dim, comm, remedy)
        return comm, dim, None
    sizes = check_sizes(operation, "sizes", sizes, comm)
    check_sum(operation, "sizes", sizes, x, dim, comm)
    return comm, dim, sizes


def check_part(operation: str, x: Tensor, dim: int, group: Any, sizes: Sequence[int] | None) -> _Checked:
    """Check the arguments for a part of a tensor; return communicator, dimension and sizes."""
    comm = resolve_communicator(operation, x, group)
    dim = normalize_dim(operation, x, dim, comm)
    if sizes is None:
        return comm, dim, None
    sizes = check_sizes(operation, "sizes", sizes, comm)
    if x.shape[dim] != sizes[comm.rank]:
        raise ShapeError(
            f"{operation}: dimension {dim} of a tensor of shape {tuple(x.shape)} has extent {x.shape[dim]}, but sizes"
            f" {sizes} has {sizes[comm.rank]} for this rank; pass the same sizes on all ranks {describe_rank(comm)}"
        )
    return comm, dim, sizes


def resolve_communicator(operation: str, x: Any, group: Any) -> Communicator:
    comm = communicator(group)
    check_tensor(operation, x, comm)
    return comm


def check_tensor(operation: str, x: Any, comm: Communicator) -> None:
    """Raise DTypeError unless `x` is a tensor of torch."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{operation}: pass a torch tensor, got {type(x).__name__} {describe_rank(comm)}")


def normalize_dim(operation: str, x: Tensor, dim: Any, comm: Communicator) -> int:
    """Return `dim` as a non-negative number. Raise ShapeError if `x` has no such dimension."""
    dims = x.dim()
    if not isinstance(dim, int | np.integer) or not -dims <= dim < dims:
        raise ShapeError(
            f"{operation}: dimension {dim} is out of range for a tensor of shape {tuple(x.shape)} {describe_rank(comm)}"
        )
    return int(dim) % dims


def check_equal(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str) -> None:
    if x.shape[dim] % comm.size:
        raise ShapeError(
            f"{operation}: dimension {dim} of a tensor of shape {tuple(x.shape)} has extent {x.shape[dim]}, which can't"
            f" be divided equally among {comm.size} ranks; {remedy} {describe_rank(comm)}"
        )


def check_sizes(operation: str, name: str, sizes: Sequence[int], comm: Communicator) -> tuple[int, ...]:
    try:
        checked = tuple(map(index, sizes))
    except TypeError:
        checked = ()
    if len(checked) != comm.size or min(checked) < 0:
        raise ShapeError(
            f"{operation}: {name} must be {comm.size} integers >= 0, one for each rank, got {sizes!r}"
            f" {describe_rank(comm)}"
        )
    return checked


def check_sum(operation: str, name: str, sizes: tuple[int, ...], x: Tensor, dim: int, comm: Communicator) -> None:
    if sum(sizes) != x.shape[dim]:
        raise ShapeError(
            f"{operation}: {name} {sizes} adds up to {sum(sizes)}, but dimension {dim} of a tensor of shape"
            f" {tuple(x.shape)} has extent {x.shape[dim]} {describe_rank(comm)}"
        )
