"""mpi4py.futures."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize("size", [2, 3])
def test_tasks_between_collectives(size: int) -> None:
    done = mpirun(size, "ci/integrations/futures_tasks.py", seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
