"""``cupy.ElementwiseKernel``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from fakecuda import kernels, memory, streams

from cupy._array import check_peer, ndarray
from cupy.cuda import runtime
from cupy.cuda.stream import get_current_stream

_CTYPES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "float16",
    "float32": "float",
    "float64": "double",
    "complex64": "complex<float>",
    "complex128": "complex<double>",
}


@dataclass(frozen=True)
class _Parameter:
    name: str
    dtype: np.dtype[Any] | None
    letter: str
    raw: bool
    const: bool


def _parameters(text: str, const: bool) -> tuple[_Parameter, ...]:
    found = []
    for one in filter(None, map(str.strip, text.split(","))):
        *qualities, kind, name = one.split()
        dtype = None if len(kind) == 1 else np.dtype(kind)
        found.append(_Parameter(name, dtype, kind if dtype is None else "", "raw" in qualities, const))
    return tuple(found)


class ElementwiseKernel:
    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        **kwargs: Any,
    ) -> None:
        self.in_params = _parameters(in_params, True)
        self.out_params = _parameters(out_params, False)
        self.params = self.in_params + self.out_params
        if not name.isidentifier():
            raise ValueError(f'Invalid kernel name: "{name}"')
        if any(one.name == "i" for one in self.params):
            raise ValueError("Can not use 'i' as a parameter name")
        self.name = self.__name__ = name
        self._operation, self._preamble = operation, preamble
        self._no_return, self._return_tuple = no_return, return_tuple
        self._kwargs = {key: kwargs[key] for key in ("loop_prep", "after_loop") if key in kwargs}

    def __call__(self, *args: Any, size: int = -1, stream: Any = None, block_size: int = 128) -> Any:
        if len(args) not in (len(self.in_params), len(self.params)):
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. It must be either {len(self.in_params)} or"
                f" {len(self.params)} (with outputs), but given {len(args)}."
            )
        here = runtime.getDevice()
        for one in args:
            if isinstance(one, ndarray):
                check_peer(one, here)
            elif isinstance(one, np.ndarray):
                raise TypeError(f"Unsupported type {type(one)}")
        types = self._types(args)
        shape = self._shape(args, size)
        values = list(args)
        for parameter in self.params[len(args) :]:
            if parameter.raw:
                raise ValueError("Output array size is Undecided")
            values.append(ndarray(shape, types[parameter.letter] if parameter.dtype is None else parameter.dtype))
        outs = tuple(values[len(self.in_params) :])
        if 0 not in shape:
            self._launch(shape, values, types, stream or get_current_stream())
        if self._no_return:
            return None
        return outs[0] if len(outs) == 1 and not self._return_tuple else outs

    def _types(self, args: tuple[Any, ...]) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of the type letters. Numbers determine a letter only where no array does."""
        types: dict[str, np.dtype[Any]] = {}
        arrays = [(one, value) for one, value in zip(self.params, args, strict=False) if isinstance(value, ndarray)]
        for parameter, value in arrays:
            known = parameter.dtype or types.setdefault(parameter.letter, value.dtype)
            if known != value.dtype:
                raise TypeError(f"Type is mismatched. {parameter.name} {value.dtype} {known}")
        for parameter, value in zip(self.params, args, strict=False):
            if parameter.dtype is None and parameter.letter not in types:
                types[parameter.letter] = np.asarray(value).dtype
        return types

    def _shape(self, args: tuple[Any, ...], size: int) -> tuple[int, ...]:
        shapes = [
            value.shape
            for one, value in zip(self.params, args, strict=False)
            if isinstance(value, ndarray) and not one.raw
        ]
        if size == -1:
            if not shapes:
                raise ValueError("Loop size is undecided.")
            return np.broadcast_shapes(*shapes)
        if shapes:
            raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
        return (size,)

    def _launch(self, shape: tuple[int, ...], values: list[Any], types: dict[str, np.dtype[Any]], stream: Any) -> None:
        parameters, numbers, places = [], {}, []
        flat = all(
            one.shape == shape and one.flags.c_contiguous
            for one, parameter in zip(values, self.params, strict=True)
            if isinstance(one, ndarray) and not parameter.raw
        )
        for position, (parameter, value) in enumerate(zip(self.params, values, strict=True)):
            dtype = types[parameter.letter] if parameter.dtype is None else parameter.dtype
            form = "raw" if parameter.raw else "array" if isinstance(value, ndarray) else "scalar"
            if form == "scalar":
                numbers[position] = np.array(value).astype(dtype)
                places.append((0, 0, 0, (), 0))
            else:
                places.append(_place(value, shape, form, flat))
            ctype = _CTYPES[dtype.name]
            parameters.append(kernels.Parameter(parameter.name, ctype, form, parameter.const))
        _refuse_races(self.name, parameters, places)
        names = [(letter, _CTYPES[dtype.name]) for letter, dtype in sorted(types.items())]
        source = kernels.elementwise_source(parameters, self._operation, self._preamble, names, **self._kwargs)
        function = kernels.load(source)
        extents = (int(np.prod(shape, dtype=np.int64)),) if flat else shape

        arrays = [(one.data.ptr, one.strides, one.itemsize) for one in values if isinstance(one, ndarray) and one.size]

        def work() -> None:
            for array in arrays:
                memory.check_aligned(*array)
            kept = {position: _translated(number) for position, number in numbers.items()}
            addresses = [
                kept[position].ctypes.data if position in kept else memory.working(low, extent) + offset
                for position, (low, extent, offset, _, _) in enumerate(places)
            ]
            kernels.call(function, extents, addresses, [one[3] for one in places], [one[4] for one in places])

        streams.launch(streams.stream_at(stream.ptr), work)


def _place(array: ndarray, shape: tuple[int, ...], form: str, flat: bool) -> tuple[int, int, int, tuple[int, ...], int]:
    """Lowest address, bytes from there, offset of the first element, strides, elements."""
    before, behind = memory.extent(array.shape, array.strides, array.itemsize)
    place = array.data.ptr - before, before + behind, before
    if form == "raw":
        if not array.flags.c_contiguous:
            raise NotImplementedError("the fake has raw arguments in C order only")
        return *place, (), array.size
    if flat:
        return *place, (array.itemsize,), array.size
    return *place, np.broadcast_to(array._image, shape).strides, array.size


def _translated(number: Any) -> Any:
    """A number for a kernel; the working address, if it is the address of device memory."""
    if number.dtype != np.uint64 or not memory.of_devices(int(number)):
        return number
    return np.asarray(memory.working(int(number), 1), np.uint64)


def _refuse_races(name: str, parameters: list[kernels.Parameter], places: list[Any]) -> None:
    """Threads of a kernel run in any order: what one writes, no other may read."""
    spots = [(one, place) for one, place in zip(parameters, places, strict=True) if one.form == "array"]
    for out, (low, extent, *rest) in spots:
        for other, (low_2, extent_2, *rest_2) in spots:
            common = memory.overlap((low, low + extent), (low_2, low_2 + extent_2))
            if not out.const and out is not other and common and (low, extent, rest) != (low_2, extent_2, rest_2):
                raise RuntimeError(f"{name}: {out.name} overlaps {other.name}, so the result is left to chance")
