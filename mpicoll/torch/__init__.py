"""Drop-in replacement for torch.distributed, with mpicoll as its backend.

``import mpicoll.torch as dist`` has every name of torch.distributed. ``dist.init_process_group()`` selects mpicoll, and
under ``mpirun`` needs no arguments. The common collectives, send and recv bypass c10d for CPU tensors;
:mod:`mpicoll.torch.autograd` has differentiable collectives. ``torch.distributed.init_process_group("mpicoll")``, or
``"mpi"``, works as well, without importing this module.

Groups accept tensors on the CPU and on CUDA devices. If CUDA is not initialized yet, ``init_process_group`` makes
`device_id` the current device or, if that is not given, the device whose index is the rank's number on its node, modulo
the number of devices.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from mpicoll import autoload as _autoload
from mpicoll.backend_names import replace_mpi as _replace_mpi

if not _dist.is_available():
    raise ImportError("mpicoll.torch: this torch was built without torch.distributed; install another build of torch")
_autoload.register_backend()

from mpicoll.torch import autograd  # noqa: E402  the backend has to be there first
from mpicoll.torch.compression import CompressionState, compression_hook  # noqa: E402
from mpicoll.torch.ddp_buckets import share_buckets  # noqa: E402
from mpicoll.torch.dropin import (  # noqa: E402
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    recv,
    reduce,
    reduce_scatter_single,
    reduce_scatter_tensor,
    send,
)
from mpicoll.torch.groups import communicator  # noqa: E402
from mpicoll.torch.resilience import resilient  # noqa: E402


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Initialize the default process group.

    Args:
        backend: as of :func:`torch.distributed.init_process_group`, by default mpicoll. In a torch that was built
            without MPI, "mpi" means mpicoll too.
        args, kwargs: as of :func:`torch.distributed.init_process_group`. Under an MPI launcher, and under torchrun,
            none are needed.

    Raises:
        SetupError: another launcher started this process, and the environment has no address of rank 0; or MPI has
            fewer ranks than the group.
        ArgumentError: `rank` or `world_size` differs from MPI's value.

    Example:
        >>> import mpicoll.torch as dist
        >>> dist.init_process_group()
        >>> dist.get_world_size()  # on one rank
        1
    """
    _dist.init_process_group("mpicoll" if backend is None else _replace_mpi(backend), *args, **kwargs)


__all__ = [
    "CompressionState",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "autograd",
    "barrier",
    "broadcast",
    "communicator",
    "compression_hook",
    "init_process_group",
    "recv",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "resilient",
    "send",
    "share_buckets",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_dist, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_dist)})
