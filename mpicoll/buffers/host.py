"""Arrays and numbers in host memory: numpy's, Python's, and those of libraries of the array API standard."""

from __future__ import annotations

import array as _array
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import Buffer, View
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DTypeError


class NumpyLibrary:
    """numpy arrays, and objects that numpy can view but not create."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        created = np.empty(shape, like.array.dtype)
        return Buffer(created, created, like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> Any:
        return view

    @dtypes.ignore_float_errors
    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        np.copyto(target, source, casting="unsafe")

    def find_stream(self, buffer: Buffer) -> None:
        return None

    def record_event(self, buffer: Buffer) -> None:
        return None


class WordsLibrary(NumpyLibrary):
    """numpy arrays in host memory that hold the elements of device arrays; bfloat16 is words of 16 bits."""

    @dtypes.ignore_float_errors
    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        if dtype.name != "bfloat16" or np.uint16 not in (source.dtype, target.dtype):
            np.copyto(target, source, casting="unsafe")
        elif source.dtype == np.uint16:
            np.left_shift(source, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)
        else:
            bits = source.view(np.uint32)
            # To nearest, ties to even; a NaN must not become infinite by that.
            rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
            np.copyto(target, np.where(np.isnan(source), 0x7FC0, rounded), casting="unsafe")


class PythonScalars(NumpyLibrary):
    """Python numbers: a result without dimensions is a Python number again, any other a numpy array."""

    def finish(self, buffer: Buffer) -> Any:
        return buffer.array.item() if buffer.user is buffer.array and buffer.array.ndim == 0 else buffer.user


class NumpyScalars(NumpyLibrary):
    """numpy scalars: a result without dimensions is a scalar again, any other a numpy array."""

    def finish(self, buffer: Buffer) -> Any:
        return buffer.array[()] if buffer.user is buffer.array else buffer.user


class ArrayApi(NumpyLibrary):
    """A library that follows the array API standard: results are made by its own ``from_dlpack``."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Any) -> None:
        self.namespace = namespace

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user if buffer.user is not buffer.array else self.wrap(buffer.array)

    def wrap(self, view: Array) -> Any:
        # numpy refuses to export bfloat16 through DLPack, so such arrays go through the library's own constructor.
        return self.namespace.asarray(view) if view.dtype.kind == "V" else self.namespace.from_dlpack(view)


NUMPY = NumpyLibrary()
WORDS = WordsLibrary()
PYTHON_SCALARS = PythonScalars()
NUMPY_SCALARS = NumpyScalars()


def _number(value: Array) -> Any:
    return value if value.ndim else value.item()


def _scalar(value: Array) -> Any:
    return value if value.ndim else value[()]


def _of_number(x: complex) -> View | None:
    array = np.asarray(x)
    # Python's integers have no bounds.
    return None if type(x) is int and array.dtype != np.int64 else (array, None, _number)


SCALAR_VIEWS: dict[type, Callable[[Any], View | None]] = {
    **dict.fromkeys((bool, int, float, complex), _of_number),
    **{np.dtype(code).type: lambda x: (np.asarray(x), None, _scalar) for code in "?bhilqBHILQefdFD"},
}
"""The same as :data:`VIEWS` for numbers, which have no memory to write to."""


def python_number(operation: str, x: complex, argument: str) -> Buffer:
    if isinstance(x, int) and not isinstance(x, bool) and not -(2**63) <= x < 2**63:
        raise DTypeError(f"{operation}: {argument}={x} does not fit int64; pass an array of a dtype that holds it")
    array = np.asarray(x)
    return Buffer(x, array, dtypes.of_numpy(array.dtype), PYTHON_SCALARS)


def host_view(x: Any) -> Array | None:
    if isinstance(x, np.ndarray) or hasattr(x, "__array_interface__"):
        return np.asarray(x)
    if isinstance(x, (bytes, bytearray, memoryview, _array.array)):
        return np.asarray(memoryview(x))
    if hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError):
            # Dtypes that numpy's DLPack lacks (bfloat16): such libraries hand out an ml_dtypes array instead.
            return np.asarray(x) if hasattr(x, "__array__") else None
    return None
