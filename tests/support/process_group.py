"""torch's default process group, for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicoll.autoload import loads_backends
from mpicoll.torch.groups import find_operations

ORDERED = "sort_ranks" in signature(dist.new_group).parameters
"""True if this torch supports groups whose ranks are not in ascending order."""

BACKEND = loads_backends()
"""True if c10d's own process group calls a backend of mpicoll; False if mpicoll's process group replaces it."""

by_torch = pytest.mark.skipif(BACKEND, reason="torch's process group does this by itself")

in_given_order = pytest.mark.skipif(not ORDERED, reason="torch makes groups in other orders from 2.13 on")

barrier_has_timeout = pytest.mark.skipif(
    "timeout" not in signature(dist.barrier).parameters, reason="torch's barrier has a timeout from 2.13 on"
)


def operations(group: Any = None) -> Any:
    """Return what mpicoll runs for `group`, by default the default group."""
    return find_operations(dist.group.WORLD if group is None else group)


@cache
def gloo_has_alltoall() -> bool:
    """Return True if gloo has the exchange of lists, which it has from a later version of torch on."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    try:
        group.alltoall([torch.empty(1)], [torch.ones(1)]).wait()
    except RuntimeError:
        return False
    return True


# The newest names are what the tests call these by.
for _new, _old in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")):
    if not hasattr(dist, _new):
        setattr(dist, _new, getattr(dist, _old))


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    """The process group that the tests of a file run in: torch's own call and nothing else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
