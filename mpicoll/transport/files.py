"""Files that all ranks of a group have opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol, TypeAlias
from weakref import finalize

import numpy as np

from mpicoll.named_tuple import NamedTuple

Memory: TypeAlias = "np.ndarray[Any, Any]"
"""Contiguous flat memory of bytes."""


class FileBlock(NamedTuple):
    """Place of a block in a file.

    `offset` bytes lie before an array of `sizes` elements of `itemsize` bytes in C order, of which the block has
    `subsizes` elements from `starts` on.
    """

    offset: int
    itemsize: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    subsizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the block."""
        return prod(self.subsizes) * self.itemsize

    @property
    def end(self) -> int:
        """The offset behind the last byte of the block; 0 if it has none."""
        if not self.nbytes:
            return 0
        last = (start + extent - 1 for start, extent in zip(self.starts, self.subsizes, strict=True))
        strides = _find_strides(self.sizes)
        return self.offset + (sum(at * by for at, by in zip(last, strides, strict=True)) + 1) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the bytes of the block lie side by side."""
        return self._count_outer() == 0

    def _count_outer(self) -> int:
        """Return the number of first dimensions along which the block has several parts."""
        inner = len(self.sizes)
        while inner and self.subsizes[inner - 1] == self.sizes[inner - 1]:
            inner -= 1
        # The dimension that divides the array is a part of each run, and so are further ones of extent 1.
        outer = max(inner - 1, 0)
        while outer and self.subsizes[outer - 1] == 1:
            outer -= 1
        return outer if self.nbytes else 0

    def list_runs(self) -> Iterator[tuple[int, int]]:
        """Find the consecutive bytes of the block, each as offset and size, in the order of its elements."""
        if not self.nbytes:
            return
        outer = self._count_outer()
        strides = [stride * self.itemsize for stride in _find_strides(self.sizes)]
        size = prod(self.subsizes[outer:]) * self.itemsize
        first = self.offset + sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        for index in np.ndindex(*self.subsizes[:outer]):
            yield first + sum(at * stride for at, stride in zip(index, strides, strict=False)), size


def _find_strides(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


class FileHandle(Protocol):
    """A file that all ranks of a group have opened.

    All methods raise OSError on the ranks on which they fail, and EOFError where the file ends before what is to be
    read. Other ranks are not affected. `memory` is contiguous, and has the bytes of the block. With `together`, a
    transfer is collective, and blocks may have several parts in the file.
    """

    def read(self, block: FileBlock, memory: Memory, *, together: bool) -> None: ...
    def write(self, block: FileBlock, memory: Memory, *, together: bool) -> None: ...
    def get_size(self) -> int:
        """Return the bytes of the file."""

    def set_size(self, size: int) -> None:
        """Cut or extend the file. Collective."""

    def sync(self) -> None:
        """Write what this rank has written to the storage device. Collective."""

    def close(self) -> None:
        """Close the file. Collective."""

    def abandon(self) -> None:
        """Release what can be released without the other ranks."""


class PosixFile:
    """A file that each rank reads and writes by POSIX's functions, through its own descriptor `fd`."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._is_first = rank == 0
        self._close = finalize(self, os.close, fd)

    def read(self, block: FileBlock, memory: Memory, *, together: bool) -> None:
        at, view = 0, memory.data
        for offset, nbytes in block.list_runs():
            while nbytes:
                done = os.preadv(self._fd, [view[at : at + nbytes]], offset)
                if not done:
                    raise end_of_file(self.get_size(), block)
                at, offset, nbytes = at + done, offset + done, nbytes - done

    def write(self, block: FileBlock, memory: Memory, *, together: bool) -> None:
        at, view = 0, memory.data
        for offset, nbytes in block.list_runs():
            while nbytes:
                done = os.pwrite(self._fd, view[at : at + nbytes], offset)
                if not done:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                at, offset, nbytes = at + done, offset + done, nbytes - done

    def get_size(self) -> int:
        return os.fstat(self._fd).st_size

    def set_size(self, size: int) -> None:
        if self._is_first:
            os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._close.detach() is not None:
            os.close(self._fd)

    def abandon(self) -> None:
        self.close()


def end_of_file(size: int, block: FileBlock) -> EOFError:
    """Return the error for a block that does not lie in a file of `size` bytes."""
    return EOFError(f"the file has {size} bytes, and bytes up to {block.end} were to be read")


def open_descriptor(path: str, flags: int) -> int:
    """Return a descriptor of the file `path`, which child processes do not inherit. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return fd
