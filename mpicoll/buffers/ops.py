"""Reduction operations and their kernels on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np

from mpicoll.buffers import dtypes
from mpicoll.buffers.buffer import Buffer, Library
from mpicoll.buffers.device import DeviceArray, check_same_place, device_of, empty_beside
from mpicoll.buffers.dtypes import Array, DType
from mpicoll.buffers.host import WORDS
from mpicoll.buffers.recognise import recognise
from mpicoll.errors import ArgumentError, DTypeError
from mpicoll.extension import find_fold
from mpicoll.named_tuple import NamedTuple
from mpicoll.ufuncs import UFUNCS

Combine: TypeAlias = Callable[[Array, Array, Array], object]
"""``combine(left, right, out)``: `out` is one of the operands."""


class Op:
    """A reduction by the caller's own associative function.

    Args:
        function: Takes two arrays of the library of the call's input (numpy arrays for numpy, tensors for torch) and
            returns their combination, of the same shape and dtype. It may write to its arguments, and return one of
            them. It is applied as ``function(lower ranks, higher ranks)``.
        commutative: Allows algorithms that change the order.
        elementwise: Declares that elements are treated independently, so that pieces of an array can be reduced
            separately. Otherwise the function always receives whole arrays, which rules out the algorithms that split
            a vector.

    Example:
        >>> geometric = mpicoll.Op(lambda a, b: np.hypot(a, b), commutative=True, elementwise=True)
        >>> mpicoll.run_local(lambda: mpicoll.allreduce(3.0 + mpicoll.world().rank, op=geometric), 2)
        [5.0, 5.0]
    """

    __slots__ = ("commutative", "elementwise", "function", "name")

    function: Callable[[Any, Any], Any]
    commutative: bool
    elementwise: bool
    name: str

    # A dataclass would compile these methods at each start, and a named tuple would be a sequence.
    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        commutative: bool = False,
        elementwise: bool = False,
        name: str = "user",
    ) -> None:
        if not callable(function):
            raise ArgumentError(
                f"Op: function must combine two arrays, got {function!r}; the name of an operation is passed as op="
            )
        for field, value in zip(Op.__slots__, (commutative, elementwise, function, name), strict=True):
            object.__setattr__(self, field, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"can't set {name!r}: an Op is immutable, since calls that use it are kept; make another one"
        )

    def __reduce__(self) -> tuple[type[Op], tuple[object, ...]]:
        return Op, (self.function, self.commutative, self.elementwise, self.name)

    def __repr__(self) -> str:
        return f"Op({self.function!r}, {self.commutative}, {self.elementwise}, {self.name!r})"

    def __str__(self) -> str:
        return f"{self.name} ({getattr(self.function, '__name__', 'function')})"


class Premul(NamedTuple):
    """``premul_sum``: every rank's operand is multiplied by its `factor`, then summed."""

    factor: complex
    name: str = "premul_sum"


def premul_sum(factor: complex) -> Premul:
    """Return the reduction ``sum(factor_r * x_r)``.

    Args:
        factor: The factor of this rank; each rank may pass another one.

    Returns:
        A reduction for ``op=`` of reductions of floating and complex dtypes.

    Example:
        >>> mpicoll.allreduce(np.array([2.0, 4.0]), op=mpicoll.premul_sum(0.5))
        array([1., 2.])
    """
    return Premul(factor)


OpLike: TypeAlias = str | Op | Premul | Callable[[Any, Any], Any]
"""Values that users may pass as ``op``: a name, an :class:`Op`, ``premul_sum(f)``, or a bare associative function."""

_UFUNCS = {"sum": np.add, "avg": np.add, "premul_sum": np.add, **UFUNCS}

NAMES = (*(name for name in _UFUNCS if name != "premul_sum"), "minloc", "maxloc")

_BOOL_NATIVE = {"min": "land", "band": "land", "max": "lor", "bor": "lor", "bxor": "lxor"}


