"""Buffer: the one place that knows where an array's memory lies and how to hand out an array of the same kind."""

from __future__ import annotations

import array as _array
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.device import DeviceArray, Ready, describe, same_place
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DeviceError, DTypeError, ShapeError


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

    def ready(self, buffer: Buffer) -> Ready | None:
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


class NumpyLibrary:
    """numpy arrays, and whatever numpy can view but not create."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        created = np.empty(shape, like.array.dtype)
        return Buffer(created, created, like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> Any:
        return view

    @dtypes.silent
    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        np.copyto(target, source, casting="unsafe")

    def add(self, left: Array, right: Array, target: Array, dtype: DType) -> bool:
        return False

    def ready(self, buffer: Buffer) -> None:
        return None


class WordsLibrary(NumpyLibrary):
    """numpy arrays in host memory, also of bfloat16 as words of 16 bits: what stands in for a device's arrays there."""

    @dtypes.silent
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
    """Python's numbers: a result without dimensions is a Python number again, any other a numpy array."""

    def finish(self, buffer: Buffer) -> Any:
        return buffer.array.item() if buffer.user is buffer.array and buffer.array.ndim == 0 else buffer.user


class NumpyScalars(NumpyLibrary):
    """numpy's scalars, likewise."""

    def finish(self, buffer: Buffer) -> Any:
        return buffer.array[()] if buffer.user is buffer.array else buffer.user


