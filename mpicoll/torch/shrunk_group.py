"""Process groups that c10d makes in ``shrink_group``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.autoload import replace_once
from mpicoll.torch.groups import find_operations


def correct_type() -> None:
    """Give groups of mpicoll that c10d makes of survivors the type of a custom backend.

    c10d takes every backend of a shrunk group for gloo or NCCL, and C++ code such as DDP's casts it to that class.
    """
    replace_once(c10d, "_create_shrunk_process_group", _create)


def _create(original: Callable[..., Any], new_backend: Any, *args: Any, **kwargs: Any) -> Any:
    group = original(new_backend, *args, **kwargs)
    if find_operations(group) is not None:
        custom = dist.ProcessGroup.BackendType.CUSTOM
        for device in group._device_types:
            group._register_backend(device, custom, new_backend)
        group._set_default_backend(custom)
    return group
