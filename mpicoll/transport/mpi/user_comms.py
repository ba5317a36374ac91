"""The program's own mpi4py communicators: transports on private duplicates of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mpicoll.errors import CommunicatorError
from mpicoll.transport.mpi.comm_facts import find_facts
from mpicoll.transport.mpi.transport import MpiTransport, translate_ranks
from mpicoll.transport.waiting import poll

R = TypeVar("R")

_ATTRIBUTE = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, owner: owner.free())


def is_communicator(x: Any) -> bool:
    """Return True if `x` is an mpi4py communicator."""
    return isinstance(x, MPI.Comm)


def duplicate(comm: Any) -> MpiTransport:
    """Return a transport on private duplicates of the mpi4py communicator `comm`. Collective over it."""
    # For the reason of MpiTransport._synchronize: no rank creates one before all of them have entered the call.
    poll(comm.Ibarrier().Test, None, "first use of an mpi4py communicator")
    collective, p2p = comm.Dup(), comm.Dup()
    for own in (collective, p2p):
        own.Set_errhandler(MPI.ERRORS_RETURN)
    node = collective.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = translate_ranks(node, range(node.size), collective)
    node.Free()
    return MpiTransport(collective, p2p, find_facts(collective, ranks))


def cached_communicator(comm: Any, make: Callable[[], R]) -> R:
    """Return the object that is cached on the mpi4py communicator `comm`: ``make()`` at its first use. The object is
    freed when `comm` is freed.

    Raises CommunicatorError if collectives of this library can't run on `comm`.
    """
    if comm == MPI.COMM_NULL:
        raise CommunicatorError("comm is MPI.COMM_NULL: it was freed, or this process is not a member of it")
    if comm.Is_inter():
        raise CommunicatorError("comm is an intercommunicator; merge it first (Intercomm.Merge)")
    owner: R | None = comm.Get_attr(_ATTRIBUTE)
    if owner is None:
        owner = make()
        comm.Set_attr(_ATTRIBUTE, owner)
    return owner
