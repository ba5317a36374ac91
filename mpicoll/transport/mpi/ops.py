"""MPI's predefined reduction operations, and which of them this MPI library computes wrongly."""

from __future__ import annotations

from functools import lru_cache

from mpi4py import MPI

from mpicoll.errors import CommunicationError
from mpicoll.transport.base import Memory

OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
    "land": MPI.LAND,
    "lor": MPI.LOR,
    "lxor": MPI.LXOR,
}
"""MPI's operation for each name of :class:`~mpicoll.transport.base.Native`."""


def reduce_local(op: str, source: Memory, target: Memory) -> None:
    """Set `target` to ``source op target``, computed by the MPI library (MPI_Reduce_local). Raises
    CommunicationError."""
    try:
        OPS[op].Reduce_local(source, target)
    except MPI.Exception as error:
        raise CommunicationError(error.Get_error_string()) from error


def reduce_in_place(data: Memory, op: str, root: int) -> None:
    """Reduce `data` by MPI_Reduce, in place at the root, whether or not the library is known to support that.

    Collective over all ranks of the job.
    """
    at_root = MPI.COMM_WORLD.rank == root
    MPI.COMM_WORLD.Reduce(MPI.IN_PLACE if at_root else data, data if at_root else None, OPS[op], root)


@lru_cache(maxsize=1)
def find_defects() -> dict[str, str]:
    """Return the reductions that the library computes wrongly in this process."""
    # The program may have set error handlers that end the job; an operation that does not exist must only raise here.
    handlers = [(comm, comm.Get_errhandler()) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]
    try:
        for comm, _ in handlers:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        from mpicoll.transport import reductions  # late: only one rank of a node needs it

        return reductions.find_defects(reduce_local)
    finally:
        for comm, handler in handlers:
            comm.Set_errhandler(handler)
            handler.Free()
