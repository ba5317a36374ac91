"""Registration of the backend "mpicoll" with torch: torch calls :func:`register` and :func:`register_backend`.

Versions of torch in which c10d loads a backend when a program names it call :func:`register_backend` then. Where c10d
does not, :mod:`mpicoll.legacy_autoload` replaces some of its functions when torch is imported. No other module of
mpicoll is imported before a program names the backend, unless torch is such an older version.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

_MAX_FRAMES = 4
"""Calls between ``init_process_group`` and the handler of ``env://``."""

_MARK = "_is_of_mpicoll"
"""Attribute of functions that replace torch's."""


def register() -> None:
    """Let ``init_process_group("mpicoll")`` take rank, size and store from MPI. Called when torch is imported.

    Takes negligible time, imports neither MPI nor numpy, and never raises.
    """
    try:
        if not loads_backends():
            import_module("mpicoll.legacy_autoload").register()
        else:
            _extend_rendezvous()
    except Exception:
        logging.getLogger("mpicoll").debug("the backend could not be registered with torch", exc_info=True)


def register_backend() -> None:
    """Register the backend. Do nothing if it is registered already, or if torch has no torch.distributed."""
    import torch
    import torch.distributed as dist

    if not loads_backends():
        import_module("mpicoll.legacy_autoload").register_backend()
    elif "MPICOLL" not in dist.Backend._plugins:
        _extend_rendezvous()
        # is_available() would initialise CUDA, which forked processes could not use then.
        devices = ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]
        dist.Backend.register_backend("mpicoll", _create_backend, extended_api=True, devices=devices)


def loads_backends() -> bool:
    """Return True if c10d loads backends by their entry points, and calls the methods of backends in Python."""
    import torch.distributed as dist

    if not dist.is_available() or not hasattr(dist.Backend, "_ensure_backend_registered"):
        return False
    # A class of C++ without a constructor can't have subclasses in Python.
    return "__init__" in vars(import_module("torch._C._distributed_c10d").Backend)


def _create_backend(options: Any, backend_options: Any) -> Any:
    """Create the backend of a process group. Called by torch."""
    return import_module("mpicoll.torch.backend").create(options, backend_options)


def _extend_rendezvous() -> None:
    """Replace torch's handler of ``env://``, the only one that c10d calls without an address from the program.

    c10d calls it before it loads the backend. Calls for other backends are passed on.
    """

    def rendezvous(original: Callable[..., Any], url: str, **kwargs: Any) -> Any:
        if _is_for_mpicoll(sys._getframe(1)):
            return import_module("mpicoll.torch.rendezvous_handler").rendezvous(original, url, **kwargs)
        return original(url, **kwargs)

    replace_once(import_module("torch.distributed.rendezvous")._rendezvous_handlers, "env", rendezvous)


def replace_once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace the function of this `name` of `owner`, a dictionary or an object, by `function`, which receives the
    original function and the arguments of the call. Do nothing if that, or what others have made of it, is there."""
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    if hasattr(original, _MARK):
        return

    # Wrappers that others make by functools.wraps have the mark too.
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(replacement, _MARK, True)
    if isinstance(owner, dict):
        owner[name] = replacement
    else:
        setattr(owner, name, replacement)


def _is_for_mpicoll(frame: FrameType | None) -> bool:
    """Return True if ``init_process_group`` calls with a backend of mpicoll, which it does not pass on."""
    for _ in range(_MAX_FRAMES):
        if frame is not None and frame.f_code.co_name == "init_process_group":
            return "mpicoll" in str(frame.f_locals.get("backend")).lower()
        frame = None if frame is None else frame.f_back
    return False
