"""Process groups whose devices are served by different backends, as in ``cpu:mpicoll,cuda:nccl``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import DeviceError, SetupError
from mpicoll.torch.group_operations import NAME
from mpicoll.torch.legacy.c10d_short_forms import to_full_form
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll


def create_other_backends(
    backends: Mapping[str, str], unfinished: Any, options: Any, backend_options: Any
) -> dict[str, Any]:
    """Return the `backends` other than mpicoll, by device.

    These are the backends that c10d has already added to the `unfinished` group, and new backends for the remaining
    devices. Raises SetupError for a backend that is not available.
    """
    found: dict[str, Any] = {}
    created = True
    for device, name in backends.items():
        if name == NAME:
            created = False  # c10d creates the backends in order, and stops at the first device of mpicoll
        elif created:
            found[device] = unfinished._get_backend(torch.device(device))
        else:
            found[device] = _create_backend(device, name, options, backend_options)
    return found


def _create_backend(device: str, name: str, options: Any, backend_options: Any) -> Any:
    store = dist.PrefixStore(f"beside/{device}/", options.store)
    rank, size = options.group_rank, options.group_size
    if name == dist.Backend.GLOO and dist.is_gloo_available():
        made: Any = c10d.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    elif name == dist.Backend.NCCL and dist.is_nccl_available():
        settings = backend_options or c10d.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        made = c10d.ProcessGroupNCCL(store, rank, size, settings)
    elif name.upper() in dist.Backend._plugins:
        plugin = dist.Backend._plugins[name.upper()]
        if plugin.extended_api:
            made = plugin.creator_fn(options, backend_options)
        else:
            made = plugin.creator_fn(store, rank, size, options.timeout)
    else:
        raise SetupError(f"{device}:{name}: this torch has no backend {name!r}; choose another one for {device}")
    if name in (dist.Backend.GLOO, dist.Backend.NCCL):
        made._set_sequence_number_for_group()
    return made


_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods that are dispatched by the device of their first tensor."""

_P2P_METHODS = ("send", "recv", "recv_anysource")


class MixedProcessGroup(ProcessGroupMpicoll):
    """Process group that dispatches calls to the backend of the tensors' device."""

    serves_all_devices = False

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta, others: Mapping[str, Any]) -> None:
        super().__init__(comm, store, timeout)
        self._others = dict(others)

    @property
    def _device_types(self) -> list[torch.device]:
        return list(dict.fromkeys([*super()._device_types, *map(torch.device, self._others)]))

    def _get_backend(self, device: torch.device) -> Any:
        return self._others.get(device.type, self)

    def _find_method(self, device: torch.device, method: str) -> Callable[..., Any] | None:
        """Return the method of the backend that serves `device`; None if that is mpicoll."""
        other = self._others.get(device.type)
        if other is None:
            return None
        found: Callable[..., Any] | None = getattr(other, method, None) or getattr(
            other, _OLD_NAMES.get(method, ""), None
        )
        if found is None:
            raise DeviceError(f"{method}: the backend of {device.type} tensors ({other.name()}) does not implement it")
        return found

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        device = getattr(opts, "device", None)
        method = None if device is None else self._find_method(device, "barrier")
        return super().barrier(opts, timeout) if method is None else method(opts)

    def _start_coalescing(self, device: torch.device) -> None:
        method = self._find_method(device, "_start_coalescing")
        if method is None:
            super()._start_coalescing(device)
        else:
            method()

    def _end_coalescing(self, device: torch.device) -> Any:
        method = self._find_method(device, "_end_coalescing")
        return super()._end_coalescing(device) if method is None else method()

    def set_timeout(self, timeout: timedelta) -> None:
        for other in self._others.values():
            other._set_default_timeout(timeout)
        super().set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        for other in self._others.values():
            other.shutdown()
        super().shutdown()

    def abort(self) -> None:
        for other in self._others.values():
            other.abort()
        super().abort()


_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names on backends of methods that have a newer name on process groups."""


def _dispatch_by_device(name: str) -> Callable[..., Any]:
    own_method = getattr(ProcessGroupMpicoll, name)

    @functools.wraps(own_method)
    def call(self: MixedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if name not in _P2P_METHODS:
            args, kwargs = to_full_form(name, args, kwargs), {}
        tensor = _find_tensor([*args, *kwargs.values()])
        method = None if tensor is None else self._find_method(tensor.device, name)
        return own_method(self, *args, **kwargs) if method is None else method(*args, **kwargs)

    return call


for _name in _METHODS:
    _method = _dispatch_by_device(_name)
    setattr(MixedProcessGroup, _name, _method)
    if _name in _OLD_NAMES:
        setattr(MixedProcessGroup, _OLD_NAMES[_name], _method)


def _find_tensor(args: Any) -> torch.Tensor | None:
    for one in args:
        found = one if isinstance(one, torch.Tensor) else _find_tensor(one) if isinstance(one, (list, tuple)) else None
        if found is not None:
            return found
    return None
