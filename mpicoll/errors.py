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
    """Base class of all exceptions of mpicoll.

    Example:
        >>> try:
        ...     mpicoll.allreduce(np.ones(3), out=np.empty(2))
        ... except mpicoll.MpicollError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


class ArgumentError(MpicollError):
    """Invalid arguments of a call. Raised before any message is sent, so the communicator stays usable.

    Example:
        >>> x = np.ones(3)
        >>> try:
        ...     mpicoll.allreduce(x, algorithm="rings")
        ... except mpicoll.ArgumentError:
        ...     total = mpicoll.allreduce(x)
        >>> total
        array([1., 1., 1.])
    """


class ShapeError(ArgumentError, ValueError):
    """Shape, count or extent that does not fit the operation.

    Example:
        >>> mpicoll.allreduce(np.ones(3), out=np.empty(2))
        Traceback (most recent call last):
            ...
        mpicoll.errors.ShapeError: allreduce: out has shape (2,), the result has shape (3,) (rank 0 of 1)
    """


class DTypeError(ArgumentError, TypeError):
    """Operation that is not defined for this dtype, or for this kind of object.

    Example:
        >>> mpicoll.allreduce(np.array(["a", "b"]))
        Traceback (most recent call last):
            ...
        mpicoll.errors.DTypeError: allreduce: op 'sum' has no meaning for dtype str32; ...
    """


class RankError(ArgumentError, ValueError):
    """Rank, root or tag that is out of range.

    Example:
        >>> mpicoll.bcast(np.ones(2), root=3)
        Traceback (most recent call last):
            ...
        mpicoll.errors.RankError: bcast: root must be a rank in [0, 1), got 3 (rank 0 of 1)
    """


class AlgorithmError(ArgumentError, ValueError):
    """Unknown algorithm, or an algorithm that was forced for a request that it does not support.

    Example:
        >>> mpicoll.allreduce(np.ones(2), algorithm="rings")
        Traceback (most recent call last):
            ...
        mpicoll.errors.AlgorithmError: allreduce has no algorithm 'rings'; there are native, ...
    """


class DeviceError(ArgumentError, TypeError):
    """Memory of a device that can't be used, or of two devices in a call that requires one device.

    Example:
        >>> import torch
        >>> mpicoll.allreduce(torch.ones(2, device="meta"))
        Traceback (most recent call last):
            ...
        mpicoll.errors.DeviceError: allreduce: x is on meta; ...
    """


class CommunicatorError(MpicollError, RuntimeError):
    """Communicator that was freed, or that can't run collectives.

    Example:
        >>> row = mpicoll.world().duplicate()
        >>> row.free()
        >>> mpicoll.barrier(comm=row)
        Traceback (most recent call last):
            ...
        mpicoll.errors.CommunicatorError: <mpicoll.Communicator world/duplicate: rank 0 of 1, freed> can't be used ...
    """


class CommunicationError(MpicollError, RuntimeError):
    """Failure of the exchange: base class of the errors of ranks that differ, do not answer, or have died.

    Example:
        >>> def program():
        ...     rank = mpicoll.world().rank
        ...     try:
        ...         mpicoll.allreduce(np.ones(2 + rank))
        ...     except mpicoll.CommunicationError as error:
        ...         return type(error).__name__
        >>> mpicoll.run_local(program, 2)
        ['MismatchError', 'MismatchError']
    """


class MismatchError(CommunicationError):
    """Different calls on the ranks, or a message that differs from the receiver's expectation.

    The error is the same on all ranks that raise it, and the communicator stays usable.

    ``calls`` holds the call of each rank of the communicator (of a message: of the sender, then of the receiver) as a
    dict with ``text``, ``site`` (``file:line in function``; None if unknown) and the fields that are compared, or None
    if the call of a rank is not known. ``fields`` are the names of the fields that differ, and ``ranks`` the ranks that
    differ from most others. ``number`` is the number of the collective on the communicator (0 for a message).

    Example:
        >>> def program():
        ...     rank = mpicoll.world().rank
        ...     try:
        ...         mpicoll.allreduce(np.ones(2 if rank < 2 else 5))
        ...     except mpicoll.MismatchError as error:
        ...         return error.ranks, error.fields, error.calls[2]["shape"]
        >>> mpicoll.run_local(program, 3)[0]
        ((2,), ('shape',), [5])
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
    """Message whose size differs from that of the receive buffer.

    Example:
        >>> def program():
        ...     if mpicoll.world().rank == 0:
        ...         mpicoll.send(np.ones(4), dest=1)
        ...     else:
        ...         mpicoll.recv(np.empty(2), source=0)
        >>> mpicoll.run_local(program, 2)
        Traceback (most recent call last):
            ...
        mpicoll.errors.TruncationError: ... a message of 32 bytes from rank 0 (tag 0) does not fit the 16 bytes ...
    """


