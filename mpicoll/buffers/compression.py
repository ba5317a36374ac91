"""Compression of float32 arrays for messages: ``bf16``, and ``int8`` in blocks.

``bf16`` sends the upper half of each number, rounded to nearest, ties to even. ``int8`` sends for each BLOCK elements a
float32 scale, the largest magnitude divided by 127, and for each element the nearest multiple of the scale. A block
with a NaN or an infinity arrives as NaN, and one whose magnitudes are all below 2**-100 as zeros.

A message of n elements has 2n bytes, or 4 bytes for each block and then n. The extension and numpy compute the same
bits.
"""

from __future__ import annotations

import numpy as np

from mpicoll.buffers.dtypes import Array, ignore_float_errors
from mpicoll.extension import find_compression

NAMES = ("bf16", "int8")

BLOCK = 256
"""Elements that have one scale."""

ERROR_BOUNDS = {"bf16": 2.0**-8, "int8": 1 / 254 + 2.0**-22}
"""The largest error of an element, as a part of its own magnitude (``bf16``), or of the largest one of its block."""

_SMALLEST = np.float32(2.0**-100)
_LARGEST_CODE = np.float32(127)

_LARGEST_SCALE = np.float32(float.fromhex("0x1.020406p+121"))
"""The largest number of which 127 times is finite."""

_AT_ONCE = BLOCK * 64
"""Elements that numpy works on at once: they stay in the caches."""


def count_message_bytes(name: str, count: int) -> int:
    """Return the bytes of a message of `count` elements."""
    return 2 * count if name == "bf16" else 4 * _count_blocks(count) + count


def compress(name: str, values: Array, message: Array, error: Array | None = None, result: Array | None = None) -> None:
    """Write the compressed float32 array `values` to `message`, whose bytes are those of :func:`count_message_bytes`.

    `error` is added to the values, and then replaced by what the message leaves out, which is nothing where NaN or an
    infinity arrives. `result`, which may be `values`, gets what the message stands for.
    """
    compiled = find_compression()
    if compiled is None:
        _compress(name, values, message, error, result)
    else:
        compiled[0](name, values, message, error, result)


def decompress(name: str, message: Array, result: Array, *, add: bool = False) -> None:
    """Write what `message` stands for to the float32 array `result`, or add it to that."""
    compiled = find_compression()
    if compiled is None:
        _decompress(name, message, result, add)
    else:
        compiled[1](name, message, result, add)


@ignore_float_errors
def _compress(name: str, values: Array, message: Array, error: Array | None, result: Array | None) -> None:
    pack = _pack_bf16 if name == "bf16" else _pack_int8
    for start in range(0, values.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        operand = values[part] if error is None else values[part] + error[part]
        sent = pack(operand, message, start, values.size)
        if error is not None:
            error[part] = np.where(np.isfinite(sent), operand - sent, np.float32(0))
        if result is not None:
            result[part] = sent


@ignore_float_errors
def _decompress(name: str, message: Array, result: Array, add: bool) -> None:
    unpack = _unpack_bf16 if name == "bf16" else _unpack_int8
    for start in range(0, result.size, _AT_ONCE):
        part = result[start : start + _AT_ONCE]
        sent = unpack(message, start, part.size, result.size)
        part[...] = part + sent if add else sent


def _pack_bf16(operand: Array, message: Array, start: int, total: int) -> Array:
    """Write the elements from number `start` on, of `total`, to the message. Return what it stands for."""
    bits = operand.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # A NaN stays one, even if only its low bits say so.
    rounded = np.where(np.isnan(operand), bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFF0000)
    message[2 * start : 2 * (start + operand.size)] = (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    return rounded.view(np.float32)


def _unpack_bf16(message: Array, start: int, count: int, total: int) -> Array:
    codes = message[2 * start : 2 * (start + count)].view(np.uint16)
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_int8(operand: Array, message: Array, start: int, total: int) -> Array:
    blocks = np.zeros((_count_blocks(operand.size), BLOCK), np.float32)
    blocks.reshape(-1)[: operand.size] = operand
    maximum = np.abs(blocks).max(axis=1)
    usable = np.isfinite(maximum) & (maximum >= _SMALLEST)
    maximum = np.where(usable, maximum, _LARGEST_CODE)
    codes = np.rint(blocks * (_LARGEST_CODE / maximum)[:, None])
    codes[~usable] = 0
    scales = np.minimum(maximum / _LARGEST_CODE, _LARGEST_SCALE)
    scales[~usable] = np.where(np.isfinite(blocks[~usable]).all(axis=1), np.float32(0), np.float32(np.nan))
    place, data = _locate_int8(start, operand.size, total)
    message[place] = scales.view(np.uint8)
    message[data] = codes.astype(np.int8).reshape(-1)[: operand.size].view(np.uint8)
    # The sum makes -0 to 0, as the code stands for that.
    return ((codes + np.float32(0)) * scales[:, None]).reshape(-1)[: operand.size]


def _unpack_int8(message: Array, start: int, count: int, total: int) -> Array:
    place, data = _locate_int8(start, count, total)
    scales = np.repeat(message[place].view(np.float32), BLOCK)[:count]
    return message[data].view(np.int8).astype(np.float32) * scales


def _locate_int8(start: int, count: int, total: int) -> tuple[slice, slice]:
    """Return where the scales and the codes of the elements are, in the bytes of a message of `total` elements."""
    codes = 4 * _count_blocks(total)
    first = start // BLOCK
    return slice(4 * first, 4 * (first + _count_blocks(count))), slice(codes + start, codes + start + count)


def _count_blocks(count: int) -> int:
    return -(-count // BLOCK)
