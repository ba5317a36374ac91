"""The kernels for devices, compiled for the host: each combines as numpy does, one operand after the other."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from support.fake_cuda import fakecuda
from support.reductions import CASES, DTYPES, HALVES, assert_same, by_numpy, make_operands

from mpicoll.buffers import kernels
from mpicoll.buffers.dtypes import Array

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

SIZES = (1, 7, 16, 37)
"""Elements: less than a thread combines at once, and more, with and without some that are left."""


def _sources() -> Iterator[kernels.Source]:
    for op, dtype in CASES:
        item = kernels.ITEMSIZE[dtype]
        for parts in range(1, 6):
            yield kernels.fold(op, dtype, parts, 1, max(16, item), wide_first=False, wide_last=False)
        for width in {item, max(4, item)}:
            yield kernels.fold(op, dtype, 3, 2, width, wide_first=False, wide_last=False)
    for dtype, first, last in product(HALVES, (False, True), (False, True)):
        for op, parts, width in product(("sum", "avg"), (1, 12), (2, 4, 16)):
            if parts > 1 or first != last:
                yield kernels.fold(op, dtype, parts, 1, width, wide_first=first, wide_last=last)


class Kernels:
    """All of them in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(self, op: str, dtype: str, width: int, parts: list[Array], outs: list[Array], count: int = 0) -> None:
        wide = [dtype in HALVES and one.dtype == np.float32 for one in (parts[0], outs[0])]
        source = kernels.fold(op, dtype, len(parts), len(outs), width, wide_first=wide[0], wide_last=wide[1])
        size = parts[0].size
        values = [size, count or len(parts), *(one.ctypes.data for one in (*parts, *outs))]
        loop = kernels.threads(dtype, size, width)
        getattr(self._library, source.name)(ctypes.c_ulonglong(loop), (ctypes.c_ulonglong * len(values))(*values))


def _function(number: int, source: kernels.Source) -> str:
    values = "".join(f"  const unsigned long long {name} = a[{at}];\n" for at, name in enumerate(source.parameters))
    return (
        f"namespace k{number} {{\n{source.preamble}\n"
        f'extern "C" void {source.name}(unsigned long long size, const unsigned long long* a) {{\n{values}'
        f"  for (unsigned long long i = 0; i < size; i++) {{ {source.operation}; }}\n}}\n}}\n"
    )


@pytest.fixture(scope="module")
def kernel() -> Kernels:
    if shutil.which("g++") is None:
        pytest.skip("the kernels are tested by compiling them for the host, for which there is no g++")
    code = "\n".join(_function(number, source) for number, source in enumerate(_sources()))
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fPIC"]
    library = fakecuda.kernels.library(code, *options, "-Wall", "-Werror", "-Wno-unused")
    return Kernels(ctypes.CDLL(str(library)))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype}" for op, dtype in CASES])
def test_combination(kernel: Kernels, op: str, dtype: str, size: int) -> None:
    for parts in range(1, 6):
        operands = make_operands(dtype, parts, size)
        out = np.empty(size, DTYPES[dtype])
        kernel(op, dtype, max(16, kernels.ITEMSIZE[dtype]), operands, [out])
        # numpy's own products of complex numbers are fused or not, as the processor has it.
        assert_same(out, by_numpy(op, operands), exactly=not (op == "prod" and dtype.startswith("complex")))


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype}" for op, dtype in CASES])
def test_narrow_steps_and_several_results(kernel: Kernels, op: str, dtype: str) -> None:
    item = kernels.ITEMSIZE[dtype]
    for width, size in product({item, max(4, item)}, SIZES):
        operands = make_operands(dtype, 3, size)
        wanted = by_numpy(op, operands)
        other = np.empty(size, DTYPES[dtype])
        # The first result is where an operand was.
        kernel(op, dtype, width, operands, [operands[1], other])
        for out in (operands[1], other):
            assert_same(out, wanted, exactly=not (op == "prod" and dtype.startswith("complex")))


def test_nothing_else_is_written(kernel: Kernels) -> None:
    around = np.full(64, 7, np.uint8)
    out = around[16:53]
    kernel("sum", "uint8", 16, [np.full(37, 200, np.uint8), np.full(37, 100, np.uint8)], [out])
    assert (out == 44).all()
    assert (around[:16] == 7).all()
    assert (around[53:] == 7).all()


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_becomes_float32(kernel: Kernels, dtype: str, width: int) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(words.size, np.float32)
    kernel("sum", dtype, width, [words], [out])
    assert_same(out, words.view(DTYPES[dtype]).astype(np.float32))


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("dtype", HALVES)
def test_float32_is_rounded_to_the_nearest_half(kernel: Kernels, dtype: str, width: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    # Halves themselves, those in the middle of two, and their neighbours.
    middle = finite.view(np.uint32)[:, None] + np.array([0x7FF, 0x800, 0x801, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000])
    random = np.random.default_rng(3).integers(0, 1 << 32, 100_000, np.uint32)
    values = np.concatenate([halves, middle.astype(np.uint32).ravel().view(np.float32), random.view(np.float32)])
    out = np.empty(values.size, np.uint16)
    kernel("sum", dtype, width, [values], [out])
    assert_same(out.view(DTYPES[dtype]), values.astype(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_in_several_steps(kernel: Kernels, dtype: str) -> None:
    """With totals in float32 in between, they are rounded as if there were one step."""
    operands = make_operands(dtype, 23, 37)
    once, total = np.empty(37, DTYPES[dtype]), np.empty(37, np.float32)
    kernel("sum", dtype, 16, operands[:12], [total])
    kernel("avg", dtype, 16, [total, *operands[12:]], [once], count=23)
    assert_same(once, by_numpy("avg", operands))


def test_many_operands(kernel: Kernels) -> None:
    """More of them than a thread reads at once."""
    for op in ("sum", "avg"):
        operands = make_operands("bfloat16", 12, 37)
        out = np.empty(37, DTYPES["bfloat16"])
        kernel(op, "bfloat16", 16, operands, [out])
        assert_same(out, by_numpy(op, operands))


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, dtype in CASES if DTYPES[dtype].kind in "fcV"])
def test_float32_is_left_to_no_compiler(op: str, dtype: str) -> None:
    """cupy lets it flush subnormal numbers, and fuse; so each operation is an instruction by name."""
    source = kernels.fold(op, dtype, 3, 1, 16, wide_first=False, wide_last=False).preamble
    names = ("MPICOLL_INLINE Wide combine", "MPICOLL_INLINE Wide finish")
    inlined = [line for line in source.splitlines() if line.startswith(names)]
    assert len(inlined) == 2
    for line in inlined:
        assert not any(f" {operator} " in line for operator in "+-*/<>"), line


def test_what_there_is_no_kernel_for() -> None:
    assert not kernels.known("sum", "bool")
    assert not kernels.known("avg", "int32")
    assert not kernels.known("min", "complex64")
    assert not kernels.known("band", "float32")
    assert not kernels.known("sum", "float128")


def test_width() -> None:
    assert kernels.width("bfloat16", 0x1000 | 0x20) == 16
    assert kernels.width("bfloat16", 0x1000 | 0x28) == 4
    assert kernels.width("bfloat16", 0x1002) == 2
    assert kernels.width("float32", 0x1004) == 4
    assert kernels.width("float64", 0x1008) == 8
    assert kernels.width("complex128", 0x1000) == kernels.width("complex128", 0x1008) == 16
    assert [kernels.alignment(name) for name in ("uint8", "float64", "complex64", "complex128")] == [1, 8, 4, 8]
