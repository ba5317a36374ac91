"""Creation of process groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpicoll.torch import c10d_collectives, callback_comms, fast_path, group_operations, sparse, work
from mpicoll.torch.group_members import create_communicator
from mpicoll.torch.group_operations import NAME
from mpicoll.torch.legacy import mixed_process_group, process_group
from mpicoll.torch.legacy.c10d_frames import find_c10d_variables
from mpicoll.torch.legacy.mixed_process_group import MixedProcessGroup, create_other_backends
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll
from mpicoll.torch.no_compile import disable_compile_in

_HELPER = "_new_process_group_helper"


disable_compile_in(
    process_group,
    c10d_collectives,
    callback_comms,
    mixed_process_group,
    group_operations,
    fast_path,
    sparse,
    work,
)


def create(options: Any, backend_options: Any) -> ProcessGroupMpicoll:
    """Create the process group for torch's `options` (``_DistributedBackendOptions``). Collective over the group.

    Raises SetupError if MPI has fewer ranks than the group.
    """
    comm = create_communicator(options)
    backends = _find_backends()
    if set(backends.values()) == {NAME}:
        return ProcessGroupMpicoll(comm, options.store, options.timeout)
    others = create_other_backends(backends, _find_unfinished_group(), options, backend_options)
    return MixedProcessGroup(comm, options.store, options.timeout, others)


def _find_backends() -> Mapping[str, str]:
    """Return the backends by device.

    c10d passes to a backend neither its own devices nor the backends of the other devices. A Python process group
    replaces all of them, so it needs both.
    """
    config = find_c10d_variables(_HELPER).get("backend_config")
    return {"cpu": NAME} if config is None else config.get_device_backend_map()


def _find_unfinished_group() -> Any:
    """Return the group that c10d is creating, with the backends that precede mpicoll."""
    return find_c10d_variables(_HELPER).get("pg")
