"""Accelerate, under mpirun and under torchrun."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launch import ROOT, mpirun

PROGRAM = "ci/integrations/accelerate_training.py"


@pytest.mark.parametrize(("size", "options"), [(2, []), (3, []), (2, ["--first"])])
def test_mpirun(size: int, options: list[str]) -> None:
    done = mpirun(size, PROGRAM, *options, seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout


def test_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM, "--first"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks\n" in done.stdout
