"""Blocking collectives on plain CPU tensors, handed to MPI with nothing in between.

What the general path finds out for each call is found out here once for each kind of call, and kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from mpicoll.buffers import dtypes
from mpicoll.buffers.ops import reduction
from mpicoll.collectives.arguments import problem
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.select import choose, forced
from mpicoll.torch.jobs import op_of
from mpicoll.transport.base import Native

Memory: TypeAlias = "Callable[[int, int], Any]"

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}
"""Dtypes that MPI has, and that torch never hands out lazily conjugated."""

_TENSOR = torch.Tensor

_BYTES: np.dtype[Any] = np.dtype(np.uint8)

_MAX = 1024
"""How many kinds of calls are kept."""


class Quick:
    """The quick calls of one communicator.

    Each method says whether it has carried the call out; if not, nothing has happened, and the general path has to.
    Which it is depends on nothing in which ranks may differ, but for what makes no difference to the messages.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._run = comm.progress.run
        self._native = comm.transport.native
        self._kept: dict[tuple[Any, ...], Any] = {}

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> bool:
        """In place; see :func:`mpicoll.torch.jobs.all_reduce`."""
        # Here each tenth of a microsecond counts: these are the checks of _plain that neither the dtype makes
        # superfluous, nor the exception that a tensor without strides or memory raises.
        try:
            if tensor.__class__ is not _TENSOR or not tensor.is_cpu or tensor.is_neg() or not tensor.is_contiguous():
                return False
            count, address = tensor.numel(), tensor.data_ptr()
        except RuntimeError:
            return False
        if forced():
            return False
        key = (tensor.dtype, hash(op), count)
        reduce = self._kept.get(key)
        if reduce is None:
            reduce = self._keep(key, self._in_place(tensor, op, count))
        if reduce is False:
            return False
        self._run(reduce, ("all_reduce of", count, "elements"), address)
        return True

    def broadcast(self, tensor: torch.Tensor, root: int) -> bool:
        """In place; see :func:`mpicoll.torch.jobs.broadcast`."""
        if not _plain(tensor) or tensor.is_conj() or forced():
            return False
        nbytes = tensor.nbytes
        key = ("broadcast", nbytes, root)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._move("bcast", nbytes, root))
        if kept is False:
            return False
        memory, native = kept
        place = memory(tensor.data_ptr(), nbytes)
        self._run(native.bcast, ("broadcast of", nbytes, "bytes"), place, root)
        return True

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """See :func:`mpicoll.torch.jobs.all_gather_single`."""
        if not _apart(output, tensor) or forced():
            return False
        nbytes = output.nbytes
        key = ("all_gather_single", nbytes)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._move("allgather", nbytes, 0))
        if kept is False or nbytes != tensor.nbytes * self._comm.size:
            return False
        memory, native = kept
        source = memory(tensor.data_ptr(), tensor.nbytes)
        target = memory(output.data_ptr(), nbytes)
        self._run(native.allgather, ("all_gather of", nbytes, "bytes"), source, target, None)
        return True

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """With even splits; see :func:`mpicoll.torch.jobs.all_to_all_single`."""
        if not _apart(output, tensor) or forced():
            return False
        nbytes = tensor.nbytes
        key = ("all_to_all_single", nbytes)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._move("alltoall", nbytes, 0))
        if kept is False or nbytes != output.nbytes:
            return False
        size = self._comm.size
        if not tensor.ndim or tensor.shape[0] % size or not output.ndim or output.shape[0] % size:
            return False
        memory, native = kept
        source, target = memory(tensor.data_ptr(), nbytes), memory(output.data_ptr(), nbytes)
        self._run(native.alltoall, ("all_to_all of", nbytes, "bytes"), source, target)
        return True

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> bool:
        """See :func:`mpicoll.torch.jobs.reduce_scatter_single`."""
        if not _apart(output, tensor) or forced():
            return False
        count = tensor.numel()
        key = ("reduce_scatter_single", tensor.dtype, hash(op), count)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._scatter(tensor, op, count))
        part = output.numel()
        if kept is False or count != part * self._comm.size:
            return False
        memory, name, native = kept
        source, target = memory(tensor.data_ptr(), count), memory(output.data_ptr(), part)
        self._run(native.reduce_scatter, ("reduce_scatter of", count, "elements"), source, target, None, name)
        return True

    def barrier(self) -> bool:
        """See :func:`mpicoll.torch.jobs.barrier`."""
        if forced():
            return False
        kept = self._kept.get(("barrier",))
        if kept is None:
            kept = self._keep(("barrier",), self._move("barrier", 0, 0))
        if kept is False:
            return False
        self._run(kept[1].barrier, ("barrier of", self._comm.size, "ranks"))
        return True

    def _keep(self, key: tuple[Any, ...], value: Any) -> Any:
        if len(self._kept) >= _MAX:
            self._kept.clear()
        self._kept[key] = value
        return value

    def _in_place(self, tensor: torch.Tensor, op: Any, count: int) -> Callable[[int], None] | bool:
        """What reduces `count` elements at an address, if MPI's allreduce does it."""
        found = self._reduction("allreduce", tensor, op, count)
        if found is None:
            return False
        dtype, name, native = found
        return native.allreduce_in_place(dtype, count, name)

    def _scatter(self, tensor: torch.Tensor, op: Any, count: int) -> tuple[Memory, str, Native] | bool:
        """What reduces `count` elements and scatters them, if MPI's reduce_scatter does it."""
        found = self._reduction("reduce_scatter", tensor, op, count)
        if found is None:
            return False
        dtype, name, native = found
        return native.typed(dtype), name, native

    def _reduction(
        self, collective: str, tensor: torch.Tensor, op: Any, count: int
    ) -> tuple[np.dtype[Any], str, Native] | None:
        """The dtype and MPI's name of the reduction, if the choice falls on MPI's own."""
        dtype = _NUMPY.get(tensor.dtype)
        if dtype is None or not count:
            return None
        name = op_of(collective, op, tensor.dtype)
        policy = dtypes.of_numpy(dtype)
        if not isinstance(name, str) or name == "avg" or not dtypes.means(name, policy):
            return None
        ready = reduction(collective, name, policy, lambda view: view, (count,))
        native = self._chosen(collective, tensor.nbytes, count, reduction=ready)
        return None if native is None or ready.native is None else (dtype, ready.native, native)

    def _move(self, collective: str, nbytes: int, root: int) -> tuple[Memory, Native] | bool:
        if (not nbytes and collective != "barrier") or not 0 <= root < self._comm.size:
            return False
        native = self._chosen(collective, nbytes, nbytes, root=root)
        return False if native is None else (native.typed(_BYTES), native)

    def _chosen(self, collective: str, nbytes: int, count: int, **details: Any) -> Native | None:
        """MPI's own collectives, if the choice falls on them. To be asked where nothing is forced for the moment."""
        if self._native is None:
            return None
        wanted = problem(collective, self._comm, None, nbytes=nbytes, count=count, **details)
        return self._native if choose(wanted, None).algorithm is None else None


def _plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie at its address, one after the other."""
    return (
        (tensor.__class__ is torch.Tensor or tensor.__class__ is torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def _apart(output: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether both are plain, of one dtype, and apart from each other in memory."""
    if not _plain(tensor) or not _plain(output) or tensor.dtype is not output.dtype or tensor.is_conj():
        return False
    first, second = tensor.data_ptr(), output.data_ptr()
    return not output.is_conj() and (first + tensor.nbytes <= second or second + output.nbytes <= first)
