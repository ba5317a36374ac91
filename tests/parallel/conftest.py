"""The ranks that a test body runs on, and torch's default process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import ranks, several, some, some_more

__all__ = ["default_group", "ranks", "several", "some", "some_more"]


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    """The process group that the tests of a file run in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
