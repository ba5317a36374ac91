"""The types of an array that a caller passes: its memory, dtype and library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpicoll.buffers.device import StreamEvent
from mpicoll.buffers.dtypes import Array, DType


class Library(Protocol):
    """The operations of an array library that the engine uses."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        """Return a new contiguous array of `like`'s dtype."""

    def finish(self, buffer: Buffer) -> Any:
        """Return the caller's result for a filled `buffer` of :meth:`empty`."""

    def wrap(self, view: Array) -> Any:
        """Return an array of this library on the memory of `view`, for a user's function."""

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        """Assign ``target[...] = source`` between storage and work dtype of `dtype`, rounding to nearest."""

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        """Record an event on the caller's stream, to be done before `buffer` is touched; None on the host."""

    def find_stream(self, buffer: Buffer) -> int | None:
        """Return the stream on which the caller uses `buffer`; None if that is not known, or on the host."""


class Buffer:
    """An array that a caller passed: the object, a numpy view of its memory (a DeviceArray on a device), its dtype and
    its library."""

    __slots__ = ("array", "dtype", "library", "user")

    def __init__(self, user: Any, array: Array, dtype: DType, library: Library) -> None:
        self.user = user
        self.array = array
        self.dtype = dtype
        self.library = library

    def result(self) -> Any:
        """Return the filled buffer as an object of its library."""
        return self.library.finish(self)

    def load(self, target: Array) -> None:
        """Write the elements in C order to the flat array `target`, of the storage or the work dtype."""
        shaped = target.reshape(self.array.shape)
        if target.dtype == self.array.dtype:
            np.copyto(shaped, self.array)
        else:
            self.library.convert(self.array, shaped, self.dtype)

    def store(self, source: Array) -> None:
        """Copy `source` to the buffer: the reverse of :meth:`load`."""
        shaped = source.reshape(self.array.shape)
        if source.dtype == self.array.dtype:
            np.copyto(self.array, shaped)
        else:
            self.library.convert(shaped, self.array, self.dtype)

    def same_memory(self, other: Buffer) -> bool:
        """Return True if both are the same elements in the same order."""
        a, b = self.array, other.array
        # The bounds come first: they are cheap, and nearly always decide.
        if a is not b and not np.may_share_memory(a, b):
            return False
        return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides

    def overlaps(self, other: Buffer) -> bool:
        """Return True if writing one may change the other, by the bounds of their memory."""
        return np.may_share_memory(self.array, other.array)


Wrap: TypeAlias = "Callable[[Array], Any] | None"
"""Makes an array of a library and dtype on the memory of a numpy array; None: the numpy array is the result."""

View: TypeAlias = "tuple[Array, Wrap, Wrap]"
"""A numpy view of an array, the function that makes another array of its kind, and the one that makes the result."""

VIEWS: dict[type, Callable[[Any], View | None]] = {}
"""By type of array: the function that returns its view, or None if its memory differs from its values. The module of a
library adds its types when it is imported."""


class DeviceLibrary(Library, Protocol):
    """A library of arrays on devices, as repeated calls use it."""

    def find_place(self, x: Any) -> tuple[DeviceKind, int] | None:
        """Return what arrays like `x` have in common, and its address; None if it is not contiguous memory of a device,
        or has no elements."""

    def current_stream(self, index: int) -> int:
        """Return the stream for which users of arrays on the device of that number have to wait."""

    def bind_empty(self, kind: DeviceKind) -> Callable[[], Any]:
        """Return a function that makes an array of `kind`."""


DeviceKind: TypeAlias = "tuple[DeviceLibrary, int, Any, tuple[int, ...]]"
"""Kind of array on a device: the library, the number of the device, the library's dtype, the shape."""

DEVICE_LIBRARIES: dict[type, DeviceLibrary] = {}
"""By type of array: its library, of arrays that may lie on a device. Filled as :data:`VIEWS`."""
