"""DDP's built-in hook for float16, which needs values that only futures of C++ hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mpicoll.autoload import replace_once
from mpicoll.torch.groups import find_operations


def register_builtin_hook(original: Callable[..., Any], model: Any, kind: Any) -> None:
    """Register torch's hook in Python for float16 if the group of `model` is mpicoll's; else call `original`."""
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS and find_operations(model.process_group) is not None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(model.process_group, fp16_compress_hook)
    else:
        original(model, kind)


def extend_ddp() -> None:
    """Let DDP's method for built-in hooks call :func:`register_builtin_hook`."""
    replace_once(torch.nn.parallel.DistributedDataParallel, "_register_builtin_comm_hook", register_builtin_hook)
