"""Fold: operands in the order of ranks, wide on the way, rounded once, and written where an operand may lie."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.data import (
    DTYPES,
    HALVES,
    OPS,
    Expected,
    dtype_of,
    expected,
    make_op,
    means,
    numbers,
    random,
    ulp,
    user_first,
    wrap,
)

from mpicoll.buffers import ops
from mpicoll.buffers.ops import Fold, Op, Reduction
from mpicoll.buffers.pair import recognise_pair
from mpicoll.buffers.recognise import recognise


@pytest.fixture(autouse=True, params=["extension", "numpy"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the kernels in C, and without them."""
    if request.param == "numpy":
        monkeypatch.setattr(ops, "find_fold", lambda: None)
    elif ops.find_fold() is None:
        pytest.skip("there is no extension")


def _fold(op: Any, like: Any) -> tuple[Fold, Reduction]:
    buffer = recognise("test", like)
    made = ops.reduction("test", op, buffer.dtype, buffer.library.wrap, buffer.array.shape)
    return Fold(made, buffer), made


def _operands(name: str, op: str, count: int, length: int = 100) -> list[np.ndarray]:
    return [numbers(random(name, op, count, rank), name, (length,), op) for rank in range(count)]


UNPREPARED = [
    (op, name)
    for op in OPS
    for name in DTYPES
    if means(op, name) and op not in ("premul_sum", "user_matmul") and (op[0] != "l" or name == "bool")
]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_op_and_dtype(count: int) -> None:
    for op, name in UNPREPARED:
        operands = _operands(name, op, count)
        kept = [one.copy() for one in operands]
        out = np.empty(100, dtype_of(name))
        fold, _ = _fold(make_op(op, 0, name), out)
        fold(operands, out)
        if count == 1:
            assert out.tobytes() == operands[0].tobytes(), (op, name)
        else:
            expected(op, operands, name).check(out, (op, name))
        for one, before in zip(operands, kept, strict=True):
            assert one.tobytes() == before.tobytes(), (op, name)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_result_may_lie_in_one_of_the_first_two(count: int, place: int) -> None:
    for op, name in UNPREPARED:
        operands = _operands(name, op, count)
        apart = np.empty(100, dtype_of(name))
        fold, _ = _fold(make_op(op, 0, name), apart)
        fold(operands, apart)
        others = [one.tobytes() for i, one in enumerate(operands) if i != place]
        fold(operands, operands[place])
        assert operands[place].tobytes() == apart.tobytes(), (op, name)
        assert [one.tobytes() for i, one in enumerate(operands) if i != place] == others, (op, name)


@pytest.mark.parametrize("place", [0, 1])
def test_extremes_with_places_in_one_of_the_first_two(place: int) -> None:
    for op in ("minloc", "maxloc"):
        values = [random(op, rank).integers(-3, 3, 200).astype(np.float64) for rank in range(3)]
        values[1][5] = np.nan
        pair = recognise_pair("test", (values[0], np.zeros(200, int)))
        made = ops.location("test", op, recognise("test", values[0]).dtype, recognise("test", np.zeros(1, int)).dtype)
        parts = []
        for rank, one in enumerate(values):
            part = np.empty(200, made.work)
            part["value"], part["index"] = one, rank
            parts.append(part)
        apart = np.empty(200, made.work)
        Fold(made, pair)(parts, apart)
        stacked = np.stack(values)
        # numpy's argmin takes the first NaN, too
        where = stacked.argmin(0) if op == "minloc" else stacked.argmax(0)
        np.testing.assert_array_equal(apart["index"], where)
        np.testing.assert_array_equal(apart["value"], np.take_along_axis(stacked, where[None], 0)[0])
        Fold(made, pair)(parts, parts[place])
        assert parts[place].tobytes() == apart.tobytes()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_rounded_once(name: str, library: str) -> None:
    """Large terms cancel and leave what half precision would have lost; and products beyond its range come back."""
    half = dtype_of(name)
    big, small = (random(name, which).standard_normal(5000) for which in (0, 1))
    terms = [(big * 256).astype(half), small.astype(half), (-big * 256).astype(half), (small / 3).astype(half)]
    exact = np.sum([one.astype(np.float64) for one in terms], axis=0)
    rounding = 4 * 2.0**-24 * np.sum([np.abs(one.astype(np.float64)) for one in terms], axis=0)
    out = np.empty(5000, half)
    for op, value in (("sum", exact), ("avg", exact / 4)):
        fold, _ = _fold(op, wrap(library, out))
        words = np.dtype(np.uint16) if library == "torch" and name == "bfloat16" else half
        fold([one.view(words) for one in terms], out.view(words))
        # Half a unit, and what float32 loses
        Expected(value, ulp(value, name) / 2 + 2 * rounding).check(out.astype(np.float64), (op, library))


