"""NCCL's collectives on device memory, where each rank has its own device."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, TypeAlias, cast
from weakref import WeakSet, finalize

import numpy as np

from mpicoll.buffers.device import Device, empty_beside, view
from mpicoll.engine.core.arrays import do_nothing
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.executors.stream_order import Completion, SubmittedCollectives
from mpicoll.errors import AlgorithmError, CommunicationError, CommunicatorError, DeviceError, RankFailed, Timeout
from mpicoll.logs import get_logger
from mpicoll.transport.base import Memory, Native, Transport
from mpicoll.transport.waiting import poll

NcclCall: TypeAlias = "Callable[[Any, int], object]"
"""Function called as ``call_nccl(communicator, stream)``, which calls NCCL."""

COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "bcast", "gather", "scatter", "allgather", "alltoall")

# Booleans are reduced as 0 and 1.
_OPS = {
    "sum": "NCCL_SUM",
    "prod": "NCCL_PROD",
    "min": "NCCL_MIN",
    "max": "NCCL_MAX",
    "land": "NCCL_MIN",
    "lor": "NCCL_MAX",
}

_DTYPES = {
    "bool": "NCCL_UINT8",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "complex64": "NCCL_FLOAT32",
    "complex128": "NCCL_FLOAT64",
}

_CHECK_INTERVAL = 0.05
"""Seconds between two checks that the other ranks are alive."""

_EXIT_GRACE = 2.0
"""Seconds within which an operation completes after its last peer has exited."""

_FREE_TIMEOUT = 5.0
"""Maximum time in seconds to wait for NCCL when a communicator is freed."""

_instances: WeakSet[Nccl] = WeakSet()


def unsupported_reason(collective: str, op: str | None, dtype: np.dtype[Any] | None) -> str | None:
    """Return the reason why NCCL can't serve a collective; None if it can. `op` is the name of MPI's operation and
    `dtype` the dtype of the reduction, both None without a reduction."""
    if collective not in COLLECTIVES:
        return f"NCCL has no {collective}"
    if op is None or dtype is None:
        return None
    kind = dtype.kind
    known = op in _OPS and dtype.name in _DTYPES and dtype.isnative
    if not known or (kind == "c" and op != "sum") or (kind == "b" and op in ("sum", "prod")):
        return f"NCCL has no {op} of {dtype.name}"
    return None


def create(transport: Transport, device: Device) -> Nccl | str:
    """Return NCCL among the ranks of `transport`, each with its `device`; or the reason why it is not available, the
    same on all ranks. Collective. Raises what `transport` raises if a rank dies meanwhile. NCCL takes some tenths of a
    second, and memory of the device."""
    if transport.size == 1:
        return "there is a single rank"
    properties: dict[str, Any] = {"device": device.identity}
    try:
        nccl = _nccl()
        properties["version"] = nccl.version()
        if transport.rank == 0:
            properties["key"] = nccl.new_key().hex()
    except (ImportError, AttributeError, RuntimeError, DeviceError) as error:
        properties["problem"] = str(error)
    properties_by_rank = [json.loads(text) for text in transport.allgather_text(json.dumps(properties))]
    why = _find_obstacle(properties_by_rank)
    if why is not None:
        return why
    # From here on all ranks are in NCCL, where a missing rank would block the others.
    created: Nccl | None = None
    problem = ""
    try:
        with device.working():
            end = nccl.create_communicator(transport.size, bytes.fromhex(properties_by_rank[0]["key"]), transport.rank)
        created = Nccl(transport, device, nccl.library(), end)
    except (RuntimeError, ValueError, MemoryError) as error:
        problem = str(error) or type(error).__name__
    try:
        problems = transport.allgather_text(problem)
    except BaseException:
        if created is not None:
            created.abort("not all ranks could start it")
        raise
    for rank, one in enumerate(problems):
        if one:
            if created is not None:
                created.abort("not all ranks could start it")
            return f"NCCL can't start: rank {rank}: {one}"
    assert created is not None
    return created


def _nccl() -> Any:
    """Return the NCCL bindings, which need cupy."""
    from mpicoll.buffers.cuda import nccl

    return nccl


def _find_obstacle(properties_by_rank: Sequence[dict[str, Any]]) -> str | None:
    """Return the reason why ranks with the exchanged properties can't use NCCL together."""
    seen: dict[str, int] = {}
    for rank, one in enumerate(properties_by_rank):
        if "problem" in one:
            return f"rank {rank}: {one['problem']}"
        other = seen.setdefault(one["device"], rank)
        if other != rank:
            return f"ranks {other} and {rank} share a device, which NCCL refuses"
        if one["version"] != properties_by_rank[0]["version"]:
            return f"rank 0 has version {properties_by_rank[0]['version']} of NCCL, rank {rank} has {one['version']}"
    return None


