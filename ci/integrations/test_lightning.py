"""Lightning's Fabric and Trainer, in Lightning's own environment for MPI."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize(("kind", "size"), [("fabric", 2), ("fabric", 3), ("trainer", 2), ("trainer", 3)])
def test_training(kind: str, size: int) -> None:
    done = mpirun(size, "ci/integrations/lightning_training.py", kind, str(size), seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
