"""The ranks that the variables of ``env://`` describe, as torchrun sets them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from mpicoll.config import config
from mpicoll.errors import SetupError
from mpicoll.transport import launch_env
from mpicoll.transport.tcp.rendezvous import connect
from mpicoll.transport.tcp.transport import TcpTransport


def connect_by_environment() -> TcpTransport:
    """Return the transport of all ranks that the environment describes (see
    :func:`~mpicoll.transport.launch_env.find_address_rank`). Collective. The store is torch's.

    Raises SetupError if there is no torch, or if its store can't be reached; and what
    :func:`~mpicoll.transport.tcp.rendezvous.connect` raises.
    """
    found = launch_env.find_address_rank(os.environ)
    assert found is not None
    rank, size = found
    what = f"rank {rank} of {size}, which MASTER_ADDR={os.environ['MASTER_ADDR']} describes"
    try:
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous
    except ImportError as error:
        raise SetupError(
            f"{what}: the ranks find each other by torch's store, and torch can't be imported ({error}); install torch,"
            " let mpirun start the ranks, or set MPICOLL_TRANSPORT=local to have a world of one here"
        ) from error
    try:
        store: Any = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=config().timeout)))[0]
    except (RuntimeError, ValueError) as error:
        raise SetupError(
            f"{what}: torch's store can't be reached: {error}; set MPICOLL_TRANSPORT=mpi if an MPI launcher has started"
            " this process, or MPICOLL_TRANSPORT=local to have a world of one here"
        ) from error
    return connect(PrefixStore("mpicoll/native", store), rank, size)
