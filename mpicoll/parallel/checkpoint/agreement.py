"""Agreement of the ranks on errors and on copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mpicoll.errors import ArgumentError, CommunicatorError, ShapeError
from mpicoll.parallel.shards import get_shard


def run_on_all_ranks(operation: str, collect: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Call `collect`, and raise its exception on all ranks: ranks without an error would wait for the others."""
    problem: Exception | None = None
    try:
        collect()
    except Exception as error:  # noqa: BLE001  raised below
        problem = error
    mine = None if problem is None else (_find_error_type(problem), str(problem))
    problems = gather_objects(mine, group)
    if problem is not None:
        raise problem
    for rank, other in enumerate(problems):
        if other is not None:
            raise other[0](f"{operation}: on rank {rank}: {other[1]}")


def _find_error_type(problem: Exception) -> type[Exception]:
    kinds = (ShapeError, ArgumentError, CommunicatorError, OSError)
    return next((kind for kind in kinds if isinstance(problem, kind)), RuntimeError)


def gather_objects(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    all_of_them: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    return all_of_them


def check_copies(named: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise if ranks hold parameters of one name that are not copies of each other: one of them would be lost.

    Copies may differ by rounding, so this compares their shapes, and their sums approximately.
    """
    if not dist.is_initialized():
        return
    mine = {}
    for name, value in named.items():
        if isinstance(value, nn.Parameter) and not isinstance(value, DTensor) and value.is_floating_point():
            shard = get_shard(value)
            size = torch.linalg.vector_norm(value.detach(), dtype=torch.float64).item()
            total = value.detach().sum(dtype=torch.float64).item()
            mine[name, 0 if shard is None else shard.comm.rank] = (tuple(value.shape), total, size)
    first: dict[Any, tuple[int, Any]] = {}
    for rank, theirs in enumerate(gather_objects(mine, group)):
        for key, sketch in theirs.items():
            owner, other = first.setdefault(key, (rank, sketch))
            if sketch[0] != other[0] or abs(sketch[1] - other[1]) > 1e-2 * max(sketch[2], other[2]):
                raise ArgumentError(
                    f"save: ranks {owner} and {rank} hold different parameters with the name {key[0]!r}, of shapes"
                    f" {other[0]} and {sketch[0]} and sums {other[1]:.6g} and {sketch[1]:.6g}; pipeline stages must"
                    " pass names= that gives each parameter a distinct name, and copies must be equal"
                )
