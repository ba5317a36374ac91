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
    return _is_reported(status.Get_elements(MPI.BYTE), data.size)


def _is_reported(nbytes: int, size: int) -> bool:
    """Return True if a status with `nbytes` has the size of the message that was too large for `size` bytes."""
    from mpicoll.transport import quirks  # late: only errors need it

    # MPICH leaves there what was in the status, or the size of the memory.
    return nbytes > size and not quirks.TRUNCATED_SIZES.applies_to(MPI.Get_library_version())


def translate_truncation(
    rank: int, error: MPI.Exception, status: MPI.Status, data: Memory
) -> CommunicationError | None:
    """Return the exception for a failed receive into `data` if the message was larger than `data`, else None."""
    return describe_truncation(rank, error, envelope_of(status), data.size) if is_truncation(error) else None


def is_truncation(error: MPI.Exception) -> bool:
    """Return True if a message was larger than the memory for it."""
    return bool(error.Get_error_class() == MPI.ERR_TRUNCATE)


def describe_truncation(rank: int, error: MPI.Exception, message: Envelope, size: int) -> TruncationError:
    """Return the exception for a `message` that was larger than the `size` bytes for it."""
    if _is_reported(message.nbytes, size):
        return truncation_error(rank, message, size)
    source = f"from rank {message.source} (tag {message.tag}) " if message.source >= 0 and message.tag >= 0 else ""
    return TruncationError(
        f"rank {rank}: a message {source}does not fit the {size} bytes that receive it"
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
