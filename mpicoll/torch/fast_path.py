"""Fast path for blocking calls on plain CPU tensors, which calls MPI or the shared-memory algorithms directly.

The general path checks and prepares each call. The fast path prepares once for each kind of call, and caches that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.autograd.graph import increment_version

from mpicoll.buffers import dtypes
from mpicoll.buffers.ops import Fold, reduction
from mpicoll.buffers.recognise import recognise
from mpicoll.buffers.torch import as_array, has_memory
from mpicoll.collectives import p2p
from mpicoll.collectives.arguments import make_query
from mpicoll.collectives.barrier import NOTHING
from mpicoll.collectives.call import MISSING
from mpicoll.engine.core.arrays import CollectiveArrays
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.native import bind_native
from mpicoll.engine.executors.shared_memory import SharedMemoryCollective
from mpicoll.engine.selection.catalogue import SharedMemoryAlgorithm
from mpicoll.engine.selection.selector import choose, get_forced_rules
from mpicoll.torch.c10d_collectives import convert_reduce_op, get_op_name
from mpicoll.torch.tensors import view_flat
from mpicoll.transport.base import Native

if TYPE_CHECKING:
    from mpicoll._shm import NativeCall

CacheEntry: TypeAlias = "tuple[Any, Call] | bool"
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

_MAX_WORK_ELEMENTS = 16 * 1024
"""Largest number of elements for which work memory of a wider dtype is cached.

A reduction of more elements takes longer than its preparation, so caching would not help.
"""

_MAX_JOINED = 1 << 18
"""Largest size in bytes of the tensors of a list that are copied to or from memory of their own here.

