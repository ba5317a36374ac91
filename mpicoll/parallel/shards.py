"""Which parameters are shards of larger ones.

Under tensor parallelism a rank holds a block of a weight. A layer says so with :func:`mark`, and whoever saves, clips
or counts parameters asks :func:`shard_of`. What is not marked is the same on all ranks of the group.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicoll.engine.communicator import Communicator
from mpicoll.errors import ShapeError

_ATTRIBUTE = "mpicoll_shard"


@dataclass(frozen=True)
class Shard:
    """How a parameter lies on its ranks: they hold consecutive blocks of the whole along `dim`, in the order of rank.

    Blocks may differ in size, and be empty. `group` is what the user passed as group, `comm` what it meant. A deep copy
    of a mark is the mark itself; what is pickled with a mark comes back without, as ranks are those of a running job.
    """

    dim: int
    group: Any
    comm: Communicator

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, ()  # one of the things that torch.load builds with weights_only=True


def mark(param: Tensor, dim: int, group: Any, comm: Communicator) -> None:
    """Say that `param` is this rank's block, along `dim`, of a parameter that is spread over the ranks of `comm`.

    Negative dims count from the end. ``Module.to`` and the like keep the mark. What makes a new Parameter does not,
    such as ``copy.deepcopy`` of one or of a module other than our layers, or ``torch.save`` and ``load``: mark what it
    makes. Raises ShapeError if `param` has no such axis.
    """
    if not -param.dim() <= dim < param.dim():
        raise ShapeError(
            f"mark: dim {dim} is no axis of a parameter of shape {tuple(param.shape)} (rank {comm.rank} of {comm.size})"
        )
    setattr(param, _ATTRIBUTE, Shard(dim % param.dim(), group, comm))


def shard_of(param: Tensor) -> Shard | None:
    """How `param` was marked, or None if it wasn't."""
    shard = getattr(param, _ATTRIBUTE, None)
    return shard if isinstance(shard, Shard) else None
