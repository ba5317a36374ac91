"""Devices of a process group, and the CUDA device of a rank where the program does not choose one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mpicoll.engine.world import world


def register_devices() -> None:
    """Register with c10d the devices that the backend "mpicoll" supports in this process.

    Functions that query c10d for the devices prefer a device other than the CPU: without CUDA, ShardedTensor.gather
    would create CUDA tensors. CUDA can't be queried yet when the backend is registered, which is when torch is
    imported.
    """
    dist.Backend.backend_capability["mpicoll"] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def select_device(device_id: Any = None) -> None:
    """Set this thread's current CUDA device to `device_id`, a ``torch.device`` or an index.

    If `device_id` is None, take the device whose index is the rank's number on its node, modulo the number of devices.
    Do nothing if there is no CUDA, or if CUDA is initialized, since the program has then chosen a device. The setting
    takes effect when CUDA is first used, so that a program that never uses CUDA gets no context on a device. A later
    ``torch.cuda.set_device`` of the program overrides it.
    """
    if torch.cuda.is_initialized() or not torch.cuda.is_available():
        return
    if device_id is None:
        index = world().local_rank % torch.cuda.device_count()
    else:
        index = device_id if isinstance(device_id, int) else device_id.index
    if index:  # 0 is torch's default
        # torch.cuda.set_device would create a context immediately.
        torch.cuda._lazy_call(lambda: torch.cuda.set_device(index))
