"""Ignite, which makes the process group or takes the program's."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize(("size", "options"), [(2, []), (2, ["--first"]), (3, ["--first"])])
def test_training(size: int, options: list[str]) -> None:
    done = mpirun(size, "ci/integrations/ignite_training.py", *options, seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
