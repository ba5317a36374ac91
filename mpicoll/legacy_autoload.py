"""Registration of the mpicoll backend with versions of torch that do not load backends by their entry points.

In a process that no MPI launcher started, torch is not changed until the program requests mpicoll: until then
:func:`register` only intercepts the names of backends. :func:`register_backend` registers the backend. If c10d has no
extension point that the backend needs, :func:`register_backend` replaces the functions in ``_PATCHED`` by wrappers,
which pass on every call that does not concern mpicoll.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mpicoll.backend_names import names_mpicoll
from mpicoll.transport import launch_env

_PATCHED = (
    "rendezvous",
    "_new_process_group_helper",
    "monitored_barrier",
    "split_group",
    "_set_pg_timeout",
    "_maybe_attach_flight_recorder",
)
"""Functions of c10d that are replaced, if this version of torch has them."""

_HELPER_BACKEND = 3
"""Index of the argument `backend` of ``_new_process_group_helper``."""

_GROUP_CREATORS = ("init_process_group", "_new_group_with_tag")
"""Functions of c10d that create process groups."""

_lock = threading.Lock()
_intercepted: tuple[Callable[..., Any], Callable[..., Any]] | None = None
"""Replacement of ``Backend.__new__``, and torch's original function."""


def register() -> None:
    """Register the backend with torch.distributed if an MPI launcher started this process.

    Otherwise defer the registration until the program names a backend of mpicoll. Takes negligible time, imports
    neither MPI nor numpy, and never raises.
    """
    try:
        if launch_env.is_started_by_mpi(os.environ):
            register_backend()
        else:
            _intercept_names()
    except Exception:
        logging.getLogger("mpicoll").debug("the backend could not be registered with torch", exc_info=True)


def register_backend() -> None:
    """Register the backend. Do nothing if it is registered already, or if torch has no torch.distributed."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    with _lock:
        if hasattr(c10d.Backend, "MPICOLL"):
            return
        _restore_names()
        for name in _PATCHED:
            original = getattr(c10d, name, None)
            if original is not None:
                wrapper = _make_patch(name, original)
                for module in (c10d, dist):
                    if getattr(module, name, None) is original:
                        setattr(module, name, wrapper)
        method = "_register_builtin_comm_hook"
        ddp = torch.nn.parallel.DistributedDataParallel
        setattr(ddp, method, _make_patch(method, getattr(ddp, method)))
        if launch_env.is_started_by_mpi(os.environ):
            # Not without a launcher: programs that find MPI available select it, and each process would be a world of
            # one rank.
            setattr(c10d, "_MPI_AVAILABLE", True)  # noqa: B010  mypy does not know the name
        c10d.Backend.register_backend("mpicoll", _create_process_group, extended_api=True, devices=["cpu", "cuda"])


def _create_process_group(options: Any, backend_options: Any) -> Any:
    """Create a process group. Called by torch."""
    return import_module("mpicoll.torch.legacy.group_creation").create(options, backend_options)


def _make_patch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name == "rendezvous":
            # It does not receive the backend, which is a local variable of its caller, init_process_group.
            ours = names_mpicoll(sys._getframe(1).f_locals.get("backend"))
        elif name == "_new_process_group_helper":
            ours = names_mpicoll(args[_HELPER_BACKEND] if len(args) > _HELPER_BACKEND else kwargs.get("backend"))
        else:
            ours = "mpicoll.torch.legacy.process_group" in sys.modules
        if ours:
            return getattr(import_module("mpicoll.torch.legacy.c10d_patches"), name)(original, *args, **kwargs)
        return original(*args, **kwargs)

    return wrapper


def is_mpicoll_available() -> bool:
    """Return True: the result of ``is_backend_available("mpicoll")`` also before the backend is registered."""
    return True


def _intercept_names() -> None:
    """Register the backend as soon as the program names it.

    Every function of c10d that takes the name of a backend first calls ``Backend`` with it. The name "mpi" counts only
    in calls from ``_GROUP_CREATORS``, since a program that only parses or compares the name does not create a group.
    """
    global _intercepted  # noqa: PLW0603  there is one torch
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    original = c10d.Backend.__new__

    @functools.wraps(original)
    def intercept(cls: type[Any], name: Any) -> Any:
        if names_mpicoll(name) and ("mpicoll" in name.lower() or sys._getframe(1).f_code.co_name in _GROUP_CREATORS):
            register_backend()
        return original(cls, name)

    _intercepted = intercept, original
    c10d.Backend.__new__ = staticmethod(intercept)  # type: ignore[method-assign]
    setattr(dist, is_mpicoll_available.__name__, is_mpicoll_available)


def _restore_names() -> None:
    from torch.distributed import distributed_c10d as c10d

    if _intercepted is not None and c10d.Backend.__new__ is _intercepted[0]:
        c10d.Backend.__new__ = staticmethod(_intercepted[1])  # type: ignore[method-assign]
