"""MPI's predefined reductions, and which of them the library computes wrongly."""

from __future__ import annotations

from functools import lru_cache

from mpi4py import MPI

from mpicoll.errors import CommunicationError
from mpicoll.transport import reductions
from mpicoll.transport.base import Memory

_OPS = {
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


def _agree_on_reductions(comm: MPI.Intracomm, nodes: tuple[int, ...]) -> reductions.Wrong:
    """Collective: what the library computes wrongly on one of the nodes. The ranks of a node have it in common."""
    found = _wrong_here() if nodes.index(nodes[comm.rank]) == comm.rank else {}
    return {what: why for one in reversed(comm.allgather(found)) for what, why in one.items()}


@lru_cache(maxsize=1)
def _wrong_here() -> reductions.Wrong:
    """What the library computes wrongly in this process."""
    # Programs may have chosen that errors end the job; one tells here that an operation is not there.
    handlers = [(comm, comm.Get_errhandler()) for comm in (MPI.COMM_WORLD, MPI.COMM_SELF)]
    try:
        for comm, _ in handlers:
            comm.Set_errhandler(MPI.ERRORS_RETURN)
        return reductions.found(reduce_local)
    finally:
        for comm, handler in handlers:
            comm.Set_errhandler(handler)
            handler.Free()


def reduce_in_place(data: Memory, op: str, root: int) -> None:
    """Collective over all ranks of the job: reduce `data`, at the root in place, whether the library can or not."""
    at_root = MPI.COMM_WORLD.rank == root
    MPI.COMM_WORLD.Reduce(MPI.IN_PLACE if at_root else data, data if at_root else None, _OPS[op], root)


def reduce_local(op: str, source: Memory, target: Memory) -> None:
    """Make `target` what `op` makes of the two, by the library's functions. Raises CommunicationError."""
    try:
        _OPS[op].Reduce_local(source, target)
    except MPI.Exception as error:
        raise CommunicationError(error.Get_error_string()) from error
