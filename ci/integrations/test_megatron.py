"""Megatron-core's tensor parallel layers: losses, gradients and weights are those of one process."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize(
    ("size", "width", "options"), [(2, 2, []), (2, 2, ["--mappings"]), (3, 3, ["--mappings"]), (4, 2, [])]
)
def test_training(size: int, width: int, options: list[str]) -> None:
    done = mpirun(size, "ci/integrations/megatron_training.py", str(width), *options, seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
