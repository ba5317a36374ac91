"""Fast path for blocking collectives on plain CPU tensors, which calls MPI or the shared-memory algorithms directly.

The general path checks and prepares each call. The fast path prepares once for each kind of call, and caches that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from mpicoll.buffers import dtypes
from mpicoll.buffers.ops import Fold, reduction
from mpicoll.buffers.recognise import recognise
from mpicoll.collectives.arguments import problem
from mpicoll.engine.call_cache import KEPT
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.operation import Shared, Unshared
from mpicoll.engine.selection.catalogue import SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import choose, forced
from mpicoll.torch.c10d_collectives import op_of

Found: TypeAlias = "tuple[Any, Call] | bool"
"""Prepared function for calls of one kind, and their Call record; False if the general path must run them."""

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}
"""Dtypes that MPI supports, and whose tensors are never lazily conjugated."""

_MOST = 16 * 1024
"""Largest number of elements for which work memory of a wider dtype is cached.

A reduction of more elements takes longer than its preparation, so caching would not help.
"""

_TENSOR = torch.Tensor

_BYTES: np.dtype[Any] = np.dtype(np.uint8)


class Quick:
    """Fast-path collectives of one communicator.

    Each method returns True if it has run the collective. If it returns False, it has sent nothing, and the general
    path must run the call. The decision depends only on properties that are equal on all ranks, except where both paths
    exchange the same messages.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._progress = comm.progress
        self._run = comm.progress.run
        self._native = comm.transport.native
        # Shared with the cache of native calls, which is cleared when the choice of algorithms may change.
        self._kept = comm.repeated

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> bool:
        """Reduce `tensor` in place; see :func:`mpicoll.torch.c10d_collectives.all_reduce`."""
        # This is the most frequent call, where 0.1 us matters. Checks of _plain are left out if the dtype implies
        # them, or if a tensor without strides or memory raises RuntimeError below.
        try:
            if tensor.__class__ is not _TENSOR or not tensor.is_cpu or tensor.is_neg() or not tensor.is_contiguous():
                return False
            shape, address = tensor.shape, tensor.data_ptr()
        except RuntimeError:
            return False
        if forced() or (self._progress.observer is not None and self._progress.thorough):
            return False
        key = (tensor.dtype, op.__class__, hash(op), shape)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._in_place(tensor, op), "all_reduce")
        if kept is False:
            return False
        reduce, call = kept
        if reduce.__class__ is Shared:
            flat = _flat(tensor)
            return self._through(reduce, call, flat, flat)
        if reduce.__class__ is _InWork:
            if tensor.is_inference():
                return False  # torch rejects copies to inference tensors
            self._run(reduce, call, tensor)
        else:
            self._run(reduce, call, address)
        return True

    def broadcast(self, tensor: torch.Tensor, root: int) -> bool:
        """Broadcast `tensor` in place; see :func:`mpicoll.torch.c10d_collectives.broadcast`."""
        # The type is checked because another type (such as a float) may equal the root of a cached call.
        if root.__class__ is not int or not _plain(tensor) or tensor.is_conj():
            return False
        if forced() or self._progress.thorough:
            return False
        nbytes = tensor.nbytes
        key = ("broadcast", tensor.dtype, tensor.shape, root)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._move("bcast", tensor, nbytes, root), "broadcast")
        if kept is False:
            return False
        ready, call = kept
        if ready.__class__ is Shared:
            flat = _bytes(tensor)
            return self._through(ready, call, flat, flat)
        memory, native = ready
        place = memory(tensor.data_ptr(), nbytes)
        self._run(native.bcast, call, place, root)
        return True

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Gather as :func:`mpicoll.torch.c10d_collectives.all_gather_single` does."""
        if not _apart(output, tensor) or forced() or self._progress.thorough:
            return False
        nbytes = output.nbytes
        key = ("all_gather_single", tensor.dtype, tensor.shape)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(
                key, self._move("allgather", tensor, tensor.nbytes * self._comm.size), "all_gather_single"
            )
        if kept is False or nbytes != tensor.nbytes * self._comm.size:
            return False
        ready, call = kept
        if ready.__class__ is Shared:
            return self._through(ready, call, _bytes(tensor), _bytes(output))
        memory, native = ready
        source = memory(tensor.data_ptr(), tensor.nbytes)
        target = memory(output.data_ptr(), nbytes)
        self._run(native.allgather, call, source, target, None)
        return True

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Exchange even splits as :func:`mpicoll.torch.c10d_collectives.all_to_all_single` does."""
        if not _apart(output, tensor) or forced() or self._progress.thorough:
            return False
        nbytes = tensor.nbytes
        key = ("all_to_all_single", tensor.dtype, tensor.shape)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._move("alltoall", tensor, nbytes), "all_to_all_single")
        if kept is False or nbytes != output.nbytes:
            return False
        size = self._comm.size
        if not tensor.ndim or tensor.shape[0] % size or not output.ndim or output.shape[0] % size:
            return False
        ready, call = kept
        if ready.__class__ is Shared:
            return self._through(ready, call, _bytes(tensor), _bytes(output))
        memory, native = ready
        source, target = memory(tensor.data_ptr(), nbytes), memory(output.data_ptr(), nbytes)
        self._run(native.alltoall, call, source, target)
        return True

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> bool:
        """Reduce and scatter as :func:`mpicoll.torch.c10d_collectives.reduce_scatter_single` does."""
        if not _apart(output, tensor) or forced() or self._progress.thorough:
            return False
        count = tensor.numel()
        key = ("reduce_scatter_single", tensor.dtype, op.__class__, hash(op), tensor.shape)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key, self._scatter(tensor, op, count), "reduce_scatter_single")
        part = output.numel()
        if kept is False or count != part * self._comm.size:
            return False
        ready, call = kept
        if ready.__class__ is Shared:
            return self._through(ready, call, _flat(tensor), _flat(output))
        memory, name, native = ready
        source, target = memory(tensor.data_ptr(), count), memory(output.data_ptr(), part)
        self._run(native.reduce_scatter, call, source, target, None, name)
        return True

    def barrier(self) -> bool:
        """Synchronize as :func:`mpicoll.torch.c10d_collectives.barrier` does."""
        if forced() or self._progress.thorough:
            return False
        kept = self._kept.get(("barrier",))
        if kept is None:
            kept = self._keep(("barrier",), self._move("barrier", None, 0), "barrier")
        if kept is False:
            return False
        ready, call = kept
        if ready.__class__ is Shared:
            return self._through(ready, call, None, None)
        self._run(ready[1].barrier, call)
        return True

    def _keep(self, key: tuple[Any, ...], found: tuple[Any, Call] | bool, name: str) -> Any:
        """Cache `found` for calls with this `key`, set torch's `name` in its Call record, and return it."""
        if len(self._kept) >= KEPT:
            self._kept.clear()
        if not isinstance(found, bool):
            found[1].name = name
        self._kept[key] = found
        return found

    def _through(self, shared: Shared, call: Call, source: Any, target: Any) -> bool:
        try:
            self._run(shared, call, source, target)
        except Unshared:
            # Raised on all ranks. The cache is cleared so that algorithms are selected again with this knowledge.
            self._kept.clear()
            return False
        return True

    def _in_place(self, tensor: torch.Tensor, op: Any) -> Found:
        """Return a function that reduces tensors like this one in place: at an address, or through shared memory."""
        count = tensor.numel()
        found = self._reduction("allreduce", tensor, op, (count,))
        if isinstance(found, bool) or isinstance(found[0], Shared):
            return found
        (ready, native), call = found
        assert ready.native is not None
        reduce = native.allreduce_in_place(ready.work, count, ready.native)
        wider = tensor.dtype not in _NUMPY
        if ready.finish is None and not wider:
            return reduce, call
        if wider and count > _MOST:
            return False
        divisor = None if ready.finish is None else self._comm.size
        return _InWork(reduce, _work(count) if wider else None, divisor), call

    def _scatter(self, tensor: torch.Tensor, op: Any, count: int) -> Found:
        """Return a function that reduces `count` elements and scatters them."""
        size = self._comm.size
        found = False if count % size else self._reduction("reduce_scatter", tensor, op, (count // size,) * size)
        if isinstance(found, bool) or isinstance(found[0], Shared):
            return found
        (ready, native), call = found
        dtype = _NUMPY.get(tensor.dtype)
        if ready.finish is not None or dtype is None:
            return False
        return (native.typed(dtype), ready.native, native), call

    def _reduction(self, collective: str, tensor: torch.Tensor, op: Any, counts: tuple[int, ...]) -> Found:
        """Return a shared-memory reduction, or a Reduction and the native object that runs it, and the Call record.

        Return False if neither can run the call.
        """
        name, count = op_of(collective, op, tensor.dtype), sum(counts)
        if not count or not isinstance(name, str) or tensor.dtype.is_complex:
            return False
        buffer = recognise(collective, tensor)
        if not dtypes.means(name, buffer.dtype):
            return False
        ready = reduction(collective, name, buffer.dtype, buffer.library.wrap, (count,))
        wanted = problem(collective, self._comm, None, nbytes=tensor.nbytes, count=count, reduction=ready)
        choice = choose(wanted, None)
        shape = tuple(tensor.shape)
        call = Call(collective, tensor.nbytes, buffer.dtype.name, shape, op=ready.name, algorithm=choice.name)
        if isinstance(choice.algorithm, SharedMemoryAlgorithm) and ready.prepare is None:
            fold = Fold(ready, buffer)
            return Shared(self._comm, wanted, choice, buffer.array.dtype, counts, fold, call=call), call
        if choice.algorithm is not None or self._native is None or ready.native is None:
            return False
        if ready.prepare is not None or tensor.dtype not in (*_NUMPY, torch.float16, torch.bfloat16):
            return False
        return (ready, self._native), call

    def _move(self, collective: str, tensor: torch.Tensor | None, nbytes: int, root: int = 0) -> Found:
        """Return a function that moves tensors like this rank's `tensor` as bytes, `nbytes` of them in all."""
        size = self._comm.size
        blocks = {"barrier": 0, "bcast": 1}.get(collective, size)
        if (not nbytes and blocks) or not 0 <= root < size or (blocks and nbytes % blocks):
            return False
        dtype, shape = "", None
        if tensor is not None:
            dtype, shape = recognise(collective, tensor).dtype.name, tuple(tensor.shape)
        wanted = problem(collective, self._comm, None, nbytes=nbytes, count=nbytes, root=root)
        choice = choose(wanted, None)
        rooted = root if collective == "bcast" else None
        call = Call(collective, nbytes, dtype, shape, root=rooted, algorithm=choice.name)
        if isinstance(choice.algorithm, SharedMemoryAlgorithm):
            counts = (nbytes // blocks,) * blocks if blocks else ()
            return Shared(self._comm, wanted, choice, _BYTES, counts, call=call), call
        if choice.algorithm is not None or self._native is None:
            return False
        return (self._native.typed(_BYTES), self._native), call


class _InWork:
    """In-place reduction of a tensor that needs more than MPI's reduction.

    It reduces in the float32 memory `work` if that is not None, and divides by `divisor` if that is not None.
    """

    __slots__ = ("_divisor", "_reduce", "_work")

    def __init__(self, reduce: Callable[[int], None], work: torch.Tensor | None, divisor: int | None) -> None:
        self._reduce = reduce
        self._work = work
        self._divisor = divisor

    def __call__(self, tensor: torch.Tensor) -> None:
        # Autograd and its version counter do not see MPI's writes; ``data`` hides these writes in the same way.
        own = tensor.data
        work = own if self._work is None else self._work
        if self._work is not None:
            own = own.view(-1)
            work.copy_(own)
        self._reduce(work.data_ptr())
        if self._divisor is not None:
            work.div_(self._divisor)
        if self._work is not None:
            own.copy_(work)


def _work(count: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=torch.float32, device="cpu")


def _flat(tensor: torch.Tensor) -> Any:
    """Return the elements as a flat numpy array; bfloat16 as uint16."""
    own = tensor.detach()
    return (own.view(torch.uint16) if own.dtype is torch.bfloat16 else own).numpy().reshape(-1)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _plain(tensor: torch.Tensor) -> bool:
    """Return True if the elements are contiguous at the tensor's address."""
    return (
        (tensor.__class__ is torch.Tensor or tensor.__class__ is torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def _apart(output: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if both tensors are plain, have the same dtype and do not overlap in memory."""
    if not _plain(tensor) or not _plain(output) or tensor.dtype is not output.dtype or tensor.is_conj():
        return False
    first, second = tensor.data_ptr(), output.data_ptr()
    return not output.is_conj() and (first + tensor.nbytes <= second or second + output.nbytes <= first)
