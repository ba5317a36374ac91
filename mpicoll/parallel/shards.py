"""Which parameters are shards of larger ones.

Under tensor parallelism a rank holds a block of a weight. A layer says so with :func:`mark`, and whoever saves, clips
or counts parameters asks :func:`shard_of`. What is not marked is the same on all ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicoll.engine.communicator import Communicator
from mpicoll.errors import ShapeError

_ATTRIBUTE = "mpicoll_shard"


@dataclass(frozen=True)
class Shard:
    """How a parameter lies on its ranks: they hold consecutive blocks of the whole along `dim`, in the order of rank.

    Blocks may differ in size, and be empty. `group` is what the user passed as group, `comm` what it meant.
    """

    dim: int
    group: Any
    comm: Communicator


def mark(param: Tensor, dim: int, group: Any, comm: Communicator) -> None:
    """Say that `param` is this rank's block, along `dim`, of a parameter that is spread over the ranks of `comm`.

    Negative dims count from the end. ``Module.to`` and the like keep the mark; ``copy.deepcopy`` of a module, and
    functions that make a new Parameter, may not: mark what they make. Raises ShapeError if `param` has no such axis.
    """
    if not -param.dim() <= dim < param.dim():
        raise ShapeError(
            f"mark: dim {dim} is no axis of a parameter of shape {tuple(param.shape)} (rank {comm.rank} of {comm.size})"
        )
    setattr(param, _ATTRIBUTE, Shard(dim % param.dim(), group, comm))


def shard_of(param: Tensor) -> Shard | None:
    """How `param` was marked, or None if it wasn't."""
    shard: Shard | None = getattr(param, _ATTRIBUTE, None)
    return shard
