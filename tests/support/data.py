"""Arrays of every library, dtype and layout, their values, and the expected results of reductions.

The oracle is plain numpy: float64 or complex128 for floating point, the dtype itself where arithmetic is exact.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

import mpicoll

if TYPE_CHECKING:
    import pytest

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
FOREIGN = (">i4", ">f8")
DTYPES = ("bool", *INTEGERS, *HALVES, *FLOATS, *COMPLEX, *FOREIGN)

BITS = ("band", "bor", "bxor")
LOGIC = ("land", "lor", "lxor")
USER = ("user_add", "user_first", "user_affine", "user_matmul")
OPS = ("sum", "prod", "min", "max", *BITS, *LOGIC, "avg", "premul_sum", *USER)
NON_COMMUTATIVE = ("user_first", "user_affine", "user_matmul")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def means(op: str, name: str) -> bool:
    """Return True if `op` is defined for the dtype `name`: the table of docs/operations.md, written out."""
    if op in ("user_add", "user_first"):
        return True
    if op == "user_affine":
        return name in COMPLEX
    if op == "user_matmul":
        return name in ("int32", "int64", "float64", "complex128")
    if name == "bool":
        return op in ("min", "max", *BITS, *LOGIC)
    if name in INTEGERS or name == ">i4":
        return op != "avg"
    if name in COMPLEX:
        return op in ("sum", "prod", "avg", "premul_sum")
    return op not in (*BITS, *LOGIC)


# --- values


def random(*what: object) -> np.random.Generator:
    """Return a generator specific to `what`, the same on every rank and in every process."""
    return np.random.default_rng(zlib.crc32(repr(what).encode()))


def numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...], op: str = "sum") -> np.ndarray:
    """Return random values: integers from the whole range, floats without overflow, half of them zero where needed."""
    dtype = dtype_of(name)
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        made: Any = rng.integers(bounds.min, bounds.max, shape, dtype.newbyteorder("="), endpoint=True)
    else:
        made = _real(rng, shape, op)
        if dtype.kind == "c":
            made = made + 1j * _real(rng, shape, op)
    if op in LOGIC or op == "user_first":
        made = np.where(rng.random(shape) < 0.5, 0, made)
    return np.asarray(made).astype(dtype)


def _real(rng: np.random.Generator, shape: tuple[int, ...], op: str) -> Any:
    if op == "prod":
        return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 2.0, shape)
    return rng.standard_normal(shape)


# --- reductions


def _namespace(a: Any) -> Any:
    return torch if isinstance(a, torch.Tensor) else np


def _plain(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Extend `function` of numpy arrays and tensors to objects that only hold an array."""

    def call(a: Any, b: Any) -> Any:
        return Api(function(a.array, b.array)) if isinstance(a, Api) else function(a, b)

    call.__name__ = function.__name__
    return call


@_plain
def user_add(a: Any, b: Any) -> Any:
    return a | b if a.dtype in (np.bool_, torch.bool) else a + b


@_plain
def user_first(a: Any, b: Any) -> Any:
    """Return of each pair the first nonzero value: associative, elementwise, exact, and not commutative."""
    return _namespace(a).where(a != 0, a, b)


@_plain
def user_affine(a: Any, b: Any) -> Any:
    """Compose maps; a complex number s + ti stands for the map x -> s x + t. Composition does not commute."""
    real = a.real * b.real
    imag = a.imag * b.real + b.imag
    return torch.complex(real, imag) if isinstance(a, torch.Tensor) else (real + 1j * imag).astype(a.dtype)


@_plain
def user_matmul(a: Any, b: Any) -> Any:
    return a @ b


def make_op(op: str, rank: int, name: str) -> Any:
    """Return the ``op`` that a caller of rank `rank` passes."""
    if op == "premul_sum":
        return mpicoll.premul_sum(factor(rank, name))
    if op == "user_add":
        return mpicoll.Op(user_add, commutative=True, elementwise=True)
    if op in ("user_first", "user_affine"):
        return mpicoll.Op(globals()[op], elementwise=True, name=op)
    return user_matmul if op == "user_matmul" else op


def factor(rank: int, name: str) -> complex:
    kind = dtype_of(name).kind
    return rank + 2 if kind in "iu" else complex(rank, 0.5) if kind == "c" else 0.5 * (rank + 1)


