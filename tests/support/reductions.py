"""What numpy makes of the named reductions of each dtype: the oracle of the kernels for hosts and for devices."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np

from mpicoll.buffers import kernels
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.ops import NAMES
from support.data import UFUNCS

DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in kernels.ITEMSIZE}
OPS = (*NAMES[:-2], "premul_sum")
CASES = [(op, dtype) for op, dtype in product(OPS, DTYPES) if kernels.known(op, dtype)]
HALVES = tuple(kernels.HALVES)


def make_operands(dtype: str, parts: int, size: int) -> list[Array]:
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


def by_numpy(op: str, parts: list[Array], count: int = 0) -> Array:
    """Combined in the dtype of the policy, rounded once."""
    dtype = parts[0].dtype
    wide = [one.astype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else one for one in parts]
    logical = op in ("land", "lor", "lxor")
    total = (wide[0] != 0).astype(dtype) if logical else wide[0].copy()
    for one in wide[1:]:
        former = total
        total = UFUNCS["sum" if op == "avg" else op](former, one).astype(former.dtype)
        if op in ("min", "max"):  # which of two equal zeros numpy returns depends on the processor
            total = np.where(former == one, one, total)
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