class Reduction(NamedTuple):
    """An operation prepared for a dtype.

    It runs on arrays of dtype `work`: `prepare` (in place, before), `combine`, then `finish` (in place, given the
    number of ranks). `native` is the name of the MPI operation that is equivalent to `combine` on `work`; None if MPI
    has no such reduction. For the correctness of a library's implementation see :meth:`Transport.find_native_defect`.
    """

    name: str
    work: np.dtype[Any]
    combine: Combine
    prepare: Callable[[Array], None] | None = None
    finish: Callable[[Array, int], None] | None = None
    native: str | None = None
    commutative: bool = True
    elementwise: bool = True

    @property
    def has_kernel(self) -> bool:
        """True for named operations on numbers, False for functions and pairs."""
        return self.name in _UFUNCS

    def changes(self, dtype: np.dtype[Any]) -> bool:
        """Return True if operands of `dtype` are prepared, converted or finished, not just combined as they are."""
        return self.prepare is not None or self.finish is not None or dtype != self.work


def reduction(
    operation: str, op: OpLike, dtype: DType, wrap: Callable[[Array], Any], shape: tuple[int, ...]
) -> Reduction:
    """Make `op` ready for arrays of `dtype`.

    `wrap` turns a numpy view of storage into what a user's function should see; `shape` is the operand's. Raises
    DTypeError if `op` is unknown or has no meaning for `dtype`.
    """
    if isinstance(op, str):
        return _get_named_reduction(operation, op, dtype)
    if isinstance(op, Premul):
        dtypes.check(operation, "premul_sum", dtype)
        return _premul(operation, op, dtype)
    if not isinstance(op, Op):
        if not callable(op):
            raise DTypeError(
                f"{operation}: op must be {', '.join(NAMES)}, premul_sum(factor), an Op or a function, got {op!r}"
            )
        op = Op(op)
    return _user(operation, op, dtype, wrap, shape)


@lru_cache(maxsize=1024)
def _get_named_reduction(operation: str, op: str, dtype: DType) -> Reduction:
    if op not in NAMES:
        raise DTypeError(f"{operation}: unknown op {op!r}; there are {', '.join(NAMES)}, or pass a function")
    if op in ("minloc", "maxloc"):
        raise DTypeError(f"{operation}: op {op!r} needs a pair (values, indices), got one array of {dtype.name}")
    dtypes.check(operation, op, dtype)
    return Reduction(
        name=op,
        work=dtype.work,
        combine=_ufunc(_UFUNCS[op]),
        prepare=_to_truth if op in dtypes.LOGIC and dtype.kind != "bool" else None,
        finish=_divide if op == "avg" else None,
        native=_native(op, dtype),
    )


def _native(op: str, dtype: DType) -> str:
    """Return the MPI operation that is equivalent to `op`."""
    if dtype.kind == "bool":
        return _BOOL_NATIVE.get(op, op)
    return "sum" if op in ("avg", "premul_sum") else op


def _ufunc(ufunc: np.ufunc) -> Combine:
    @dtypes.ignore_float_errors
    def combine(left: Array, right: Array, out: Array) -> None:
        ufunc(left, right, out=out)

    return combine


def _to_truth(work: Array) -> None:
    np.not_equal(work, 0, out=work, casting="unsafe")


@dtypes.ignore_float_errors
def _divide(work: Array, size: int) -> None:
    np.divide(work, size, out=work)


def _premul(operation: str, op: Premul, dtype: DType) -> Reduction:
    factor = np.asarray(op.factor)
    if dtype.kind == "integer" and factor.dtype.kind in "iu":
        bounds = np.iinfo(dtype.work)
        fits = bool(bounds.min <= factor <= bounds.max)
    else:
        fits = np.can_cast(factor.dtype, dtype.work, casting="same_kind")
    if factor.ndim or not fits:
        raise DTypeError(
            f"{operation}: premul_sum: the factor {op.factor!r} is not a number of dtype {dtype.name}; convert one of"
            " them"
        )
    # On one rank the factor may exceed the range, whatever the other ranks pass.
    scale = dtypes.ignore_float_errors(factor.astype)(dtype.work)

    @dtypes.ignore_float_errors
    def multiply(work: Array) -> None:
        np.multiply(work, scale, out=work)

    native = _native("premul_sum", dtype)
    return Reduction("premul_sum", dtype.work, _ufunc(np.add), prepare=multiply, native=native)


