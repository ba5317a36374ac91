"""A stand-in for libcuda, loaded under its name: whoever opens ``libcuda.so.1`` in this process gets it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from fakecuda import errors, kernels, memory, streams, words
from fakecuda.errors import CUDARuntimeError

_BUFFER_ID, _LEGACY_IPC, _RANGE_START, _RANGE_SIZE = 7, 10, 11, 12


def _range(base: int, size: int, address: int) -> None:
    """Needs the context of the memory's device."""
    if not streams.has_context():
        raise CUDARuntimeError(errors.UNINITIALIZED)
    streams.check_context(streams.device())
    found = memory.find(address)
    if found is None:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    if found.device != streams.device():
        raise CUDARuntimeError(errors.NOT_FOUND)
    if base:
        ctypes.c_uint64.from_address(base).value = found.base
    if size:
        ctypes.c_size_t.from_address(size).value = found.size


def _attribute(value: int, attribute: int, address: int) -> None:
    streams.check_context(streams.device())
    found = memory.find(address)
    if found is None:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    if attribute == _LEGACY_IPC:
        ctypes.c_bool.from_address(value).value = found.block.ipc
        return
    known = {_BUFFER_ID: found.number, _RANGE_START: found.base, _RANGE_SIZE: found.size}
    if attribute not in known:
        raise CUDARuntimeError(errors.INVALID_VALUE)
    ctypes.c_uint64.from_address(value).value = known[attribute]


def _attributes(count: int, attributes: int, values: int, address: int) -> None:
    for place in range(count):
        attribute = ctypes.c_int.from_address(attributes + 4 * place).value
        _attribute(ctypes.c_uint64.from_address(values + 8 * place).value, attribute, address)


def _context_state(device: int, flags: int, active: int) -> None:
    ctypes.c_uint.from_address(flags).value = 0
    ctypes.c_int.from_address(active).value = device in streams.contexts


def _exchange_capture_mode(mode: int) -> None:
    place = ctypes.c_int.from_address(mode)
    place.value = streams.exchange_capture_mode(place.value)


def _query(event: int) -> int:
    streams.not_while_capturing()
    return streams.event_at(event).query()


def _device_address(place: int, address: int, flags: int) -> None:
    streams.check_context(streams.device())
    if not memory.pinned(address):
        raise CUDARuntimeError(errors.INVALID_VALUE)
    ctypes.c_uint64.from_address(place).value = address


def _write_value(stream: int, address: int, value: int, flags: int) -> None:
    words.write(streams.stream_at(stream or 0), address, value, flags)


def _wait_value(stream: int, address: int, value: int, flags: int) -> None:
    words.wait(streams.stream_at(stream or 0), address, value, flags)


_NAMES = {ctypes.c_void_p: "void*", ctypes.c_int: "int", ctypes.c_uint: "unsigned", ctypes.c_uint64: "unsigned long"}
_POINTER, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64
_FUNCTIONS: dict[str, tuple[Callable[..., int | None], tuple[Any, ...]]] = {
    "cuMemGetAddressRange_v2": (_range, (_POINTER, _POINTER, _ADDRESS)),
    "cuPointerGetAttribute": (_attribute, (_POINTER, ctypes.c_int, _ADDRESS)),
    "cuPointerGetAttributes": (_attributes, (ctypes.c_uint, _POINTER, _POINTER, _ADDRESS)),
    "cuDevicePrimaryCtxGetState": (_context_state, (ctypes.c_int, _POINTER, _POINTER)),
    "cuThreadExchangeStreamCaptureMode": (_exchange_capture_mode, (_POINTER,)),
    "cuEventQuery": (_query, (_ADDRESS,)),
    "cuMemHostGetDevicePointer_v2": (_device_address, (_POINTER, _ADDRESS, ctypes.c_uint)),
    "cuStreamWriteValue32_v2": (_write_value, (_ADDRESS, _ADDRESS, ctypes.c_uint, ctypes.c_uint)),
    "cuStreamWaitValue32_v2": (_wait_value, (_ADDRESS, _ADDRESS, ctypes.c_uint, ctypes.c_uint)),
}


def _source() -> str:
    lines = ['extern "C" {']
    for name, (_, types) in _FUNCTIONS.items():
        numbered = [(_NAMES[one], f"a{place}") for place, one in enumerate(types)]
        kinds, names = zip(*numbered, strict=True)
        lines.append(f"int (*fake_{name})({', '.join(kinds)});")
        lines.append(f"int {name}({', '.join(map(' '.join, numbered))}) {{ return fake_{name}({', '.join(names)}); }}")
    return "\n".join([*lines, "}\n"])


def _told(function: Callable[..., int | None]) -> Callable[..., int]:
    """It returns CUDA's status."""

    def call(*arguments: Any) -> int:
        try:
            return function(*arguments) or 0
        except CUDARuntimeError as error:
            return error.status

    return call


_kept: list[Any] = []
"""Callbacks of the library, kept alive."""


def load() -> ctypes.CDLL:
    """Load it. Raises RuntimeError where there is no compiler."""
    library = ctypes.CDLL(str(kernels.build(_source(), "-Wl,-soname,libcuda.so.1")))
    for name, (function, types) in _FUNCTIONS.items():
        callback = ctypes.CFUNCTYPE(ctypes.c_int, *types)(_told(function))
        _kept.append(callback)
        ctypes.c_void_p.in_dll(library, f"fake_{name}").value = ctypes.cast(callback, ctypes.c_void_p).value
    return library
