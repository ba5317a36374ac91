"""Reductions, ufuncs and conversions, against numpy's."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_memory import down, up

from mpicoll.buffers import kernels
from mpicoll.errors import DeviceError, DTypeError

Array = np.ndarray[Any, Any]

PAIR = np.dtype([("value", "f8"), ("index", "i4")])


@pytest.mark.slow
def test_fold_of_each_op_and_dtype(on: Any) -> None:
    for dtype in kernels.ITEMSIZE:
        ops = [op for op in ("sum", "avg", "max", "lxor") if kernels.known(op, dtype)]
        for number, op in enumerate(ops):
            count = 2 + number
            kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
            values = [(np.arange(37) * (i + 1) % 5).astype(kind) for i in range(count)]
            parts = [up(on, one) for one in values]
            other = on.empty(37, kind)
            with on.working():
                on.fold(op, parts, [parts[-1], other], dtype)
            wide = np.stack([one.astype("c16" if kind.kind == "c" else "f8") for one in values])
            wanted = {
                "sum": lambda wide: wide.sum(0),
                "avg": lambda wide: wide.mean(0),
                "max": lambda wide: wide.max(0),
                "lxor": lambda wide: (wide != 0).sum(0) % 2,
            }[op](wide)
            for out in (parts[-1], other):
                got = down(on, out).astype(wide.dtype)
                tolerance = 0.0 if op != "avg" else 1e-2 if dtype in kernels.HALVES else 1e-6
                np.testing.assert_allclose(got, wanted, rtol=tolerance, err_msg=f"{op} {dtype}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_fold_of_more_parts_than_a_kernel_has(on: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PARTS", 4)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for count in (4, 5, 7, 8, 11):
        values = [np.linspace(-3, 9 + i, 5003).astype(kind) for i in range(count)]
        parts = [up(on, one) for one in values]
        outs = [parts[0], parts[-1]]
        op = "sum" if dtype == "int8" else "avg"
        with on.working():
            on.fold(op, parts, outs, dtype)
        wide = kind if dtype == "int8" else np.dtype("f4")
        total = values[0].astype(wide)
        for one in values[1:]:
            total = total + one.astype(wide)
        wanted = (total if op == "sum" else total / np.float32(count)).astype(kind)
        for out in outs:
            assert down(on, out).tobytes() == wanted.tobytes()


def test_fold_refuses_what_has_no_meaning(on: Any) -> None:
    part = on.empty(4, np.dtype("f4"))
    with pytest.raises(DTypeError, match="no kernel that combines arrays of float32 by 'band'"):
        on.fold("band", [part], [part], "float32")


UFUNCS = ["add", "multiply", "minimum", "maximum", "divide"]


@pytest.mark.parametrize("ufunc", UFUNCS)
def test_ufuncs(on: Any, ufunc: str) -> None:
    function = getattr(np, ufunc)
    for dtype in ("f4", "f8", "c16", "i4"):
        if (dtype, ufunc) in (("c16", "minimum"), ("c16", "maximum"), ("i4", "divide")):
            continue
        values, more = (np.arange(1, 25).reshape(4, 6) % k + 1 for k in (7, 5))
        values, more = values.astype(dtype), more.astype(dtype)
        for cut in (np.s_[:], np.s_[:, ::2], np.s_[::-1]):
            for second in (more[cut], 3, np.asarray(3, dtype)):
                x = up(on, values)
                y = up(on, more)[cut] if np.ndim(second) else second
                wanted = values.copy()
                function(wanted[cut], second, out=wanted[cut])
                with on.working():
                    assert function(x[cut], y, out=x[cut]) is not None
                np.testing.assert_allclose(down(on, x), wanted, rtol=1e-6)


def test_ufuncs_of_other_dtypes(on: Any) -> None:
    truth = np.array([True, False, True, False])
    x, y = up(on, truth), up(on, truth[::-1].copy())
    work = up(on, np.array([5, 0, -1, 0], "i2"))
    with on.working():
        np.logical_or(x, y, out=x)
        np.minimum(y, x, out=y)
        np.not_equal(work, 0, out=work, casting="unsafe")
    np.testing.assert_array_equal(down(on, x), [True] * 4)
    np.testing.assert_array_equal(down(on, y), truth[::-1])
    np.testing.assert_array_equal(down(on, work), [1, 0, 1, 0])


def test_ufuncs_on_memory_that_overlaps(on: Any) -> None:
    wanted = np.arange(16.0)
    x = up(on, wanted)
    with on.working():
        np.add(x[:-1], x[1:], out=x[1:])
        np.add(x[:4], x[8:12], out=x[2:9:2])
        square = x.reshape(4, 4)
        np.divide(square.T, 2, out=square)
    np.add(wanted[:-1].copy(), wanted[1:].copy(), out=wanted[1:])
    np.add(wanted[:4].copy(), wanted[8:12].copy(), out=wanted[2:9:2])
    np.testing.assert_array_equal(down(on, x).reshape(4, 4), wanted.reshape(4, 4).T / 2)


def test_an_operand_on_the_host(on: Any) -> None:
    x = up(on, np.arange(6.0).reshape(2, 3))
    with on.working():
        np.multiply(x, np.arange(3.0), out=x)
    np.testing.assert_array_equal(down(on, x), np.arange(6.0).reshape(2, 3) * np.arange(3.0))


def test_no_such_ufunc(on: Any) -> None:
    x = on.empty(3, np.dtype("f4"))
    with pytest.raises(DeviceError, match="spacing: there is no such function for memory of cuda:0"):
        np.spacing(x, out=x)


@pytest.mark.parametrize("dtype", kernels.HALVES)
def test_conversion(on: Any, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    floats = np.linspace(-70, 70, 4 * 37).astype("f4").reshape(4, 37)
    floats[0, :3] = np.nan, np.inf, 1e-7
    halves = floats.astype(kind)
    for source, target, wanted in [(floats, kind, halves), (halves, np.dtype("f4"), halves.astype("f4"))]:
        places = [(False, False), (True, False), (False, True)]
        for cut, (from_host, to_host) in product((np.s_[:], np.s_[:, 1:], np.s_[::2, ::-1]), places):
            of = source if from_host else up(on, source)
            into = np.zeros(source.shape, target) if to_host else up(on, np.zeros(source.shape, target))
            with on.working():
                on.convert(of[cut], into[cut], dtype)
            got = into if to_host else down(on, into)
            np.testing.assert_array_equal(got[cut].astype("f8"), wanted[cut].astype("f8"))
            kept = np.ones(source.shape, bool)
            kept[cut] = False
            assert not got[kept].astype("f8").any()


def test_conversion_in_place(on: Any) -> None:
    values = np.arange(100).astype("f2")
    room = up(on, np.zeros(100, "f4"))
    halves = room.view("f2")[:100]
    with on.working():
        on.copy(halves, values)
        on.convert(halves, room, "float16")
    np.testing.assert_array_equal(down(on, room), np.arange(100, dtype="f4"))
    with on.working():
        on.convert(room, halves, "float16")
    np.testing.assert_array_equal(down(on, halves), values)
