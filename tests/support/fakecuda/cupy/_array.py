"""``cupy.ndarray``: numpy keeps shape, strides and address; what touches memory is a kernel on the current stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from fakecuda import memory as fake_memory
from fakecuda import streams

from cupy.cuda import memory, runtime
from cupy.cuda.device import Device
from cupy.cuda.stream import _BaseStream, get_current_stream


class PerformanceWarning(RuntimeWarning):
    """As cupy's."""


def _launch(function: Callable[..., Any], *arrays: Any) -> None:
    """A kernel: when it runs, `function` gets numpy arrays in place of `arrays`, of which it writes the first. It keeps
    no memory alive."""
    here = runtime.getDevice()
    for one in arrays[1:]:
        if isinstance(one, ndarray) and _race(arrays[0], one):
            raise RuntimeError("the result overlaps an operand, and cupy does not see it: it is left to chance")
    places: list[Any] = []
    for one in arrays:
        if isinstance(one, ndarray):
            check_peer(one, here)
            places.append((one.data.ptr, one.shape, one.dtype, one.strides))
        else:
            places.append(one)

    def work() -> None:
        for address, shape, dtype, strides in (one for one in places if isinstance(one, tuple)):
            if 0 not in shape:
                fake_memory.check_aligned(address, strides, dtype.itemsize)
        views = [fake_memory.working_view(*one) if isinstance(one, tuple) else one for one in places]
        with np.errstate(all="ignore"):
            function(*views)

    streams.launch(streams.stream_at(get_current_stream().ptr), work)


def _race(out: ndarray, operand: ndarray) -> bool:
    """Return True if both overlap at different places and in different memory objects. cupy does not copy the operand
    then, since it compares memory objects only."""
    if out.data.mem.ptr == operand.data.mem.ptr or not fake_memory.overlap(out._bounds(), operand._bounds()):
        return False
    return (out.data.ptr, out.shape, out.strides) != (operand.data.ptr, operand.shape, operand.strides)


def check_peer(array: ndarray, device: int) -> None:
    """As cupy does it for each array of a kernel."""
    owner = array.data.device_id
    if owner == device:
        return
    message = f"The device where the array resides ({owner}) is different from the current device ({device})."
    if not fake_memory.can_reach(device, owner):
        raise ValueError(f"{message} Peer access is unavailable between these devices.")
    fake_memory.peers.add((device, owner))
    warnings.warn(f"{message} Peer access has been activated automatically.", PerformanceWarning, stacklevel=4)


def _sized(shape: Any) -> tuple[int, ...]:
    return (int(shape),) if np.isscalar(shape) else tuple(map(int, shape))


