"""Means of metrics, such as the loss of an epoch, over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpicoll.collectives.allreduce import allreduce
from mpicoll.errors import ArgumentError
from mpicoll.parallel.gradients import get_replica_communicator
from mpicoll.parallel.groups import describe_rank

V = TypeVar("V")


def metric_average(value: V, *, weight: float = 1.0, group: Any = None) -> V:
    """Return the mean of `value` over the ranks, the same on all of them. Collective.

    Args:
        value: a number, a numpy array, a tensor, or a dict of these, of the same keys and shapes on all ranks. All are
            sent in one message, in float64.
        weight: what this rank's values count, such as its number of samples.
        group: the data parallel ranks, by default the ``data`` and ``context`` axes of the grid in use; without a grid,
            all ranks.

    Returns:
        A float for each number; an array or tensor of the same dtype and device for each floating one (float64 for
        others).

    Raises:
        ArgumentError: a value is something else, or complex, raised before any message leaves; or the sum of the
            weights is not positive, raised on all ranks.

    Example:
        ::

            mean = metric_average({"loss": 0.5, "accuracy": 0.9}, weight=32)
    """
    comm = get_replica_communicator(group)
    values: Mapping[Any, Any] = value if isinstance(value, Mapping) else {None: value}
    for one in values.values():
        # numpy's complex scalars can be converted to float, with the loss of a part.
        if not isinstance(one, (SupportsFloat, np.ndarray)) or torch.as_tensor(one).is_complex():
            dtype = f" of {one.dtype}" if isinstance(one, (np.ndarray, Tensor)) else ""
            raise ArgumentError(
                f"metric_average: got a {type(one).__name__}{dtype}; pass numbers, numpy arrays, tensors, or a dict of"
                f" these, none of them complex {describe_rank(comm)}"
            )
    tensors = {key: torch.as_tensor(one).detach() for key, one in values.items()}
    flat = [one.reshape(-1).to("cpu", torch.float64) for one in tensors.values()]
    own = torch.cat([*flat, torch.ones(1, dtype=torch.float64)]).mul_(weight)
    # A value that does not count, such as the mean of no samples, may be NaN.
    total = allreduce(own if weight else torch.zeros_like(own), comm=comm)
    if not total[-1] > 0:
        raise ArgumentError(
            f"metric_average: the weights of the {comm.size} ranks add up to {total[-1].item()}; pass weights >= 0,"
            " not all of them 0"
        )
    parts = (total[:-1] / total[-1]).split([len(one) for one in flat])
    means = {key: _restore(part, values[key]) for key, part in zip(values, parts, strict=True)}
    result: Any = means if isinstance(value, Mapping) else means[None]
    return result  # type: ignore[no-any-return]


def _restore(mean: Tensor, like: Any) -> Any:
    if isinstance(like, np.ndarray):
        is_floating = np.issubdtype(like.dtype, np.floating)
        return mean.view(like.shape).numpy().astype(like.dtype if is_floating else np.float64)
    if not isinstance(like, Tensor):
        return mean.item()
    return mean.view(like.shape).to(like.device, like.dtype if like.is_floating_point() else torch.float64)
