"""Repeated calls of the MPI library's own collectives, which the extension carries out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.transport.base import Memory, Native

if TYPE_CHECKING:
    from mpicoll._shm import NativeCall

IN_PLACE = ("allreduce", "reduce", "bcast", "scan", "exscan")
"""Collectives whose output may be their input."""


def bind_native(
    arrays: CollectiveArrays, native: Native, dtype: np.dtype[Any], *, has_input: bool, has_output: bool
) -> NativeCall | None:
    """Return what carries out the collective of the MPI library for arrays of `dtype` like `arrays`, for
    :meth:`~mpicoll.engine.core.queue.OperationQueue.add_call`; None if only Python can do that.

    `has_input` and `has_output` state whether it has an input and an output on this rank. The extension is there.
    """
    from mpicoll._shm import CallMemory, NativeCall

    read = (np.empty(0, dtype), CallMemory()) if has_input else (None, None)
    written = (np.empty(0, dtype), CallMemory()) if has_output else (None, None)
    buffers = [(array, memory) for array, memory in (read, written) if array is not None]

    def record(source: Memory | None, target: Memory | None) -> tuple[Any, tuple[Any, ...]] | None:
        return native.record(lambda mpi: arrays.native_call(mpi)(source, target), buffers)

    apart = record(read[0], written[0])
    if apart is None:
        return None
    in_place = None
    if has_input and has_output and arrays.collective in IN_PLACE:
        in_place = record(written[0], written[0])
        if in_place is None:
            return None
    # What a native call does after the call of MPI.
    identity = arrays.identity if arrays.collective == "exscan" and arrays.rank == 0 else None
    fill = None if identity is None else np.asarray(identity, dtype).tobytes()
    copies = arrays.collective == "bcast" and arrays.rank == arrays.root and has_input and has_output
    return NativeCall(apart[0], apart[1], None if in_place is None else in_place[1], read[1], written[1], fill, copies)
