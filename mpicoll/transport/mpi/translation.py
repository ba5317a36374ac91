"""Translation of mpi4py's statuses and exceptions into those of this library."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from mpi4py import MPI

from mpicoll.errors import CommunicationError, TruncationError
from mpicoll.transport.base import Envelope, Memory, truncation_error

F = TypeVar("F", bound=Callable[..., Any])


def envelope_of(status: MPI.Status) -> Envelope:
    """Return the envelope of the message that `status` describes."""
    return Envelope(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))


def translate_error(rank: int, error: MPI.Exception) -> CommunicationError:
    """Return this library's exception for `error` on `rank`."""
    text = f"rank {rank}: {error.Get_error_string()}"
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TruncationError(f"{text}; the sender's message is larger than the buffer that receives it")
    return CommunicationError(text)


def reports_size(status: MPI.Status, data: Memory) -> bool:
    """Return True if `status` contains the size of the message that was too large for `data`."""
    from mpicoll.transport import quirks  # late: only errors need it

    # MPICH leaves there what was in the status, or the size of the memory.
    return status.Get_elements(MPI.BYTE) > data.size and not quirks.TRUNCATED_SIZES.applies_to(
        MPI.Get_library_version()
    )


def translate_truncation(
    rank: int, error: MPI.Exception, status: MPI.Status, data: Memory
) -> CommunicationError | None:
    """Return the exception for a failed receive into `data` if the message was larger than `data`, else None."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        return None
    message = envelope_of(status)
    if reports_size(status, data):
        return truncation_error(rank, message, data.size)
    source = f"from rank {message.source} (tag {message.tag}) " if message.source >= 0 and message.tag >= 0 else ""
    return TruncationError(
        f"rank {rank}: a message {source}does not fit the {data.size} bytes that receive it"
        f" ({' '.join(error.Get_error_string().split())})"
    )


def translates_errors(method: F) -> F:
    """Decorate a method to raise ``self.translate_error(error)`` instead of MPI's exceptions.

    The method is called with positional arguments only.
    """

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except MPI.Exception as error:
            raise self.translate_error(error) from error

    return cast(F, call)
