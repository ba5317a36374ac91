"""Backend of c10d, for versions of torch that accept one in Python. c10d's own process group calls it.

The process group converts the forms of a call, dispatches by device, checks calls if TORCH_DISTRIBUTED_DEBUG=DETAIL is
set, and numbers groups: this class only has the operations, in c10d's full form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ErrorType, FakeWork
from torch.distributed.distributed_c10d import BarrierOptions

from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.world import can_connect_world, has_world
from mpicoll.errors import ArgumentError, CommunicatorError, RankFailed, SetupError, Timeout
from mpicoll.torch import group_operations, work, work_status
from mpicoll.torch.abort_hooks import AbortHooks
from mpicoll.torch.callback_comms import callback_context
from mpicoll.torch.current_device import select_device
from mpicoll.torch.ddp_hooks import extend_ddp
from mpicoll.torch.group_members import create_communicator
from mpicoll.torch.group_operations import NAME, GroupOperations
from mpicoll.torch.no_compile import disable_compile_in
from mpicoll.torch.shrunk_group import correct_type
from mpicoll.torch.tensor_pool import TensorPool
from mpicoll.wording import rank_list


def create(options: Any, backend_options: Any) -> BackendMpicoll:
    """Create the backend for torch's `options` (``_DistributedBackendOptions``). Collective over the group.

    Raises SetupError if MPI has fewer ranks than the group, or is not started and has ranks that don't call this.
    """
    if not can_connect_world():
        _check_start(options.global_ranks_in_group)
    comm = create_communicator(options)
    if not options.global_ranks_in_group:
        select_device(options.process_group.bound_device_id)
    work_status.forward()
    extend_ddp()
    return BackendMpicoll(comm, options.group_id, options.timeout)


def _check_start(ranks: Sequence[int]) -> None:
    """Raise SetupError if a group of `ranks` would start MPI, which waits for all ranks: c10d calls the members only.

    The default group, of no `ranks`, has all of them.
    """
    if ranks and len(ranks) < dist.get_world_size() and not has_world():
        raise SetupError(
            f"a process group of mpicoll of {rank_list(ranks)} can't start MPI, which waits for all"
            f" {dist.get_world_size()} ranks: call mpicoll.world() on all ranks before, or let the default group have"
            " mpicoll as a backend"
        )


_open: set[BackendMpicoll] = set()
"""Backends that are not shut down: with TORCH_DISTRIBUTED_DEBUG=DETAIL only C++ refers to them."""


class BackendMpicoll(GroupOperations, Backend):
    """Backend of a group whose operations run on an mpicoll communicator."""

    __reduce_ex__ = refuse_pickling(
        "backend",
        "pass on its ranks, torch.distributed.get_process_group_ranks(group), and call new_group(ranks) on all ranks",
    )

    # Those of torch's own class ask this object again, and so recurse without end.
    supports_coalescing = False
    supports_reconfigure = False
    supports_window = False
    # c10d's _time_estimator has no `finally`: after an exception no collective would be carried out any more.
    _supports_time_estimate = False

    supports_abort_hooks = True

    # A completed Work of C++. Without one, torch's flight recorder takes the operation for one that is still running.
    blocking_result = FakeWork()

    def __init__(self, comm: Communicator, name: str, timeout: timedelta) -> None:
        Backend.__init__(self, comm.rank, comm.size)
        self._name = name
        self.set_communicator(comm, name, timeout)
        self._abort_hooks = AbortHooks()
        self._tensor_pool = TensorPool(core_of(comm))
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def options(self) -> Any:
        options = Backend.Options(NAME, timedelta(seconds=self.comm.timeout))
        options.group_name = self._name
        return options

    def abort(self) -> None:
        _open.discard(self)
        self._abort_hooks.run()
        self._abort_hooks.clear()
        GroupOperations.abort(self)

    def shutdown(self) -> None:
        _open.discard(self)
        GroupOperations.shutdown(self)
        self._abort_hooks.clear()

    # c10d looks for the names of its C++ methods.

    def registerAbortHook(self, hook_id: int, hook: Callable[[], None]) -> None:  # noqa: N802
        """Call `hook` before this group, or the job, is aborted: by :meth:`abort`, or because of a failure."""
        self._abort_hooks.add(hook_id, hook)

    def unregisterAbortHook(self, hook_id: int) -> None:  # noqa: N802
        self._abort_hooks.remove(hook_id)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    allreduce_sparse = GroupOperations.allreduce

    def monitored_barrier(self, opts: BarrierOptions, wait_all_ranks: bool = False) -> None:
        self.run_monitored_barrier(opts.timeout if opts.timeout >= timedelta(0) else None, wait_all_ranks)

    def get_error(self) -> ErrorType:
        """Return REMOTE_ERROR if a rank of the group has died or the group is shut down, else SUCCESS.

        The look for a death takes up to 1 s.
        """
        core = core_of(self.comm)
        return ErrorType.REMOTE_ERROR if core.freed or core.transport.detect_failure() else ErrorType.SUCCESS

    def _get_sequence_number_for_group(self) -> int:
        return core_of(self.comm).queue.number

    def _wait_for_pending_works(self) -> None:
        """Wait until neither an operation nor a callback of the group is pending."""
        if not self._callback_comms.drain(self.comm.timeout):
            raise Timeout(f"operations of {self!r} are pending after the group's timeout of {self.comm.timeout:g} s")

    # Memory.

    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """Return True for the CPU if the ranks share memory.

        C++ code, such as DDP's, passes an index and gets False: torch 2.15 can't pass the options of a tensor to
        Python, so that it would fail to allocate.
        """
        return isinstance(device, torch.device) and device.type == "cpu" and self._tensor_pool.is_shared

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of `size` elements, which are undefined, in memory that collectives of the group use without
        copies. Collective: all ranks must call this with equal sizes, in the same order as their collectives."""
        if device.type != "cpu" or callback_context.path:
            return torch.empty(size, dtype=dtype, device=device)
        return self._tensor_pool.allocate(size, dtype)

    # Groups that are made from this one.

    @property
    def supports_splitting(self) -> bool:
        return True

    def split(self, store: dist.Store, ranks: Sequence[int], opts: Any) -> BackendMpicoll:
        """Return the backend of a group of `ranks` of this group. Collective over them.

        Raises ArgumentError on other ranks, for which torch would crash without a backend.
        """
        if self.comm.rank not in ranks:
            raise ArgumentError(
                f"split_group: rank {self.comm.rank} is in none of the groups, which this version of torch does not"
                " support for a backend in Python; put each rank into a group, or call new_group"
            )
        comm = self.comm.group(ranks)
        assert comm is not None
        return BackendMpicoll(comm, opts.group_name, opts._timeout)

    supports_shrinking = True

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> Any:
        """Return the backend of the ranks that are not excluded. Collective over them; c10d abandons this group.

        Excluded ranks have died (see :meth:`mpicoll.Communicator.shrink`), or don't call this function. Raises
        CommunicatorError if other ranks have died too.
        """
        comm, timeout = self.comm, timedelta(seconds=self.comm.timeout)
        remaining = [rank for rank in range(comm.size) if rank not in ranks_to_exclude]
        if core_of(comm).transport.detect_failure():
            part: Communicator | None = comm.shrink()
        else:
            try:
                part = comm.group(remaining)
            except RankFailed:  # other ranks may have known it before
                part = comm.shrink()
            else:
                core_of(comm).free_locally()
        if part is None or part.size != len(remaining):
            raise CommunicatorError(
                f"shrink_group: {len(remaining)} ranks should remain without {list(ranks_to_exclude)}, but"
                f" {part.size if part else 0} do; exclude all ranks that have died"
            )
        correct_type()
        return BackendMpicoll(part, f"{self._name}:shrunk", timeout)

    def reconfigure(self, opts: Any) -> Any:
        raise NotImplementedError(
            "reconfigure: this version of torch can't change the rank and size of a backend in Python; call"
            " torch.distributed.shrink_group to go on without ranks that have died"
        )

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: ranks are connected when a group is made."""

    def __repr__(self) -> str:
        return f"<BackendMpicoll {self._name}: rank {self.comm.rank} of {self.comm.size}>"


# c10d's C++ code calls them also where a function that torch.compile has compiled goes on after a graph break.
disable_compile_in(sys.modules[__name__], group_operations, work)
