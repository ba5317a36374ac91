"""Buffers of torch tensors, on the CPU and on CUDA devices. The only file of this package that imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch

from mpicoll.buffers import device, dtypes
from mpicoll.buffers.buffer import DEVICE_LIBRARIES, VIEWS, Buffer, DeviceKind, View
from mpicoll.buffers.device import Device, DeviceArray, StreamEvent, device_of
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DeviceError, DTypeError
from mpicoll.extension import set_torch_access

_TAKES_DLPACK = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""True if numpy's arrays of DLPack are writable."""


def as_array(x: torch.Tensor) -> Array:
    """Return numpy's view of a dense CPU tensor that is neither conjugated nor negated lazily, and needs no gradient.

    After ``x.numpy()`` torch refuses to resize the storage, as FSDP does with that of parameters.
    """
    return np.from_dlpack(x) if _TAKES_DLPACK else x.numpy()


class TorchLibrary:
    """torch tensors on the CPU."""

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        created = torch.empty(shape, dtype=like.user.dtype, device="cpu")
        return Buffer(created, _view(created, like.dtype), like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> torch.Tensor:
        return torch.from_numpy(view)

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        _tensor(target, dtype).copy_(_tensor(source, dtype))

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        return None

    def find_stream(self, buffer: Buffer) -> int | None:
        return None


class BFloat16Library(TorchLibrary):
    """torch tensors of bfloat16 on the CPU, which numpy sees as 16-bit words."""

    def wrap(self, view: Array) -> torch.Tensor:
        return _bfloat16_on(view)


class TorchCudaLibrary:
    """torch tensors on a CUDA device.

    New tensors come from torch's allocator for the caller's current stream, so they are created in the caller's thread.
    ``record_stream`` is not needed: tensors are kept until the host has seen the work on them complete.
    """

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        created = torch.empty(shape, dtype=like.user.dtype, device=like.user.device)
        return Buffer(created, _cuda_view(created, like.dtype, device_of(like.array)), like.dtype, self)

    def finish(self, buffer: Buffer) -> Any:
        return buffer.user

    def wrap(self, view: Array) -> torch.Tensor:
        return _on_memory(view)

    def convert(self, source: Array, target: Array, dtype: DType) -> None:
        on = device_of(target, source)
        assert on is not None
        on.convert(source, target, dtype.name)

    def record_event(self, buffer: Buffer) -> StreamEvent | None:
        from mpicoll.buffers.cuda.events import record_event

        index = buffer.user.device.index
        return record_event(index, self.current_stream(index))

    def find_stream(self, buffer: Buffer) -> int | None:
        return self.current_stream(buffer.user.device.index)

    def find_place(self, x: torch.Tensor) -> tuple[DeviceKind, int] | None:
        if not x.is_cuda or x.layout is not torch.strided or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        address = x.data_ptr()
        return ((self, x.device.index, x.dtype, x.shape), address) if address else None

    def current_stream(self, index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream

    def bind_empty(self, kind: DeviceKind) -> Callable[[], Any]:
        _, index, dtype, shape = kind
        return partial(torch.empty, shape, dtype=dtype, device=torch.device("cuda", index))


class BFloat16CudaLibrary(TorchCudaLibrary):
    """torch tensors of bfloat16 on a CUDA device."""

    def wrap(self, view: Array) -> torch.Tensor:
        return _on_memory(view).view(torch.bfloat16)


_TORCH = TorchLibrary()
_BFLOAT16 = BFloat16Library()
_TORCH_CUDA = TorchCudaLibrary()
_BFLOAT16_CUDA = BFloat16CudaLibrary()


def recognise_tensor(operation: str, x: torch.Tensor, argument: str) -> Buffer:
    """Return the buffer of a tensor on the CPU or on a CUDA device.

    Waits for the collective whose result `x` is, if that is one of torch's asynchronous functional collectives. Raises
    DeviceError on other devices, and for CUDA tensors without cupy or while a CUDA graph is captured; DTypeError for
    layouts without plain strides, and for tensors without memory.
    """
    if not x.is_cpu and not x.is_cuda:
        raise DeviceError(
            f"{operation}: {argument} is on {x.device}; mpicoll takes tensors on the CPU and on CUDA devices: pass"
            f" {argument}.cpu()"
        )
    kind = find_other_kind(x)
    if kind is not None:
        raise DTypeError(
            f"{operation}: {argument} is a {kind} tensor; pass a dense one (to_dense(), dequantize() or"
            " to_padded_tensor())"
        )
    on = None if x.is_cpu else cuda_device(operation, x.device, argument)
    if is_pending(x):
        x = x.trigger_wait()
    dense = x.detach().resolve_conj().resolve_neg()
    if not has_memory(dense):
        raise DTypeError(f"{operation}: {argument} {describe_missing_memory(x)}")
    dtype = _dtype(x.dtype)
    words = x.dtype is torch.bfloat16
    library: TorchLibrary | TorchCudaLibrary
    if on is None:
        view, library = _view(dense, dtype), _BFLOAT16 if words else _TORCH
    else:
        view, library = _cuda_view(dense, dtype, on), _BFLOAT16_CUDA if words else _TORCH_CUDA
    if x.is_conj() or x.is_neg():
        # The values were resolved into a copy: writes to it would not reach the caller's tensor.
        view.flags.writeable = False
    return Buffer(dense, view, dtype, library)


def cuda_device(operation: str, place: torch.device, argument: str) -> Device:
    """Return the CUDA device `place` of `argument`. Raise DeviceError if it cannot be used now, or at all."""
    if torch.version.hip is not None:
        raise DeviceError(
            f"{operation}: {argument} is on {place} of ROCm {torch.version.hip}, whose memory mpicoll can't use: pass"
            f" {argument}.cpu()"
        )
    try:
        from mpicoll.buffers.cuda.device import cuda_device as device_of_index
        from mpicoll.buffers.cuda.events import refuse_capture
    except ImportError as error:
        raise DeviceError(
            f"{operation}: {argument} is on {place}, for which mpicoll needs cupy ({error});"
            ' install it: pip install "mpicoll[cuda13]", or "mpicoll[cuda12]" for older drivers'
        ) from error
    refuse_capture(operation, argument, place.index, _TORCH_CUDA.current_stream(place.index))
    return device_of_index(place.index)


def _bfloat16_on(words: Array) -> torch.Tensor:
    return torch.from_numpy(words).view(torch.bfloat16)


def find_other_kind(x: torch.Tensor) -> str | None:
    """Return what a tensor without plain strides is called; None for a dense one."""
    if x.is_quantized or x.is_nested:
        return "quantized" if x.is_quantized else "nested"
    return None if x.layout is torch.strided else str(x.layout).removeprefix("torch.")


def has_memory(x: torch.Tensor) -> bool:
    """Return True if the elements of a dense tensor lie in its storage. numpy would allocate other memory for them.

    There are none in a storage that was freed. A tensor that stands for others has no storage, although it may be of
    the type torch.Tensor, as those within torch.func are.
    """
    try:
        return x.numel() == 0 or x.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def describe_missing_memory(x: torch.Tensor) -> str:
    """Return what to say about a tensor for which :func:`has_memory` is False."""
    try:
        freed = not x.untyped_storage().nbytes()
    except RuntimeError:
        freed = False  # it has no storage at all
    if freed:
        return (
            f"has {x.numel()} elements, but no memory: its storage was resized to 0 bytes, as FSDP does with"
            " parameters that it has sharded"
        )
    return (
        f"is a {type(x).__name__} that has no memory itself; pass the plain tensor that it stands for (of a DTensor,"
        " to_local()); those of torch.func and FakeTensorMode have no values to pass"
    )


def is_pending(x: torch.Tensor) -> TypeGuard[Any]:
    """Return True for a result of torch's asynchronous functional collectives, which has memory after the wait."""
    # Imported if there is such a tensor.
    functional = sys.modules.get("torch.distributed._functional_collectives")
    return isinstance(x, getattr(functional, "AsyncCollectiveTensor", ()))


def _find_view(x: torch.Tensor) -> View | None:
    """Return numpy's view of a CPU tensor if the view shows the memory unchanged."""
    if not x.is_cpu:
        return None
    try:
        if not has_memory(x) or x.is_neg() or x.is_conj():
            return None
        if x.dtype is torch.bfloat16:
            return as_array(x.detach().view(torch.uint16)), _bfloat16_on, _bfloat16_on
        return as_array(x.detach() if x.requires_grad else x), torch.from_numpy, torch.from_numpy
    except (BufferError, RuntimeError, TypeError):
        return None


VIEWS[torch.Tensor] = VIEWS[torch.nn.Parameter] = _find_view
DEVICE_LIBRARIES[torch.Tensor] = DEVICE_LIBRARIES[torch.nn.Parameter] = _TORCH_CUDA
set_torch_access(torch.Tensor)


def itemsize_of(operation: str, dtype: Any) -> int:
    """Return the bytes of an element of a torch dtype. Raise DTypeError if `dtype` is not a torch dtype."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError(f"{operation}: {dtype!r} is not a dtype of torch")
    return dtype.itemsize


def from_bytes(memory: Array, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose elements lie in `memory`, an array of bytes with the alignment of the dtype."""
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if not memory.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def _dtype(dtype: torch.dtype) -> DType:
    if dtype is torch.bfloat16:
        return dtypes.BFLOAT16_WORDS
    try:
        return dtypes.of_numpy(torch.empty((), dtype=dtype, device="cpu").numpy().dtype)
    except TypeError:
        return dtypes.opaque(str(dtype).removeprefix("torch."), dtype.itemsize)


def _view(x: torch.Tensor, dtype: DType) -> Array:
    if dtype.kind != "opaque" and dtype is not dtypes.BFLOAT16_WORDS:
        return as_array(x)
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return as_array(x.view(words)).view(dtype.storage)


def _cuda_view(x: torch.Tensor, dtype: DType, on: Device | None) -> DeviceArray:
    assert on is not None
    size = x.element_size()
    strides = tuple(stride * size for stride in x.stride())
    return device.view(on, x.data_ptr(), tuple(x.shape), dtype.storage, strides, owner=x)


class _CudaMemory:
    """An owner of device memory from which torch creates a tensor, and which the tensor keeps alive."""

    __slots__ = ("__cuda_array_interface__", "owner")

    def __init__(self, view: DeviceArray) -> None:
        self.owner = view
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (view.ctypes.data, False),
            "shape": view.shape,
            "typestr": view.dtype.str,
            "strides": view.strides,
        }


def _on_memory(view: Array) -> torch.Tensor:
    """Return a tensor on the memory of `view`."""
    assert isinstance(view, DeviceArray)
    return torch.as_tensor(_CudaMemory(view), device=view.on.name)


def _tensor(view: Array, dtype: DType) -> torch.Tensor:
    with_words = dtype is dtypes.BFLOAT16_WORDS and view.dtype == np.uint16
    return torch.from_numpy(view).view(torch.bfloat16) if with_words else torch.from_numpy(view)
