"""The docstrings of the public functions of collectives: their examples run, and they describe each argument."""

from __future__ import annotations

import doctest
import inspect
import re

import numpy as np
import pytest

import mpicoll

FUNCTIONS = sorted(
    name
    for name in mpicoll.__all__
    if inspect.isfunction(value := getattr(mpicoll, name)) and value.__module__.startswith("mpicoll.collectives.")
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples(name: str) -> None:
    """The results on one rank are those that the docstring shows."""
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(getattr(mpicoll, name), name, globs={"mpicoll": mpicoll, "np": np})
    assert test.examples, f"{name} has no example"
    failures: list[str] = []
    mpicoll.run_local(lambda: doctest.DocTestRunner().run(test, out=failures.append), 1)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments(name: str) -> None:
    """The docstring describes the arguments in their order, or refers to the function that has the same."""
    function = getattr(mpicoll, name)
    text = inspect.getdoc(function)
    assert text is not None
    same = re.search(r"with the same\s+arguments", text)
    arguments = re.search(r"^Args:\n(.*?)\n\n(?=\S)", text, re.DOTALL | re.MULTILINE)
    assert (same is None) != (arguments is None)
    if arguments is not None:
        described = re.findall(r"^    (\w+): ", arguments[1], re.MULTILINE)
        assert described == list(inspect.signature(function).parameters)