class RankFailed(CommunicationError):
    """Death of a peer. ``ranks`` are the dead ranks, as ranks of the world, as far as known.

    Example:
        >>> from mpicoll.transport.local import Kill
        >>> def program():
        ...     try:
        ...         mpicoll.barrier()
        ...     except mpicoll.RankFailed as error:
        ...         return error.ranks
        >>> mpicoll.run_local(program, 2, faults=[Kill(rank=1)])
        [(1,), None]
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Timeout(CommunicationError, TimeoutError):
    """Operation that did not complete within its timeout. An operation that waits for a message is still pending.

    Example:
        >>> def program():
        ...     if mpicoll.world().rank == 0:
        ...         try:
        ...             mpicoll.recv(np.empty(2), source=1, timeout=0.05)
        ...         except mpicoll.Timeout:
        ...             print("no message within 50 ms")
        ...     mpicoll.barrier()
        >>> results = mpicoll.run_local(program, 2)
        no message within 50 ms
    """


class FileError(MpicollError, OSError):
    """Failure to open, read or write a file.

    ``filename`` is the path, ``errno`` the number of the system's error (None if the file itself is not as expected),
    and ``ranks`` are the ranks of the communicator on which it occurred. After a collective call the error is the same
    on all ranks, and the communicator stays usable.

    Example:
        >>> try:
        ...     mpicoll.load("absent.npy")
        ... except mpicoll.FileError as error:
        ...     print(error.filename, error.errno, error.ranks)
        absent.npy 2 (0,)
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

    Example:
        >>> with mpicoll.debug(numerics=True):
        ...     try:
        ...         mpicoll.allreduce(np.array([1.0, np.nan]))
        ...     except mpicoll.NumericsError as error:
        ...         print(error.ranks)
        (0,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SetupError(MpicollError, RuntimeError):
    """Wrong environment: no MPI library, two MPI libraries, or a malformed variable.

    Example:
        >>> with mpicoll.trace("/dev/null/traces"):
        ...     mpicoll.barrier()
        Traceback (most recent call last):
            ...
        mpicoll.errors.SetupError: rank 0 can't write its trace to /dev/null/traces: Not a directory; ...
    """


class SpawnError(MpicollError, RuntimeError):
    """Failure of a job that :func:`mpicoll.spawn` started.

    The message contains the traceback of the rank that failed first. ``rank`` is its number (None if unknown) and
    ``status`` its exit status, or that of the launcher if the rank left no report. ``__cause__`` is the exception of
    the rank, if it could be pickled.

    Example:
        >>> try:
        ...     mpicoll.spawn(lambda rank: 1 / (rank - 1), nprocs=2)
        ... except mpicoll.SpawnError as error:
        ...     print(error.rank, repr(error.__cause__))
        1 ZeroDivisionError('division by zero')
    """

    def __init__(self, message: str, rank: int | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class ScheduleError(MpicollError):
    """Schedule that does not implement its collective; raised by ``mpicoll.schedules.verify``.

    Example:
        >>> from dataclasses import replace
        >>> ring = mpicoll.schedules.get("allreduce", "ring")
        >>> without_messages = replace(ring, generate=lambda rank, size, **options: iter(()))
        >>> mpicoll.schedules.verify(without_messages, 3)
        Traceback (most recent call last):
            ...
        mpicoll.errors.ScheduleError: allreduce/ring, size 3, root 0: ...
    """
