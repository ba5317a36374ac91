"""The docstrings of the public names: their examples run, and those of collectives describe each argument."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mpicoll

FUNCTIONS = sorted(
    name
    for name in mpicoll.__all__
    if inspect.isroutine(value := getattr(mpicoll, name)) and value.__module__.startswith("mpicoll.collectives.")
)


OTHERS = sorted(
    name
    for name in mpicoll.__all__
    if callable(value := getattr(mpicoll, name))
    and name not in FUNCTIONS
    and not (inspect.isclass(value) and issubclass(value, Exception))
    and name != "spawn"  # it starts a job
)


@pytest.mark.parametrize("name", FUNCTIONS + OTHERS)
def test_examples(name: str) -> None:
    """The results on one rank are those that the docstring shows."""
    finder = doctest.DocTestFinder(recurse=False)
    value = inspect.unwrap(getattr(mpicoll, name))
    (test,) = finder.find(value, name, globs={"mpicoll": mpicoll, "np": np})
    assert test.examples, f"{name} has no example"
    failures: list[str] = []
    mpicoll.run_local(lambda: doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failures.append), 1)
    assert not failures, "".join(failures)


TORCH = """
import doctest, sys, torch
import mpicoll.torch as dist
dist.init_process_group()
names = "all_reduce broadcast all_gather_into_tensor reduce_scatter_tensor all_to_all_single barrier send"
for name in names.split():
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(dist, name), name, globs={"torch": torch, "dist": dist})
    assert test.examples, name
    assert doctest.DocTestRunner().run(test).failed == 0
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_examples_of_the_functions_that_bypass_c10d() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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


def test_summaries() -> None:
    """They begin with a verb or a noun; ruff's D401 finds other moods than the imperative."""
    found = []
    for path in Path(mpicoll.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                if re.match(r"(What|Who|Whom|How|Whether|Which|Where|When|Why)\b", text):
                    found.append(f"{path.name}:{node.lineno}: {text.splitlines()[0]}")
    assert not found
