"""Files by MPI-IO."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI

from mpicoll.transport import quirks
from mpicoll.transport.base import Memory
from mpicoll.transport.files import FileBlock, end_of_file
from mpicoll.transport.mpi.fault_tolerance import allgather_objects

_CHUNK = 1 << 30
"""Bytes of one call: MPI's counts are ints, and libraries have had defects with larger ones."""

_MAX_EXTENT = 2**31 - 1

_ERRNO = {
    MPI.ERR_ACCESS: errno.EACCES,
    MPI.ERR_FILE_EXISTS: errno.EEXIST,
    MPI.ERR_NO_SPACE: errno.ENOSPC,
    MPI.ERR_NO_SUCH_FILE: errno.ENOENT,
    MPI.ERR_QUOTA: errno.EDQUOT,
    MPI.ERR_READ_ONLY: errno.EROFS,
}


class MpiFile:
    """The file `path`, which exists, opened by all ranks of `comm`. Collective."""

    def __init__(self, comm: MPI.Intracomm, path: str, *, reads: bool, writes: bool) -> None:
        amode = MPI.MODE_RDWR if reads and writes else MPI.MODE_WRONLY if writes else MPI.MODE_RDONLY
        self._comm = comm
        with _translation():
            # Relative paths could begin with what MPICH takes for the name of a file system, such as "ufs:".
            self._file = MPI.File.Open(comm, os.path.abspath(path), amode)  # noqa: PTH100
        version = MPI.Get_library_version()
        self._path = path
        self._calls_together = not (quirks.FILE_ERRORS.applies_to(version) or quirks.FILE_VIEWS.applies_to(version))
        self._keeps_locks = quirks.FILE_LOCKS.applies_to(version)

    def read(self, block: FileBlock, memory: Memory, *, together: bool) -> None:
        # Statuses are no help: after a collective read some libraries report all bytes in any case.
        size = self.get_size()
        error = end_of_file(size, block) if block.end > size else None
        self._transfer("Read_at", block, memory, error, together=together)

    def write(self, block: FileBlock, memory: Memory, *, together: bool) -> None:
        self._transfer("Write_at", block, memory, None, together=together)

    def _transfer(
        self, name: str, block: FileBlock, memory: Memory, error: Exception | None, *, together: bool
    ) -> None:
        """Call the method `name`, or its collective form. If there is an `error` already, transfer nothing and raise
        it."""
        if error is not None:
            memory = memory[:0]
        if together and self._calls_together:
            needs = -(-memory.size // _CHUNK), not block.is_contiguous, max(block.sizes, default=0) > _MAX_EXTENT
            chunks, strided, huge = (max(column) for column in zip(*allgather_objects(self._comm, needs), strict=True))
            if not (strided and huge):
                self._transfer_together(name, block, memory, error, chunks, strided=strided)
                return
        if error is not None:
            raise error
        method, at = getattr(self._file, name), 0
        for offset, nbytes in block.list_runs():
            for begin in range(0, nbytes, _CHUNK):
                part = memory[at : at + min(_CHUNK, nbytes - begin)]
                at += part.size
                status = MPI.Status()
                try:
                    with _translation():
                        method(offset + begin, [part, part.size, MPI.BYTE], status)
                except OSError:
                    self._unlock()
                    raise
                count = status.Get_count(MPI.BYTE)
                if name == "Write_at" and count < part.size:
                    raise OSError(errno.EIO, f"MPI has written {count} of {part.size} bytes, and reports no error")

    def _transfer_together(
        self, name: str, block: FileBlock, memory: Memory, error: Exception | None, chunks: int, *, strided: bool
    ) -> None:
        """Transfer by collective calls of MPI. All ranks make the same calls, regardless of what fails."""
        method, begin = getattr(self._file, f"{name}_all"), next(block.list_runs(), (0, 0))[0]
        if strided:
            self._set_view(block if memory.size else None)
            begin = 0
        for at in range(0, chunks * _CHUNK, _CHUNK):
            part = memory[at : at + _CHUNK]
            try:
                with _translation():
                    method(begin + at if part.size else 0, [part, part.size, MPI.BYTE])
            except OSError as failure:
                self._unlock()
                error = error or failure
        if strided:
            self._file.Set_view(0, MPI.BYTE, MPI.BYTE)
        if error is not None:
            raise error

    def _unlock(self) -> None:
        """Release the locks that MPI has left behind."""
        if self._keeps_locks:
            with suppress(OSError):
                os.close(os.open(self._path, os.O_RDONLY))  # closing a file drops all locks of this process on it

    def _set_view(self, block: FileBlock | None) -> None:
        """Let offsets count the bytes of `block` only; None is a block without bytes. Collective."""
        if block is None or not block.sizes:
            self._file.Set_view(0 if block is None else block.offset, MPI.BYTE, MPI.BYTE)
            return
        element = MPI.BYTE.Create_contiguous(block.itemsize)
        part = element.Create_subarray(list(block.sizes), list(block.subsizes), list(block.starts)).Commit()
        try:
            self._file.Set_view(block.offset, MPI.BYTE, part)
        finally:
            part.Free()
            element.Free()

    def get_size(self) -> int:
        with _translation():
            return int(self._file.Get_size())

    def set_size(self, size: int) -> None:
        with _translation():
            self._file.Set_size(size)

    def sync(self) -> None:
        with _translation():
            # Twice, as the standard requires before other ranks may read what was written.
            self._file.Sync()
            self._comm.Barrier()
            self._file.Sync()

    def close(self) -> None:
        with _translation():
            self._file.Close()

    def abandon(self) -> None:
        """Do nothing: MPI closes a file with all ranks only."""


@contextmanager
def _translation() -> Iterator[None]:
    """Raise OSError for exceptions of MPI."""
    try:
        yield
    except MPI.Exception as error:
        number = _ERRNO.get(error.Get_error_class(), errno.EIO)
        text = os.strerror(number)
        if number == errno.EIO:
            # MPICH adds its stack of calls.
            text += f" (MPI: {error.Get_error_string().partition(', error stack')[0].strip()})"
        raise OSError(number, text) from error
