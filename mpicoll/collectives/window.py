"""Windows: memory of each rank that all ranks of a communicator read and write."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from math import prod
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from mpicoll.buffers import ops
from mpicoll.buffers.buffer import Buffer
from mpicoll.buffers.device import device_of
from mpicoll.buffers.dtypes import Array
from mpicoll.buffers.recognise import output, recognise
from mpicoll.collectives import barrier
from mpicoll.collectives.arguments import ArrayT, adds_rank_to_errors, check_rank
from mpicoll.collectives.empty import check_shape, make_array
from mpicoll.engine import dispatch
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.process_local import refuse_pickling
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.executors.shared_memory import SharedMemoryCollective
from mpicoll.engine.world import CommLike, resolve
from mpicoll.errors import (
    ArgumentError,
    CommunicatorError,
    DeviceError,
    DTypeError,
    MismatchError,
    ShapeError,
)
from mpicoll.extension import find_window_memory, make_queue_lock
from mpicoll.transport.waiting import poll
from mpicoll.transport.windows import Memory, RemoteMemory, SharedWindow
from mpicoll.wording import rank_list

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Self

    from mpicoll.engine.core.arena import Arena

_PROGRAM, _COMBINE = 0, 1
"""The numbers of the locks of a rank's memory."""

_OPERATIONS = "put", "get", "accumulate", "get_accumulate"
_LOCK, _UNLOCK = len(_OPERATIONS), len(_OPERATIONS) + 2
"""The numbers of calls that the extension carries out; a shared lock has that after _LOCK."""

_LINE = 64
"""Bytes at a multiple of which the locks begin."""

_OPS = (*(one for one in ops.NAMES if one not in ("avg", "minloc", "maxloc")), "replace")


