"""Every exception that mpicoll raises on its own account.

::

    MpicollError
    ├── ArgumentError            a call that can't mean anything; raised before any message leaves
    │   ├── ShapeError           (also a ValueError) a shape, a count or an extent does not fit
    │   ├── DTypeError           (also a TypeError) an operation has no meaning for a dtype or an object
    │   ├── RankError            (also a ValueError) a rank, a root or a tag is out of range
    │   ├── AlgorithmError       (also a ValueError) an unknown algorithm, or one that can't serve the request
    │   └── DeviceError          (also a TypeError) memory of a device that can't be used, or of two that must be one
    ├── CommunicatorError        (also a RuntimeError) a communicator that was freed, or can't be used at all
    ├── CommunicationError       (also a RuntimeError) the exchange itself failed
    │   ├── MismatchError        the ranks disagree about a call; ``ranks`` and ``calls`` say how
    │   ├── TruncationError      a message and the buffer that receives it differ in size
    │   ├── RankFailed           a peer is gone; ``ranks`` names it
    │   └── Timeout              (also a TimeoutError) nothing arrived within the bound
    ├── NumericsError            (also a FloatingPointError) NaN or infinity where MPICOLL_CHECK=numerics finds them
    ├── SetupError               (also a RuntimeError) the surroundings are wrong: no MPI, two of them, a bad variable
    ├── SpawnError               (also a RuntimeError) a rank of a spawned job failed; ``rank`` and ``status`` say more
    └── ScheduleError            a schedule that does not do what its collective promises (see ``schedules.verify``)
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
    """The root of the tree: ``except mpicoll.MpicollError`` catches all of it."""


class ArgumentError(MpicollError):
    """A call that can't mean anything. Raised before any message leaves, so the communicator stays usable."""


class ShapeError(ArgumentError, ValueError):
    """A shape, a count or an extent does not fit the operation."""


class DTypeError(ArgumentError, TypeError):
    """The operation has no meaning for this dtype, or for this kind of object."""


class RankError(ArgumentError, ValueError):
    """A rank, a root or a tag is out of range."""


class AlgorithmError(ArgumentError, ValueError):
    """An algorithm is unknown, or was forced on a request that it can't serve."""


class DeviceError(ArgumentError, TypeError):
    """Memory of a device that can't be used, or of two devices that must be one."""


class CommunicatorError(MpicollError, RuntimeError):
    """A communicator that was freed, or that can't carry collectives at all."""


class CommunicationError(MpicollError, RuntimeError):
    """The exchange itself failed."""


class MismatchError(CommunicationError):
    """The ranks disagree about a call, or a message is not what its receiver expects. The same on all ranks that raise
    it; the communicator stays usable.

    ``calls`` holds for each rank of the communicator what it has called (of a message: for the sender, then the
    receiver), as a dict with ``text``, ``site`` (``file:line in function``; None where nobody knows) and the fields
    that are compared; None where a rank's is not known. ``fields`` names those that differ, and ``ranks`` are the ranks
    that differ from most others. ``number`` says which collective of the communicator it is (0 for a message).
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
    """A message and the buffer that receives it differ in size."""


class RankFailed(CommunicationError):
    """A peer is gone. ``ranks`` names the dead, as ranks of the world, where they are known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Timeout(CommunicationError, TimeoutError):
    """Nothing arrived within the bound. The operation is still pending where it waited for a message."""


class NumericsError(MpicollError, FloatingPointError):
    """NaN or infinity in what goes into a collective, or in what comes out although there was none in what went in.
    The same on all ranks; ``ranks`` are those, of the communicator, where it was found."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SetupError(MpicollError, RuntimeError):
    """The surroundings are not what they should be: no MPI library, two of them, a malformed variable."""


class SpawnError(MpicollError, RuntimeError):
    """A job that :func:`mpicoll.spawn` started has failed.

    The message contains the traceback of the rank that failed first, ``rank`` is its number (None where that is not
    known), ``status`` its exit status, or the launcher's where the rank left no word. ``__cause__`` is the rank's
    exception, if it could be pickled.
    """

    def __init__(self, message: str, rank: int | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class ScheduleError(MpicollError):
    """A schedule that does not do what its collective promises; raised by ``mpicoll.schedules.verify``."""
