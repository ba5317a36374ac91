"""Exception classes of mpicoll.

::

    MpicollError
    ├── ArgumentError            invalid arguments of a call; raised before any message is sent
    │   ├── ShapeError           (also a ValueError) a shape, a count or an extent does not fit
    │   ├── DTypeError           (also a TypeError) an operation has no meaning for a dtype or an object
    │   ├── RankError            (also a ValueError) a rank, a root or a tag is out of range
    │   ├── AlgorithmError       (also a ValueError) an algorithm is unknown, or does not support the request
    │   └── DeviceError          (also a TypeError) memory of an unsupported device, or of two different devices
    ├── CommunicatorError        (also a RuntimeError) a communicator was freed, or can't be used
    ├── CommunicationError       (also a RuntimeError) the exchange failed
    │   ├── MismatchError        the ranks made different calls; see ``ranks`` and ``calls``
    │   ├── TruncationError      a message and the buffer that receives it differ in size
    │   ├── RankFailed           a peer has died; ``ranks`` are the dead ranks
    │   └── Timeout              (also a TimeoutError) an operation did not complete within its timeout
    ├── FileError                (also an OSError) a file can't be opened, read or written; see ``filename``, ``errno``
    ├── NumericsError            (also a FloatingPointError) NaN or infinity found by MPICOLL_CHECK=numerics
    ├── SetupError               (also a RuntimeError) the environment is wrong: no MPI, two MPIs, a bad variable
    ├── SpawnError               (also a RuntimeError) a rank of a spawned job failed; see ``rank`` and ``status``
    └── ScheduleError            a schedule does not implement its collective (see ``schedules.verify``)
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlgorithmError",
    "ArgumentError",
    "CommunicationError",
    "CommunicatorError",
    "DTypeError",
    "DeviceError",
    "FileError",
    "MismatchError",
    "MpicollError",
    "NumericsError",
    "RankError",
    "RankFailed",
    "ScheduleError",
    "SetupError",
    "ShapeError",
    "SpawnError",
    "Timeout",
    "TruncationError",
]


class MpicollError(Exception):
    """Base class of all exceptions of mpicoll."""


class ArgumentError(MpicollError):
    """Invalid arguments of a call. Raised before any message is sent, so the communicator stays usable."""


class ShapeError(ArgumentError, ValueError):
    """Shape, count or extent that does not fit the operation."""


class DTypeError(ArgumentError, TypeError):
    """Operation that is not defined for this dtype, or for this kind of object."""


class RankError(ArgumentError, ValueError):
    """Rank, root or tag that is out of range."""


class AlgorithmError(ArgumentError, ValueError):
    """Unknown algorithm, or an algorithm that was forced for a request that it does not support."""


class DeviceError(ArgumentError, TypeError):
    """Memory of a device that can't be used, or of two devices in a call that requires one device."""


class CommunicatorError(MpicollError, RuntimeError):
    """Communicator that was freed, or that can't run collectives."""


class CommunicationError(MpicollError, RuntimeError):
    """Failure of the exchange."""


class MismatchError(CommunicationError):
    """Different calls on the ranks, or a message that differs from the receiver's expectation.

    The error is the same on all ranks that raise it, and the communicator stays usable.

    ``calls`` holds the call of each rank of the communicator (of a message: of the sender, then of the receiver) as a
    dict with ``text``, ``site`` (``file:line in function``; None if unknown) and the fields that are compared, or None
    if the call of a rank is not known. ``fields`` are the names of the fields that differ, and ``ranks`` the ranks that
    differ from most others. ``number`` is the number of the collective on the communicator (0 for a message).
    """

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        fields: tuple[str, ...] = (),
        calls: tuple[dict[str, Any] | None, ...] = (),
        number: int = 0,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.fields = fields
        self.calls = calls
        self.number = number


class TruncationError(CommunicationError):
    """Message whose size differs from that of the receive buffer."""


class RankFailed(CommunicationError):
    """Death of a peer. ``ranks`` are the dead ranks, as ranks of the world, as far as known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Timeout(CommunicationError, TimeoutError):
    """Operation that did not complete within its timeout. An operation that waits for a message is still pending."""


class FileError(MpicollError, OSError):
    """Failure to open, read or write a file.

    ``filename`` is the path, ``errno`` the number of the system's error (None if the file itself is not as expected),
    and ``ranks`` are the ranks of the communicator on which it occurred. After a collective call the error is the same
    on all ranks, and the communicator stays usable.
    """

    def __init__(
        self, message: str, filename: str | None = None, errno: int | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.filename = filename
        self.errno = errno
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])  # that of OSError depends on what it knows of the file

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.filename, self.errno, self.ranks)


class NumericsError(MpicollError, FloatingPointError):
    """NaN or infinity in the input of a collective, or in its output although the input had none.

    The error is the same on all ranks; ``ranks`` are the ranks of the communicator on which the value was found.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SetupError(MpicollError, RuntimeError):
    """Wrong environment: no MPI library, two MPI libraries, or a malformed variable."""


class SpawnError(MpicollError, RuntimeError):
    """Failure of a job that :func:`mpicoll.spawn` started.

    The message contains the traceback of the rank that failed first. ``rank`` is its number (None if unknown) and
    ``status`` its exit status, or that of the launcher if the rank left no report. ``__cause__`` is the exception of
    the rank, if it could be pickled.
    """

    def __init__(self, message: str, rank: int | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class ScheduleError(MpicollError):
    """Schedule that does not implement its collective; raised by ``mpicoll.schedules.verify``."""