@dataclass(frozen=True, slots=True)
class ArrayApi:
    """A library that follows the array API standard: results are made by its own ``from_dlpack``."""

    namespace: Any

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        created = np.empty(shape, like.array.dtype)
        return Buffer(created, created, like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user if buffer.user is not buffer.array else self.wrap(buffer.array)

    def wrap(self, view: Array) -> Any:
        # numpy refuses to export bfloat16 through DLPack, so such arrays go through the library's own constructor.
        return self.namespace.asarray(view) if view.dtype.kind == "V" else self.namespace.from_dlpack(view)

    @dtypes.silent
    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        np.copyto(target, source, casting="unsafe")

    def add(self, left: Array, right: Array, target: Array, dtype: DType) -> bool:
        return False

    def ready(self, buffer: Buffer) -> None:
        return None


NUMPY = NumpyLibrary()
WORDS = WordsLibrary()
_PYTHON = PythonScalars()
_NUMPY_SCALARS = NumpyScalars()


Wrap: TypeAlias = "Callable[[Array], Any] | None"
"""What makes an array of a library and dtype on the memory of one of numpy's; None: that is one already."""

View: TypeAlias = "tuple[Array, Wrap, Wrap]"
"""numpy's view of an array, what makes another one of its kind, and what makes the caller's result of an array."""

VIEWS: dict[type, Callable[[Any], View | None]] = {}
"""For types of other libraries: the view of such an array, if its memory is what it shows. Libraries enter themselves
when they are first met."""


def _number(value: Array) -> Any:
    return value if value.ndim else value.item()


def _scalar(value: Array) -> Any:
    return value if value.ndim else value[()]


def _of_number(x: complex) -> View | None:
    array = np.asarray(x)
    # Python's integers have no bounds.
    return None if type(x) is int and array.dtype != np.int64 else (array, None, _number)


_INPUTS: dict[type, Callable[[Any], View | None]] = {
    **dict.fromkeys((bool, int, float, complex), _of_number),
    **{np.dtype(code).type: lambda x: (np.asarray(x), None, _scalar) for code in "?bhilqBHILQefdFD"},
}
"""The same for what has no memory to write to."""


def numpy_views(x: Any, out: Any) -> tuple[Array | None, Array | None, Wrap, Wrap] | None:
    """numpy's views of `x` and `out`, either of which may be None, and what makes an array of their kind and the
    caller's result of numpy's; None if there is more to it."""
    given = None if x is None else _view(x, _INPUTS)
    if given is None and x is not None:
        return None
    if out is None or out is x:
        # No number can be written to.
        if given is None or (out is x and type(x) in _INPUTS):
            return None
        return given[0], given[0] if out is x else None, given[1], given[2]
    into = _view(out, {})
    if given is None or into is None:
        return None if into is None else (None, *into)
    # Both are of one library and dtype, as far as numpy can't tell them apart.
    return None if given[1] is not into[1] else (given[0], into[0], given[1], given[2])


def _view(x: Any, others: dict[type, Callable[[Any], View | None]]) -> View | None:
    if type(x) is np.ndarray:
        return x, None, None
    view = VIEWS.get(type(x)) or others.get(type(x))
    return None if view is None else view(x)


def recognise(operation: str, x: Any, argument: str = "x") -> Buffer:
    """The buffer of `x`: a numpy array or scalar, a Python number, a torch tensor, a CUDA array (cupy's, or anything
    with the CUDA array interface), or any object with DLPack, the array interface or Python's buffer protocol.

    Raises DeviceError for memory of devices other than CUDA's, and of CUDA's where it can't be used, and DTypeError for
    everything else, naming `operation` and `argument`.
    """
    if type(x) is np.ndarray:
        return Buffer(x, x, _dtype(operation, x, argument), NUMPY)
    # A library that was not imported can't have made x, so mpicoll needn't import it either.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from mpicoll.buffers.torch import recognise_tensor

        return recognise_tensor(operation, x, argument)
    if isinstance(x, np.generic):  # before Python's numbers: numpy.float64 is a float as well
        array = np.asarray(x)
        return Buffer(x, array, dtypes.of_numpy(array.dtype), _NUMPY_SCALARS)
    if isinstance(x, (bool, int, float, complex)):
        return _python_number(operation, x, argument)
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{operation}: {argument} is a masked array, whose mask would be lost; fill it first")
    if hasattr(x, "__cuda_array_interface__") or _dlpack_device(x) not in _DLPACK_HOST:
        return _on_device(operation, x, argument)
    view = _host_view(x)
    if view is None:
        raise DTypeError(
            f"{operation}: {argument} is a {type(x).__name__}, which is no array; pass a numpy array, a torch tensor"
            " or an object with DLPack or the array interface (numpy.asarray makes one of a list)"
        )
    namespace = getattr(x, "__array_namespace__", None)
    library: Library = NUMPY if isinstance(x, np.ndarray) or namespace is None else ArrayApi(namespace())
    return Buffer(x if isinstance(library, ArrayApi) else view, view, _dtype(operation, view, argument), library)


def _dtype(operation: str, array: Array, argument: str) -> DType:
    try:
        return dtypes.of_numpy(array.dtype)
    except DTypeError as error:
        raise DTypeError(f"{operation}: {argument}: {error}") from None


_DLPACK_HOST = frozenset({None, 1, 3, 11})
"""DLPack's device types whose memory the CPU may read: CPU, CUDA-pinned, ROCm-pinned. None: not of DLPack."""

_DLPACK_CUDA = 2


def _dlpack_device(x: Any) -> int | None:
    device = getattr(x, "__dlpack_device__", None)
    return None if device is None else int(device()[0])


def _on_device(operation: str, x: Any, argument: str) -> Buffer:
    what = f"{operation}: {argument} is a {type(x).__name__}"
    if hasattr(x, "__cuda_array_interface__"):
        memory = describe(x)
        what += f" of shape {memory.shape} and dtype {memory.dtype}"
    else:
        kind, index = x.__dlpack_device__()
        what += f" on DLPack device type {int(kind)}, index {index}"
        if kind != _DLPACK_CUDA:
            raise DeviceError(f"{what}, whose memory mpicoll can't use; copy it to the host first")
    try:
        from mpicoll.buffers.cupy import recognise_cuda
    except ImportError as error:
        raise DeviceError(
            f'{what} in CUDA memory, for which mpicoll needs cupy ({error}): pip install "mpicoll[cuda13]" (cuda12 for'
            " older drivers), or copy it to the host first"
        ) from error
    return recognise_cuda(operation, x, argument)


def _python_number(operation: str, x: complex, argument: str) -> Buffer:
    if isinstance(x, int) and not isinstance(x, bool) and not -(2**63) <= x < 2**63:
        raise DTypeError(f"{operation}: {argument}={x} does not fit int64; pass an array of a dtype that holds it")
    array = np.asarray(x)
    return Buffer(x, array, dtypes.of_numpy(array.dtype), _PYTHON)


def _host_view(x: Any) -> Array | None:
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


def output(operation: str, out: Any, like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """The buffer of the caller's `out`, which must have `shape`, `like`'s dtype, and be writable.

    Raises ShapeError or DTypeError that names both sides.
    """
    buffer = recognise(operation, out, "out")
    same_place(operation, like.array, buffer.array)
    if buffer.array.shape != shape:
        raise ShapeError(f"{operation}: out has shape {buffer.array.shape}, the result has shape {shape}")
    # bfloat16 is the one dtype that libraries show to numpy in different ways.
    same = buffer.dtype.storage == like.dtype.storage or (buffer.dtype.name == like.dtype.name == "bfloat16")
    if not same or buffer.dtype.name != like.dtype.name:
        raise DTypeError(f"{operation}: out has dtype {_shown(buffer)}, the result has dtype {_shown(like)}")
    if isinstance(buffer.library, (PythonScalars, NumpyScalars)):
        raise DTypeError(f"{operation}: out is the number {out!r}, which can't be written to; pass an array")
    if not buffer.array.flags.writeable:
        raise ShapeError(f"{operation}: out is read-only; pass a writable array, or leave out= away")
    strides = zip(buffer.array.strides, shape, strict=True)
    if buffer.array.size and any(stride == 0 and extent > 1 for stride, extent in strides):
        raise ShapeError(f"{operation}: elements of out share memory (an expanded array); pass a copy")
    # Whatever library it is of, its memory is filled like that of a result of `like`'s, and the caller gets it back.
    # On a device only its own library knows the stream on which it is used.
    library = buffer.library if isinstance(buffer.array, DeviceArray) else like.library
    return Buffer(out, buffer.array.view(like.dtype.storage), like.dtype, library)


def _shown(buffer: Buffer) -> str:
    """The dtype for a message: with byte order and fields, where it has them."""
    dtype = buffer.array.dtype
    return buffer.dtype.name if dtype.isnative and dtype.names is None else str(dtype)
