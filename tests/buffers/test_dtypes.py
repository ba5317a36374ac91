"""The dtype policy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.data import COMPLEX, FLOATS, HALVES, INTEGERS, dtype_of

from mpicoll.buffers import dtypes
from mpicoll.errors import DTypeError


@pytest.mark.parametrize(
    ("names", "kind"),
    [(("bool",), "bool"), (INTEGERS, "integer"), (FLOATS, "float"), (HALVES, "half"), (COMPLEX, "complex")],
    ids=["bool", "integers", "floats", "halves", "complex"],
)
def test_kinds(names: tuple[str, ...], kind: str) -> None:
    for name in names:
        dtype = dtypes.of_numpy(dtype_of(name))
        assert (dtype.name, dtype.kind, dtype.storage) == (name, kind, dtype_of(name))
        assert dtype.work == (np.float32 if kind == "half" else dtype_of(name))
        assert (dtype.work != dtype.storage) == (kind == "half")


@pytest.mark.parametrize("text", ["M8[s]", "m8[ns]", "S3", "U2", "V5", "i4,f8", np.longdouble, np.clongdouble])
def test_what_only_moves(text: object) -> None:
    dtype = dtypes.of_numpy(np.dtype(text))
    assert dtype.kind == "opaque"
    for op in ("sum", "min", "band", "lor", "avg"):
        with pytest.raises(DTypeError, match=f"op '{op}' has no meaning for dtype .*move data"):
            dtypes.check("allreduce", op, dtype)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_small_dtypes_of_ml_dtypes_only_move(name: str) -> None:
    assert dtypes.of_numpy(np.dtype(getattr(ml_dtypes, name))).kind == "opaque"


@pytest.mark.parametrize("text", [">i2", ">u8", ">f4", ">c16", ">f2"])
def test_foreign_byte_order_is_reduced_in_our_own(text: str) -> None:
    dtype = dtypes.of_numpy(np.dtype(text))
    assert dtype.storage == np.dtype(text)
    assert dtype.work.isnative
    assert dtype.work != dtype.storage


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f8", "float64"),
        (">f8", ">f8"),
        (">M8[s]", ">M8[s]"),
        ("V3", "void24"),
        ("i4,>f4", "void64{f0: int32 at 0, f1: >f4 at 4}"),
        ([("a", "(2,3)>i2"), ("b", [("c", "u1")])], "void104{a: >i2[2, 3] at 0, b: void8{c: uint8 at 0} at 12}"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
    ids=str,
)
def test_texts(text: object, shown: str) -> None:
    assert dtypes.of_numpy(np.dtype(text)).text == shown


def test_texts_are_equal_only_for_equal_dtypes() -> None:
    """Also those that are too long to be shown."""
    fields = [(f"field {number}", "f4") for number in range(100)]
    texts = {dtypes.of_numpy(np.dtype(one)).text for one in (fields, fields[::-1], fields[1:])}
    assert len(texts) == 3
    assert max(map(len, texts)) < 50
    packed = {"names": ["a", "b"], "formats": ["u1", "f8"], "offsets": [0, 8], "itemsize": 16}
    aligned = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    assert dtypes.of_numpy(np.dtype(packed)).text == dtypes.of_numpy(aligned).text


def test_python_objects_are_refused() -> None:
    with pytest.raises(DTypeError, match="object"):
        dtypes.of_numpy(np.dtype(object))


def test_refusals_tell_what_to_do() -> None:
    for op, name, remedy in (
        ("sum", "bool", "lor"),
        ("avg", "int32", "floating"),
        ("band", "float32", "integer"),
        ("lor", "bfloat16", "integer"),
        ("min", "complex64", "abs"),
    ):
        with pytest.raises(DTypeError, match=f"scan: op '{op}' has no meaning for dtype {name}; .*{remedy}"):
            dtypes.check("scan", op, dtypes.of_numpy(dtype_of(name)))
