"""The kernels in C for arrays in host memory: each combines as numpy does, in the order of the operands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.data import random
from support.reductions import CASES, DTYPES, HALVES, OPS, assert_same, by_numpy, make_operands

from mpicoll.buffers.dtypes import Array

shm: Any = pytest.importorskip("mpicoll._shm", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SIZES = (0, 1, 7, 1000, 333)
"""Elements: none, less than a vector, and several with and without some that are left."""


@pytest.fixture(params=["base", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> str:
    try:
        shm.fold("sum", "int8", [b""], bytearray(), request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return str(request.param)


def _special(dtype: str, parts: int, size: int) -> list[Array]:
    """Return operands with all kinds of numbers: any bits in halves, and zeros of both signs beside each other."""
    made = make_operands(dtype, parts, size)
    if dtype in HALVES:
        made = [random(dtype, parts, i).integers(0, 1 << 16, size, np.uint16).view(DTYPES[dtype]) for i in range(parts)]
    if DTYPES[dtype].kind in "fV" and parts > 1:
        made[0][:4], made[1][:4] = ([-0.0, 0.0, np.nan, 1.0][:size], [0.0, -0.0, 1.0, np.nan][:size])
    return made


def _same_place(parts: list[Array]) -> Iterator[tuple[list[Array], Array]]:
    """Yield copies of the operands, with a result that lies apart and one in the place of each of them."""
    for place in range(-1, len(parts)):
        copies = [one.copy() for one in parts]
        yield copies, np.empty_like(parts[0]) if place < 0 else copies[place]


def _unaligned(array: Array) -> Array:
    memory = np.empty(array.nbytes + 1, np.uint8)
    memory[1:] = array.view(np.uint8)
    return memory[1:].view(array.dtype)


@pytest.mark.every_size
@pytest.mark.parametrize("op", OPS)
def test_combination(op: str, instructions: str) -> None:
    for dtype in (dtype for name, dtype in CASES if name == op):
        # numpy's own products of complex numbers are fused or not, as the processor has it
        exactly = op != "prod" or not dtype.startswith("complex")
        for size in SIZES:
            for count in range(1, 6):
                operands = _special(dtype, count, size)
                wanted = by_numpy(op, operands)
                for parts, out in _same_place(operands):
                    kept = [None if part is out else part.copy() for part in parts]
                    shm.fold(op, dtype, parts, out, instructions)
                    assert_same(out, wanted, exactly)
                    for part, before in zip(parts, kept, strict=True):
                        assert before is None or part.tobytes() == before.tobytes()
                parts, out = [_unaligned(one) for one in operands], _unaligned(operands[0])
                shm.fold(op, dtype, parts, out, instructions)
                assert_same(out, wanted, exactly)


def test_nothing_else_is_written(instructions: str) -> None:
    for size in range(200):
        around = np.full(300, 7, np.uint8)
        ones = np.full(size, 200, np.uint8)
        shm.fold("sum", "uint8", [ones, ones], around[16 : 16 + size], instructions)
        assert (around[16 : 16 + size] == 144).all()
        assert (around[:16] == 7).all()
        assert (around[16 + size :] == 7).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_kept(dtype: str, instructions: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    for op in ("sum", "prod", "avg", "min", "max"):
        out = np.empty_like(halves)
        shm.fold(op, dtype, [halves], out, instructions)
        assert_same(out, halves)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_rounded_to_the_nearest(dtype: str, instructions: str) -> None:
    """What lies in the middle of two, and a little beside it, from the largest to the subnormal ones and zero."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    steps = np.diff(np.unique(finite))
    apart = np.resize(steps, finite.size)
    for a, b in pairwise((apart / 2, apart / 2 * 0.99, -apart / 2, apart * 1.5)):
        parts = [one.astype(DTYPES[dtype]) for one in (finite, a, b)]
        out = np.empty_like(parts[0])
        shm.fold("sum", dtype, parts, out, instructions)
        assert_same(out, by_numpy("sum", parts))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_large_results(op: str) -> None:
    """From 8 MiB on, results are written past the caches, to memory that begins in the middle of a vector too."""
    for dtype in (*HALVES, "float32", "float64"):
        item = DTYPES[dtype].itemsize
        memory = np.empty((8 << 20) + 100 * item, np.uint8)
        size = (8 << 20) // item + 13
        parts = [np.resize(one, size) for one in make_operands(dtype, 3, 1000)]
        wanted = np.empty_like(parts[0])
        shm.fold(op, dtype, parts, wanted, "base")
        assert_same(wanted[:1000], by_numpy(op, [one[:1000] for one in parts]))
        for at in (0, item, 1, 64):
            memory[:] = 7
            shm.fold(op, dtype, parts, memory[at : at + wanted.nbytes])
            assert memory[at : at + wanted.nbytes].tobytes() == wanted.tobytes()
            assert (memory[:at] == 7).all()
            assert (memory[at + wanted.nbytes :] == 7).all()
        shm.fold(op, dtype, parts, parts[1])
        assert parts[1].tobytes() == wanted.tobytes()


def test_many_operands() -> None:
    for op, dtype in (("sum", "float32"), ("avg", "bfloat16"), ("max", "float16"), ("lxor", "int16")):
        operands = make_operands(dtype, 50, 100)
        out = np.empty_like(operands[0])
        shm.fold(op, dtype, operands, out)
        assert_same(out, by_numpy(op, operands))


def test_what_there_is_no_kernel_for() -> None:
    for op, dtype in (("sum", "bool"), ("avg", "int32"), ("min", "complex64"), ("band", "float32"), ("x", "int8")):
        with pytest.raises(ValueError, match=f"no reduction {op} of {dtype}"):
            shm.fold(op, dtype, [bytes(16)], bytearray(16))
    with pytest.raises(ValueError, match="no instructions mmx"):
        shm.fold("sum", "int8", [b""], bytearray(), "mmx")


def test_arguments() -> None:
    ones, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    for parts, to, message in (
        ([ones, ones[:3]], out, r"parts\[1\] has 12 bytes and out has 16"),
        ([np.ones(6, np.uint8)], np.ones(6, np.uint8), "no whole number of elements of float32"),
        ([ones], fixed, "read-only"),
        ([bytes(16)], bytes(16), "can be written"),
        ([], out, "at least one array"),
        ([np.ones(8, np.float32)[::2]], out, "contiguous"),
        ([np.ones(5, np.float32)[1:]], out, None),
    ):
        if message is None:
            shm.fold("sum", "float32", parts, to)
        else:
            with pytest.raises(ValueError, match=message):
                shm.fold("sum", "float32", parts, to)
    memory = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="begins within"):
        shm.fold("sum", "float32", [memory[:4], ones], memory[2:6])
    for wrong in ((1, "float32", [ones], out), ("sum", "float32", 3, out), ("sum", "float32", [3], out), ("sum",)):
        with pytest.raises(TypeError):
            shm.fold(*wrong)


def test_types_of_memory() -> None:
    """Whatever has contiguous memory; bfloat16 has no format that the buffer protocol knows."""
    ones = np.ones(3, ml_dtypes.bfloat16)
    out = bytearray(6)
    shm.fold("sum", "bfloat16", (ones, ones.view(np.uint16), memoryview(ones.tobytes())), out)
    assert out == np.full(3, 3, ml_dtypes.bfloat16).tobytes()
