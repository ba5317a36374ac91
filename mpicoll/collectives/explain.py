"""explain: the algorithm that a call would use, and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpicoll import schedules
from mpicoll.buffers.ops import OpLike
from mpicoll.buffers.recognise import recognise
from mpicoll.collectives import arguments
from mpicoll.collectives.arguments import problem
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.selector import Choice, choose, unsupported_reasons
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
    like: Any = None,
    comm: CommLike = None,
) -> Choice:
    """Return the algorithm that a call of `collective` would use, the reason, and why other algorithms can't be used.

    Printing the result shows all of this. `nbytes` is the size of the vector, or of all blocks together for gather,
    scatter, allgather, reduce_scatter and alltoall. `op` and `dtype` (numpy's) matter for reductions. For data on a
    device `like` is an array on it, whose contents don't matter. The capabilities of the ranks on the device are known
    after their first collective on it, and assumed until then. Sends nothing.

    Raises AlgorithmError if `collective` is unknown or no algorithm supports the call, DTypeError if `op` is not
    defined for `dtype`.
    """
    communicator = resolve(comm)
    wanted = problem_of(collective, nbytes, op, dtype, root, algorithm, communicator, like)
    choice = choose(wanted, algorithm)
    if communicator.size == 1:
        return choice  # with one rank the other algorithms are irrelevant
    refused = (f"not {name}: {why}" for name, why in unsupported_reasons(wanted).items() if why is not None)
    return replace(choice, refused=tuple(refused))


def problem_of(
    collective: str,
    nbytes: int,
    op: OpLike,
    dtype: Any,
    root: int,
    algorithm: str | None,
    communicator: Communicator,
    like: Any = None,
) -> SelectionQuery:
    """Return the selection query of such a call. Raises the errors of :func:`explain`."""
    if collective not in schedules.collectives():
        raise AlgorithmError(f"explain: no collective {collective!r}; there are {', '.join(schedules.collectives())}")
    root = arguments.rank("explain", "root", root, communicator)
    if collective in ("scan", "exscan"):
        arguments.no_average(collective, op)
    value = np.empty(1, dtype)
    sample = (value, np.zeros(1, int)) if op in ("minloc", "maxloc") else value
    buffer, reduction = arguments.operand(collective, sample, op) if collective in _REDUCTIONS else (None, None)
    return problem(
        collective,
        communicator,
        algorithm,
        nbytes=nbytes,
        count=nbytes if buffer is None else nbytes // buffer.array.itemsize,
        array=None if like is None else recognise("explain", like, "like").array,
        root=root,
        reduction=reduction,
    )