The general path, which takes 30 us, copies nothing where they are adjacent in memory.
"""

_TENSOR = torch.Tensor

_BYTES: np.dtype[Any] = np.dtype(np.uint8)

_SUM = torch.distributed.ReduceOp.SUM
_SUM_HASH = hash(_SUM)


class FastPath:
    """Fast-path collectives and messages of one communicator.

    Each method returns True if it has run the call. If it returns False, it has sent nothing, and the general
    path must run the call. The decision depends only on properties that are equal on all ranks, except where both paths
    exchange the same messages.
    """

    def __init__(self, communicator: Communicator) -> None:
        comm = core_of(communicator)
        self._communicator = communicator
        self._comm = comm
        self._queue = comm.queue
        self._run = comm.queue.run
        self._repeat = comm.queue.run_repeated
        self._native = comm.transport.native
        # Shared with the cache of native calls, which is cleared when the choice of algorithms may change.
        self._cache = comm.call_cache

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> bool:
        """Send `tensor`; see :meth:`mpicoll.torch.group_operations.GroupOperations.send`."""
        if self._repeat(MISSING, tensor, None, "send", dest, tag) is not MISSING:
            return True
        if not self._can_pass(tensor, dest, tag):
            return False
        p2p.send(tensor, dest, tag, comm=self._communicator)
        return True

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int) -> bool:
        """Receive into `tensor`; see :meth:`mpicoll.torch.group_operations.GroupOperations.recv`."""
        if source is None:  # c10d finds the rank of the sender
            return False
        if self._repeat(MISSING, None, tensor, "recv", source, tag, None) is not MISSING:
            return True
        if not self._can_pass(tensor, source, tag):
            return False
        p2p.recv(None, source, tag, out=tensor, comm=self._communicator)
        return True

    def _can_pass(self, tensor: torch.Tensor, peer: Any, tag: Any) -> bool:
        """Return True if c10d would send or receive the bytes of `tensor` itself, and raise no error of its own."""
        return (
            peer.__class__ is int
            and tag.__class__ is int
            and 0 <= peer < self._comm.size
            and peer != self._comm.rank
            and tag >= 0
            and _is_plain(tensor)
            and not tensor.is_complex()  # c10d sends its real view
            and not tensor.requires_grad
        )

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> bool:
        """Reduce `tensor` in place; see :func:`mpicoll.torch.c10d_collectives.all_reduce`."""
        # This is the most frequent call, where 0.1 us matters.
        op_hash = _SUM_HASH if op is _SUM else hash(op)
        if self._repeat(MISSING, tensor, tensor, "all_reduce", op.__class__, op_hash) is not MISSING:
            return True
        # Checks of _is_plain are left out if the dtype implies them, or if a tensor without strides raises RuntimeError
        # below.
        try:
            if tensor.__class__ is not _TENSOR or not tensor.is_cpu or tensor.is_neg() or not tensor.is_contiguous():
                return False
            if not has_memory(tensor):
                return False
            shape = tensor.shape
        except RuntimeError:
            return False
        if get_forced_rules() or (self._queue.observer is not None and self._queue.needs_every_operation):
            return False
        key = (tensor.dtype, op.__class__, op_hash, shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_in_place(tensor, op), "all_reduce")
        if cached is False:
            return False
        reduce, call = cached
        if reduce.__class__ is not _ReduceInWorkMemory:
            return self._run_bound(cached, tensor, tensor, ("all_reduce", op.__class__, op_hash))
        if tensor.is_inference():
            return False  # torch rejects copies to inference tensors
        self._run(reduce, call, tensor)
        return True

    def broadcast(self, tensor: torch.Tensor, root: int) -> bool:
        """Broadcast `tensor` in place; see :func:`mpicoll.torch.c10d_collectives.broadcast`."""
        if self._repeat(MISSING, tensor, tensor, "broadcast", root) is not MISSING:
            return True
        # The type is checked because another type (such as a float) may equal the root of a cached call.
        if root.__class__ is not int or not _is_plain(tensor) or tensor.is_conj():
            return False
        if get_forced_rules() or self._queue.needs_every_operation:
            return False
        key = ("broadcast", tensor.dtype, tensor.shape, root)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_move("bcast", tensor, tensor.nbytes, root), "broadcast")
        return cached is not False and self._run_bound(cached, tensor, tensor, ("broadcast", root))

    def reduce(self, tensor: torch.Tensor, op: Any, root: int) -> bool:
        """Reduce `tensor` in place at the root; see :func:`mpicoll.torch.c10d_collectives.reduce`."""
        op_hash = _SUM_HASH if op is _SUM else hash(op)
        output = tensor if root == self._comm.rank else None
        name = ("reduce", op.__class__, op_hash, root)
        if self._repeat(MISSING, tensor, output, *name) is not MISSING:
            return True
        if root.__class__ is not int or not _is_plain(tensor) or tensor.is_conj():
            return False
        if get_forced_rules() or self._queue.needs_every_operation:
            return False
        key = (*name, tensor.dtype, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_reduce(tensor, op, root), "reduce")
        return cached is not False and self._run_bound(cached, tensor, output, name)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Gather as :func:`mpicoll.torch.c10d_collectives.all_gather_single` does."""
        if self._repeat(MISSING, tensor, output, "all_gather_single") is not MISSING:
            increment_version(output)
            return True
        if not _are_plain_and_disjoint(output, tensor) or get_forced_rules() or self._queue.needs_every_operation:
            return False
        nbytes = tensor.nbytes * self._comm.size
        key = ("all_gather_single", tensor.dtype, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_move("allgather", tensor, nbytes), "all_gather_single")
        return (
            cached is not False
            and output.nbytes == nbytes
            and self._run_bound(cached, tensor, output, ("all_gather_single",))
        )

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Exchange even splits as :func:`mpicoll.torch.c10d_collectives.all_to_all_single` does."""
        if self._repeat(MISSING, tensor, output, "all_to_all_single") is not MISSING:
            increment_version(output)
            return True
        if not _are_plain_and_disjoint(output, tensor) or get_forced_rules() or self._queue.needs_every_operation:
            return False
        key = ("all_to_all_single", tensor.dtype, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_move("alltoall", tensor, tensor.nbytes), "all_to_all_single")
        if cached is False or tensor.nbytes != output.nbytes:
            return False
        size = self._comm.size
        if not tensor.ndim or tensor.shape[0] % size or not output.ndim or output.shape[0] % size:
            return False
        return self._run_bound(cached, tensor, output, ("all_to_all_single",))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> bool:
        """Reduce and scatter as :func:`mpicoll.torch.c10d_collectives.reduce_scatter_single` does."""
        op_hash = _SUM_HASH if op is _SUM else hash(op)
        name = ("reduce_scatter_single", op.__class__, op_hash)
        if self._repeat(MISSING, tensor, output, *name) is not MISSING:
            increment_version(output)
            return True
        if not _are_plain_and_disjoint(output, tensor) or get_forced_rules() or self._queue.needs_every_operation:
            return False
        count = tensor.numel()
        key = ("reduce_scatter_single", tensor.dtype, op.__class__, op_hash, tensor.shape)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._add_to_cache(key, self._bind_reduce_scatter(tensor, op, count), "reduce_scatter_single")
        return (
            cached is not False
            and count == output.numel() * self._comm.size
            and self._run_bound(cached, tensor, output, name)
        )

    # Calls with lists of tensors only repeat what the general path has prepared for the joined tensors.

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> bool:
        """Gather as :func:`mpicoll.torch.c10d_collectives.all_gather` does."""
        return self._fill(outputs, tensor, "all_gather", None, None, None)

    def gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, root: int) -> bool:
        """Gather as :func:`mpicoll.torch.c10d_collectives.gather` does."""
        if root == self._comm.rank:
            return self._fill(outputs, tensor, "gather", None, root, None)
        if not _is_plain(tensor):
            return False
        return self._repeat(MISSING, _flatten(tensor), None, "gather", None, root, None) is not MISSING

    def scatter(self, output: torch.Tensor, tensors: list[torch.Tensor], root: int) -> bool:
        """Scatter as :func:`mpicoll.torch.c10d_collectives.scatter` does."""
        return self._collect(output, tensors if root == self._comm.rank else None, "scatter", None, root, None)

    def reduce_scatter(self, output: torch.Tensor, tensors: list[torch.Tensor], op: Any) -> bool:
        """Reduce and scatter as :func:`mpicoll.torch.c10d_collectives.reduce_scatter` does."""
        name = get_op_name(op)
        if name in (None, "premul_sum") or (name == "avg" and not output.dtype.is_floating_point):
            return False
        return output.dtype is not torch.bool and self._collect(output, tensors, "reduce_scatter", name, None, None)

    def all_to_all(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
        """Exchange as :func:`mpicoll.torch.c10d_collectives.all_to_all` does."""
        if len(tensors) != self._comm.size or not _can_join(tensors, tensors[0]):
            return False
        counts = (tensors[0].numel(),) * len(tensors)
        return self._fill(outputs, torch.stack(tensors), "all_to_all", None, None, (counts, counts))

    def _fill(self, outputs: list[torch.Tensor], tensor: torch.Tensor, *key: Any) -> bool:
        """Repeat the call of this `key`, whose input is `tensor`, and whose result is divided into `outputs`."""
        size = self._comm.size
        if len(outputs) != size or not _is_plain(tensor) or not _can_join(outputs, outputs[0]):
            return False
        joined = torch.empty((size, *outputs[0].shape), dtype=outputs[0].dtype, device="cpu")
        if self._repeat(MISSING, _flatten(tensor), _flatten(joined), *key) is MISSING:
            return False
        torch._foreach_copy_(outputs, joined.unbind())
        return True

    def _collect(self, output: torch.Tensor, tensors: list[torch.Tensor] | None, *key: Any) -> bool:
        """Repeat the call of this `key`, whose input are the joined `tensors`, if this rank has one."""
        if not _is_plain(output):
            return False
        joined = None
        if tensors is not None:
            if len(tensors) != self._comm.size or not _can_join(tensors, output):
                return False
            joined = _flatten(torch.stack(tensors))
        if self._repeat(MISSING, joined, _flatten(output), *key) is MISSING:
            return False
        increment_version(output)
        return True

    def barrier(self) -> bool:
        """Synchronize as :func:`mpicoll.torch.c10d_collectives.barrier` does."""
        if self._repeat(MISSING, NOTHING, None, "barrier") is not MISSING:
            return True
        if get_forced_rules() or self._queue.needs_every_operation:
            return False
        cached = self._cache.get(("barrier",))
        if cached is None:
            cached = self._add_to_cache(("barrier",), self._bind_move("barrier", None, 0), "barrier")
        return cached is not False and self._run_bound(cached, None, None, ("barrier",))

    def _run_bound(
        self,
        cached: tuple[Any, Call],
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        name: tuple[Any, ...],
    ) -> bool:
        """Run the collective that `cached` is bound to, on the memory of `tensor` and `output`. Have later calls of
        `name` on tensors like these carried out by the extension alone, if it can do that. Return True."""
        (function, view), call = cached
        source = None if tensor is None else view(tensor)
        target = source if output is tensor else None if output is None else view(output)
        self._run(function, call, source, target)
        if output is not None and output is not tensor:
            increment_version(output)
        carrier = None if self._queue.calls is None else function.find_compiled()
        if carrier is not None:
            given = NOTHING if tensor is None else tensor
            self._queue.add_call(name, given, output, None, carrier, call, in_place=output is tensor)
        return True

    def _add_to_cache(self, key: tuple[Any, ...], bound: tuple[Any, Call] | bool, name: str) -> Any:
        """Cache `bound` for calls with this `key`, set torch's `name` in its Call record, and return it."""
        if not isinstance(bound, bool):
            function = bound[0][0] if type(bound[0]) is tuple else bound[0]
            if isinstance(function, SharedMemoryCollective) and not self._comm.has_arena:
                return False  # the availability of shared memory is known after its first use
            bound[1].name = name
        self._comm.cache_call(key, bound)
        return bound

    def _bind_in_place(self, tensor: torch.Tensor, op: Any) -> CacheEntry:
        """Return a function that reduces tensors like this one in place, and the view of tensors that it takes; or one
        that takes tensors."""
        count = tensor.numel()
        bound = self._bind_reduction("allreduce", tensor, op, (count,))
        if isinstance(bound, bool):
            return bound
        function, call = bound
        if isinstance(function, SharedMemoryCollective):
            return (function, _view_flat), call
        if isinstance(function, _CopyOfSingleRank):
            return (function, _view_nothing), call
        arrays, native = function
        ready = arrays.reduction
        wider = tensor.dtype not in _NUMPY
        if ready.finish is None and not wider:
            return (_NativeCollective(arrays, native, ready.work), _native_view(native, ready.work)), call
        if wider and count > _MAX_WORK_ELEMENTS:
            return False
        reduce = native.bind_allreduce_in_place(ready.work, count, ready.native)
        divisor = None if ready.finish is None else self._comm.size
        return _ReduceInWorkMemory(reduce, _allocate_work(count) if wider else None, divisor), call

    def _bind_reduce_scatter(self, tensor: torch.Tensor, op: Any, count: int) -> CacheEntry:
        """Return a function that reduces `count` elements and scatters them, and the view of tensors that it takes."""
        size = self._comm.size
        if count % size:
            return False
        bound = self._bind_reduction("reduce_scatter", tensor, op, (count // size,) * size)
        return self._add_view(bound, tensor.dtype, _view_bytes)

    def _bind_reduce(self, tensor: torch.Tensor, op: Any, root: int) -> CacheEntry:
        """Return a function that reduces tensors like this one in place at the root, and the view of tensors that it
        takes."""
        if not 0 <= root < self._comm.size:
            return False
        bound = self._bind_reduction("reduce", tensor, op, (tensor.numel(),), root)
        return self._add_view(bound, tensor.dtype, _view_nothing)

    def _add_view(self, bound: CacheEntry, dtype: torch.dtype, view_of_single_rank: Callable[..., Any]) -> CacheEntry:
        """Return the reduction that :meth:`_bind_reduction` has bound, with the view of tensors that it takes; False
        if it needs work memory."""
        if isinstance(bound, bool):
            return bound
        function, call = bound
        if isinstance(function, SharedMemoryCollective):
            return (function, _view_flat), call
        if isinstance(function, _CopyOfSingleRank):
            return (function, view_of_single_rank), call
        arrays, native = function
        element = _NUMPY.get(dtype)
        if arrays.reduction.finish is not None or element is None:
            return False
        return (_NativeCollective(arrays, native, element), _native_view(native, element)), call

    def _bind_reduction(
        self, collective: str, tensor: torch.Tensor, op: Any, counts: tuple[int, ...], root: int | None = None
    ) -> CacheEntry:
        """Return a reduction in shared memory or of a single rank, or the arrays of a native one and the MPI library;
        and the Call record.

        Return False if neither can run the call.
        """
        name, count = convert_reduce_op(collective, op, tensor.dtype), sum(counts)
        if not count or not isinstance(name, str) or tensor.dtype.is_complex:
            return False
        buffer = recognise(collective, tensor)
        if not dtypes.means(name, buffer.dtype):
            return False
        ready = reduction(collective, name, buffer.dtype, buffer.library.wrap, (count,))
        arrays = CollectiveArrays(collective, self._comm.rank, counts=counts, root=root or 0, reduction=ready)
        choice = choose(make_query(self._comm, arrays, None, nbytes=tensor.nbytes), None)
        shape = tuple(tensor.shape)
        call = Call(
            collective, tensor.nbytes, buffer.dtype.name, shape, root=root, op=ready.name, algorithm=choice.name
        )
        if self._comm.size == 1:
            return _CopyOfSingleRank(), call
        if isinstance(choice.algorithm, SharedMemoryAlgorithm) and ready.prepare is None:
            arrays.fold = Fold(ready, buffer)
            return SharedMemoryCollective(self._comm, choice, arrays, buffer.array.dtype, call=call), call
        if choice.algorithm is not None or self._native is None or ready.native is None:
            return False
        if ready.prepare is not None or tensor.dtype not in (*_NUMPY, torch.float16, torch.bfloat16):
            return False
        return (arrays, self._native), call

    def _bind_move(self, collective: str, tensor: torch.Tensor | None, nbytes: int, root: int = 0) -> CacheEntry:
        """Return a function that moves tensors like this rank's `tensor` as bytes, `nbytes` in all, and the view
        of tensors that it takes."""
        size = self._comm.size
        blocks = {"barrier": 0, "bcast": 1}.get(collective, size)
        if (not nbytes and blocks) or not 0 <= root < size or (blocks and nbytes % blocks):
            return False
        dtype, shape = "", None
        if tensor is not None:
            # c10d views complex numbers as real ones, and other ranks may make this call through c10d.
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            dtype, shape = recognise(collective, real).dtype.name, tuple(real.shape)
        counts = (nbytes // blocks,) * blocks if blocks else ()
        arrays = CollectiveArrays(collective, self._comm.rank, counts=counts, root=root)
        choice = choose(make_query(self._comm, arrays, None, nbytes=nbytes), None)
        rooted = root if collective == "bcast" else None
        call = Call(collective, nbytes, dtype, shape, root=rooted, algorithm=choice.name)
        if size == 1:
            return (_CopyOfSingleRank(), _view_nothing if collective in ("barrier", "bcast") else _view_bytes), call
        if isinstance(choice.algorithm, SharedMemoryAlgorithm):
            return (SharedMemoryCollective(self._comm, choice, arrays, _BYTES, call=call), _view_bytes), call
        if choice.algorithm is not None or self._native is None:
            return False
        return (_NativeCollective(arrays, self._native, _BYTES), _native_view(self._native, _BYTES)), call


class _CopyOfSingleRank:
    """Collective of a group of one rank. Most algorithms cost more than the copy, as they are made for several."""

    __slots__ = ()

    def __call__(self, source: Any, target: Any) -> None:
        if target is not source:
            target[...] = source

    def find_compiled(self) -> None:
        """Return None: the extension has no such collective."""


class _NativeCollective:
    """Collective of the MPI library on memory of `dtype` like `arrays`, on all ranks alike."""

    __slots__ = ("_arrays", "_call", "_dtype", "_native")

    def __init__(self, arrays: CollectiveArrays, native: Native, dtype: np.dtype[Any]) -> None:
        self._arrays = arrays
        self._native = native
        self._dtype = dtype
        self._call = arrays.native_call(native)

    def __call__(self, source: Any, target: Any) -> None:
        self._call(source, target)

    def find_compiled(self) -> NativeCall | None:
        """Return what carries out the collective in the extension; None if only Python can do that."""
        arrays = self._arrays
        has_input = arrays.collective != "barrier"
        has_output = has_input and (arrays.collective != "reduce" or arrays.rank == arrays.root)
        return bind_native(arrays, self._native, self._dtype, has_input=has_input, has_output=has_output)


class _ReduceInWorkMemory:
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


def _native_view(native: Native, dtype: np.dtype[Any]) -> Callable[[torch.Tensor], Any]:
    """Return a function that converts a tensor to memory of `dtype` for `native`."""
    memory, itemsize = native.bind_dtype(dtype), dtype.itemsize
    return lambda tensor: memory(tensor.data_ptr(), tensor.nbytes // itemsize)


def _allocate_work(count: int) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=torch.float32, device="cpu")


def _view_flat(tensor: torch.Tensor) -> Any:
    """Return the elements as a flat numpy array; bfloat16 as uint16."""
    own = tensor.detach()
    return as_array(own.view(torch.uint16) if own.dtype is torch.bfloat16 else own).reshape(-1)


def _view_nothing(tensor: torch.Tensor) -> None:
    """Return None, for a collective that leaves the tensor as it is."""


def _view_bytes(tensor: torch.Tensor) -> Any:
    return as_array(view_flat(tensor.detach()).view(torch.uint8))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the elements are contiguous at the tensor's address."""
    return (
        (tensor.__class__ is torch.Tensor or tensor.__class__ is torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
        and has_memory(tensor)
    )


def _can_join(tensors: list[torch.Tensor], like: torch.Tensor) -> bool:
    """Return True if all `tensors` are plain, of the dtype and shape of `like`, unknown to autograd, and small."""
    dtype, shape = like.dtype, like.shape
    return like.nbytes * len(tensors) <= _MAX_JOINED and all(
        one.dtype is dtype
        and one.shape == shape
        and not one.requires_grad
        and not one.is_inference()
        and _is_plain(one)
        for one in tensors
    )


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a plain tensor as the general path passes them on."""
    return view_flat(tensor.detach())


def _are_plain_and_disjoint(output: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if both tensors are plain, have the same dtype and do not overlap in memory."""
    if not _is_plain(tensor) or not _is_plain(output) or tensor.dtype is not output.dtype or tensor.is_conj():
        return False
    first, second = tensor.data_ptr(), output.data_ptr()
    return not output.is_conj() and (first + tensor.nbytes <= second or second + output.nbytes <= first)
