"""Messages as MPI and mpi4py see them: envelopes, and errors of receives."""

from __future__ import annotations

from mpi4py import MPI

from mpicoll.errors import CommunicationError, TruncationError
from mpicoll.transport.base import Envelope, Memory, does_not_fit

_INT_MAX = 2**31 - 1
"""The largest count that MPI implementations without the large-count interface take."""


def _envelope(status: MPI.Status) -> Envelope:
    return Envelope(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))


def _explained(rank: int, error: MPI.Exception) -> CommunicationError:
    kind = error.Get_error_class()
    text = f"rank {rank}: {error.Get_error_string()}"
    if kind == MPI.ERR_TRUNCATE:
        return TruncationError(f"{text}; the sender's message is larger than the buffer that receives it")
    return CommunicationError(text)


def _too_large(rank: int, error: MPI.Exception, status: MPI.Status, data: Memory) -> CommunicationError | None:
    """What to raise for the error of a receive, if the message was larger than `data`."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        return None
    message = _envelope(status)
    # Not every MPI library says how large it was.
    return does_not_fit(rank, message, data.size) if message.nbytes > data.size else _explained(rank, error)