@pytest.mark.parametrize("name", HALVES)
def test_a_tie_is_decided_by_the_exact_sum(name: str) -> None:
    """1 + e/2 is a tie that goes to 1; a little more, from a third operand, tips it. Rounding twice would lose that."""
    e = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[name]
    parts = [np.full(3, value, dtype_of(name)) for value in (1.0, e / 2, e / 64)]
    out = np.empty(3, dtype_of(name))
    fold, _ = _fold("sum", out)
    fold(parts, out)
    assert (out.astype(float) == 1 + e).all()
    fold(parts[:2], out)
    assert (out.astype(float) == 1).all()


def test_order_of_operands() -> None:
    """The order of ranks, in float32 to the bit, and for functions that don't commute."""
    operands = [
        numbers(random("order", rank), "float32", (1000,)) * np.float32(10.0 ** (4 * rank)) for rank in range(4)
    ]
    out = np.empty(1000, np.float32)
    fold, _ = _fold("sum", out)
    fold(operands, out)
    assert out.tobytes() == (((operands[0] + operands[1]) + operands[2]) + operands[3]).tobytes()
    sparse = [np.where(random(rank).random(50) < 0.5, 0, rank + 1) for rank in range(4)]
    first = np.empty(50, int)
    fold, _ = _fold(Op(user_first, elementwise=True), first)
    fold(sparse, first)
    np.testing.assert_array_equal(first, user_first(user_first(user_first(sparse[0], sparse[1]), sparse[2]), sparse[3]))


def test_parts_of_any_length_one_after_another() -> None:
    """Scratch memory is kept, and a shorter or longer part must not see what it held."""
    for name in ("float16", ">f8", "int32"):
        operands = _operands(name, "sum", 3, 4000)
        whole = np.empty(4000, dtype_of(name))
        fold, _ = _fold("sum", whole)
        fold(operands, whole)
        pieces = np.empty(4000, dtype_of(name))
        at = 0
        for length in (0, 1, 1000, 3, 2500, 0, 496):
            fold([one[at : at + length] for one in operands], pieces[at : at + length])
            at += length
        assert pieces.tobytes() == whole.tobytes()


def test_without_a_buffer_nothing_is_finished() -> None:
    """Operands are of the dtype of the reduction then, and the caller finishes."""
    buffer = recognise("test", np.zeros(3, np.float16))
    made = ops.reduction("test", "avg", buffer.dtype, buffer.library.wrap, (3,))
    assert made.work == np.float32
    out = np.empty(3, np.float32)
    Fold(made)([np.full(3, 1.0, np.float32), np.full(3, 2.5, np.float32)], out)
    np.testing.assert_array_equal(out, [3.5] * 3)


def test_what_a_function_raises_comes_through() -> None:
    def refuse(a: Any, b: Any) -> Any:
        raise KeyError("refused")

    fold, _ = _fold(Op(refuse, elementwise=True), np.zeros(3))
    with pytest.raises(KeyError, match="refused"):
        fold([np.zeros(3), np.ones(3)], np.empty(3))


@pytest.mark.parametrize(
    "like", [np.zeros(4, np.float16), torch.zeros(4, dtype=torch.bfloat16)], ids=["numpy", "torch"]
)
def test_unaligned_memory(like: Any) -> None:
    """Slots and the memory of other ranks may begin anywhere."""
    raw = np.zeros(33, np.uint8)
    words = np.float16 if isinstance(like, np.ndarray) else np.uint16
    parts = [raw[1:9].view(words), raw[9:17].view(words)]
    value = np.ones(4, np.float16 if words is np.float16 else ml_dtypes.bfloat16).view(words)
    for part in parts:
        part[...] = value
    out = raw[17:25].view(words)
    fold, _ = _fold("sum", like)
    fold(parts, out)
    assert out.tobytes() == (np.ones(4) * 2).astype(np.float16 if words is np.float16 else ml_dtypes.bfloat16).tobytes()
