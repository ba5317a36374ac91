"""Which ranks a function of this package works with.

Nothing here is a module's variable: functions take the group that they work with as ``group=``, a process group of
mpicoll, a 1-D DeviceMesh, an mpicoll Communicator or an mpi4py one. Without it they take the axis of the grid that
:func:`use` has put in use in the caller's context, and if there is none all ranks.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from mpicoll.engine.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError
from mpicoll.torch import groups as torch_groups


class Grid(Protocol):
    """Ranks in a grid of named axes, as :class:`mpicoll.parallel.topology.PipelineParallelGrid`."""

    def communicator(self, *axes: str) -> Communicator:
        """The ranks that differ from this one in their coordinates on `axes` only."""


_in_use: ContextVar[Grid | None] = ContextVar("mpicoll_parallel_grid", default=None)


class use:  # noqa: N801  called like a function, as torch.no_grad is
    """``use(grid)`` makes `grid` the default of this package from now on, in this thread; None takes it away.

    As a context manager, ``with use(grid):``, it puts back at its end what was in use before. It is a context variable:
    other threads, such as those of a ThreadPoolExecutor, don't see it, and take all ranks until they call it too, or
    run in ``contextvars.copy_context()``. Layers keep the ranks that they were made on, whatever thread calls them.
    """

    def __init__(self, grid: Grid | None) -> None:
        self._token: Token[Grid | None] | None = _in_use.set(grid)

    def __enter__(self) -> Grid | None:
        return current_grid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _in_use.reset(self._token)
            self._token = None


def current_grid() -> Grid | None:
    """The grid that is in use, if there is one."""
    return _in_use.get()


def communicator(group: Any = None, axis: str = "model") -> Communicator:
    """The communicator that `group` means; None is `axis` of the grid in use, and without a grid torch's default
    process group if that is mpicoll's, else mpicoll's world.

    Raises ArgumentError for a DeviceMesh of several dimensions, CommunicatorError for process groups of other backends
    and where this process is no member.
    """
    if group is None:
        grid = _in_use.get()
        if grid is not None:
            return grid.communicator(axis)
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ArgumentError(f"a DeviceMesh of one dimension is needed, such as mesh['tp'], got {group}")
        if group.get_coordinate() is None:
            raise CommunicatorError(f"this process is not in {group}; only its ranks may call this")
        group = group.get_group()
    return torch_groups.communicator(group)