class Window:
    """Array of each rank that all ranks of a communicator read and write without a call of its owner. Collective; freed
    by :meth:`free`, or at the end of a ``with`` block.

    On one node the arrays lie in memory that the ranks share, and calls access it directly. Between the nodes of an MPI
    job, MPI's windows are used: there a rank may have to enter a call of MPI before others can access its memory, such
    as any call of mpicoll that waits.

    A call outside of :meth:`lock` holds a shared lock of the target's memory while it lasts, and is complete when it
    returns. Accumulating calls are atomic with respect to each other; elements that one rank reads or puts while
    another one changes them are undefined, unless :meth:`lock` or :meth:`fence` orders the calls. A call that waits for
    a lock raises Timeout after the timeout of the communicator; in a window of MPI, the job is ended then. Threads of a
    rank may call the methods at once, and take turns; the locks are those of the rank.

    Args:
        shape: the shape of this rank's array; it may differ between ranks.
        dtype: numpy's, or torch's with ``like="torch"``; the same on every rank.
        like: the library of the array.
        comm: the communicator; None is :func:`mpicoll.world`.
        driver: "mpi" takes MPI's windows on one node, too.

    Attributes:
        local: This rank's array, which begins with zeros.

    Raises:
        ShapeError, DTypeError: `shape` or `dtype` is invalid; no message has been sent.
        MismatchError: the ranks pass different dtypes.
        CommunicatorError: the ranks can't share memory, and don't use MPI.
        CommunicationError: a rank can't allocate its memory; raised on all ranks.

    Example:
        >>> with mpicoll.Window(3, "int64") as window:  # on one rank
        ...     window.accumulate(np.array([1, 2]), rank=0, offset=1)
        ...     window.get(0)
        array([0, 1, 2])
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = "float32",
        *,
        like: str = "numpy",
        comm: CommLike = None,
        driver: Literal["auto", "mpi"] = "auto",
    ) -> None:
        core = resolve(comm)
        extents, itemsize, name = _check(core, shape, dtype, like, driver)
        self._core = core
        # The ranks whose lock the program holds.
        self._held: set[int] = set()
        # The locks are those of a rank: its threads have one at a time.
        self._turn = make_queue_lock()
        self._turn_of: tuple[int, Call] | None = None
        self._is_free = False

        def create() -> tuple[RemoteMemory, Array, list[tuple[int, ...]]]:
            return _create(core, extents, itemsize, name, self._held, by_mpi=driver == "mpi")

        self._memory, own, self._shapes = core.queue.run(create, Call(f"Window({name})"))
        self.local: Any = make_array("Window", extents, dtype, like, lambda size: own[:size])
        self._buffer = recognise("Window", self.local)
        self._kind = dtype, like
        # Carries out calls like earlier ones in the extension.
        self._direct = self._memory.direct if isinstance(self._memory, SharedWindow) else None
        if self._direct is not None:
            core.queue.bind_window(self._direct, self._turn, self.local, self._shapes)
        # The same for fence: it returns False if Python has to carry it out.
        self._meet_directly: Callable[[], bool] | None = None
        self._meeting: tuple[SharedMemoryCollective, Call] | None = None

    __reduce_ex__ = refuse_pickling("Window", "every process of the job creates it, by mpicoll.Window")

    def __repr__(self) -> str:
        core, state = self._core, ", freed" if self._is_free else ""
        return f"<mpicoll.Window of {self._buffer.dtype.name}: rank {core.rank} of {core.size}{state}>"

    def shared(self, rank: int) -> Any:
        """Return the array of `rank` itself, to read and to write, on one node. Raises CommunicatorError if it is in
        the memory of another node, or a window of MPI."""
        self._check_usable("shared")
        target = _check_target(self._core, "shared", rank)
        memory = self._memory.view(target)
        if memory is None:
            raise CommunicatorError(
                f"Window.shared: the array of rank {target} is not in memory that this rank can access; use get()"
                f" (rank {self._core.rank} of {self._core.size})"
            )
        dtype, like = self._kind
        return make_array("Window.shared", self._shapes[target], dtype, like, lambda size: memory[:size])

    def put(self, x: Any, rank: int, offset: int = 0) -> None:
        """Write the array `x`, of the window's dtype, to the array of `rank`, from element `offset` on, in C order.
        Raises ArgumentError, ShapeError, DTypeError, DeviceError and RankError for invalid arguments, before anything
        is written."""
        if self._direct is not None and self._direct.put(x, rank, offset):
            return
        data, target, begin = self._prepare_input("put", x, rank, offset)
        self._run("put", target, lambda: self._memory.put(target, begin, data))

    @overload
    def get(
        self, rank: int, offset: int = ..., shape: int | tuple[int, ...] | None = ..., *, out: None = ...
    ) -> Any: ...
    @overload
    def get(self, rank: int, offset: int = ..., shape: None = ..., *, out: ArrayT) -> ArrayT: ...
    def get(self, rank: int, offset: int = 0, shape: int | tuple[int, ...] | None = None, *, out: Any = None) -> Any:
        """Read from the array of `rank`, from element `offset` on, an array of `shape`, or one like `out`, an array of
        the window's dtype with any strides, which is filled; without both, the whole array, of its shape. Return the
        array, or `out`. Raises what :meth:`put` raises."""
        if self._direct is not None:
            value = self._direct.get(rank, offset, shape, out)
            if value is not None:
                return value
        self._check_usable("get")
        buffer, target, begin = _prepare_output(self._core, self._buffer, self._shapes, rank, offset, shape, out)
        into = buffer.array if buffer.array.flags.c_contiguous else np.empty(buffer.array.shape, buffer.array.dtype)
        if self._overlaps(into, target):
            into = into.copy()
        flat = into.reshape(-1).view(np.uint8)
        self._run("get", target, lambda: self._memory.get(target, begin, flat))
        if into is not buffer.array:
            np.copyto(buffer.array, into)
        return buffer.result() if out is None else out

    def accumulate(self, x: Any, rank: int, op: str = "sum", offset: int = 0) -> None:
        """Combine the array of `rank`, from element `offset` on, with the array `x` of the window's
        dtype. `op` is "sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor", "lxor" or "replace". Atomic
        with respect to all other accumulating calls. Raises what :meth:`put` raises."""
        if self._direct is None or not self._direct.accumulate(x, rank, op, offset):
            self._accumulate("accumulate", x, rank, op, offset)

    def get_accumulate(self, x: Any, rank: int, op: str = "sum", offset: int = 0) -> Any:
        """Do the same as :meth:`accumulate`, and return a new array of the shape of `x` with the elements before, such
        as the next value of a counter."""
        value = None if self._direct is None else self._direct.get_accumulate(x, rank, op, offset)
        return self._accumulate("get_accumulate", x, rank, op, offset).result() if value is None else value

    def fence(self) -> None:
        """Wait until all ranks have called it: what was put and accumulated before can be read by all afterwards.
        Collective. Raises ArgumentError, before anything else, if this rank holds a lock."""
        if self._meet_directly is not None and not self._held and self._meet_directly():
            return
        self._check_usable("fence")
        self._check_released("fence")
        if self._core.has_arena and isinstance(self._memory, SharedWindow):
            self._meet_in_shared_memory()
        else:
            self._core.queue.run(self._meet, Call("Window.fence"))

    def lock(self, rank: int, *, exclusive: bool = True) -> AbstractContextManager[Window]:
        """Hold the lock of the memory of `rank` in a ``with`` block. While it is exclusive, calls of other ranks on
        that memory wait; while it is shared, those for an exclusive lock do. Raises ArgumentError if this rank holds it
        already, and Timeout if another one does not release it within the timeout of the communicator."""
        direct = self._direct
        return _HeldLock(self, rank, exclusive=exclusive) if direct is None else direct.hold(self, rank, exclusive)

    def _acquire(self, rank: Any, exclusive: bool) -> int:
        """Acquire the lock of `rank` for the program, and return the rank."""
        self._check_usable("lock")
        target = _check_target(self._core, "lock", rank)

        def hold() -> None:
            if target in self._held:
                raise ArgumentError(
                    f"Window.lock: this rank holds the lock of rank {target} (rank {self._core.rank} of"
                    f" {self._core.size})"
                )
            self._memory.lock(target, _PROGRAM, exclusive)
            self._held.add(target)

        call = Call(f"Window.lock({target}, exclusive={exclusive})", collective=False)
        self._run_watched(call, hold)
        self._repeat(_LOCK + (not exclusive), target, call)
        return target

    def _release(self, target: int) -> None:
        """Release the lock of `target`, which the program holds."""

        def release() -> None:
            self._held.remove(target)
            self._memory.unlock(target, _PROGRAM)

        call = Call(f"Window.unlock({target})", collective=False)
        self._run_watched(call, release)
        self._repeat(_UNLOCK, target, call)

    def free(self) -> None:
        """Free the window, when all ranks have called it; arrays keep their memory. Collective. Freeing it twice has no
        effect. Raises ArgumentError, before anything else, if this rank holds a lock."""
        if not self._is_free:
            self._check_usable("free")
            self._check_released("free")
            self._is_free = True
            if self._direct is not None:
                self._direct.unbind()
            self._direct = self._meet_directly = self._meeting = None
            self._core.queue.run(self._free, Call("Window.free"))

    def __enter__(self) -> Self:
        self._check_usable("__enter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Freeing is collective: after an error on this rank alone it would wait for ranks that never enter it.
        if kind is None:
            self.free()

    def _check_usable(self, operation: str) -> None:
        self._core.check()
        if self._is_free:
            raise ArgumentError(
                f"Window.{operation}: the window was freed (rank {self._core.rank} of {self._core.size})"
            )

    def _check_released(self, operation: str) -> None:
        if self._held:
            raise ArgumentError(
                f"Window.{operation}: this rank holds the lock of {rank_list(self._held)}; call it after the with block"
                f" (rank {self._core.rank} of {self._core.size})"
            )

    def _overlaps(self, array: Array, target: int) -> bool:
        """Return True if `array` may lie in the array of `target`: the order in which overlapping memory is copied is
        undefined."""
        memory = self._memory.view(target)
        if memory is None:
            return target == self._core.rank and np.may_share_memory(array, self._buffer.array)
        return np.may_share_memory(array, memory)

    def _run(self, operation: str, target: int, access: Callable[[], Any]) -> None:
        """Call `access` with the lock of the memory of `target`."""
        call = Call(f"Window.{operation}", peer=target, collective=False)
        self._run_watched(call, lambda: self._access(target, access))
        self._repeat(_OPERATIONS.index(operation), target, call)

    def _repeat(self, operation: int, target: int, call: Call) -> None:
        """Have later calls like `call` carried out by the extension, if possible."""
        if self._direct is not None:
            self._direct.add(operation, target, call)

    def _run_watched(self, call: Call, function: Callable[[], None]) -> None:
        """Call `function`, whose waits have a bound unless MPI waits."""
        bounded = isinstance(self._memory, SharedWindow)
        self._core.queue.run_with_deadline(self._run_alone, call, function, call, bounded=bounded)

    def _run_alone(self, function: Callable[[], None], call: Call) -> None:
        """Call `function` while no other thread accesses the window."""
        me, current = threading.get_ident(), self._turn_of
        if current is not None and current[0] == me:
            raise CommunicatorError(
                f"{call}: called in the middle of {current[1]} on the same window and thread, such as by a signal"
                f" handler; call it afterwards (rank {self._core.rank} of {self._core.size})"
            )
        if not self._turn.acquire(blocking=False):
            what = f"{call}, after that of another thread, on rank {self._core.rank} of {self._core.size}"
            poll(lambda: self._turn.acquire(blocking=False), self._core.timeout, what)
        try:
            self._turn_of = me, call
            function()
        finally:
            self._turn_of = None
            self._turn.release()

    def _access(self, target: int, access: Callable[[], Any]) -> None:
        if target in self._held:
            access()
            return
        self._memory.lock(target, _PROGRAM, False, True)
        try:
            access()
        finally:
            self._memory.unlock(target, _PROGRAM)

    def _prepare_input(self, operation: str, x: Any, rank: int, offset: int) -> tuple[Array, int, int]:
        """Return the bytes of `x`, the target, and the offset in bytes there."""
        self._check_usable(operation)
        buffer, target, begin = self._prepare_operand(operation, x, rank, offset)
        return np.ascontiguousarray(buffer.array).reshape(-1).view(np.uint8), target, begin

    def _prepare_operand(self, operation: str, x: Any, rank: int, offset: int) -> tuple[Buffer, int, int]:
        """Return the buffer of `x`, or of a copy of it, the target, and the offset in bytes there."""
        buffer, target, begin = _check_operand(self._core, operation, self._buffer, self._shapes, x, rank, offset)
        if self._overlaps(buffer.array, target):
            buffer = Buffer(None, buffer.array.copy(), buffer.dtype, buffer.library)
        return buffer, target, begin

    def _accumulate(self, operation: str, x: Any, rank: int, op: str, offset: int) -> Buffer:
        """Return the elements before, for get_accumulate only."""
        self._check_usable(operation)
        buffer, target, begin = self._prepare_operand(operation, x, rank, offset)
        combine, kernel = _bind_combine(self._core, operation, buffer, op)
        if self._direct is not None and kernel is not None:
            self._direct.add_op(op, *kernel)
        before = self._buffer.library.empty(self._buffer, buffer.array.shape)
        old = before.array.reshape(-1)
        memory = self._memory.view(target)

        def combine_there() -> None:
            new = np.empty_like(old)
            self._memory.get(target, begin, old.view(np.uint8))
            combine(old, new)
            self._memory.put(target, begin, new.view(np.uint8))

        def combine_here() -> None:
            assert memory is not None
            part = memory[begin : begin + old.nbytes].view(old.dtype)
            if operation == "get_accumulate":
                np.copyto(old, part)
            combine(part, part)

        def access() -> None:
            self._memory.lock(target, _COMBINE, True)
            try:
                (combine_there if memory is None else combine_here)()
            finally:
                self._memory.unlock(target, _COMBINE)

        self._run(operation, target, access)
        return before

    def _meet_in_shared_memory(self) -> None:
        core = self._core
        if self._meeting is None:
            # The signature differs from that of a barrier, so that ranks which call one are found.
            call, operation = Call("Window.fence"), barrier.prepare(core, "shm_flat")
            choice = dispatch.select_algorithm(operation)
            assert choice is not None
            arrays = operation.arrays.for_shared_memory()
            self._meeting = SharedMemoryCollective.of(operation, choice, arrays, call=call), call
        collective, call = self._meeting
        core.queue.run(collective, call, None, None)
        compiled = collective.find_compiled()
        if compiled is not None:
            self._meet_directly = core.queue.bind_call(compiled, call, None, None)

    def _meet(self) -> None:
        call = Call("Window.fence")
        self._run_alone(self._memory.sync, call)
        dispatch.make_task(barrier.prepare(self._core, None))()
        self._run_alone(self._memory.sync, call)

    def _free(self) -> None:
        dispatch.make_task(barrier.prepare(self._core, None))()
        self._run_alone(self._memory.free, Call("Window.free"))


class _HeldLock:
    """The lock of the memory of `rank`, held in a ``with`` block; that of the extension does the same."""

    __slots__ = ("_exclusive", "_rank", "_window")

    def __init__(self, window: Window, rank: Any, *, exclusive: bool) -> None:
        self._window = window
        self._rank = rank
        self._exclusive = exclusive

    def __enter__(self) -> Window:
        self._rank = self._window._acquire(self._rank, self._exclusive)  # noqa: SLF001  a part of the window
        return self._window

    def __exit__(self, *error: object) -> None:
        self._window._release(self._rank)  # noqa: SLF001


def _wait(core: CommunicatorCore, ready: Callable[[], bool], holders: Callable[[], list[int]], what: str) -> None:
    """Wait for a lock, in a call that the watchdog knows."""
    # Other ranks may wait for messages of this one, or for its windows of MPI.
    poll(
        ready,
        core.timeout,
        f"{what} (rank {core.rank} of {core.size})",
        lambda: core.transport.check_peers(0.0, holders()),
    )


@adds_rank_to_errors
def _check(core: CommunicatorCore, shape: Any, dtype: Any, like: str, driver: Any) -> tuple[tuple[int, ...], int, str]:
    """Return the extents of this rank's array, the bytes of an element, and the name of the dtype."""
    extents = check_shape("Window", shape)
    empty = recognise("Window", make_array("Window", 0, dtype, like, lambda size: np.empty(size, np.uint8)))
    if driver not in ("auto", "mpi"):
        raise ArgumentError(f"Window: driver must be 'auto' or 'mpi', got {driver!r}")
    if driver == "mpi" and core.transport.mpi is None:
        raise ArgumentError("Window: driver 'mpi' needs MPI, which this job does not use; pass 'auto'")
    return extents, empty.array.itemsize, empty.dtype.text


