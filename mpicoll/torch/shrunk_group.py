"""Process groups that c10d makes in ``shrink_group``."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.torch.groups import find_operations

_CREATE = "_create_shrunk_process_group"

_replaced: dict[str, object] = {}
"""The replacement of torch's function."""


def correct_type() -> None:
    """Give groups of mpicoll that c10d makes of survivors the type of a custom backend.

    c10d takes every backend of a shrunk group for gloo or NCCL, and C++ code such as DDP's casts it to that class.
    """
    original = getattr(c10d, _CREATE)
    if original is _replaced.get(_CREATE):
        return

    @functools.wraps(original)
    def create(new_backend: Any, *args: Any, **kwargs: Any) -> Any:
        group = original(new_backend, *args, **kwargs)
        if find_operations(group) is not None:
            custom = dist.ProcessGroup.BackendType.CUSTOM
            for device in group._device_types:
                group._register_backend(device, custom, new_backend)
            group._set_default_backend(custom)
        return group

    setattr(c10d, _CREATE, create)
    _replaced[_CREATE] = create