@dataclass(frozen=True)
class Expected:
    """A value, and the tolerance of each element (None: exact)."""

    value: np.ndarray
    slack: np.ndarray | None = None

    def check(self, got: np.ndarray, where: object = "") -> None:
        if self.slack is None:
            np.testing.assert_array_equal(got, self.value, err_msg=str(where))
            return
        wide = got.astype(self.value.dtype)
        wrong = ~(np.abs(wide - self.value) <= self.slack)
        assert not wrong.any(), (
            f"{where}: {wrong.sum()} of {wrong.size} wrong: got {wide[wrong][:5]}, expected {self.value[wrong][:5]},"
            f" within {self.slack[wrong][:5]}"
        )

    def rows(self, start: int, stop: int) -> Expected:
        return Expected(self.value[start:stop], None if self.slack is None else self.slack[start:stop])


UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "premul_sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "complex64": 2.0**-23}
"""Distance from 1 to the next number; 2**-52 for dtypes that are not listed."""


def ulp(value: np.ndarray, name: str) -> np.ndarray:
    """Return the distance between neighbours of dtype `name`, a half precision, around `value`."""
    digits, smallest = {"float16": (10, -14), "bfloat16": (7, -126)}[name]
    magnitude = np.maximum(np.abs(value), 2.0**smallest)
    return 2.0 ** (np.floor(np.log2(magnitude)) - digits)


def expected(op: str, operands: Sequence[np.ndarray], name: str) -> Expected:
    """Return the reduction of one operand for each rank, in the order of ranks."""
    dtype = dtype_of(name)
    if op in ("min", "max", "user_first") or dtype.kind in "biu":
        return Expected(_exact(op, operands, name))
    count = len(operands)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    values = [one.astype(wide) for one in operands]
    if op == "premul_sum":
        values = [factor(rank, name) * one for rank, one in enumerate(values)]
    magnitude = [np.abs(one) for one in values]
    if op == "prod":
        value, bound = reduce(np.multiply, values), reduce(np.multiply, magnitude)
    elif op in ("user_affine", "user_matmul"):
        # Each factor of the composition is bounded by its magnitude or 1, whichever is larger.
        function = user_affine if op == "user_affine" else np.matmul
        value = reduce(function, values)
        bound = np.full(value.shape, np.prod([2 * max(1.0, one.max(initial=0.0)) for one in magnitude]))
    else:
        value, bound = reduce(np.add, values), reduce(np.add, magnitude)
        if op == "avg":
            value, bound = value / count, bound / count
    value, bound = np.asarray(value), np.asarray(bound)
    if name in HALVES and op != "user_add":
        # float32 on the way, and one rounding at the end
        return Expected(value, ulp(value, name) + (count + 1) * 2.0**-23 * bound)
    return Expected(value, 4 * (count + 1) * EPSILON.get(name, 2.0**-52) * bound)


def _exact(op: str, operands: Sequence[np.ndarray], name: str) -> np.ndarray:
    native = [one.astype(one.dtype.newbyteorder("=")) for one in operands]
    if op in ("user_first", "user_matmul"):
        return np.asarray(reduce({"user_first": user_first, "user_matmul": np.matmul}[op], native))
    if op == "user_add":
        op = "lor" if name == "bool" else "sum"
    if op == "premul_sum":
        native = [one * np.asarray(factor(rank, name), one.dtype) for rank, one in enumerate(native)]
    if op in LOGIC:
        native = [one != 0 for one in native]
    return np.asarray(reduce(UFUNCS[op], native)).astype(dtype_of(name))


def neutral(op: str, name: str) -> Any:
    """Return the neutral element of a reduction, or None where there is none: written out, not computed."""
    dtype = dtype_of(name)
    if op in ("sum", "premul_sum", "bor", "bxor", "lor", "lxor"):
        return 0
    if op in ("prod", "land"):
        return 1
    if op == "band":
        return True if name == "bool" else -1 if dtype.kind == "i" else np.iinfo(dtype).max
    if op in ("min", "max"):
        if name == "bool":
            return op == "min"
        if dtype.kind in "iu":
            return np.iinfo(dtype).max if op == "min" else np.iinfo(dtype).min
        return np.inf if op == "min" else -np.inf
    return None


# --- libraries