def _create(
    core: CommunicatorCore,
    extents: tuple[int, ...],
    itemsize: int,
    name: str,
    held: set[int],
    *,
    by_mpi: bool,
) -> tuple[RemoteMemory, Array, list[tuple[int, ...]]]:
    """Return the memory of all ranks, that of this one, and the shapes of all arrays. `held` is the set of the ranks
    whose lock the program holds. Collective."""
    mine = json.dumps([name, by_mpi, extents])
    parts = [json.loads(one) for one in ([mine] if core.size == 1 else core.transport.allgather_text(mine))]
    names = [part[0] for part in parts]
    where = f"rank {core.rank} of {core.size}"
    if len({(part[0], part[1]) for part in parts}) > 1:
        raise MismatchError(f"Window: the ranks pass different dtypes or drivers: {', '.join(names)} ({where})")
    shapes = [tuple(part[2]) for part in parts]
    nbytes = max(prod(extents) * itemsize, 1)
    arena = None if by_mpi else core.arena()
    if (core.size == 1 and not by_mpi) or arena is not None:
        memory, own = _share(core, arena, nbytes, held)
        return memory, own, shapes
    if core.transport.mpi is None:
        reason = core.no_shm_reason or core.shm_failed_reason
        raise CommunicatorError(f"Window: the ranks can't share memory ({reason}), and don't use MPI ({where})")
    own = np.zeros(nbytes, np.uint8)
    return core.transport.create_window(own), own, shapes


