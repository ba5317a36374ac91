"""torch's own features on the default process group, one process group per file.

The same tests run on another backend where PYTEST_TORCH_BACKEND names it, which tells a wrong test from a wrong
backend. gloo needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT then.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def backend() -> str:
    """What the default process group is made of."""
    return os.environ.get("PYTEST_TORCH_BACKEND", "mpicoll")


@pytest.fixture(scope="module", autouse=True)
def default_group(backend: str) -> Iterator[None]:
    """The process group that these tests run in: all they do for the backend is to name it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


def _skip_unless(fits: Callable[[int], bool], what: str) -> Callable[[], None]:
    @pytest.fixture
    def check() -> None:
        if not fits(dist.get_world_size()):
            pytest.skip(f"needs {what}")

    return check


two_ranks = _skip_unless(lambda size: size == 2, "two ranks exactly, for its time")
several_ranks = _skip_unless(lambda size: size > 1, "at least two ranks")
four_ranks = _skip_unless(lambda size: size == 4, "four ranks, for a mesh of 2x2")


def _shared_folder() -> Iterator[Path]:
    """An empty folder, the same on all ranks. pytest's own would be one per rank."""
    path = [tempfile.mkdtemp(prefix="unchanged-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, src=0)
    yield Path(path[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


folder = pytest.fixture(_shared_folder)
module_folder = pytest.fixture(_shared_folder, scope="module")
