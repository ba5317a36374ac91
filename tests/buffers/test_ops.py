"""The kernels that reduce, and what they start from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from support.data import BITS, DTYPES, LOGIC, dtype_of, expected, make_op, means, neutral, numbers, random, user_first

import mpicoll
from mpicoll.buffers import dtypes, ops
from mpicoll.buffers.host import NUMPY
from mpicoll.errors import DTypeError

NAMED = ("sum", "prod", "min", "max", *BITS, *LOGIC, "avg", "premul_sum")


def _ready(op: Any, name: str, shape: tuple[int, ...] = (50,)) -> ops.Reduction:
    return ops.reduction("op", op, dtypes.of_numpy(dtype_of(name)), NUMPY.wrap, shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("into_left", [True, False])
def test_kernels(name: str, into_left: bool) -> None:
    for op in NAMED:
        if not means(op, name):
            continue
        inputs = [numbers(random(op, rank), name, (50,), op) for rank in range(3)]
        works = []
        for rank, one in enumerate(inputs):
            reduction = _ready(make_op(op, rank, name), name)
            work = one.astype(reduction.work)
            if reduction.prepare is not None:
                reduction.prepare(work)
            works.append(work)
        total = works[0]
        for work in works[1:]:
            out = total if into_left else work
            reduction.combine(total, work, out)
            total = out
        if reduction.finish is not None:
            reduction.finish(total, 3)
        expected(op, inputs, name).check(total.astype(dtype_of(name)), op)


@pytest.mark.parametrize("op", [op for op in NAMED if op != "avg"])
def test_identity_changes_nothing(op: str) -> None:
    for name in DTYPES:
        if not means(op, name):
            continue
        dtype = dtypes.of_numpy(dtype_of(name))
        reduction = _ready(make_op(op, 0, name), name)
        identity = ops.identity(reduction, dtype)
        assert np.asarray(identity).astype(dtype.work) == np.asarray(neutral(op, name)).astype(dtype.work)
        work = numbers(random(op, name), name, (50,), op).astype(reduction.work)
        if reduction.prepare is not None:
            reduction.prepare(work)
        for swap in (False, True):
            other, out = np.full(50, identity).astype(reduction.work), work.copy()
            reduction.combine(*((out, other) if swap else (other, out)), out)
            np.testing.assert_array_equal(out, work)


@pytest.mark.parametrize("name", ["bool", "int8", "float32", "complex64"])
def test_functions_have_no_identity_whatever_they_are_called(name: str) -> None:
    function = mpicoll.Op(user_first, name="sum")
    assert ops.identity(_ready(function, name), dtypes.of_numpy(dtype_of(name))) is None


def test_an_op_needs_a_function() -> None:
    with pytest.raises(mpicoll.ArgumentError, match="Op: function must combine two arrays, got 'sum'; the name of an"):
        mpicoll.Op("sum")  # type: ignore[arg-type]


def test_user_function_sees_lower_ranks_on_the_left() -> None:
    seen = []

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        seen.append((a.tolist(), b.tolist()))
        return a * 10 + b

    reduction = _ready(function, "int64", (2,))
    left, right = np.array([1, 2]), np.array([3, 4])
    reduction.combine(left, right, right)
    assert right.tolist() == [13, 24]
    reduction.combine(left, right, left)
    assert left.tolist() == [23, 44]
    assert seen == [([1, 2], [3, 4]), ([1, 2], [13, 24])]


def test_user_function_sees_the_shape_of_the_call_and_pieces_flat() -> None:
    shapes = []

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        shapes.append(a.shape)
        return a + b

    reduction = _ready(mpicoll.Op(function, elementwise=True), "float64", (2, 3))
    reduction.combine(np.zeros(6), np.ones(6), out := np.zeros(6))
    reduction.combine(np.zeros(4), np.ones(4), np.zeros(4))
    assert shapes == [(2, 3), (4,)]
    assert out.shape == (6,)


def test_user_function_that_writes_to_its_arguments() -> None:
    """The operand that the result does not replace may lie in the memory of another rank."""

    def function(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = a + b
        a[:] = b[:] = -1
        return total

    reduction = _ready(function, "int64", (2,))
    for swap in (False, True):
        out, other = np.array([1, 2]), np.array([3, 4])
        reduction.combine(*((other, out) if swap else (out, other)), out)
        assert out.tolist() == [4, 6]
        assert other.tolist() == [3, 4]


def test_bare_functions_are_assumed_to_be_nothing_special() -> None:
    reduction = _ready(user_first, "int8")
    assert (reduction.commutative, reduction.elementwise, reduction.native) == (False, False, None)
    declared = _ready(mpicoll.Op(user_first, commutative=True, elementwise=True), "int8")
    assert (declared.commutative, declared.elementwise) == (True, True)


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda a, b: a[:-1], r"shape \(49,\)"),
        (lambda a, b: a.astype("f4"), "float32"),
        (lambda a, b: a[0], r"shape \(\)"),
        (lambda a, b: None, "NoneType"),
        (lambda a, b: [1.0] * 50, "list"),
        (lambda a, b: torch.zeros(50), "float32"),
    ],
    ids=["shape", "dtype", "scalar", "None", "list", "tensor"],
)
def test_user_function_that_returns_something_else(function: Any, word: str) -> None:
    reduction = _ready(function, "float64")
    with pytest.raises(DTypeError, match=f"op: .*{word}"):
        reduction.combine(np.zeros(50), np.zeros(50), np.zeros(50))


@pytest.mark.parametrize("op", ["add", "SUM", "minloc", 3, None, b"sum"])
def test_unknown_ops(op: Any) -> None:
    with pytest.raises(DTypeError, match="op"):
        _ready(op, "float64")


@pytest.mark.parametrize(
    ("factor", "name", "fits"),
    [
        (2, "uint8", True),
        (255, "uint8", True),
        (256, "uint8", False),
        (-1, "uint8", False),
        (-128, "int8", True),
        (2**70, "int64", False),
        (0.5, "int32", False),
        (0.5, "bfloat16", True),
        (3, "float16", True),
        (1j, "float64", False),
        (1j, "complex64", True),
        (np.float32(2), "float64", True),
        ([1, 2], "float64", False),
    ],
    ids=str,
)
def test_factors(factor: Any, name: str, fits: bool) -> None:
    if fits:
        assert _ready(mpicoll.premul_sum(factor), name).prepare is not None
    else:
        with pytest.raises(DTypeError, match=f"premul_sum.*factor.*{name}"):
            _ready(mpicoll.premul_sum(factor), name)


@pytest.mark.parametrize("op", ["minloc", "maxloc"])
@pytest.mark.parametrize("into_left", [True, False])
def test_location_prefers_nan_then_value_then_lowest_index(op: str, into_left: bool) -> None:
    value, index = dtypes.of_numpy(np.dtype("f8")), dtypes.of_numpy(np.dtype("i4"))
    reduction = ops.location("op", op, value, index)
    best = -5.0 if op == "minloc" else 5.0
    left = np.array([(best, 3), (0, 3), (1, 7), (np.nan, 4), (0, 9), (np.nan, 9)], reduction.work)
    right = np.array([(0, 1), (best, 4), (1, 6), (best, 1), (np.nan, 2), (np.nan, 8)], reduction.work)
    out = left if into_left else right
    reduction.combine(left, right, out)
    assert out["index"].tolist() == [3, 4, 6, 4, 2, 8]
    np.testing.assert_array_equal(out["value"], [best, best, 1, np.nan, np.nan, np.nan])


def test_a_function_as_operation_is_an_immutable_value() -> None:
    """Calls that use it are kept by its identity; pytrees and messages treat sequences as containers."""
    one = mpicoll.Op(max, commutative=True, name="largest")
    with pytest.raises(AttributeError, match="can't set 'commutative': an Op is immutable"):
        one.commutative = False
    assert not isinstance(one, tuple)
    other = pickle.loads(pickle.dumps(copy.copy(one)))
    assert repr(other) == repr(one) == "Op(<built-in function max>, True, False, 'largest')"
    assert other != one
    assert {one: 1}[one] == 1
