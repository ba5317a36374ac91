"""Ranks that are Ray's actors, which the program makes or Ray Train does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT

SECONDS = 250
"""Ray starts up to a dozen processes of Python."""


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("kind", ["actors", "trainer"])
def test_training(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "ci/integrations/ray_training.py", kind, "2", str(tmp_path)]
    # Its parts trust each other on this machine, and nothing is reported to Ray's authors.
    environ = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks\n" in done.stdout
