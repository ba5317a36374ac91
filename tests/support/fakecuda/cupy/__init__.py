"""A fake of cupy for machines without CUDA: the part of it that mpicoll uses, on the fake CUDA beside it.

Names and signatures are those of cupy 14.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from fakecuda import driver as _driver

from cupy import cuda
from cupy._array import DLPack as _DLPack
from cupy._array import PerformanceWarning as PerformanceWarning
from cupy._array import Ufunc, _launch, _unsafe_copy, ndarray, reduction
from cupy._array import where as where
from cupy._raw import RawKernel as RawKernel
from cupy.cuda import memory as _memory
from cupy.cuda import pinned_memory as _pinned
from cupy.cuda import runtime as _runtime

__version__ = "14.0.0"
is_fake = True

bool_ = np.bool_
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
float16, float32, float64 = np.float16, np.float32, np.float64
complex64, complex128 = np.complex64, np.complex128
dtype = np.dtype
newaxis, nan, inf = None, np.nan, np.inf

_ARITHMETIC = "add subtract multiply divide true_divide floor_divide remainder power negative absolute minimum maximum"
_LOGIC = "bitwise_and bitwise_or bitwise_xor invert logical_and logical_or logical_xor logical_not"
_COMPARISONS = "equal not_equal less less_equal greater greater_equal isnan isfinite"
_FUNCTIONS = "sqrt exp log sin cos tanh conjugate"
_UFUNCS = f"{_ARITHMETIC} {_LOGIC} {_COMPARISONS} {_FUNCTIONS}".split()
globals().update({name: Ufunc(getattr(np, name)) for name in _UFUNCS})
globals().update({name: reduction(name) for name in ("sum", "prod", "min", "max", "any", "all", "mean")})
abs = absolute  # type: ignore[name-defined]  # noqa: F821

with suppress(RuntimeError):  # without a compiler there is no libcuda, as on a machine that has no driver
    _driver.load()


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    made = ndarray(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(prototype.shape, dtype or prototype.dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, dtype or a.dtype)


def ones_like(a: ndarray, dtype: Any = None) -> ndarray:
    return ones(a.shape, dtype or a.dtype)


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    return full(a.shape, fill_value, dtype or a.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    values = np.arange(start, dtype=dtype) if stop is None else np.arange(start, stop, step, dtype=dtype)
    made = ndarray(values.shape, values.dtype)
    _launch(np.copyto, made, values)
    return made


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", *, blocking: bool = False) -> ndarray:
    """From the host through page-locked memory: the host may overwrite `obj` at once."""
    given = _on_device(obj)
    if given is not None:
        same = dtype is None or given.dtype == dtype
        return given if same and not copy else given.astype(given.dtype if dtype is None else dtype)
    values = np.array(obj, dtype=dtype, order="C")
    made = ndarray(values.shape, values.dtype)
    _launch(np.copyto, made, values)
    if blocking:
        cuda.get_current_stream().synchronize()
    return made


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: Any = None, blocking: bool = False
) -> ndarray:
    return array(a, dtype, bool(copy), blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    found = asarray(a, dtype)
    return found if found.flags.c_contiguous else found.copy()


def _on_device(obj: Any) -> ndarray | None:
    if isinstance(obj, ndarray):
        return obj
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is None:
        return None
    pointer, shape = interface["data"][0], interface["shape"]
    kind = np.dtype(interface["typestr"])
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    owner = _memory.UnownedMemory(pointer, nbytes, obj, -1 if nbytes else _runtime.getDevice())
    if interface.get("stream") is not None:
        _runtime.streamSynchronize(interface["stream"])
    return ndarray(shape, kind, _memory.MemoryPointer(owner, 0), interface.get("strides"))


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    found = _on_device(a)
    if found is not None:
        return found.get(stream=stream, order=order, out=out, blocking=blocking)
    return np.asarray(a)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    if isinstance(src, np.ndarray):
        if src.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
        src = src.squeeze()[()]
    if isinstance(src, ndarray):
        if not np.can_cast(src.dtype, dst.dtype, casting):
            raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
        if src.data.device_id != dst.data.device_id:
            if (
                src.dtype != dst.dtype
                or src.shape != dst.shape
                or not (dst.flags.c_contiguous and src.flags.c_contiguous)
            ):
                raise ValueError("copies between devices are of contiguous arrays of one shape and dtype")
            dst.data.copy_from_device_async(src.data, src.nbytes)
            return
    else:
        np.copyto(np.empty((), dst.dtype), src, casting=casting)
    if where is not None:
        _launch(lambda to, of, mask: np.copyto(to, of, casting="unsafe", where=mask), dst, src, where)
    else:
        _launch(_unsafe_copy, dst, src)


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    kind, index = array.__dlpack_device__()
    if kind != 2:
        raise TypeError("CPU arrays cannot be directly imported to CuPy.")
    with cuda.Device(index):
        stream = cuda.get_current_stream().ptr or _runtime.streamLegacy
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0), copy=copy)
        except TypeError:
            capsule = array.__dlpack__(stream=stream)
    if not isinstance(capsule, _DLPack):
        raise NotImplementedError("the fake takes DLPack capsules of its own arrays only")
    return capsule.array.view()


def concatenate(tup: Any, axis: int = 0) -> ndarray:
    sample = np.concatenate([np.empty(one.shape, one.dtype) for one in tup], axis)
    made = ndarray(sample.shape, sample.dtype)
    _launch(lambda to, *parts: np.concatenate(parts, axis, out=to), made, *tup)
    return made


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> ndarray:
    if a1.shape != a2.shape:
        return full((), False)
    return (a1 == a2).all()  # type: ignore[no-any-return]


def get_default_memory_pool() -> _memory.MemoryPool:
    return _memory._pool


def get_default_pinned_memory_pool() -> _pinned.PinnedMemoryPool:
    return _pinned._pool


def get_array_module(*args: Any) -> Any:
    import cupy

    return cupy if any(isinstance(one, ndarray) for one in args) else np
