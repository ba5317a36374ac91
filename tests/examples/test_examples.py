"""The examples run, and do what they promise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.launch import ROOT, mpirun
from support.scripts import run_scripts

from mpicoll.extension import find_missing_reason

DIGITS = ROOT / "examples" / "digits.py"
HELLO = ROOT / "examples" / "hello.py"


def test_no_example_hides_a_package() -> None:
    """A folder or a script of a package's name would be imported in its place where that is not installed."""
    scripts = list((ROOT / "examples").rglob("*.py"))
    nodes = [node for path in scripts for node in ast.walk(ast.parse(path.read_text()))]
    imported = {name.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert {"numpy", "torch"} <= imported
    assert not imported & {path.stem for path in (ROOT / "examples").iterdir()}


def digits(size: int, *arguments: str | Path) -> str:
    done = mpirun(size, DIGITS, *arguments, warm=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def accuracy(output: str) -> float:
    match = re.search(r"test accuracy ([\d.]+)%", output)
    assert match is not None, output
    return float(match[1]) / 100


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The parameters that one rank without mpirun ends up with after 3 epochs, which are 66 steps."""
    return trained(tmp_path_factory.mktemp("reference") / "alone.npz", 0)


def trained(path: Path, size: int) -> dict[str, np.ndarray]:
    arguments = ("--epochs", "3", "--save", path)
    if size:
        digits(size, *arguments)
    else:
        subprocess.run([sys.executable, DIGITS, *arguments], check=True, timeout=60, capture_output=True, cwd=ROOT)
    with np.load(path) as saved:
        return dict(saved)


@pytest.mark.slow
@pytest.mark.parametrize("size", [*(pytest.param(one, marks=pytest.mark.long) for one in (1, 2, 4)), 3])
def test_digits_parameters_agree(size: int, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    """A batch of 64 can't be shared evenly by 3, and the last one, of 3 samples, leaves the fourth of 4 without any."""
    parameters = trained(tmp_path / "parameters.npz", size)
    assert parameters.keys() == reference.keys()
    for name, value in parameters.items():
        # Weights are of the order of 1, in float64; what differs is the order in which gradients are added.
        np.testing.assert_allclose(value, reference[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_digits_reaches_the_accuracy() -> None:
    output = digits(4)
    assert accuracy(output) > 0.95
    assert "4 ranks, 30 epochs" in output
    assert "\x1b" not in output, "no progress bar where nobody watches"


@pytest.mark.slow
def test_digits_refuses_nonsense() -> None:
    done = mpirun(1, DIGITS, "--epochs", "0", warm=True)
    assert done.returncode == 2
    assert "--epochs and --batch must be at least 1" in done.stdout


def sections(output: str) -> dict[str, list[str]]:
    """The lines below each title, by the title's first word."""
    titled = [part.splitlines() for part in output.strip().split("\n\n")]
    return {lines[0].split()[0].rstrip(":"): lines[1:] for lines in titled}


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 3, *(pytest.param(one, marks=pytest.mark.long) for one in (2, 4))])
def test_hello(size: int) -> None:
    if size:
        done = mpirun(size, HELLO)
        assert done.returncode == 0, done.stdout
        output = done.stdout
    else:
        output = subprocess.run(
            [sys.executable, HELLO], check=True, timeout=60, capture_output=True, text=True, cwd=ROOT
        ).stdout
    ranks = range(size or 1)
    total = len(ranks) * np.arange(3.0) + sum(ranks)
    expected = {
        "Ranks": [f"one of {len(ranks)}, number {rank} of {len(ranks)} on node 0" for rank in ranks],
        "allreduce": [f"{np.arange(3.0) + rank} -> {total}" for rank in ranks],
        "bcast": ["[7 7 7]" for _ in ranks],
        "allgather": [str([[rank, rank**2] for rank in ranks]) for _ in ranks],
        "sendrecv": [f"got {(rank - 1) % len(ranks)} from the left" for rank in ranks],
        "iallreduce": [
            f"my own sum is {3.0 + 3 * rank}, the maximum over all is {np.arange(3.0) + ranks[-1]}" for rank in ranks
        ],
        "allreduce_init": [f"after three runs: {np.full(2, float(len(ranks) ** 3))}" for _ in ranks],
        "A": [str([[1, sum(ranks) + len(ranks)], [0, 1]]) for _ in ranks],
    }
    found = sections(output)
    for title, lines in expected.items():
        assert found[title] == [f"  rank {rank}: {line}" for rank, line in enumerate(lines)]
    choose = found["Choose"]
    assert choose[: len(ranks)] == [f"  rank {rank}: {total}" for rank in ranks]
    in_memory = "shm_flat: " if find_missing_reason() is None else "native: "
    chosen = in_memory if size > 1 else "native: " if size else "recursive_doubling: not"
    assert choose[-2].startswith(f"  without a wish, {chosen}")
    assert choose[-1] == "  with a wish, tree: forced by `with algorithms`"
    assert "allreduce/ring on 3 ranks, 4 rounds" in output


BY_HAND = ROOT / "examples" / "allreduce_by_hand.py"


@pytest.mark.slow
@pytest.mark.parametrize("size", [*(pytest.param(one, marks=pytest.mark.long) for one in (2, 4, 5, 6)), 3])
def test_allreduce_by_hand(size: int) -> None:
    done = mpirun(size, BY_HAND, "--numbers", "1000", "--repeats", "3")
    assert done.returncode == 0, done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    *pictures, comparison, _ = re.split(r"\n\n(?=\S)", done.stdout)
    if size <= 5:
        steps = {"master-worker": 2 * (size - 1), "tree": 2 * (size - 1).bit_length(), "ring": 2 * (size - 1)}
        assert [picture.strip().partition(":")[0] for picture in pictures] == list(steps)
        for picture, count in zip(pictures, steps.values(), strict=True):
            last = picture.rpartition(f"step {count}\n")[2].splitlines()
            assert [re.findall(r"\b1+$", line) for line in last] == [["1" * size]] * size, picture
    laws = re.findall(r"(\S+) +equal +(\S+) N, law (\S+) N", comparison)
    assert [name for name, *_ in laws] == ["master-worker", "tree", "ring"], done.stdout
    # 1000 numbers can't be cut into equal chunks by each size.
    assert all(float(counted) == pytest.approx(float(law), abs=0.02) for _, counted, law in laws), done.stdout


NEEDING = [
    *("digits", "ddp_digits", "fsdp_gpt", "gpt_3d", "resilient_digits", "resilient_ddp", "data_parallel"),
    "parameter_server",
]


@pytest.mark.slow
def test_a_package_that_is_missing(tmp_path: Path) -> None:
    """One line says which, and how to get it; the docstring names the same packages."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules.update(dict.fromkeys(('rich', 'sklearn')))\n")
    scripts = [ROOT / "examples" / f"{name}.py" for name in NEEDING]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for script, end in zip(
        scripts, run_scripts(0, tmp_path, *([one] for one in scripts), warm=False, PYTHONPATH=path), strict=True
    ):
        assert end.statuses == [1], end
        match = re.fullmatch(r"(\w+\.py) needs \w+[\w.]*: (pip install .*)\n", end.printed[0])
        assert match is not None, end
        assert f"``{match[2]}``" in (script.with_name(match[1])).read_text()
