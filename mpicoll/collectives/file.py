"""Files that all ranks of a communicator read and write."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import output, recognise
from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors
from mpicoll.collectives.empty import check_shape, make_array
from mpicoll.collectives.memory import InputArray, OutputArray
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import ArgumentError, DeviceError, FileError, ShapeError
from mpicoll.transport.files import FileBlock, FileHandle, open_descriptor
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from typing_extensions import Self

_READ, _CREATE, _NEW = 0, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_EXCL

_MODES = {
    "r": (True, False, _READ),
    "r+": (True, True, _READ),
    "w": (False, True, _CREATE),
    "w+": (True, True, _CREATE),
    "x": (False, True, _NEW),
    "x+": (True, True, _NEW),
}
"""By mode: whether the file is read, whether it is written, and the flags by which rank 0 creates it."""

_MAX_OFFSET = 2**63 - 1


class File:
    """File that all ranks of a communicator have opened, created by :meth:`open`. Usable as a context manager that
    closes it.

    Ranks read and write arrays, of any dtype of fixed size and with any strides, at offsets in bytes; what is in the
    file are the elements in C order, without a header (:func:`mpicoll.save` writes one). ``read_at`` and ``write_at``
    are calls of one rank; those whose name ends in ``_all`` are collective, each rank with its own offset and array.
    Bytes that one rank writes while another one reads or writes the same bytes are undefined until both have called
    :meth:`sync`, or the next collective call on one node.

    A system's error raises :class:`FileError`: after a collective call the same one on all ranks, and the other ranks
    have completed their part. Calls are bounded by the timeout of the communicator, like all operations.

    Attributes:
        name: The path that :meth:`open` got.
        mode: The mode of :meth:`open`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, mpicoll.File.open(f"{folder}/x", "w+") as file:
        ...     file.write_at_all(8 * mpicoll.world().rank, np.array([2.5]))
        ...     file.read_at_all(0, mpicoll.world().size, "float64")
        array([2.5])
    """

    def __init__(self, core: CommunicatorCore, name: str, mode: str, handle: FileHandle) -> None:
        self.name = name
        self.mode = mode
        self._core = core
        self._handle: FileHandle | None = handle
        # The last error that all ranks have got.
        self._common_error: BaseException | None = None

    __reduce_ex__ = refuse_pickling("File", "every process of the job opens it, by mpicoll.File.open")

    def __repr__(self) -> str:
        state = ", closed" if self._handle is None else ""
        return f"<mpicoll.File {self.name!r}, mode {self.mode!r}: rank {self._core.rank} of {self._core.size}{state}>"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        comm: CommLike = None,
        driver: Literal["auto", "mpi", "posix"] = "auto",
    ) -> Self:
        """Open a file on all ranks. Collective.

        Args:
            path: the file, on a file system that all ranks have; the same on every rank.
            mode: "r" reads, "r+" reads and writes an existing file; "w" creates a file to write, or empties an existing
                one, "x" raises if there is one; "w+" and "x+" also read.
            comm: the communicator; None is :func:`mpicoll.world`.
            driver: "mpi" takes MPI-IO, "posix" the functions of the operating system. "auto" takes MPI-IO if the ranks
                are on several nodes and use MPI: on one node it is slower, and no library needs it.

        Returns:
            The file.

        Raises:
            ArgumentError: an argument is invalid; no message has been sent.
            FileError: a rank can't open the file; the same error on all ranks.
        """
        core = resolve(comm)
        name = _check_open(core, path, mode, driver)
        reads, writes, creation = _MODES[mode]
        access = os.O_RDWR if reads and writes else os.O_WRONLY if writes else os.O_RDONLY

        def run() -> FileHandle:
            opened: list[int] = []

            def open_here(flags: int) -> None:
                opened.append(open_descriptor(name, flags))

            try:
                # The first rank creates the file, so the others open this one, or report that they do not see it.
                if creation:
                    _run_and_agree(core, "open", name, open_here if core.rank == 0 else None, access | creation)
                _run_and_agree(core, "open", name, None if opened else open_here, access)
            except BaseException:
                for fd in opened:
                    os.close(fd)
                raise

            def take_over() -> FileHandle:
                return core.transport.open_file(name, opened.pop(), reads=reads, writes=writes, driver=driver)

            handle: FileHandle = _run_and_agree(core, "open", name, take_over)
            return handle

        return cls(core, name, mode, core.queue.run(run, Call(f"File.open({name!r}, {mode!r})")))

    @overload
    def read_at(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: Literal["numpy"] = ...,
        out: None = ...,
    ) -> Array: ...
    @overload
    def read_at(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: str,
        out: None = ...,
    ) -> Any: ...
    @overload
    def read_at(self, offset: int, shape: None = ..., dtype: None = ..., *, like: str = ..., out: ArrayT) -> ArrayT: ...
    def read_at(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = None,
        dtype: Any = None,
        *,
        like: str = "numpy",
        out: Any = None,
    ) -> Any:
        """Read an array that begins `offset` bytes behind the begin of the file.

        Pass the `shape` and the `dtype` (numpy's, or torch's with ``like="torch"``) of the array, or the array itself
        as `out`. Return the array. Raises ArgumentError, ShapeError and DTypeError for invalid arguments, and FileError
        if the file ends before.
        """
        return self._read("read_at", offset, shape, dtype, like, out)

    @overload
    def read_at_all(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: Literal["numpy"] = ...,
        out: None = ...,
    ) -> Array: ...
    @overload
    def read_at_all(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: str,
        out: None = ...,
    ) -> Any: ...
    @overload
    def read_at_all(
        self, offset: int, shape: None = ..., dtype: None = ..., *, like: str = ..., out: ArrayT
    ) -> ArrayT: ...
    def read_at_all(
        self,
        offset: int,
        shape: int | tuple[int, ...] | None = None,
        dtype: Any = None,
        *,
        like: str = "numpy",
        out: Any = None,
    ) -> Any:
        """Do the same as :meth:`read_at` on all ranks. Collective; the arguments may differ between ranks."""
        return self._read("read_at_all", offset, shape, dtype, like, out)

    @overload
    def read_subarray_all(
        self,
        offset: int,
        sizes: int | tuple[int, ...],
        starts: int | tuple[int, ...],
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: Literal["numpy"] = ...,
        out: None = ...,
    ) -> Array: ...
    @overload
    def read_subarray_all(
        self,
        offset: int,
        sizes: int | tuple[int, ...],
        starts: int | tuple[int, ...],
        shape: int | tuple[int, ...] | None = ...,
        dtype: Any = ...,
        *,
        like: str,
        out: None = ...,
    ) -> Any: ...
    @overload
    def read_subarray_all(
        self,
        offset: int,
        sizes: int | tuple[int, ...],
        starts: int | tuple[int, ...],
        shape: None = ...,
        dtype: None = ...,
        *,
        like: str = ...,
        out: ArrayT,
    ) -> ArrayT: ...
    def read_subarray_all(
        self,
        offset: int,
        sizes: int | tuple[int, ...],
        starts: int | tuple[int, ...],
        shape: int | tuple[int, ...] | None = None,
        dtype: Any = None,
        *,
        like: str = "numpy",
        out: Any = None,
    ) -> Any:
        """Read a block of an array in the file. Collective; blocks may differ between ranks, overlap, or be empty.

        The array begins at `offset`, and has `sizes` elements along its axes; the block begins at the indices `starts`.
        Pass its `shape` and `dtype`, or the array itself as `out`. Return the block. Raises ShapeError for a block that
        does not lie within `sizes`, and what :meth:`read_at` raises.
        """
        return self._read("read_subarray_all", offset, shape, dtype, like, out, sizes, starts)

    def write_at(self, offset: int, x: Any) -> None:
        """Write the array `x` from `offset` bytes behind the begin of the file on.

        Raises ArgumentError and DTypeError for invalid arguments, before anything is written, and FileError.
        """
        self._write("write_at", offset, x)

    def write_at_all(self, offset: int, x: Any) -> None:
        """Do the same as :meth:`write_at` on all ranks. Collective; the arguments may differ between ranks."""
        self._write("write_at_all", offset, x)

    def write_subarray_all(
        self, offset: int, x: Any, sizes: int | tuple[int, ...], starts: int | tuple[int, ...]
    ) -> None:
        """Write a block of an array in the file. Collective; blocks may differ between ranks or be empty.

        The array begins at `offset`, and has `sizes` elements along its axes; `x` is its block that begins at the
        indices `starts`. Raises ShapeError for a block that does not lie within `sizes`, and what :meth:`write_at`
        raises.
        """
        self._write("write_subarray_all", offset, x, sizes, starts)

    def get_size(self) -> int:
        """Return the size of the file in bytes. Raises FileError."""
        size: int = self._run("get_size", self._check_open("get_size").get_size)
        return size

    def set_size(self, size: int) -> None:
        """Cut the file after `size` bytes, or extend it by zeros. Collective; `size` is the same on every rank. Raises
        ArgumentError for an invalid size, and FileError."""
        handle = self._check_open("set_size", writes=True)
        nbytes = _check_offset(self._core, "File.set_size", size, 0, "size")
        self._run("set_size", lambda: handle.set_size(nbytes), f"File.set_size({self.name!r}, {nbytes})")

    def sync(self) -> None:
        """Write all data to the storage device; what a rank has written before can be read by all ranks afterwards.
        Collective. Raises FileError."""
        self._run("sync", self._check_open("sync").sync, f"File.sync({self.name!r})")

    def close(self) -> None:
        """Close the file. Collective. Closing it twice has no effect. Raises FileError, and CommunicatorError if its
        communicator was freed."""
        if self._handle is not None:
            self._core.check()
            handle, self._handle = self._handle, None
            self._run("close", handle.close, f"File.close({self.name!r})")

    def __enter__(self) -> Self:
        self._check_open("__enter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing is collective: after an error on this rank alone it would wait for ranks that never enter it.
        if error is None or error is self._common_error:
            self.close()
        elif self._handle is not None:
            self._handle.abandon()
            self._handle = None

    def _check_open(self, operation: str, *, reads: bool = False, writes: bool = False) -> FileHandle:
        """Return the handle. Raises ArgumentError if the file is closed, or opened in another mode."""
        self._core.check()
        mode_reads, mode_writes, _ = _MODES[self.mode]
        problem = ""
        if self._handle is None:
            problem = "it is closed"
        elif (reads and not mode_reads) or (writes and not mode_writes):
            what, mode = ("reading", "r") if reads else ("writing", "w")
            problem = f"it is not open for {what}, but with mode {self.mode!r}; open it with mode {mode!r} or 'r+'"
        if self._handle is None or problem:
            location = f"rank {self._core.rank} of {self._core.size}"
            raise ArgumentError(f"File.{operation}: {self.name!r}: {problem} ({location})")
        return self._handle

    def _read(self, operation: str, offset: Any, shape: Any, dtype: Any, like: str, out: Any, *subarray: Any) -> Any:
        handle, name = self._check_open(operation, reads=True), f"File.{operation}"
        buffer = prepare_output(self._core, name, shape, dtype, like, out)
        block = _make_block(self._core, name, offset, buffer, *subarray)
        target, together = OutputArray(buffer), operation.endswith("_all")
        self._run(
            operation,
            lambda: handle.read(block, target.as_bytes, together=together),
            f"{name}({self.name!r})" if together else None,
        )
        target.store()
        return buffer.result() if out is None else out

    def _write(self, operation: str, offset: Any, x: Any, *subarray: Any) -> None:
        handle, name = self._check_open(operation, writes=True), f"File.{operation}"
        buffer = prepare_input(self._core, name, x)
        block = _make_block(self._core, name, offset, buffer, *subarray)
        source, together = InputArray(buffer), operation.endswith("_all")
        source.load()
        self._run(
            operation,
            lambda: handle.write(block, source.as_bytes, together=together),
            f"{name}({self.name!r})" if together else None,
        )

    def _run(self, operation: str, work: Callable[[], Any], collective: str | None = None) -> Any:
        """Return what `work` returns; `collective` is the call that all ranks make, None if it is one of this rank."""
        core = self._core
        if collective is None:
            call = Call(f"File.{operation}({self.name!r})", collective=False)
            return core.queue.run_with_deadline(lambda: _run_alone(core, operation, self.name, work), call)
        try:
            return core.queue.run(lambda: _run_and_agree(core, operation, self.name, work), Call(collective))
        except FileError as error:
            self._common_error = error
            raise


def prepare_input(core: CommunicatorCore, operation: str, x: Any) -> Buffer:
    """Return the buffer of `x`, in memory of the host."""
    return _recognise(core, operation, x, "x")


def prepare_output(core: CommunicatorCore, operation: str, shape: Any, dtype: Any, like: str, out: Any) -> Buffer:
    """Return the buffer of `out`, or of a new array of this shape and dtype."""
    given = [one is not None for one in (shape, dtype)]
    if any(given) if out is not None else not all(given):
        location = f"(rank {core.rank} of {core.size})"
        raise ArgumentError(f"{operation}: pass shape and dtype of the array, or the array itself as out= {location}")
    return _make_output(core, operation, shape, dtype, like, out)


@adds_rank_to_errors
def _make_output(core: CommunicatorCore, operation: str, shape: Any, dtype: Any, like: str, out: Any) -> Buffer:
    if out is None:
        return recognise(operation, make_array(operation, shape, dtype, like, lambda size: np.empty(size, np.uint8)))
    buffer = _recognise(core, operation, out, "out")
    return output(operation, out, buffer, buffer.array.shape)


@adds_rank_to_errors
def _recognise(core: CommunicatorCore, operation: str, x: Any, argument: str) -> Buffer:
    buffer = recognise(operation, x, argument)
    device = device_of(buffer.array)
    if device is not None:
        raise DeviceError(f"{operation}: {argument} is on {device.name}; files take memory of the host: copy it first")
    return buffer


@adds_rank_to_errors
def _check_open(core: CommunicatorCore, path: Any, mode: Any, driver: Any) -> str:
    """Return the name of the file."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        name = ""
    if not name or "\0" in name:
        raise ArgumentError(f"File.open: path must be a str or os.PathLike, got {path!r}")
    if mode not in _MODES:
        raise ArgumentError(f"File.open: mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
    if driver not in ("auto", "mpi", "posix"):
        raise ArgumentError(f"File.open: driver must be 'auto', 'mpi' or 'posix', got {driver!r}")
    if driver == "mpi" and core.transport.mpi is None:
        raise ArgumentError("File.open: driver 'mpi' needs MPI, which this job does not use; pass 'auto'")
    return name


@adds_rank_to_errors
def _check_offset(core: CommunicatorCore, operation: str, offset: Any, nbytes: int, argument: str = "offset") -> int:
    """Return `offset`, from which `nbytes` are to be read or written."""
    try:
        number = index(offset)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_OFFSET - nbytes:
        raise ArgumentError(f"{operation}: {argument} must be a number of bytes >= 0, got {offset!r}")
    return number


@adds_rank_to_errors
def _make_block(
    core: CommunicatorCore, operation: str, offset: Any, buffer: Buffer, sizes: Any = None, starts: Any = None
) -> FileBlock:
    """Return the place of `buffer` at `offset`, as a whole, or as a block of an array of `sizes`."""
    array = buffer.array
    if sizes is None:
        block = FileBlock(0, 1, (array.nbytes,), (0,), (array.nbytes,))
    else:
        block = make_subarray(operation, array.itemsize, sizes, starts, array.shape)
    return block._replace(offset=_check_offset(core, operation, offset, block.end))


def make_subarray(operation: str, itemsize: int, sizes: Any, starts: Any, shape: tuple[int, ...]) -> FileBlock:
    """Return the place of a block of `shape` in an array of `sizes` at the begin of a file. Raises ShapeError."""
    extents, first = check_shape(operation, sizes, "sizes"), check_shape(operation, starts, "starts")
    fits = len(extents) == len(first) == len(shape) and all(
        start + extent <= size for start, extent, size in zip(first, shape, extents, strict=True)
    )
    if not fits:
        raise ShapeError(
            f"{operation}: a block of shape {tuple(shape)} from {first} on does not lie in an array of shape {extents}"
        )
    return FileBlock(0, itemsize, extents, first, tuple(shape))


def _run_alone(core: CommunicatorCore, operation: str, name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (OSError, EOFError) as error:
        raise FileError(
            f"File.{operation}: {name!r}: {_describe(error)} (rank {core.rank} of {core.size})",
            name,
            getattr(error, "errno", None),
            (core.rank,),
        ) from error


def _run_and_agree(
    core: CommunicatorCore, operation: str, name: str, work: Callable[..., Any] | None, *args: Any
) -> Any:
    """Return what `work`, this rank's part of a collective call, returns. Raises the same FileError on all ranks if it
    fails on one."""
    value, error = None, None
    try:
        if work is not None:
            value = work(*args)
    except (OSError, EOFError) as failure:
        error = failure
    mine = "" if error is None else json.dumps([_describe(error), getattr(error, "errno", None)])
    texts = [mine] if core.size == 1 else core.transport.allgather_text(mine)
    ranks = tuple(rank for rank, text in enumerate(texts) if text)
    if not ranks:
        return value
    kinds = {text: rank_list(rank for rank in ranks if texts[rank] == text) for text in texts if text}
    problems = "; ".join(f"{json.loads(text)[0]} on {where}" for text, where in kinds.items())
    number = json.loads(texts[ranks[0]])[1]
    elsewhere = operation == "open" and number == errno.ENOENT and 0 not in ranks
    remedy = "; the file must be on a file system that all ranks share" if elsewhere else ""
    raise FileError(f"File.{operation}: {name!r}: {problems}{remedy}", name, number, ranks) from error


def _describe(error: OSError | EOFError) -> str:
    return getattr(error, "strerror", None) or str(error)
