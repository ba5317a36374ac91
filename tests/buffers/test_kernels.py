"""The kernels for devices, compiled for the host: each combines as numpy does, one operand after the other."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from support.fake_cuda import fakecuda

from mpicoll.buffers import kernels
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import NAMES

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in kernels.ITEMSIZE}
OPS = (*NAMES[:-2], "premul_sum")
CASES = [(op, dtype) for op, dtype in product(OPS, DTYPES) if kernels.known(op, dtype)]
HALVES = tuple(kernels.HALVES)

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


def _operands(dtype: str, parts: int, size: int) -> list[Array]:
    kind = DTYPES[dtype]
    random = np.random.default_rng([parts, size, *dtype.encode()])
    if kind == np.bool_:
        return [random.integers(0, 2, size).astype(kind) for _ in range(parts)]
    if kind.kind in "iu":
        bounds = np.iinfo(kind)
        made = [random.integers(bounds.min, bounds.max, size, kind, endpoint=True) for _ in range(parts)]
        for one in made:
            one[random.random(size) < 0.3] = 0
        return made
    made = [random.normal(size=size).astype(np.float64) for _ in range(parts)]
    for one in made:
        one[random.random(size) < 0.1] = random.choice([np.nan, np.inf, -np.inf, 0.0, 70000.0, 1e-7, 1e-40])
    if kind.kind == "c":
        return [(one + 1j * random.normal(size=size)).astype(kind) for one in made]
    return [one.astype(kind) for one in made]


UFUNCS = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), np.add),
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


def _by_numpy(op: str, parts: list[Array], count: int = 0) -> Array:
    """Combined in the dtype of the policy, rounded once."""
    dtype = parts[0].dtype
    wide = [one.astype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else one for one in parts]
    logical = op in ("land", "lor", "lxor")
    total = (wide[0] != 0).astype(dtype) if logical else wide[0].copy()
    for one in wide[1:]:
        total = UFUNCS[op](total, one).astype(total.dtype)
    if op == "avg":
        total = np.divide(total, count or len(parts)).astype(total.dtype)
    return total.astype(dtype)


def assert_same(got: Array, wanted: Array, exactly: bool = True) -> None:
    """The same bits, but for what kind of NaN it is."""
    assert got.dtype == wanted.dtype
    if not exactly:
        np.testing.assert_allclose(got, wanted, rtol=4 * np.finfo(got.dtype).eps)
        return
    views = [one.view(one.real.dtype) if one.dtype.kind == "c" else one for one in (got, wanted)]
    if got.dtype.kind in "fcV":
        nan = [np.isnan(one.astype(np.float64)) for one in views]
        np.testing.assert_array_equal(*nan)
        views = [np.where(nan[0], one.dtype.type(0), one) for one in views]
    words = f"u{views[0].itemsize}"
    if got.dtype.kind in "iub" or got.dtype.kind in "fcV":
        np.testing.assert_array_equal(views[0].view(words), views[1].view(words))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype}" for op, dtype in CASES])
def test_combination(kernel: Kernels, op: str, dtype: str, size: int) -> None:
    for parts in range(1, 6):
        operands = _operands(dtype, parts, size)
        out = np.empty(size, DTYPES[dtype])
        kernel(op, dtype, max(16, kernels.ITEMSIZE[dtype]), operands, [out])
        # numpy's own products of complex numbers are fused or not, as the processor has it.
        assert_same(out, _by_numpy(op, operands), exactly=not (op == "prod" and dtype.startswith("complex")))


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=[f"{op}-{dtype}" for op, dtype in CASES])
def test_narrow_steps_and_several_results(kernel: Kernels, op: str, dtype: str) -> None:
    item = kernels.ITEMSIZE[dtype]
    for width, size in product({item, max(4, item)}, SIZES):
        operands = _operands(dtype, 3, size)
        wanted = _by_numpy(op, operands)
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
    operands = _operands(dtype, 23, 37)
    once, total = np.empty(37, DTYPES[dtype]), np.empty(37, np.float32)
    kernel("sum", dtype, 16, operands[:12], [total])
    kernel("avg", dtype, 16, [total, *operands[12:]], [once], count=23)
    assert_same(once, _by_numpy("avg", operands))


def test_many_operands(kernel: Kernels) -> None:
    """More of them than a thread reads at once."""
    for op in ("sum", "avg"):
        operands = _operands("bfloat16", 12, 37)
        out = np.empty(37, DTYPES["bfloat16"])
        kernel(op, "bfloat16", 16, operands, [out])
        assert_same(out, _by_numpy(op, operands))


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
