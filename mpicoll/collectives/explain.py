"""explain: which algorithm a call would take, and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll import schedules
from mpicoll.buffers.ops import OpLike
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import problem
from mpicoll.engine.select import Choice, choose
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import AlgorithmError

_REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")


def explain(
    collective: str,
    nbytes: int,
    *,
    op: OpLike = "sum",
    dtype: Any = "float32",
    root: int = 0,
    algorithm: str | None = None,
    comm: CommLike = None,
) -> Choice:
    """The algorithm that a call of `collective` would take, with the reason; printing it shows both.

    `nbytes` is the size of the vector, or of all blocks together for gather, scatter, allgather, reduce_scatter and
    alltoall. `op` and `dtype` (numpy's) matter for reductions. Sends nothing. Raises AlgorithmError if `collective` is
    unknown or nothing can serve the call, DTypeError if `op` has no meaning for `dtype`.
    """
    if collective not in schedules.collectives():
        raise AlgorithmError(f"explain: no collective {collective!r}; there are {', '.join(schedules.collectives())}")
    communicator = resolve(comm)
    root = arguments.rank("explain", "root", root, communicator)
    if collective in ("scan", "exscan"):
        arguments.no_average(collective, op)
    value = np.empty(1, dtype)
    sample = (value, np.zeros(1, int)) if op in ("minloc", "maxloc") else value
    reduction = arguments.operand(collective, sample, op)[1] if collective in _REDUCTIONS else None
    wanted = problem(
        collective,
        communicator,
        algorithm,
        nbytes=nbytes,
        count=nbytes if reduction is None else nbytes // reduction.work.itemsize,
        root=root,
        reduction=reduction,
    )
    return choose(wanted, algorithm)
