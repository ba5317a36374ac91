"""The ranks that a test body runs on, and torch's default process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from support.process_group import ORDERED, default_group
from support.ranks import ranks, several, some, some_more

__all__ = ["default_group", "groups", "ranks", "several", "some", "some_more"]


@pytest.fixture(scope="module")
def groups(default_group: None) -> dict[str, Any]:
    """Groups by name, as a caller passes them; NON_GROUP_MEMBER on ranks that are not in them.

    ``part`` lacks rank 0, ``reversed`` has all ranks in reversed order where torch can make such groups, ``one`` is
    each rank for itself.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    alone = [dist.new_group([other]) for other in everyone]
    return {
        "world": None,
        "part": dist.new_group(everyone[1:] or [0]),
        "reversed": dist.new_group(everyone[::-1], sort_ranks=False) if ORDERED else dist.new_group(everyone),
        "one": alone[rank],
    }