def _share(core: CommunicatorCore, arena: Arena | None, nbytes: int, held: set[int]) -> tuple[SharedWindow, Memory]:
    """Return the memory of the ranks of a node, each behind its locks, and that of this rank. Collective."""
    direct = find_window_memory()
    head = 0 if direct is None else direct.count_lock_bytes(core.size)
    if arena is None:
        whole = np.zeros(head + nbytes + _LINE, np.uint8)
        parts = [whole[-whole.ctypes.data % _LINE :][: head + nbytes]]
    else:
        own = core.allocate(head + nbytes)
        own[...] = 0
        peers = arena.segments.by_number[arena.segments.allocated]
        parts = [own if rank == core.rank else peers[rank] for rank in range(core.size)]
        core.transport.allgather_text("")  # all locks are zero from now on
    memories = [part[head:] for part in parts]
    shared = SharedWindow(memories, None if direct is None else direct(parts, core.rank, held), partial(_wait, core))
    return shared, memories[core.rank]


@adds_rank_to_errors
def _check_target(core: CommunicatorCore, operation: str, rank: Any) -> int:
    return check_rank(f"Window.{operation}", "rank", rank, core)


def _check_bounds(operation: str, target: int, shape: tuple[int, ...], offset: Any, count: int) -> int:
    """Return `offset`, from which `count` elements of the array of `target`, of this shape, are accessed."""
    try:
        begin = index(offset)
    except TypeError:
        begin = -1
    if not 0 <= begin <= prod(shape) - count:
        raise ShapeError(
            f"Window.{operation}: {count} elements from offset {offset!r} on do not lie in the array of rank {target},"
            f" of {prod(shape)} elements (shape {shape})"
        )
    return begin


