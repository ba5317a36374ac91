"""Process group of mpicoll for versions of torch in which a backend in Python replaces c10d's process group.

The names and arguments of the methods are those that c10d uses; it calls some of them from C++ and others from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, BarrierOptions

from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.torch.group_operations import NAME, GroupOperations
from mpicoll.torch.legacy.c10d_short_forms import accept_short_forms, to_full_form
from mpicoll.torch.work import Work


class ProcessGroupMpicoll(GroupOperations, dist.ProcessGroup):
    """Torch process group on an mpicoll communicator."""

    __reduce_ex__ = refuse_pickling(
        "process group",
        "pass on its ranks, torch.distributed.get_process_group_ranks(group), and call new_group(ranks) on all ranks",
    )

    # c10d reads these attributes of a device's backend, which here is the group itself.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, comm: Communicator, store: dist.Store, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, comm.rank, comm.size)
        self._store = store
        self._rank, self._size = comm.rank, comm.size
        self._group_name = self._group_desc = ""
        self.set_communicator(comm, "", timeout)

    # Names, store, devices and options of the group.

    # c10d asks for both in most calls. C++ takes 1 us to find out that this class does not override getRank.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name
        # torch names a group right after creating it, before any operation can start on it.
        self.set_name(name)

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._group_desc = text

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        # torch sends its own data, such as objects, from the CPU if the CPU is listed here.
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group itself, which serves tensors of all its devices."""
        return self

    @property
    def options(self) -> Any:
        return torch._C._distributed_c10d.Backend.Options(NAME, timedelta(seconds=self.comm.timeout))

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def splitGroup(  # noqa: N802
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        devices: Any = None,
    ) -> ProcessGroupMpicoll | None:
        """Return a new group of `ranks` of this group; None on ranks that are not members. Collective."""
        comm = self.comm.group(ranks)
        if comm is None:
            return None
        store = dist.PrefixStore(f"split/{group_name}/", self._store)
        part = ProcessGroupMpicoll(comm, store, timeout or timedelta(seconds=self.comm.timeout))
        part.setGroupName(group_name or f"{self._group_name}:split")
        part.setGroupDesc(group_desc or f"{self._group_desc}:split")
        return part

    split_group = splitGroup

    def mergeRemoteGroup(self, *args: Any) -> Any:  # noqa: N802
        raise NotImplementedError(
            "merge_remote_group: an mpicoll group can't contain ranks of another MPI job; start all ranks in one job"
        )

    merge_remote_group = mergeRemoteGroup

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.run_monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.end_coalescing()

    # Collectives, in all the forms that torch's own groups accept.

    def allreduce(self, tensors: Any = None, opts: Any = None, *more: Any, **named: Any) -> Work | None:
        # A wrapper would double the time of the Python code of this call, which is the most frequent one.
        if named or type(opts) is not AllreduceOptions:
            tensors, opts = to_full_form("allreduce", (tensors, opts, *more), named)
        return GroupOperations.allreduce(self, tensors, opts)

    allreduce_coalesced = accept_short_forms(GroupOperations.allreduce_coalesced)
    broadcast = accept_short_forms(GroupOperations.broadcast)
    reduce = accept_short_forms(GroupOperations.reduce)
    allgather = accept_short_forms(GroupOperations.allgather)
    allgather_coalesced = accept_short_forms(GroupOperations.allgather_coalesced)
    all_gather_single = accept_short_forms(GroupOperations.all_gather_single)
    all_gather_single_coalesced = accept_short_forms(GroupOperations.all_gather_single_coalesced)
    gather = accept_short_forms(GroupOperations.gather)
    scatter = accept_short_forms(GroupOperations.scatter)
    reduce_scatter = accept_short_forms(GroupOperations.reduce_scatter)
    reduce_scatter_single = accept_short_forms(GroupOperations.reduce_scatter_single)
    reduce_scatter_single_coalesced = accept_short_forms(GroupOperations.reduce_scatter_single_coalesced)
    alltoall = accept_short_forms(GroupOperations.alltoall)
    all_to_all_single = accept_short_forms(GroupOperations.all_to_all_single)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work | None:
        if type(opts) is not BarrierOptions:
            (opts,) = to_full_form("barrier", (opts,), {"timeout": timeout})
        return GroupOperations.barrier(self, opts)

    # Older names that torch still uses.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def __repr__(self) -> str:
        return f"<ProcessGroupMpicoll {self._group_name}: rank {self.comm.rank} of {self.comm.size}>"
