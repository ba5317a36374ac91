"""The program's own mpi4py communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mpicoll.errors import CommunicatorError
from mpicoll.transport.base import renumber
from mpicoll.transport.mpi.transport import MpiTransport

R = TypeVar("R")


def duplicate(comm: Any) -> MpiTransport:
    """The transport on private duplicates of the mpi4py communicator `comm`. Collective over it."""
    collective, p2p = comm.Dup(), comm.Dup()
    for own in (collective, p2p):
        own.Set_errhandler(MPI.ERRORS_RETURN)
    node = collective.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = collective.allgather(node.bcast(collective.rank, 0))
    node.Free()
    return MpiTransport(collective, p2p, renumber(leaders))


_ATTACHED = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, owner: owner.free())


def attached(comm: Any, make: Callable[[], R]) -> R:
    """What `make` gives for the mpi4py communicator `comm`: made at first use, kept with it, freed when it is freed.

    Raises CommunicatorError if it can't carry our collectives.
    """
    if comm == MPI.COMM_NULL:
        raise CommunicatorError("comm is MPI.COMM_NULL: it was freed, or this process is not a member of it")
    if comm.Is_inter():
        raise CommunicatorError("comm is an intercommunicator; merge it first (Intercomm.Merge)")
    owner: R | None = comm.Get_attr(_ATTACHED)
    if owner is None:
        owner = make()
        comm.Set_attr(_ATTACHED, owner)
    return owner


def is_communicator(x: Any) -> bool:
    """Whether `x` is an mpi4py communicator."""
    return isinstance(x, MPI.Comm)
