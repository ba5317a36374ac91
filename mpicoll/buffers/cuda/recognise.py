"""Buffers of CUDA arrays: cupy's, and others with the CUDA array interface or DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import DEVICE_LIBRARIES, Buffer, DeviceKind
from mpicoll.buffers.cuda.copies import wrap
from mpicoll.buffers.cuda.device import CudaDevice, cuda_device
from mpicoll.buffers.cuda.driver import CurrentDevice
from mpicoll.buffers.cuda.events import current_stream, record_event, refuse_capture
from mpicoll.buffers.device import DeviceArray, StreamEvent, describe, device_of, view
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DeviceError, DTypeError

_CUDA_MEMORY = (1, 2, 3)
"""CUDA's kinds of memory that a device can reach: page-locked host memory, a device's, managed."""

_LEGACY_STREAM = 1
"""The default stream, which waits for all streams that don't opt out of it."""

_DLPACK_CUDA = 2
"""DLPack's type of CUDA devices."""


class CupyLibrary:
    """cupy's arrays."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        on, dtype = _home(like), like.array.dtype
        try:
            with CurrentDevice(on.index):
                created = cupy.empty(shape, dtype)
        except (TypeError, ValueError) as error:
            raise DTypeError(f"cupy has no arrays of {like.dtype.name} ({error}); pass out=") from error
        return Buffer(created, _of_cupy(created), like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> Any:
        assert isinstance(view, DeviceArray)
        assert isinstance(view.on, CudaDevice)
        return wrap(view.on, view)

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        on = device_of(source, target)
        assert on is not None
        on.convert(source, target, dtype.name)

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        index = _home(buffer).index
        return record_event(index, current_stream(index))

    def find_stream(self, buffer: Buffer) -> int | None:
        # Other libraries may use their memory again on streams that they don't name.
        return current_stream(_home(buffer).index) if isinstance(buffer.user, cupy.ndarray) else None

    def find_place(self, x: Any) -> tuple[DeviceKind, int] | None:
        memory = x.data
        if not memory.ptr or not x.flags.c_contiguous:
            return None
        return (self, memory.device_id, x.dtype, x.shape), memory.ptr

    def current_stream(self, index: int) -> int:
        return current_stream(index)

    def bind_empty(self, kind: DeviceKind) -> Callable[[], Any]:
        _, index, dtype, shape = kind

        def create() -> Any:
            with CurrentDevice(index):
                return cupy.empty(shape, dtype)

        return create


class InterfaceLibrary(CupyLibrary):
    """Other arrays with the CUDA array interface. Results are cupy's."""

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        if isinstance(buffer.user, cupy.ndarray):
            return super().record_event(buffer)
        return record_event(_home(buffer).index, _interface_stream(buffer.user))


@dataclass(frozen=True, slots=True)
class DlpackLibrary(CupyLibrary):
    """Arrays that are taken by DLPack. Results are made by their library's ``from_dlpack``; if it has none, they are
    cupy's."""

    make: Callable[[Any], Any]

    def finish(self, buffer: Buffer) -> Any:
        return self.make(buffer.user) if isinstance(buffer.user, cupy.ndarray) else buffer.user

    def wrap(self, view: Array) -> Any:
        return self.make(CupyLibrary.wrap(self, view))

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        if not isinstance(buffer.user, cupy.ndarray):
            # Their library makes cupy's stream wait for its own.
            cupy.from_dlpack(buffer.user)
        return CupyLibrary.record_event(self, buffer)


_CUPY = DEVICE_LIBRARIES[cupy.ndarray] = CupyLibrary()
_INTERFACE = InterfaceLibrary()


def _home(buffer: Buffer) -> CudaDevice:
    on = device_of(buffer.array)
    assert isinstance(on, CudaDevice)
    return on


def _of_cupy(x: Any) -> DeviceArray:
    return view(cuda_device(x.data.device_id), x.data.ptr, x.shape, x.dtype, x.strides, owner=x)


def _interface_stream(x: Any) -> int:
    """Return the stream for which users of `x` have to wait."""
    stream = x.__cuda_array_interface__.get("stream")
    # numba writes None for the legacy default stream, and before version 3 there was no word for a stream: it may be
    # any that the default stream waits for.
    return _LEGACY_STREAM if stream is None else int(stream)


def recognise_cuda(operation: str, x: Any, argument: str = "x") -> Buffer:
    """Return the buffer of `x`: a cupy array, or any object with the CUDA array interface, or DLPack on a CUDA device.

    Raises DeviceError for addresses that are none of CUDA's, and while work is captured into a CUDA graph; DTypeError
    for a foreign byte order and malformed interfaces.
    """
    if isinstance(x, cupy.ndarray):
        index = x.data.device_id
        refuse_capture(operation, argument, index, current_stream(index))
        return Buffer(x, _of_cupy(x), _dtype(operation, argument, x.dtype), _CUPY)
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is None or (not _names_stream(interface) and _has_dlpack(x)):
        return _by_dlpack(operation, x, argument, readonly=interface is not None and describe(x).readonly)
    return _recognise_by_interface(operation, x, argument)


def _names_stream(interface: Any) -> bool:
    """Return True if a CUDA array interface names the stream of the work on the array."""
    return interface.get("version", 0) >= 3 and interface.get("stream") is not None


def _has_dlpack(x: Any) -> bool:
    """Return True if `x` exports the memory of a CUDA device by DLPack. Its library then makes our stream wait for its
    own, which need not be one that the default stream waits for: JAX's interface names no stream."""
    return hasattr(x, "__dlpack__") and int(x.__dlpack_device__()[0]) == _DLPACK_CUDA


def _recognise_by_interface(operation: str, x: Any, argument: str) -> Buffer:
    memory = describe(x)
    dtype = _dtype(operation, argument, memory.dtype)
    index = cupy.cuda.runtime.getDevice()
    if 0 not in memory.shape:
        place = runtime.pointerGetAttributes(memory.pointer)
        if place.type not in _CUDA_MEMORY:
            raise DeviceError(
                f"{operation}: {argument} is a {type(x).__name__} at {memory.pointer:#x}, which is not CUDA memory"
            )
        index = place.device
    refuse_capture(operation, argument, index, _interface_stream(x))
    array = view(
        cuda_device(index), memory.pointer, memory.shape, memory.dtype, memory.strides, x, writable=not memory.readonly
    )
    return Buffer(x, array, dtype, _INTERFACE)


def _by_dlpack(operation: str, x: Any, argument: str, *, readonly: bool = False) -> Buffer:
    _, index = x.__dlpack_device__()
    refuse_capture(operation, argument, index, current_stream(index))
    try:
        array = cupy.from_dlpack(x)
    except runtime.CUDARuntimeError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DTypeError(
            f"{operation}: {argument} is a {type(x).__name__} that cupy can't take by DLPack: {error}"
        ) from error
    namespace = getattr(x, "__array_namespace__", None)
    module = sys.modules.get(type(x).__module__.partition(".")[0]) if namespace is None else namespace()
    library = DlpackLibrary(getattr(module, "from_dlpack", lambda result: result))
    memory = _of_cupy(array)
    if readonly:
        memory.flags.writeable = False
    return Buffer(x, memory, _dtype(operation, argument, array.dtype), library)


def _dtype(operation: str, argument: str, dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise DTypeError(
            f"{operation}: {argument} has dtype {dtype}, whose byte order is not this machine's; convert it first"
        )
    try:
        return dtypes.of_numpy(dtype)
    except DTypeError as error:
        raise DTypeError(f"{operation}: {argument}: {error}") from None
