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


REFERENCE = """
import doctest, inspect, sys
sys.path.insert(0, sys.argv[1])
from importlib import import_module
import numpy as np, torch
import mpicoll, mpicoll.parallel
import mpicoll.parallel.data_parallel.elastic, mpicoll.torch.autograd
import mpicoll.torch as dist
from assemble import API, list_sections

runner = doctest.DocTestRunner()

def run(value, name):
    "Run the examples of one name in a namespace of their own; return how many there were."
    (test,) = doctest.DocTestFinder(recurse=False).find(
        inspect.unwrap(value), name, globs={"mpicoll": mpicoll, "np": np, "torch": torch, "dist": dist}
    )
    if test.examples:
        assert runner.run(test).failed == 0
    return len(test.examples)

run(dist.init_process_group, "init_process_group")
# These and the exceptions have other tests of their examples: test_examples, and tests/parallel/test_names.py.
elsewhere = {*mpicoll.parallel.__all__} - {"parameter_server", "pipeline"}
without, ran = [], 0
for module in API:
    owner = import_module(module)
    names = [name for section in list_sections(module).values() for name in section]
    for name in names:
        value = getattr(owner, name)
        if module == "mpicoll" or not callable(value) or name == "init_process_group":
            continue
        if value is getattr(mpicoll.parallel, name, None) and name in elsewhere:
            continue
        found = run(value, module + "." + name)
        ran += found > 0
        if not found:
            without.append(module + "." + name)
assert not without, f"no example: {without}"
assert ran > 70, ran
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_examples_of_the_other_modules_of_the_reference() -> None:
    """Every name has one, and shows what it gives on one rank, or on ranks as threads."""
    folder = str(Path(__file__).parents[1] / "ci" / "docs")
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, folder], capture_output=True, text=True, timeout=120, check=False
    )
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
