"""Training goes on when ranks are killed, and no step is lost or counted twice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.launch import ROOT, mpirun

DIGITS = ROOT / "examples" / "resilient_digits.py"
HELPERS = ROOT / "examples" / "data_parallel.py"
DDP = ROOT / "examples" / "resilient_ddp.py"
ULFM = ("--with-ft", "ulfm")
SAMPLES = 1347
EPOCHS = 3

# Most of it is the import of torch and scikit-learn, on more ranks than cores.
pytestmark = pytest.mark.timeout(240)


def run(script: Path, path: Path, deaths: dict[int, int], *arguments: str, size: int = 4, warm: bool = True) -> float:
    """The accuracy, after the ledger was found to be right."""
    kill = ["--kill", *map(str, deaths), "--at", *map(str, deaths.values())] if deaths else []
    command = ("--epochs", str(EPOCHS), "--save", path, *kill, *arguments)
    done = mpirun(size, script, *command, seconds=120, options=ULFM if deaths else (), warm=warm)
    assert done.returncode == 0, done.stdout
    steps = EPOCHS * -(-SAMPLES // 64)
    left = size - len(deaths)
    ledger = f"{size} ranks began, {left} were left after {steps} steps on {EPOCHS * SAMPLES} samples"
    assert ledger in done.stdout, done.stdout
    assert (re.search("ha(s|ve) died", done.stdout) is not None) == bool(deaths)
    match = re.search(r"test accuracy ([\d.]+)%", done.stdout)
    assert match is not None, done.stdout
    return float(match[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, np.ndarray], float]:
    path = tmp_path_factory.mktemp("digits") / "alone.npz"
    correct = run(DIGITS, path, {}, size=1)
    with np.load(path) as saved:
        return dict(saved), correct


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "every"),
    [
        ({3: 0, 0: 20, 1: 65}, 1),  # in the first step and in the last, after which nobody is left but one
        ({0: 30, 2: 30}, 1),  # at the same time
        ({2: 21, 3: 40, 0: 53}, 5),  # soon after the state was copied, just then, and some steps later
    ],
)
def test_digits(
    deaths: dict[int, int], every: int, undisturbed: tuple[dict[str, np.ndarray], float], tmp_path: Path
) -> None:
    path = tmp_path / "left.npz"
    expected, correct = undisturbed
    assert run(DIGITS, path, deaths, "--every", str(every)) == correct
    with np.load(path) as saved:
        for name, value in saved.items():
            # In float64; what differs is the order in which gradients are added.
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("script", [DIGITS, DDP], ids=lambda script: script.stem)
def test_it_imports_what_it_needs(script: Path, tmp_path: Path) -> None:
    assert run(script, tmp_path / "saved", {}, size=1, warm=False) > 90


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    """First rank 0 dies, then one that has been through that."""
    alone, path = tmp_path / "alone.pt", tmp_path / "left.pt"
    correct = run(DDP, alone, {}, size=1)
    expected = torch.load(alone)
    assert run(DDP, path, {0: 20, 2: 33}, size=3) == correct
    for name, value in torch.load(path).items():
        # Adam divides by the root of what may be close to nothing, so rounding shows more.
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


@pytest.mark.slow
def test_data_parallel_helpers() -> None:
    """Rank 0 dies in an epoch, in the backward pass or while others wait; the others begin the epoch again."""
    command = ("--epochs", "4", "--kill", "0", "--at", "2", "--compression", "top-k")
    done = mpirun(3, HELPERS, *command, seconds=120, options=ULFM, warm=True)
    assert done.returncode == 0, done.stdout
    match = re.search(r"2 ranks, compression top-k, ([\d,]+) bytes .*, epoch 4: loss 0\.\d+\n.* ([\d.]+)%", done.stdout)
    assert match is not None, done.stdout
    # A tenth of 4,810 parameters, with indices.
    assert int(match[1].replace(",", "")) == pytest.approx(481 * 8, abs=16)
    assert float(match[2]) > 90