class ndarray:  # noqa: N801
    __array_priority__ = 100

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        shape, dtype = _sized(shape), np.dtype(dtype)
        if memptr is None:
            memptr = memory.alloc(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            if order == "F":
                strides = fake_memory.contiguous(shape[::-1], dtype.itemsize)[::-1]
        self._finish(fake_memory.array_at(memptr.ptr, shape, dtype, strides), memptr)

    def _finish(self, image: np.ndarray[Any, Any], memptr: Any) -> None:
        """`image` is numpy's array of the device's address, whose memory nobody touches."""
        self._image = image
        self.data = memptr
        self.base: ndarray | None = None

    def _view(self, image: np.ndarray[Any, Any]) -> ndarray:
        made = ndarray.__new__(type(self))
        moved = image.ctypes.data - self._image.ctypes.data if image.size else 0
        made._finish(image, self.data + moved)
        made.base = self
        return made

    shape = property(lambda self: self._image.shape)
    strides = property(lambda self: self._image.strides)
    dtype = property(lambda self: self._image.dtype)
    ndim = property(lambda self: self._image.ndim)
    size = property(lambda self: self._image.size)
    itemsize = property(lambda self: self._image.itemsize)
    nbytes = property(lambda self: self._image.nbytes)
    flags = property(lambda self: self._image.flags)
    device = property(lambda self: Device(self.data.device_id))
    real = property(lambda self: self._view(self._image.real))
    imag = property(lambda self: self._view(self._image.imag))

    def _bounds(self) -> tuple[int, int]:
        """Return the begin and the end of the array's memory."""
        before, behind = fake_memory.extent(self.shape, self.strides, self.itemsize)
        return (self.data.ptr - before, self.data.ptr + behind) if self.size else (0, 0)

    def __len__(self) -> int:
        return len(self._image)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3}
        interface["stream"] = get_current_stream().ptr or runtime.streamLegacy
        interface["strides"] = None if self.flags.c_contiguous else self.strides
        interface["data"] = (self.data.ptr if self.size else 0, False)
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> DLPack:
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("unsupported device requested.")
        consumer = runtime.streamLegacy if stream is None else stream
        if consumer < -1:
            raise ValueError(f"On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or larger, not {stream}")
        here = get_current_stream()
        if consumer >= 0 and consumer != (here.ptr or runtime.streamLegacy):
            _BaseStream(consumer, -1).wait_event(here.record())
        return DLPack(self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array"
            " explicitly."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        if isinstance(options.get("out"), tuple):
            (options["out"],) = options["out"]
        return Ufunc(ufunc)(*inputs, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.where:
            return where(*args, **kwargs)
        return NotImplemented

    def __matmul__(self, other: ndarray) -> ndarray:
        sample = np.matmul(np.zeros(self.shape, self.dtype), np.zeros(other.shape, other.dtype))
        made = ndarray(sample.shape, sample.dtype)
        _launch(lambda target, left, right: np.matmul(left, right, out=target), made, self, other)
        return made

    # Views

    def __getitem__(self, key: Any) -> ndarray:
        key = key if isinstance(key, tuple) else (key,)
        if any(not isinstance(one, (int, np.integer, slice, type(None), type(...))) for one in key):
            raise NotImplementedError("the fake has basic indexing only")
        return self._view(self._image[key if any(one is ... for one in key) else (*key, ...)])

    def __iter__(self) -> Any:
        return (self[place] for place in range(len(self)))

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._image.view() if dtype is None else self._image.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 else shape
        extents = np.broadcast_to(np.int8(0), self.size).reshape(wanted).shape
        if self.flags.c_contiguous:
            return self._view(self._image.reshape(extents))
        # numpy copies before it finds out that it must not, so it gets memory that may be read.
        readable = fake_memory.working_view(self.data.ptr, self.shape, self.dtype, self.strides)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                readable.shape = extents
            except AttributeError:
                return self.copy().reshape(extents)
        return self._view(fake_memory.array_at(self.data.ptr, extents, self.dtype, readable.strides))

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._image.transpose(*axes))

    T = property(lambda self: self.transpose())

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._view(self._image.squeeze(axis))

    # Copies

    def copy(self, order: str = "C") -> ndarray:
        made = ndarray(self.shape, self.dtype)
        _launch(np.copyto, made, self)
        return made

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy().reshape(-1)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        made = ndarray(self.shape, dtype)
        _launch(_unsafe_copy, made, self)
        return made

    def fill(self, value: Any) -> None:
        _launch(_unsafe_copy, self, value.item() if isinstance(value, np.ndarray) else value)

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        stream = stream or get_current_stream()
        with streams.on_device(self.data.device_id):
            source = self
            if not self.flags.c_contiguous:
                with stream:
                    source = self.copy()
            if out is None:
                out = np.empty(self.shape, self.dtype)
            elif out.dtype != self.dtype or out.shape != self.shape or not out.flags.c_contiguous:
                raise ValueError(f"out is {out.dtype}{out.shape}, the array {self.dtype}{self.shape}")
            if self.size:
                source.data.copy_to_host_async(out.ctypes.data, source.nbytes, stream)
            if blocking:
                stream.synchronize()
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        with streams.on_device(self.data.device_id):
            kept = np.ascontiguousarray(arr)
            self.data.copy_from_host_async(kept.ctypes.data, self.nbytes, stream)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            if key in (..., slice(None)) and value.shape == self.shape and value.dtype == self.dtype:
                return self.set(value)
            if value.size != 1:
                raise TypeError("Unsupported type numpy.ndarray: use cupy.asarray, or [...] of equal shape and dtype")
        target = self[key]
        _launch(_unsafe_copy, target, value)
        return None

    def item(self, *args: int) -> Any:
        return self.get().item(*args)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return bytes(self.get().tobytes())

    __int__ = __index__ = lambda self: int(self.get())
    __float__ = lambda self: float(self.get())  # noqa: E731
    __bool__ = lambda self: bool(self.get())  # noqa: E731
    __complex__ = lambda self: complex(self.get())  # noqa: E731

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    __hash__ = None  # type: ignore[assignment]


def _unsafe_copy(target: Any, source: Any) -> None:
    np.copyto(target, source, casting="unsafe")


class DLPack:
    """A substitute for a capsule between arrays of the fake."""

    def __init__(self, array: ndarray) -> None:
        self.array = array


class Ufunc:
    """A ufunc of numpy's as a kernel."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc
        self.__name__ = self.name = ufunc.__name__

    def __call__(self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind") -> Any:
        inputs, given = args[: self.ufunc.nin], args[self.ufunc.nin :]
        if given:
            (out,) = given
        if isinstance(out, tuple):
            (out,) = out
        for one in (*inputs, out):
            if isinstance(one, np.ndarray) and one.ndim:
                raise TypeError(f"Unsupported type {type(one)}")
        samples = [np.empty(0, one.dtype) if isinstance(one, ndarray) else one for one in inputs]
        options: dict[str, Any] = {"casting": casting}
        if dtype is not None:
            options["dtype"] = dtype
        with np.errstate(all="ignore"):
            kind = self.ufunc(*samples, **options, **({} if out is None else {"out": np.empty(0, out.dtype)})).dtype
        shape = np.broadcast_shapes(*(one.shape for one in inputs if isinstance(one, ndarray)))
        if out is None:
            out = ndarray(shape, kind)
        elif np.broadcast_shapes(shape, out.shape) != out.shape:
            raise ValueError(f"Out shape {out.shape} is mismatched with the broadcast shape {shape}")
        _launch(lambda target, *values: self.ufunc(*values, out=target, **options), out, *inputs)
        return out


def where(condition: ndarray, x: ndarray, y: ndarray) -> ndarray:
    """As cupy's, whose kernel has no loop for dtypes other than numpy's own."""
    made = ndarray(np.broadcast_shapes(condition.shape, x.shape, y.shape), np.result_type(x.dtype, y.dtype))
    _launch(lambda target, *values: np.copyto(target, np.where(*values)), made, condition, x, y)
    return made


def _operator(ufunc: np.ufunc, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: ndarray, other: Any) -> Any:
        if not isinstance(other, (ndarray, int, float, complex, np.generic)):
            return NotImplemented
        return Ufunc(ufunc)(other, self) if swapped else Ufunc(ufunc)(self, other)

    return method


def _unary(ufunc: np.ufunc) -> Callable[[Any], Any]:
    def method(self: ndarray) -> Any:
        return Ufunc(ufunc)(self)

    return method


def _in_place(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    return lambda self, other: Ufunc(ufunc)(self, other, out=self)


_OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
for _name, _ufunc in _OPERATORS.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
    setattr(ndarray, f"__r{_name}__", _operator(_ufunc, swapped=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_ufunc))
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
for _name, _ufunc in _COMPARISONS.items():
    setattr(ndarray, f"__{_name}__", _operator(_ufunc))
for _name, _ufunc in {"neg": np.negative, "abs": np.absolute, "invert": np.invert}.items():
    setattr(ndarray, f"__{_name}__", _unary(_ufunc))


def reduction(name: str) -> Callable[..., ndarray]:
    """numpy's function of that name, over axes, as a kernel."""
    function = getattr(np, name)

    def reduce(a: ndarray, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        options = {"axis": axis, "keepdims": keepdims} | ({} if dtype is None else {"dtype": dtype})
        sample = function(np.ones(a.shape, a.dtype), **options)
        made = ndarray(np.shape(sample), np.asarray(sample).dtype) if out is None else out
        _launch(lambda target, source: np.copyto(target, function(source, **options), casting="unsafe"), made, a)
        return made

    return reduce


for _name in ("sum", "prod", "min", "max", "any", "all", "mean"):
    setattr(ndarray, _name, reduction(_name))
