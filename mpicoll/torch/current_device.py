"""Devices of a process group, and the CUDA device of a rank where the program does not choose one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mpicoll.engine.world import world


def declare() -> None:
    """Tell c10d for which devices the backend "mpicoll" stands in this process.

    What asks c10d for them takes a device other than the CPU if there is one: ShardedTensor.gather would make CUDA
    tensors where there is no CUDA. When torch is imported, where the backend is registered, it is too early to look.
    """
    dist.Backend.backend_capability["mpicoll"] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def settle(device_id: Any = None) -> None:
    """Let this thread's current CUDA device be `device_id` (a ``torch.device``, or an index) or, if that is None, the
    one of the rank's number on its node, modulo the number of devices.

    Nothing happens where there is no CUDA, or where it is in use: then the program has chosen already. The choice takes
    effect when CUDA is first used, so that a program that never does gets no context on a device; a program that calls
    ``torch.cuda.set_device`` by itself has its own.
    """
    if torch.cuda.is_initialized() or not torch.cuda.is_available():
        return
    if device_id is None:
        index = world().local_rank % torch.cuda.device_count()
    else:
        index = device_id if isinstance(device_id, int) else device_id.index
    if index:  # it is 0 by itself
        # torch.cuda.set_device would make a context at once.
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))
