"""Choice of the ranks on which a function of this package works.

Functions take ``group=``: a process group of mpicoll, a 1-D DeviceMesh, an mpicoll Communicator or an mpi4py
communicator. By default it is the axis of the grid that :func:`use` has put in use in the caller's context, and without
a grid all ranks. No module holds global groups.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from mpicoll.engine.core.communicator import Communicator
from mpicoll.errors import ArgumentError, CommunicatorError
from mpicoll.torch import groups as torch_groups


class Grid(Protocol):
    """Ranks in a grid of named axes, such as :class:`mpicoll.parallel.topology.PipelineParallelGrid`."""

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks whose coordinates differ from this rank's on `axes` only."""


_current_grid: ContextVar[Grid | None] = ContextVar("mpicoll_parallel_grid", default=None)


class use:  # noqa: N801  called like a function, as torch.no_grad is
    """Make a grid the default of this package, in this thread.

    ``use(grid)`` sets the default from now on; ``use(None)`` removes it. As a context manager, ``with use(grid):``, it
    restores the previous default at its end. The default is a context variable: other threads, such as those of a
    ThreadPoolExecutor, don't see it and use all ranks until they call it too, or run in ``contextvars.copy_context()``.
    Layers keep the ranks on which they were made, whichever thread calls them.

    Args:
        grid: an object with a method ``communicator(*axes)``, or None.

    Example:
        ::

            with PipelineParallelGrid() as grid, use(grid):
                average_gradients(nn.Linear(4, 2).parameters())  # over the axis "data" of the grid
    """

    def __init__(self, grid: Grid | None) -> None:
        self._token: Token[Grid | None] | None = _current_grid.set(grid)

    def __enter__(self) -> Grid | None:
        return get_current_grid()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current_grid.reset(self._token)
            self._token = None


def get_current_grid() -> Grid | None:
    """Return the grid in use, or None."""
    return _current_grid.get()


def communicator(group: Any = None, axis: str = "model") -> Communicator:
    """Return the communicator of `group`.

    Args:
        group: a process group of mpicoll, a 1-D DeviceMesh, a Communicator, an mpi4py communicator, or None for `axis`
            of the grid in use; without a grid, torch's default process group if it is mpicoll's, else mpicoll's world.
        axis: an axis of the grid.

    Raises:
        ArgumentError: a DeviceMesh has several dimensions.
        CommunicatorError: a process group is another backend's, or this process is not one of its ranks.
    """
    if group is None:
        grid = _current_grid.get()
        if grid is not None:
            return grid.communicator(axis)
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ArgumentError(f"pass a DeviceMesh of one dimension, such as mesh['tp'], got {group}")
        if group.get_coordinate() is None:
            raise CommunicatorError(f"this process is not in {group}; only its ranks may call this")
        group = group.get_group()
    return torch_groups.communicator(group)


def describe_rank(comm: Communicator) -> str:
    """Return this rank and the number of ranks, for error messages."""
    return f"(rank {comm.rank} of {comm.size})"