def _user(operation: str, op: Op, dtype: DType, wrap: Callable[[Array], Any], shape: tuple[int, ...]) -> Reduction:
    whole = int(np.prod(shape))

    def combine(left: Array, right: Array, out: Array) -> None:
        # Pieces of an elementwise function are flat; other functions must receive the shape that the caller passed.
        view = shape if left.size == whole else left.shape
        # The function may write to its arguments. The operand that is not replaced may be another rank's, or be read
        # again.
        first, second = (one if one is out else _copy(one) for one in (left, right))
        device = device_of(out)
        if device is not None:
            device.synchronize()  # the function may use other streams
        value = op.function(wrap(first.reshape(view)), wrap(second.reshape(view)))
        result = _storage(operation, value, out)
        # Functions on arrays of a foreign byte order return the native one.
        same = result.dtype == dtype.storage or (dtype.kind != "half" and result.dtype == dtype.work)
        if result.shape != view or not same:
            raise DTypeError(
                f"{operation}: op {op} returned shape {result.shape} and dtype {getattr(value, 'dtype', result.dtype)}"
                f" for operands of shape {view} and dtype {dtype.name}; it must keep both"
            )
        np.copyto(out, result.reshape(-1))
        if device is not None:
            device.synchronize()  # the value's memory is freed, and may be reused at once

    return Reduction(
        name=str(op),
        work=dtype.storage,
        combine=combine,
        commutative=op.commutative,
        elementwise=op.elementwise,
    )


def _storage(operation: str, value: Any, out: Array) -> Array:
    """Return the memory of a user function's result, ready to be read."""
    device = device_of(out)
    if isinstance(value, np.ndarray) and device is None:
        return value
    buffer = recognise(operation, value, "the value of op")
    check_same_place(operation, out, buffer.array, ("the operands lie", "the value of op lies"))
    ready = buffer.library.record_event(buffer)
    if device is not None and ready is not None:
        with device.working([ready]):
            pass
    return buffer.array


def pair_dtype(value: DType, index: DType) -> np.dtype[Any]:
    """Return the dtype of a (value, index) pair in memory while it is reduced."""
    return np.dtype([("value", value.work), ("index", index.work)])


def location(operation: str, op: str, value: DType, index: DType) -> Reduction:
    """Return minloc or maxloc on an array of pairs: the extreme value with its lowest index; NaN is extreme."""
    dtypes.check(operation, op, value)
    if index.kind != "integer":
        raise DTypeError(f"{operation}: op {op!r} needs integer indices, got dtype {index.name}")
    return _location(op, pair_dtype(value, index))


@lru_cache(maxsize=64)
def _location(op: str, pair: np.dtype[Any]) -> Reduction:
    beats: np.ufunc = np.less if op == "minloc" else np.greater

    def combine(left: Array, right: Array, out: Array) -> None:
        other = right if out is left else left
        a, b = other["value"], out["value"]
        better, equal = beats(a, b), a == b
        if a.dtype.kind == "f":
            a_nan, b_nan = np.isnan(a), np.isnan(b)
            better |= a_nan & ~b_nan
            equal |= a_nan & b_nan
        np.copyto(out, other, where=better | (equal & (other["index"] < out["index"])))

    return Reduction(name=op, work=pair, combine=combine)


