"""barrier: wait until all ranks have entered the barrier."""

from __future__ import annotations

import numpy as np

from mpicoll.collectives.arguments import names_rank, problem, within
from mpicoll.engine.call_cache import repeated
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.request import Request
from mpicoll.engine.operation import Flat, Operation, start
from mpicoll.engine.plan import Plan
from mpicoll.engine.world import CommLike, resolve

_NOTHING = np.empty(0, np.uint8)


def barrier(*, comm: CommLike = None, algorithm: str | None = None, timeout: float | None = None) -> None:
    """Wait until all ranks have entered the barrier.

    Raises AlgorithmError before any message is sent, and Timeout after `timeout` seconds (see :func:`allreduce`).
    """
    communicator = resolve(comm)
    if timeout is not None:
        within(communicator, "barrier", timeout, lambda: ibarrier(comm=comm, algorithm=algorithm))
        return
    repeated(communicator, ("barrier", algorithm), _NOTHING, None, lambda own, out: prepare(communicator, algorithm))


def ibarrier(*, comm: CommLike = None, algorithm: str | None = None) -> Request:
    """Start :func:`barrier` in the background. The request completes when all ranks have entered the barrier."""
    return start(prepare(resolve(comm), algorithm))


def barrier_init(*, comm: CommLike = None, algorithm: str | None = None) -> Plan:
    """Return :func:`barrier` as a plan for repeated use."""
    return Plan(prepare(resolve(comm), algorithm))


@names_rank
def prepare(comm: Communicator, algorithm: str | None) -> Operation:
    return Operation(
        comm,
        problem("barrier", comm, algorithm, nbytes=0, count=0),
        algorithm,
        native=lambda mpi: mpi.barrier(),
        regions=lambda schedule: [],
        result=lambda: None,
        flat=Flat,
        bare=True,
    )
