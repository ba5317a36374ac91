"""Marks of parameters that are shards of larger ones.

Under tensor parallelism a rank holds a block of a weight. A layer marks it with :func:`mark`; code that saves, clips or
counts parameters queries :func:`get_shard`. Parameters without a mark are the same on all ranks of the group.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ShapeError
from mpicoll.parallel.groups import describe_rank

_ATTRIBUTE = "mpicoll_shard"


@dataclass(frozen=True)
class Shard:
    """The layout of a sharded parameter: the ranks hold consecutive blocks along `dim`, in rank order.

    Blocks may differ in size, and be empty. `group` is the argument that the user passed, `comm` the communicator. A
    deep copy of a mark is the mark itself; a pickled parameter loses its mark, because ranks belong to a running job.
    """

    dim: int
    group: Any
    comm: Communicator

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, ()  # one of the things that torch.load builds with weights_only=True


def mark(param: Tensor, dim: int, group: Any, comm: Communicator) -> None:
    """Mark `param` as this rank's block, along `dim`, of a parameter that is sharded over the ranks of `comm`.

    Negative dims count from the end. ``Module.to`` and similar methods keep the mark. Functions that make a new
    Parameter lose it, such as ``copy.deepcopy`` of one or of a module other than mpicoll's layers, or ``torch.save``
    and ``load``: mark the new one.

    Raises:
        ShapeError: `param` has no such dimension.
    """
    if not -param.dim() <= dim < param.dim():
        raise ShapeError(
            f"mark: dim {dim} is not an axis of a parameter of shape {tuple(param.shape)} {describe_rank(comm)}"
        )
    setattr(param, _ATTRIBUTE, Shard(dim % param.dim(), group, comm))


def get_shard(param: Tensor) -> Shard | None:
    """Return the mark of `param`, or None."""
    shard = getattr(param, _ATTRIBUTE, None)
    return shard if isinstance(shard, Shard) else None