@adds_rank_to_errors
def _check_operand(
    core: CommunicatorCore,
    operation: str,
    window: Buffer,
    shapes: list[tuple[int, ...]],
    x: Any,
    rank: Any,
    offset: Any,
) -> tuple[Buffer, int, int]:
    """Return the buffer of `x`, the target, and the offset in bytes there."""
    name = f"Window.{operation}"
    target = check_rank(name, "rank", rank, core)
    buffer = recognise(name, x)
    device = device_of(buffer.array)
    if device is not None:
        raise DeviceError(f"{name}: x is on {device.name}; windows take memory of the host: copy it first")
    # bfloat16 is the one dtype that libraries show to numpy in different ways.
    same = buffer.dtype.storage == window.dtype.storage or buffer.dtype.name == "bfloat16"
    if buffer.dtype.name != window.dtype.name or not same:
        mine, theirs = (
            one.dtype.name if buffer.dtype.name != window.dtype.name else str(one.array.dtype)
            for one in (buffer, window)
        )
        raise DTypeError(f"{name}: x has dtype {mine}, and the window has {theirs}")
    begin = _check_bounds(operation, target, shapes[target], offset, buffer.array.size)
    return buffer, target, begin * buffer.array.itemsize


@adds_rank_to_errors
def _prepare_output(
    core: CommunicatorCore,
    window: Buffer,
    shapes: list[tuple[int, ...]],
    rank: Any,
    offset: Any,
    shape: Any,
    out: Any,
) -> tuple[Buffer, int, int]:
    """Return the buffer of the result of get, the target, and the offset in bytes there."""
    target = check_rank("Window.get", "rank", rank, core)
    if out is not None:
        if shape is not None:
            raise ArgumentError("Window.get: pass shape or out, not both")
        found = recognise("Window.get", out, "out")
        buffer = output("Window.get", out, window, found.array.shape)
    else:
        extents = shapes[target] if shape is None else check_shape("Window.get", shape)
        _check_bounds("get", target, shapes[target], offset, prod(extents))
        buffer = window.library.empty(window, extents)
    begin = _check_bounds("get", target, shapes[target], offset, buffer.array.size)
    return buffer, target, begin * buffer.array.itemsize


