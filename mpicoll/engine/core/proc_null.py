"""The null process."""

from __future__ import annotations

from enum import IntEnum


class _ProcNull(IntEnum):
    """Null process: sending to it has no effect, and receiving from it completes at once and receives nothing.

    Example:
        A line of ranks, whose ends have one neighbour each:

        >>> def program():
        ...     world = mpicoll.world()
        ...     right = world.rank + 1 if world.rank + 1 < world.size else mpicoll.PROC_NULL
        ...     left = world.rank - 1 if world.rank > 0 else mpicoll.PROC_NULL
        ...     halo = np.full(1, -1.0)
        ...     return mpicoll.sendrecv(np.full(1, float(world.rank)), dest=right, source=left, out=halo).tolist()
        >>> mpicoll.run_local(program, 3)
        [[-1.0], [0.0], [1.0]]
    """

    # The value of MPI's standard ABI; unlike -1, a wrong rank + 1 or rank - 1 does not yield it.
    PROC_NULL = -3

    def __repr__(self) -> str:
        return "mpicoll.PROC_NULL"


PROC_NULL = _ProcNull.PROC_NULL