class Api:
    """A minimal array of the array API standard: results are of this class again."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __array_namespace__(self, api_version: str | None = None) -> type[Namespace]:
        return Namespace

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


class Namespace:
    @staticmethod
    def from_dlpack(x: Any) -> Api:
        return Api(np.from_dlpack(x))

    @staticmethod
    def asarray(x: Any) -> Api:
        return Api(x)


class DLPack:
    """An exporter of memory without a constructor: results are numpy arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Interface:
    """An exporter by numpy's array interface: results are numpy arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array.__array_interface__


LIBRARIES = ("numpy", "torch", "api", "dlpack", "interface", "python", "scalar")


def has(library: str, name: str) -> bool:
    """Return True if the library has arrays of the dtype `name`."""
    if library == "python":
        return name in ("bool", "int64", "float64", "complex128")
    if library == "torch":
        return name not in FOREIGN
    if library in ("api", "dlpack", "interface"):
        return name not in FOREIGN and not (name == "bfloat16" and library != "api")
    return not (library == "scalar" and name in FOREIGN)


def wrap(library: str, view: np.ndarray) -> Any:
    """Return an object of `library` on the memory of `view`; the value itself for numbers."""
    if library == "torch":
        if view.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(view)
    if library == "python":
        return view.item()
    if library == "scalar":
        return view[()]
    made: dict[str, Callable[[np.ndarray], Any]] = {"api": Api, "dlpack": DLPack, "interface": Interface}
    return made[library](view) if library in made else view


def unwrap(library: str, result: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the memory of a result, after checking its type, dtype and shape."""
    dtype = dtype_of(name)
    if library == "torch":
        assert type(result) is torch.Tensor
        words = result.view(torch.int16) if result.dtype is torch.bfloat16 else result
        array = words.numpy()
        if result.dtype is torch.bfloat16:
            array = array.view(ml_dtypes.bfloat16)
    elif library == "api":
        assert type(result) is Api
        array = result.array
    elif library == "python" and shape == ():
        assert type(result) is type(np.zeros((), dtype).item())
        array = np.asarray(result)
    elif library == "scalar" and shape == ():
        assert type(result) is dtype.type
        array = np.asarray(result)
    else:
        assert type(result) is np.ndarray
        array = result
    assert array.dtype == dtype
    assert array.shape == shape
    return array


# --- layouts

LAYOUTS = ("contiguous", "strided", "fortran", "negative", "readonly")


def laid(values: np.ndarray, layout: str) -> np.ndarray:
    """Return a copy of `values` in the memory layout `layout`."""
    if layout == "strided":
        base = np.empty((*values.shape[:-1], 2 * values.shape[-1] + 1), values.dtype)
        view = base[..., 1::2]
        view[...] = values
        return view
    if layout == "fortran":
        return values.T.copy().T
    if layout == "negative":
        flip = (slice(None, None, -1),) * values.ndim
        return values[flip].copy()[flip]
    made = values.copy()
    made.flags.writeable = layout != "readonly"
    return made


def has_layout(library: str, layout: str, shape: tuple[int, ...]) -> bool:
    if library in ("python", "scalar"):
        return layout == "contiguous"
    if library == "torch" and layout in ("negative", "readonly"):
        return False
    return layout in ("contiguous", "readonly") or len(shape) > 0


# --- covering


def covering(axes: dict[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return rows, one value of each axis, that cover all pairs of values of two axes that an allowed row can have.

    `allowed` is called on partial rows, and may return False only if every completion would be rejected as well.
    """
    missing = {
        (a, i, b, j): None
        for a, b in itertools.combinations(axes, 2)
        for i, j in itertools.product(range(len(axes[a])), range(len(axes[b])))
        if allowed({a: axes[a][i], b: axes[b][j]})
    }
    place = {name: number for number, name in enumerate(axes)}

    def pair(a: str, i: int, b: str, j: int) -> tuple[str, int, str, int]:
        return (a, i, b, j) if place[a] < place[b] else (b, j, a, i)

    def fill(row: dict[str, Any], chosen: dict[str, int]) -> bool:
        """Choose values for the remaining axes, those with the most new pairs first."""
        name = next((one for one in axes if one not in chosen), None)
        if name is None:
            return True
        gains = [
            (-sum(pair(name, k, other, at) in missing for other, at in chosen.items()), k)
            for k in range(len(axes[name]))
        ]
        for _, k in sorted(gains):
            row[name], chosen[name] = axes[name][k], k
            if allowed(row) and fill(row, chosen):
                return True
            del row[name], chosen[name]
        return False

    rows = []
    while missing:
        a, i, b, j = next(iter(missing))
        row, chosen = {a: axes[a][i], b: axes[b][j]}, {a: i, b: j}
        if not fill(row, chosen):  # three values that exclude each other
            del missing[a, i, b, j]
            continue
        for one, other in itertools.combinations(axes, 2):
            missing.pop((one, chosen[one], other, chosen[other]), None)
        rows.append(row)
    return rows


def multiply_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an operation with premul_sum fail on the ranks whose operand is large."""
    multiply = np.multiply

    def multiplied(left: np.ndarray, right: Any, **options: Any) -> Any:
        if left.flat[0] > 1e30:
            raise MemoryError("there is no room for what is large")
        return multiply(left, right, **options)

    monkeypatch.setattr(np, "multiply", multiplied)
