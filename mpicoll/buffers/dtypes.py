"""The dtype policy: the supported dtypes, the dtypes in which they are reduced, and the operations defined for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar, cast
from zlib import crc32

import numpy as np

from mpicoll.errors import DTypeError
from mpicoll.named_tuple import NamedTuple

Array: TypeAlias = np.ndarray[Any, Any]

F = TypeVar("F", bound=Callable[..., Any])


def ignore_float_errors(function: F) -> F:
    """Wrap `function` so that numpy ignores floating-point errors: as in MPI, infinities and NaN are results.
    Warnings would appear on some of the ranks only, and exceptions of numpy would leave the other ranks waiting."""
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        return np.errstate(all="ignore")(function)

    # ``np.errstate`` as a decorator was not safe for several threads before.
    @wraps(function)
    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return cast("F", call)


ARITHMETIC = ("sum", "prod", "avg", "premul_sum")
ORDER = ("min", "max", "minloc", "maxloc")
BITS = ("band", "bor", "bxor")
LOGIC = ("land", "lor", "lxor")

_MEANING = {
    "bool": ("min", "max", *BITS, *LOGIC),
    "integer": ("sum", "prod", "premul_sum", *ORDER, *BITS, *LOGIC),
    "float": (*ARITHMETIC, *ORDER),
    "half": (*ARITHMETIC, *ORDER),
    "complex": ARITHMETIC,
    "opaque": (),
}

_REMEDY = {
    "bool": "use lor or land, or convert to an integer dtype to count",
    "integer": "convert to a floating dtype first",
    "float": "convert to an integer or bool dtype first",
    "half": "convert to an integer or bool dtype first",
    "complex": "reduce a real quantity such as abs(x)",
    "opaque": "only operations that move data take this dtype",
}


_KINDS = {
    "bool": "bool",
    **{f"{sign}int{bits}": "integer" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "float",
    "float64": "float",
    "complex64": "complex",
    "complex128": "complex",
}


_LONGEST = 100
"""Characters of the text of a dtype; the headers of checked messages have room for them."""


class DType(NamedTuple):
    """A dtype as the engine sees it.

    `name` is numpy's name (``bfloat16`` for every library), `storage` numpy's view of the memory: the dtype itself, or
    raw 16-bit words where numpy lacks the dtype. Reductions run in `work`, which differs from `storage` for
    half-precision (float32: accumulate wide, round once) and for a foreign byte order.
    """

    name: str
    storage: np.dtype[Any]
    work: np.dtype[Any]
    kind: str

    @property
    def text(self) -> str:
        """The name, with the byte order and the fields that it leaves out: what ranks compare, and messages show."""
        dtype = self.storage
        if (dtype.isnative and dtype.names is None) or dtype.name != self.name:
            return self.name
        text = _describe(dtype)
        if len(text) > _LONGEST:
            # A hash still tells other fields from these.
            text = f"{self.name}{{{len(dtype.names or ())} fields, {crc32(text.encode()):08x}}}"
        return text


def _describe(dtype: np.dtype[Any]) -> str:
    if dtype.fields is not None and dtype.names is not None:
        fields = (f"{name}: {_describe(dtype.fields[name][0])} at {dtype.fields[name][1]}" for name in dtype.names)
        return f"{dtype.name}{{{', '.join(fields)}}}"
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{_describe(base)}{list(shape)}"
    return dtype.name if dtype.isnative else dtype.str


@lru_cache(maxsize=256)
def of_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the policy for a numpy dtype, including those of ml_dtypes. Raise DTypeError for Python objects."""
    if dtype.hasobject:
        raise DTypeError(f"dtype {dtype} holds Python objects, which are not bytes that can be sent; use a numeric one")
    if dtype.name == "bfloat16":
        return DType("bfloat16", dtype, np.dtype(np.float32), "half")
    if dtype.name == "float16":
        return DType("float16", dtype, np.dtype(np.float32), "half")
    # Listed by name: extended precision differs between platforms, and ml_dtypes adds kinds of 8 bits and less.
    kind = _KINDS.get(dtype.name, "opaque")
    return DType(dtype.name, dtype, dtype.newbyteorder("="), kind)


BFLOAT16_WORDS = DType("bfloat16", np.dtype(np.uint16), np.dtype(np.float32), "half")
"""bfloat16 of a library for which numpy has no dtype: numpy sees 16-bit words, and the library converts them."""


def opaque(name: str, itemsize: int) -> DType:
    """Return a dtype of `itemsize` bytes that can be moved but not reduced."""
    storage = np.dtype(f"V{itemsize}")
    return DType(name, storage, storage, "opaque")


def means(op: str, dtype: DType) -> bool:
    """Return True if the reduction `op` is defined for `dtype`."""
    return op in _MEANING[dtype.kind]


def check(operation: str, op: str, dtype: DType) -> None:
    """Raise DTypeError, naming both, if the reduction `op` is not defined for `dtype`."""
    if not means(op, dtype):
        raise DTypeError(f"{operation}: op {op!r} has no meaning for dtype {dtype.name}; {_REMEDY[dtype.kind]}")
