"""The public functions of blocking collectives are like functions, also where the extension begins them."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import pydoc
import weakref
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.extension import find_missing_reason, make_function

NAMES = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "reduce",
    "recv",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_like_a_function(name: str) -> None:
    function = getattr(mpicoll, name)
    plain: Any = inspect.unwrap(function)
    assert (find_missing_reason() is None) == (plain is not function)
    assert inspect.signature(function) == inspect.signature(plain)
    assert inspect.getsource(function) == inspect.getsource(plain)
    assert inspect.isroutine(function)
    assert name in repr(function)
    assert (function.__name__, function.__module__, function.__doc__) == (name, plain.__module__, plain.__doc__)
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function
    assert any(text in pydoc.render_doc(function) for text in ("Wait", "out: ", "dest: "))
    assert weakref.ref(function)() is function


def test_invalid_arguments_raise_what_the_function_raises() -> None:
    x = np.ones(2)
    for args, named in (
        ((), {}),
        ((x, "sum", x), {}),
        ((x,), {"x": x}),
        ((x,), {"outt": x}),
        ((), {"op": "sum"}),
    ):
        with pytest.raises(TypeError) as got:
            mpicoll.allreduce(*args, **named)  # type: ignore[arg-type]
        with pytest.raises(TypeError) as want:
            inspect.unwrap(mpicoll.allreduce)(*args, **named)
        assert str(got.value) == str(want.value)


def test_it_is_a_method_of_a_class() -> None:
    class Team:
        total = mpicoll.allreduce

    assert isinstance(Team.total, type(mpicoll.allreduce))
    with pytest.raises(mpicoll.DTypeError, match="Team"):
        Team().total()


@pytest.mark.extension
def test_it_is_released() -> None:
    def same(x: Any, *, out: Any = None, comm: Any = None, timeout: Any = None) -> Any:
        return x, out

    function = make_function(same, "same", ("out",), None)
    assert function(1, out=2, timeout=3) == (1, 2)
    function.__dict__["itself"] = function
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None
    for wrong in (lambda: make_function(same, "same", ("other",), None), lambda: make_function(repr, "x", (), None)):
        with pytest.raises((ValueError, AttributeError)):
            wrong()
