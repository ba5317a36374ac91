"""Makes torch know mpicoll: torch calls :func:`register` when it is imported, if mpicoll is installed.

Everything that takes time, or could go wrong, waits until a process group is made. Where c10d has no door for a backend
of others, the functions in ``_DOORS`` are led through ours, which pass on whatever does not concern mpicoll.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_NAMES = ("mpicoll", "mpi")
"""What the backend is called. "mpi" is ours only in a torch that was built without MPI."""

_DOORS = (
    "init_process_group",
    "new_group",
    "monitored_barrier",
    "split_group",
    "_set_pg_timeout",
    "_maybe_attach_flight_recorder",
)
"""Where this torch has them."""

_BACKEND = {"init_process_group": 0, "new_group": 2}
"""Functions that are told a backend, and as which of their arguments."""


def register() -> None:
    """Register the backend with torch.distributed; instant, imports neither MPI nor numpy, and never raises."""
    try:
        enroll()
    except Exception:
        logging.getLogger("mpicoll").debug("the backend could not be registered with torch", exc_info=True)


def enroll() -> None:
    """Register the backend, or do nothing if it is registered already, or torch has no torch.distributed."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "MPICOLL"):
        return
    from torch.distributed import distributed_c10d as c10d

    for name in _DOORS:
        if hasattr(c10d, name):
            door = _door(name, getattr(c10d, name))
            for module in (c10d, dist):
                if hasattr(module, name):
                    setattr(module, name, door)
    method = "_register_builtin_comm_hook"
    ddp = torch.nn.parallel.DistributedDataParallel
    setattr(ddp, method, _door(method, getattr(ddp, method)))
    if not c10d.is_mpi_available():
        _take_over_mpi(c10d)
    c10d.Backend.register_backend("mpicoll", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    """What torch calls for a new process group."""
    return import_module("mpicoll.torch.creation").create(options, backend_options)


def _door(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def door(*args: Any, **kwargs: Any) -> Any:
        place = _BACKEND.get(name)
        backend = None if place is None else args[place] if len(args) > place else kwargs.get("backend")
        # Unless a process group of ours is asked for, or there may be one, mpicoll must not even be in the way.
        if names_mpicoll(backend) or (place is None and "mpicoll.torch.backend" in sys.modules):
            return getattr(import_module("mpicoll.torch.doors"), name)(original, *args, **kwargs)
        return original(*args, **kwargs)

    return door


def names_mpicoll(backend: Any) -> bool:
    """Whether the name of a backend asks for mpicoll: ``mpicoll``, ``mpi``, or ``cpu:mpicoll,cuda:nccl``."""
    import torch.distributed as dist

    parts = [part.rpartition(":")[2] for part in backend.lower().split(",")] if isinstance(backend, str) else []
    return any(part in _NAMES and dist.Backend(part) == "mpicoll" for part in parts)


def _take_over_mpi(c10d: ModuleType) -> None:
    """Let "mpi" mean mpicoll wherever torch reads the name of a backend."""
    plain = c10d.Backend.__new__

    def named(cls: type[Any], name: Any) -> Any:
        value = plain(cls, name)
        return "mpicoll" if value == "mpi" else value

    c10d.Backend.__new__ = staticmethod(named)
    setattr(c10d, "_MPI_AVAILABLE", True)  # noqa: B010  it is no name that mypy knows
