"""JAX's arrays on the CPU."""

from __future__ import annotations

import pytest
from support.launch import mpirun


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arrays(size: int) -> None:
    done = mpirun(size, "ci/integrations/jax_arrays.py", seconds=100)
    assert done.returncode == 0, done.stdout
    assert f"{size} ranks\n" in done.stdout