@adds_rank_to_errors
def _bind_combine(
    core: CommunicatorCore, operation: str, operand: Buffer, op: Any
) -> tuple[Callable[[Array, Array], object], tuple[str | None, str | None] | None]:
    """Return a function that writes the combination of its first flat array with `operand` to its second one; and the
    op and the dtype by which the extension does the same, None to replace the elements. There may be no such op."""
    name = f"Window.{operation}"
    if not isinstance(op, str) or op not in _OPS:
        raise DTypeError(f"{name}: op must be one of {', '.join(_OPS)}, got {op!r}")
    if op == "replace":
        return lambda old, new: operand.load(new), (None, None)
    reduction = ops.reduction(name, op, operand.dtype, operand.library.wrap, operand.array.shape)
    kernel = ops.Fold(reduction, operand).fused
    if not reduction.changes(operand.array.dtype):
        flat = np.ascontiguousarray(operand.array).reshape(-1)
        return lambda old, new: reduction.combine(old, flat, new), kernel
    left, right = (np.empty(operand.array.size, reduction.work) for _ in range(2))
    operand.load(right)
    if reduction.prepare is not None:
        reduction.prepare(right)

    def combine(old: Array, new: Array) -> None:
        Buffer(None, old, operand.dtype, operand.library).load(left)
        if reduction.prepare is not None:
            reduction.prepare(left)
        reduction.combine(left, right, left)
        Buffer(None, new, operand.dtype, operand.library).store(left)

    return combine, kernel
