"""barrier: wait until all ranks have entered the barrier."""

from __future__ import annotations

import numpy as np

from mpicoll.collectives.arguments import adds_rank_to_errors, make_query
from mpicoll.collectives.call import begins, call, repeats, start
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.core.request import Request
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve

NOTHING = np.empty(0, np.uint8)
"""The input of a barrier."""


@repeats("barrier", "algorithm", given=NOTHING)
def barrier(*, comm: CommLike = None, algorithm: str | None = None, timeout: float | None = None) -> None:
    """Wait until all ranks have entered the barrier.

    Args:
        comm: the communicator; None is :func:`mpicoll.world`.
        algorithm: the name of an algorithm to force (see :func:`mpicoll.algorithms`); None has one selected.
        timeout: seconds to wait (see :func:`allreduce`).

    Raises:
        AlgorithmError: `algorithm` is invalid; no message has been sent.
        Timeout: the barrier is not complete after `timeout` seconds (see :func:`allreduce`).

    Example:
        >>> mpicoll.barrier()
    """
    communicator = resolve(comm)
    call(communicator, ("barrier", algorithm), NOTHING, None, timeout, lambda x, out: prepare(communicator, algorithm))


@begins("barrier", "algorithm", given=NOTHING)
def ibarrier(*, comm: CommLike = None, algorithm: str | None = None) -> Request[None]:
    """Start :func:`barrier` in the background, with the same arguments.

    Returns:
        A request that completes when all ranks have entered the barrier; its value is None.

    Example:
        >>> mpicoll.ibarrier().wait()
    """
    communicator = resolve(comm)
    return start(communicator, ("barrier", algorithm), NOTHING, None, lambda x, out: prepare(communicator, algorithm))


def barrier_init(*, comm: CommLike = None, algorithm: str | None = None) -> Plan[None]:
    """Create a plan for repeated calls of :func:`barrier` with the same arguments.

    Returns:
        A plan; each run waits until all ranks have entered it.

    Example:
        >>> plan = mpicoll.barrier_init()
        >>> plan()
    """
    return Plan(prepare(resolve(comm), algorithm))


@adds_rank_to_errors
def prepare(comm: CommunicatorCore, algorithm: str | None) -> Operation:
    arrays = CollectiveArrays("barrier", comm.rank, persistent=True)
    return Operation(comm, make_query(comm, arrays, algorithm, nbytes=0), algorithm, arrays)