class Nccl:
    """Implementation of the :class:`~mpicoll.transport.base.Native` protocol on arrays of a device, by NCCL, without
    scans.

    Must be used inside of ``device.working``, where all ranks call the same collectives in the same order. Each call
    returns when this rank's part is done. The object becomes unusable after a failure, and after a rank has died or
    does not enter the collective within the timeout while this rank waits for the device. While NCCL connects the
    ranks, at creation and again at the first collective of each kind, it blocks in the host and can't be interrupted:
    then only the watch (:mod:`mpicoll.engine.diagnostics.watchdog`) bounds the wait, and ends the job.

    NCCL requires the operations of all communicators on a device in one order on all ranks, otherwise it may wait
    forever. The caller must ensure that order: of two communicators that use NCCL, each with an operation in the
    background, all ranks must complete the same one before the other begins.
    """

    max_count = 2**62
    has_persistent = False

    def __init__(self, transport: Transport, device: Device, module: Any, communicator: Any) -> None:
        self._transport = transport
        self._device = device
        self._module = module
        self._communicator = communicator
        self._rank, self._size = transport.rank, transport.size
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._bytes: int = module.NCCL_UINT8
        self._failure: str | None = None
        # False in a block in which calls return when they have been submitted.
        self._waits = True
        self._end: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._keeper = threading.Thread(
            target=_hold_communicator, args=(communicator, device, self._end), name="mpicoll-nccl", daemon=True
        )
        self._keeper.start()
        # For communicators that the program does not free.
        self._leave = finalize(self, self._end.put, communicator.destroy)
        self._leave.atexit = False
        _instances.add(self)

    # --- collectives

    def allreduce(self, source: Memory, target: Memory, op: str) -> None:
        count, kind, how = self._reduction(source, op)
        self._run(
            "allreduce",
            count,
            lambda nccl, stream: nccl.allReduce(_address(source), _address(target), count, kind, how, stream),
        )

    def reduce(self, source: Memory, target: Memory | None, op: str, root: int) -> None:
        count, kind, how = self._reduction(source, op)
        to = 0 if target is None else _address(target)
        self._run(
            "reduce", count, lambda nccl, stream: nccl.reduce(_address(source), to, count, kind, how, root, stream)
        )

    def reduce_scatter(self, source: Memory, target: Memory, counts: Sequence[int] | None, op: str) -> None:
        count, kind, how = self._reduction(source, op)
        if counts is None:
            part = count // self._size
            self._run(
                "reduce_scatter",
                count,
                lambda nccl, stream: nccl.reduceScatter(_address(source), _address(target), part, kind, how, stream),
            )
            return
        numbers = count // max(1, source.size)  # of each element

        def call_nccl(nccl: Any, stream: int) -> None:
            for rank, at, elements in _iter_blocks(counts, source):
                to = _address(target) if rank == self._rank else 0
                nccl.reduce(at, to, elements * numbers, kind, how, rank, stream)

        self._run("reduce_scatter", count, call_nccl, grouped=True)

    def bcast(self, data: Memory, root: int) -> None:
        at, nbytes = _address(data), data.nbytes
        self._run("bcast", nbytes, lambda nccl, stream: nccl.broadcast(at, at, nbytes, self._bytes, root, stream))

    def gather(self, source: Memory, target: Memory | None, counts: Sequence[int] | None, root: int) -> None:
        assert target is not None or self._rank != root
        if target is not None and self._rank == root:
            self._copy_own_block(source, target, counts)
        self._run_rooted("gather", target, source, counts, root)

    def scatter(self, source: Memory | None, target: Memory, counts: Sequence[int] | None, root: int) -> None:
        assert source is not None or self._rank != root
        if source is not None and self._rank == root:
            begin = sum(counts[:root]) if counts else target.size * root
            _copy(target, source[begin : begin + target.size])
        self._run_rooted("scatter", source, target, counts, root)

    def _run_rooted(
        self, what: str, whole: Memory | None, part: Memory, counts: Sequence[int] | None, root: int
    ) -> None:
        """Move blocks between the root, which has the `whole`, and the other ranks, each of which has its `part`."""
        blocks = [] if whole is None else list(_iter_blocks(counts or [part.size] * self._size, whole))

        def call_nccl(nccl: Any, stream: int) -> None:
            at_root, elsewhere = (nccl.recv, nccl.send) if what == "gather" else (nccl.send, nccl.recv)
            if self._rank != root:
                if part.size:
                    elsewhere(_address(part), part.nbytes, self._bytes, root, stream)
                return
            for rank, at, elements in blocks:
                if rank != root:
                    at_root(at, elements * part.itemsize, self._bytes, rank, stream)

        self._run(what, 1, call_nccl, grouped=True)

    def allgather(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None:
        if counts is None:
            nbytes = source.nbytes
            self._run(
                "allgather",
                nbytes,
                lambda nccl, stream: nccl.allGather(_address(source), _address(target), nbytes, self._bytes, stream),
            )
            return

        def call_nccl(nccl: Any, stream: int) -> None:
            for rank, at, elements in _iter_blocks(counts, target):
                of = _address(source) if rank == self._rank else at
                nccl.broadcast(of, at, elements * target.itemsize, self._bytes, rank, stream)

        self._run("allgather", sum(counts), call_nccl, grouped=True)

    def alltoall(self, source: Memory, target: Memory) -> None:
        block, nbytes = source.size // self._size, source.nbytes // self._size
        if np.may_share_memory(source, target):
            copied = empty_beside(source, source.size)
            np.copyto(copied, source)
            source = copied
        own_block = slice(self._rank * block, (self._rank + 1) * block)
        _copy(target[own_block], source[own_block])

        def call_nccl(nccl: Any, stream: int) -> None:
            for peer in self._peers:
                nccl.send(_address(source) + peer * nbytes, nbytes, self._bytes, peer, stream)
                nccl.recv(_address(target) + peer * nbytes, nbytes, self._bytes, peer, stream)

        self._run("alltoall", nbytes, call_nccl, grouped=True)

    def barrier(self) -> None:
        word = self._device.empty(1, np.dtype(np.uint8))
        np.copyto(word, np.zeros(1, np.uint8))
        self.allreduce(word, word, "max")

    def scan(self, source: Memory, target: Memory, op: str) -> None:
        raise AlgorithmError("scan: not supported by NCCL; use another algorithm")

    def exscan(self, source: Memory, target: Memory, op: str) -> None:
        raise AlgorithmError("exscan: not supported by NCCL; use another algorithm")

    def bind_allreduce_in_place(self, dtype: np.dtype[Any], count: int, op: str) -> Callable[[int], None]:
        at = self.bind_dtype(dtype)

        def again(address: int) -> None:
            memory = at(address, count)
            self.allreduce(memory, memory, op)

        return again

    def bind(self, call: Callable[[Native], None], *, persistent: bool) -> Callable[[], None]:
        return lambda: call(self)

    def record(self, call: Callable[[Native], None], buffers: Sequence[tuple[Memory, Any]]) -> None:
        """Return None: the functions of NCCL take no buffers."""

    def bind_dtype(self, dtype: np.dtype[Any]) -> Callable[[int, int], Memory]:
        return lambda address, count: view(self._device, address, (count,), dtype)

    # --- life

    def free(self) -> None:
        """Release the resources of NCCL. Waits briefly for the ranks that free it too, because some versions of NCCL
        do."""
        self.begin_free().join(_FREE_TIMEOUT)

    def abort(self, why: str) -> None:
        """End the running operations, and release the resources of NCCL. Waits for no rank."""
        self._finish(self._communicator.abort, why)
        self._keeper.join(_FREE_TIMEOUT)

    def begin_free(self, dead: AbstractSet[int] = frozenset()) -> threading.Thread:
        """Free NCCL, or abort it if one of its ranks is among the `dead` (ranks of the world), in the thread that is
        returned."""
        if dead.isdisjoint(self._transport.members):
            self._finish(self._communicator.destroy, "it was freed")
        else:
            self._finish(self._communicator.abort, "ranks have died")
        return self._keeper

    def _finish(self, how: Callable[[], object], why: str) -> None:
        """Request the end from the thread that holds NCCL's communicator, unless this was done."""
        self._failure = self._failure or why
        if self._leave.detach() is not None:
            self._end.put(how)

    # --- work

    def _reduction(self, source: Memory, op: str) -> tuple[int, int, int]:
        """Return the number of elements, the dtype and the operation that NCCL reduces with."""
        width = 2 if source.dtype.kind == "c" else 1
        kind, how = (getattr(self._module, name) for name in (_DTYPES[source.dtype.name], _OPS[op]))
        return source.size * width, kind, how

    def _copy_own_block(self, source: Memory, target: Memory, counts: Sequence[int] | None) -> None:
        """Copy this rank's block to its position in `target`."""
        begin = sum(counts[: self._rank]) if counts else source.size * self._rank
        _copy(target[begin : begin + source.size], source)

    def _run(self, what: str, count: int, call_nccl: NcclCall, *, grouped: bool = False) -> None:
        """Run `call_nccl` on the device's stream and wait for it. If `count` is 0, no rank has work to do."""
        if self._failure is not None:
            raise CommunicatorError(
                f"{what}: NCCL can't be used any more on this communicator: {self._failure}; create a new one with"
                " duplicate()"
            )
        if not count:
            return
        try:
            with self._group() if grouped else nullcontext():
                call_nccl(self._communicator, self._device.stream)
            if self._waits:
                self._wait(what)
        except BaseException as error:
            self.abort(f"{what} failed ({error})")
            if isinstance(error, self._module.NcclError):
                raise CommunicationError(f"{what}: rank {self._rank} of {self._size}: {error}") from error
            raise

    @contextmanager
    def _group(self) -> Iterator[None]:
        self._module.groupStart()
        try:
            yield
        except BaseException:
            # Half a group must not be launched, but a group has to end. NCCL drops one in which a call has failed, as
            # a message to a rank that does not exist does.
            with suppress(self._module.NcclError):
                self._communicator.send(0, 0, self._bytes, self._size, self._device.stream)
            with suppress(self._module.NcclError):
                self._module.groupEnd()
            raise
        self._module.groupEnd()

    def _wait(self, what: str) -> None:
        """Return when all work queued on the device is done. NCCL by itself would wait forever."""
        mark = self._device.record_event()
        begin = time.monotonic()
        look, next_look = self.watch(what, begin), begin + _CHECK_INTERVAL

        def ready() -> bool:
            nonlocal next_look
            if mark.done():
                return True
            now = time.monotonic()
            if now > next_look:
                next_look = now + _CHECK_INTERVAL
                look()
            return False

        poll(ready, None, what)

    def check_errors(self) -> None:
        """Raise the error that NCCL has found in submitted work, which does not end then."""
        self._communicator.check_async_error()

    def watch(self, what: str, begin: float) -> Callable[[], None]:
        """Return a function that raises the error of work that was begun at that time and is not done, if NCCL or
        another rank has failed or the work takes too long."""
        failed_at = float("inf")

        def look() -> None:
            nonlocal failed_at
            now = time.monotonic()
            self.check_errors()
            if now - begin > self._transport.timeout:
                raise Timeout(
                    f"{what}: rank {self._rank} of {self._size}: NCCL is not done within the timeout of"
                    f" {self._transport.timeout:g} s"
                )
            try:
                self._transport.check_peers(now - begin, self._peers)
            except RankFailed:
                failed_at = min(failed_at, now)
                # A rank that has completed its part may exit.
                if now - failed_at > _EXIT_GRACE:
                    raise

        return look

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Have calls in the block return when they have been submitted to the device."""
        self._waits = False
        try:
            yield
        finally:
            self._waits = True


class NcclOrder(SubmittedCollectives):
    """NCCL's collectives of one communicator, which the streams of the ranks order: the host submits them and returns.

    When NCCL or another rank fails, NCCL is aborted, so that its work on the device ends, and the communicator fails.
    """

    def __init__(self, comm: CommunicatorCore, device: Device, nccl: Nccl) -> None:
        super().__init__(comm, device)
        self._nccl = nccl
        self._looked_at: Completion | None = None
        self._look: Callable[[], None] = do_nothing

    def submit(self, run_native: Callable[[Native], None]) -> None:
        """Submit a collective: ``run_native(nccl)``. Raises the error of a communicator that has failed."""
        self.check()
        self._number += 1
        try:
            with self._nccl.submitting():
                run_native(cast(Native, self._nccl))
        except BaseException as error:
            self.fail(error)
            raise

    def _find_failure(self) -> None:
        """Return None: other ranks report no failure; they abort NCCL."""

    def _release(self) -> None:
        self._nccl.abort(f"an earlier collective failed ({self._failure})")

    def _check_work(self) -> None:
        self._nccl.check_errors()

    def _check_late_ranks(self, first: Completion) -> None:
        if self._looked_at is not first:
            what = "a collective" if first.entry is None else str(first.entry[2])
            self._looked_at, self._look = first, self._nccl.watch(what, first.begin)
        self._look()


def _hold_communicator(communicator: Any, device: Device, end: SimpleQueue[Callable[[], object]]) -> None:
    """Hold NCCL's communicator until `end` delivers a function that ends it, and call that.

    This runs in a separate thread, since NCCL may wait for the other ranks of the node. The thread is started early,
    because none can be started at interpreter exit. While it holds the communicator, the interpreter does not finalize
    that itself, which might block forever."""
    try:
        with device.working():  # so that NCCL does not use this thread's default device
            end.get()()
    except Exception as error:  # noqa: BLE001  the communicator is unusable in any case
        get_logger().warning("NCCL on %s did not end well: %s", device.name, error)


def free_all(dead: AbstractSet[int]) -> None:
    """Free all remaining communicators of NCCL at the end of the program; abort those with a rank among the `dead`
    (ranks of the world). Not collective; takes seconds at most."""
    keepers = [one.begin_free(dead) for one in list(_instances)]
    deadline = time.monotonic() + _FREE_TIMEOUT
    for keeper in keepers:
        keeper.join(max(0.0, deadline - time.monotonic()))


def _address(memory: Memory) -> int:
    return memory.ctypes.data


def _iter_blocks(counts: Sequence[int], memory: Memory) -> Iterator[tuple[int, int, int]]:
    """Return rank, address and elements of each block of `memory` that is not empty."""
    at = _address(memory)
    for rank, elements in enumerate(counts):
        if elements:
            yield rank, at, elements
        at += elements * memory.itemsize


def _copy(target: Memory, source: Memory) -> None:
    """Queue the copy of a block on the device, unless it is in its place."""
    if target.size and _address(target) != _address(source):
        np.copyto(target, source)