class Fold:
    """Combines operands of the caller's dtype in the order of ranks, rounding once.

    For reductions that need no preparation of the operands. Parts of the vectors may be folded separately if the
    operation is `elementwise`. Not safe for several threads: it keeps its scratch memory.
    """

    __slots__ = (
        "_combine",
        "_dtype",
        "_finish",
        "_kernel",
        "_library",
        "_named",
        "_scratch",
        "elementwise",
        "fused",
        "what",
    )

    def __init__(self, reduction: Reduction, buffer: Buffer | None = None) -> None:
        """Prepare for operands of `buffer`'s dtype; without a buffer, of the dtype in which they are reduced, and the
        caller finishes the result."""
        self._combine = reduction.combine
        self._named = reduction.has_kernel
        self.elementwise = reduction.elementwise
        # The identity of this fold; libraries may represent one dtype in different ways.
        native = buffer is None or buffer.array.dtype.isnative
        self.what = reduction.name, (reduction.work if buffer is None else buffer.dtype).name, native
        # The operation and the dtype for `Device.fold` or `_shm.fold`, which do the whole reduction; None for functions
        # and pairs, and for a foreign byte order.
        self.fused: tuple[str, str] | None = None
        if self._named and native:
            # Without a buffer the caller finishes the result.
            self.fused = ("sum" if buffer is None and reduction.name == "avg" else reduction.name), self.what[1]
        self._kernel = None if self.fused is None else find_fold()
        self._finish = self._dtype = None
        self._library: Library | None = None
        if buffer is not None:
            self._finish = reduction.finish
            if reduction.work != buffer.array.dtype and self._kernel is None:
                # Device data that named operations reduce on the host is host memory there, not its library's.
                on_device = isinstance(buffer.array, DeviceArray)
                self._dtype, self._library = buffer.dtype, WORDS if on_device else buffer.library
                self._scratch = np.empty((2, _WIDE), reduction.work)

    def __call__(self, parts: Sequence[Array], out: Array) -> None:
        """Write the combination of `parts` to `out`, which may be the memory of one part and must overlap no other."""
        if isinstance(out, DeviceArray) and self.fused is not None:
            op, dtype = self.fused
            out.on.fold(op, cast("Sequence[DeviceArray]", parts), [out], dtype)
        elif self._kernel is not None and self.fused is not None:
            self._kernel(*self.fused, parts, out)
        elif self._library is not None:
            self._wide(parts, out)
        else:
            # Copies of the operands that the first write to `out` would overwrite.
            later = [_copy(part) if np.may_share_memory(part, out) else part for part in parts[2:]]
            if len(parts) == 1:
                np.copyto(out, parts[0])
            elif self._named:
                self._combine(parts[0], parts[1], out)
            else:
                # User functions write the result to one of their operands.
                second = _copy(parts[1]) if np.may_share_memory(parts[1], out) else parts[1]
                np.copyto(out, parts[0])
                self._combine(out, second, out)
            for part in later:
                self._combine(out, part, out)
            if self._finish is not None:
                self._finish(out, len(parts))

    def _wide(self, parts: Sequence[Array], out: Array) -> None:
        assert self._library is not None
        assert self._dtype is not None
        convert, dtype = self._library.convert, self._dtype
        # In pieces, so that the wide values stay in the innermost cache.
        for start in range(0, out.size, _WIDE):
            stop = min(start + _WIDE, out.size)
            total, operand = self._scratch[0][: stop - start], self._scratch[1][: stop - start]
            convert(parts[0][start:stop], total, dtype)
            for part in parts[1:]:
                convert(part[start:stop], operand, dtype)
                self._combine(total, operand, total)
            if self._finish is not None:
                self._finish(total, len(parts))
            convert(total, out[start:stop], dtype)


def _copy(part: Array) -> Array:
    made = empty_beside(part, part.size)
    np.copyto(made, part)
    return made


_WIDE = 16 * 1024
"""Number of elements that are reduced at a time in a wider dtype than theirs."""


def identity(reduction: Reduction, dtype: DType) -> Any:
    """Return the neutral element of a named operation in its work dtype; None for functions or if there is none."""
    op = reduction.name
    if op in ("sum", "premul_sum", "bor", "bxor", "lor", "lxor"):
        return 0
    if op in ("prod", "land"):
        return 1
    if op == "band":
        return True if dtype.kind == "bool" else np.array(-1).astype(dtype.work)
    if op in ("min", "max"):
        if dtype.kind == "bool":
            return op == "min"
        if dtype.work.kind == "f":
            return np.inf if op == "min" else -np.inf
        bounds = np.iinfo(dtype.work)
        return bounds.max if op == "min" else bounds.min
    return None
