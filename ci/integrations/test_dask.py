"""A cluster of dask-mpi, whose tasks call collectives of mpicoll."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize("size", [3, 4])
def test_tasks_call_collectives(size: int) -> None:
    done = mpirun(size, "ci/integrations/dask_tasks.py", seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
