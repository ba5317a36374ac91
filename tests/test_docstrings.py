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


JOBS = ["SpawnError", "spawn"]

OTHERS = sorted({*mpicoll.__all__} - {*FUNCTIONS, *JOBS, "schedules"})


def run_example(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(
        inspect.unwrap(getattr(mpicoll, name)), name, globs={"mpicoll": mpicoll, "np": np}
    )
    assert test.examples, f"{name} has no example"
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", FUNCTIONS + OTHERS)
def test_examples(name: str) -> None:
    """The results on one rank are those that the docstring shows."""
    mpicoll.run_local(run_example, 1, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_examples_that_start_a_job(name: str) -> None:
    run_example(name)


REFERENCE = """
import doctest, inspect, sys
sys.path.insert(0, sys.argv[1])
from importlib import import_module
import numpy as np, torch
import mpicoll, mpicoll.parallel
import mpicoll.parallel.data_parallel.elastic, mpicoll.torch.autograd
import mpicoll.torch as dist
from assemble import API, find_documentation, list_sections

runner = doctest.DocTestRunner()

def run(text, name):
    "Run the examples of one name in a namespace of their own; return how many there were."
    names = {"mpicoll": mpicoll, "np": np, "torch": torch, "dist": dist}
    test = doctest.DocTestParser().get_doctest(text or "", names, name, None, None)
    if test.examples:
        assert runner.run(test).failed == 0
    return len(test.examples)

run(inspect.getdoc(dist.init_process_group), "init_process_group")
# These have another test of their examples, tests/parallel/test_names.py, and those of mpicoll itself test_examples.
elsewhere = {*mpicoll.parallel.__all__} - {"parameter_server", "pipeline"}
without, ran = [], 0
for module in API:
    owner = import_module(module)
    names = [name for section in list_sections(module).values() for name in section]
    for name in names:
        value = getattr(owner, name)
        if module == "mpicoll" or name == "init_process_group":
            continue
        if value is getattr(mpicoll.parallel, name, None) and name in elsewhere:
            continue
        found = run(find_documentation(module, name), module + "." + name)
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
