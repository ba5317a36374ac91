"""The types of an array that a caller passes: its memory, dtype and library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpicoll.buffers.device import StreamEvent
from mpicoll.buffers.dtypes import Array, DType


class Library(Protocol):
    """What the engine needs of an array library."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        """A new contiguous array of `like`'s dtype."""

    def finish(self, buffer: Buffer) -> Any:
        """What the caller gets for a filled `buffer` of :meth:`empty`."""

    def wrap(self, view: Array) -> Any:
        """An array of this library on the memory of `view`, for a user's function."""

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        """``target[...] = source`` between storage and work dtype of `dtype`, either way, rounding to nearest."""

    def add(self, left: Array, right: Array, target: Array, dtype: DType) -> bool:
        """For half-precision: ``target[...] = left + right``, rounded once, without a detour by `convert`. Whether that
        was done; if this library can't, nothing has happened."""

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        """What the caller's streams have to have done before `buffer` may be touched, as of now; None if nothing."""


@dataclass(slots=True)
class Buffer:
    """An array of the caller's: the object, a numpy view of its memory (a DeviceArray, if that is a device's), its
    dtype and its library."""

    user: Any
    array: Array
    dtype: DType
    library: Library

    def result(self) -> Any:
        """The filled buffer as an object of its library."""
        return self.library.finish(self)

    def load(self, target: Array) -> None:
        """Write the elements in C order to the flat array `target`, of the storage or the work dtype."""
        shaped = target.reshape(self.array.shape)
        if target.dtype == self.array.dtype:
            np.copyto(shaped, self.array)
        else:
            self.library.convert(self.array, shaped, self.dtype)

    def store(self, source: Array) -> None:
        """The reverse of :meth:`load`."""
        shaped = source.reshape(self.array.shape)
        if source.dtype == self.array.dtype:
            np.copyto(self.array, shaped)
        else:
            self.library.convert(shaped, self.array, self.dtype)

    def same_memory(self, other: Buffer) -> bool:
        """Whether both are the same elements in the same order."""
        a, b = self.array, other.array
        # The bounds come first: they are cheap, and nearly always decide.
        if a is not b and not np.may_share_memory(a, b):
            return False
        return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides

    def overlaps(self, other: Buffer) -> bool:
        """Whether writing one may change the other (by the bounds of their memory)."""
        return np.may_share_memory(self.array, other.array)


Wrap: TypeAlias = "Callable[[Array], Any] | None"
"""What makes an array of a library and dtype on the memory of one of numpy's; None: that is one already."""

View: TypeAlias = "tuple[Array, Wrap, Wrap]"
"""numpy's view of an array, what makes another one of its kind, and what makes the caller's result of an array."""

VIEWS: dict[type, Callable[[Any], View | None]] = {}
"""For types of other libraries: the view of such an array, if its memory is what it shows. Libraries enter themselves
when they are first met."""
