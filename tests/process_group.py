"""torch's default process group, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    """The process group that the tests of a file run in: torch's own call and nothing else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
