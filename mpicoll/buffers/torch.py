"""torch CPU tensors as buffers. The only file of this package that imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import VIEWS, Buffer
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.errors import DeviceError, DTypeError


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

    def add(self, left: Array, right: Array, target: Array, dtype: DType) -> bool:
        # torch adds halves in float32, and rounds the sum.
        torch.add(_tensor(left, dtype), _tensor(right, dtype), out=_tensor(target, dtype))
        return True


class BFloat16Library(TorchLibrary):
    """The same for bfloat16, which numpy sees as 16-bit words."""

    def wrap(self, view: Array) -> torch.Tensor:
        return torch.from_numpy(view).view(torch.bfloat16)


_TORCH = TorchLibrary()
_BFLOAT16 = BFloat16Library()


def recognise_tensor(operation: str, x: torch.Tensor, argument: str) -> Buffer:
    """The buffer of a tensor. Raises DeviceError off the CPU, DTypeError for layouts without plain strides."""
    if x.device.type != "cpu":
        raise DeviceError(
            f"{operation}: {argument} is on {x.device}; device memory is not supported yet: pass {argument}.cpu()"
        )
    if x.layout is not torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise DTypeError(f"{operation}: {argument} is a {kind} tensor; pass a dense one (to_dense() or dequantize())")
    dense = x.detach().resolve_conj().resolve_neg()
    dtype = _dtype(x.dtype)
    view = _view(dense, dtype)
    if x.is_conj() or x.is_neg():
        # The values were resolved into a copy: nothing written there would reach the caller's tensor.
        view.flags.writeable = False
    return Buffer(dense, view, dtype, _BFLOAT16 if x.dtype is torch.bfloat16 else _TORCH)


def _numpy(x: torch.Tensor) -> Array | None:
    """numpy's view of a tensor, if it has one."""
    try:
        return x.numpy()
    except (RuntimeError, TypeError):
        return None


VIEWS[torch.Tensor] = _numpy, torch.from_numpy


def itemsize_of(operation: str, dtype: Any) -> int:
    """The bytes of an element of a torch dtype. Raises DTypeError if `dtype` is none."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError(f"{operation}: {dtype!r} is no dtype of torch")
    return dtype.itemsize


def from_bytes(memory: Array, dtype: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose elements lie in `memory`, bytes that begin where an element may."""
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
        return x.numpy()
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(words).numpy().view(dtype.storage)


def _tensor(view: Array, dtype: DType) -> torch.Tensor:
    with_words = dtype is dtypes.BFLOAT16_WORDS and view.dtype == np.uint16
    return torch.from_numpy(view).view(torch.bfloat16) if with_words else torch.from_numpy(view)
