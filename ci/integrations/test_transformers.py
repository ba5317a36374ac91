"""The Trainer of Transformers: the ranks find the losses and the weights of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT, mpirun

PROGRAM = "ci/integrations/transformers_training.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process has found."""
    file = tmp_path_factory.mktemp("alone") / "found.pt"
    command = [sys.executable, PROGRAM, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return file


@pytest.mark.parametrize("options", [[], ["--first"]])
def test_mpirun(alone: Path, options: list[str]) -> None:
    done = mpirun(2, PROGRAM, alone, *options, seconds=100)
    assert done.returncode == 0, done.stdout
    assert "2 ranks\n" in done.stdout


def test_torchrun(alone: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM]
    command += [str(alone), "--first"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks\n" in done.stdout
