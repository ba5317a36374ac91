"""Recognition of an array's library: the only module that knows all libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import VIEWS, Buffer, Library, View, Wrap
from mpicoll.buffers.device import DeviceArray, check_same_place, describe
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.buffers.host import (
    NUMPY,
    NUMPY_SCALARS,
    SCALAR_VIEWS,
    ArrayApi,
    NumpyScalars,
    PythonScalars,
    host_view,
    python_number,
)
from mpicoll.errors import DeviceError, DTypeError, ShapeError


def numpy_views(x: Any, out: Any) -> tuple[Array | None, Array | None, Wrap, Wrap] | None:
    """Return numpy views of `x` and `out`, either of which may be None, and the functions that make an array of their
    kind and the caller's result; None if :func:`recognise` has to look at them."""
    given = None if x is None else _view(x, SCALAR_VIEWS)
    if given is None and x is not None:
        return None
    if out is None or out is x:
        # No number can be written to.
        if given is None or (out is x and type(x) in SCALAR_VIEWS):
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


def is_tensor(x: Any) -> bool:
    """Return True for a tensor of torch, but not of a class derived from torch.Tensor."""
    return type(x) is _imported_class("torch", "Tensor")


def _imported_class(library: str, name: str) -> Any:
    """Return a class of `library`, or an empty tuple if the library was not imported: it can't have made an array then,
    so mpicoll needn't import it either. Nor has it a class yet while another thread is importing it."""
    return getattr(sys.modules.get(library), name, ())


def bind_empty(like: Any) -> Callable[[], Any] | None:
    """Return a function that makes an array like `like`; None for other arrays than numpy's and torch's."""
    if type(like) is np.ndarray:
        return partial(np.empty, like.shape, like.dtype)
    if not is_tensor(like):
        return None
    torch = sys.modules["torch"]
    return partial(torch.empty, like.shape, dtype=like.dtype, device=like.device)


def recognise(operation: str, x: Any, argument: str = "x") -> Buffer:
    """Return the buffer of `x`: a numpy array or scalar, a Python number, a torch tensor, a CUDA array (cupy's,
    or any with the CUDA array interface), or any object with DLPack, the array interface or Python's buffer protocol.

    Raises DeviceError for memory of devices other than CUDA's, and of CUDA's where it can't be used, and DTypeError for
    everything else, naming `operation` and `argument`.
    """
    if type(x) is np.ndarray:
        return Buffer(x, x, _dtype(operation, x, argument), NUMPY)
    if isinstance(x, _imported_class("torch", "Tensor")):
        from mpicoll.buffers.torch import recognise_tensor

        return recognise_tensor(operation, x, argument)
    if isinstance(x, _imported_class("cupy", "ndarray")):
        # Before its interface is asked for, which it makes each time.
        from mpicoll.buffers.cuda.recognise import recognise_cuda

        return recognise_cuda(operation, x, argument)
    if isinstance(x, np.generic):  # before Python's numbers: numpy.float64 is a float as well
        array = np.asarray(x)
        return Buffer(x, array, dtypes.of_numpy(array.dtype), NUMPY_SCALARS)
    if isinstance(x, (bool, int, float, complex)):
        return python_number(operation, x, argument)
    if isinstance(x, np.ma.MaskedArray):
        raise DTypeError(f"{operation}: {argument} is a masked array, whose mask would be lost; fill it first")
    if hasattr(x, "__cuda_array_interface__") or _dlpack_device(x) not in _DLPACK_HOST:
        return _on_device(operation, x, argument)
    view = host_view(x)
    if view is None:
        raise DTypeError(
            f"{operation}: {argument} is a {type(x).__name__}, which is not an array; pass a numpy array, a torch"
            " tensor or an object with DLPack or the array interface (numpy.asarray makes one of a list)"
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
    if not hasattr(x, "__cuda_array_interface__"):
        kind, _ = x.__dlpack_device__()
        if kind != _DLPACK_CUDA:
            raise DeviceError(
                f"{operation}: {_describe_device_array(x, argument)}, whose memory mpicoll can't use; copy it to the"
                " host first"
            )
    try:
        from mpicoll.buffers.cuda.recognise import recognise_cuda
    except ImportError as error:
        raise DeviceError(
            f"{operation}: {_describe_device_array(x, argument)} in CUDA memory, for which mpicoll needs cupy"
            f' ({error}): pip install "mpicoll[cuda13]" (cuda12 for older drivers), or copy it to the host first'
        ) from error
    return recognise_cuda(operation, x, argument)


def _describe_device_array(x: Any, argument: str) -> str:
    what = f"{argument} is a {type(x).__name__}"
    if hasattr(x, "__cuda_array_interface__"):
        memory = describe(x)
        return f"{what} of shape {memory.shape} and dtype {memory.dtype}"
    kind, index = x.__dlpack_device__()
    return f"{what} on DLPack device type {int(kind)}, index {index}"


def output(operation: str, out: Any, like: Buffer, shape: tuple[int, ...]) -> Buffer:
    """Return the buffer of the caller's `out`, which must have `shape`, `like`'s dtype, and be writable.

    Raises ShapeError or DTypeError that names both sides.
    """
    buffer = recognise(operation, out, "out")
    check_same_place(operation, like.array, buffer.array)
    if buffer.array.shape != shape:
        raise ShapeError(f"{operation}: out has shape {buffer.array.shape}, the result has shape {shape}")
    # bfloat16 is the one dtype that libraries show to numpy in different ways.
    same = buffer.dtype.storage == like.dtype.storage or (buffer.dtype.name == like.dtype.name == "bfloat16")
    if not same or buffer.dtype.name != like.dtype.name:
        raise DTypeError(f"{operation}: out has dtype {buffer.dtype.text}, the result has dtype {like.dtype.text}")
    if isinstance(buffer.library, (PythonScalars, NumpyScalars)):
        raise DTypeError(f"{operation}: out is the number {out!r}, which can't be written to; pass an array")
    if not buffer.array.flags.writeable:
        raise ShapeError(f"{operation}: out is read-only; pass a writable array, or leave out= away")
    strides = zip(buffer.array.strides, shape, strict=True)
    if buffer.array.size and any(stride == 0 and extent > 1 for stride, extent in strides):
        raise ShapeError(f"{operation}: elements of out share memory (an expanded array); pass a copy")
    # The memory is filled like that of a result of `like`'s library, and the caller's array is returned. On a device
    # only the array's own library has the stream on which the array is used.
    library = buffer.library if isinstance(buffer.array, DeviceArray) else like.library
    return Buffer(out, buffer.array.view(like.dtype.storage), like.dtype, library)
