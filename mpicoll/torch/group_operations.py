"""Methods that c10d calls on a group of mpicoll: collectives, point-to-point operations, timeouts and the group's end.

The names and arguments of the methods are those that c10d uses, in its full form: lists of tensors, and options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.autograd.graph import increment_version

from mpicoll.collectives import p2p
from mpicoll.collectives.arguments import adds_rank_to_errors, check_rank
from mpicoll.collectives.barrier import NOTHING
from mpicoll.config import config
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.diagnostics.watchdog import MIN_REPORTED_TIMEOUT
from mpicoll.engine.dispatch import DeferringTask, Task
from mpicoll.errors import ArgumentError, CommunicatorError
from mpicoll.torch import c10d_collectives, connected_groups, sparse
from mpicoll.torch.barrier_monitor import GRACE, MonitoredBarrier
from mpicoll.torch.begun_collectives import UNSET_TIMEOUT, BegunCollectives
from mpicoll.torch.c10d_collectives import get_op_name
from mpicoll.torch.callback_comms import CallbackComms, callback_context
from mpicoll.torch.fast_messages import FastMessages
from mpicoll.torch.fast_path import FastPath
from mpicoll.torch.tensors import check_plain, flatten_input, prepare_in_place
from mpicoll.torch.work import (
    CoalescedHandle,
    DeviceHandle,
    RecvHandle,
    Work,
    WorkHandle,
    block_current_stream,
    create_transfer_work,
)

PrepareTask: TypeAlias = "Callable[[CommunicatorCore], Task]"
"""Function that checks the arguments of a collective and returns its Task on a communicator."""

NAME = "mpicoll"

direct_operations: dict[Any, GroupOperations] = {}
"""Operations of groups, which are not shut down, that may be called without c10d: a cache of
:func:`mpicoll.torch.groups.find_direct`. No group may be referenced by its operations: C++ refers to them for c10d's
process group, so the cycle would never be collected."""

_log = logging.getLogger("mpicoll")


class GroupOperations:
    """Operations of a group on an mpicoll communicator, to be inherited by a class that c10d knows.

    Collectives run in the order of their calls; blocking and asynchronous collectives share one queue per group. The
    tensors of an asynchronous operation must not be changed before its Work has completed. Their memory is kept until
    then, even if the Work is dropped.

    Tensors may be on the CPU and on CUDA devices. An operation starts after all work that was enqueued on the caller's
    current stream before the call. Completion is synchronized with the host, so every stream may use the result; where
    MPICOLL_CUDA_ORDER orders streams, with the current stream, of the call or of ``Work.wait``.

    `timeout` applies to all operations, and becomes the timeout of the communicator: if an operation takes longer, the
    job is aborted with a report, whether or not a thread waits for the operation. torch's default (30 minutes) means
    MPICOLL_TIMEOUT.
    """

    comm: Communicator
    blocking_result: Work | None = None
    """Result of blocking collectives."""
    serves_all_devices = True

    def set_communicator(self, comm: Communicator, name: str, timeout: timedelta) -> None:
        """Run the operations on `comm`. `name` is that of the group, and is the same on all ranks."""
        self.comm = comm
        self._fast_path: FastPath | None = FastPath(comm)
        self._messages: FastMessages | None = FastMessages(core_of(comm))
        comm.timeout = to_seconds(timeout)
        self._coalesced: list[Work] | None = None
        self._num_barriers = 0
        self.set_name(name)

    def set_name(self, name: str) -> None:
        """Set the group's name, before any operation starts on it."""
        if name:
            core_of(self.comm).queue.group.name = f"torch's group {name}"
        self._callback_comms = CallbackComms(self.comm, name)
        own = self._callback_comms.get_current()
        self._begun: BegunCollectives | None = BegunCollectives(own.core, own.callbacks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all later and pending operations."""
        for comm in self._callback_comms.list_communicators():
            comm.timeout = to_seconds(timeout)

    @property
    def is_shut_down(self) -> bool:
        return self._fast_path is None

    def get_fast_path(self) -> FastPath | None:
        """Return the fast path if a blocking call may use it, else None.

        A call may not use it if the profiler is enabled, in a callback, and after shutdown.
        """
        return None if profiler._is_profiler_enabled or callback_context.path else self._fast_path

    def shutdown(self) -> None:
        """Complete all pending operations and callbacks, and free the communicator. Collective.

        If an operation is still pending after the group's timeout, other ranks have not joined it. The communicator is
        then not freed, since an MPI call still uses it.
        """
        self._leave_fast_paths()
        if self._callback_comms.drain(self.comm.timeout):
            self._callback_comms.free()
            connected_groups.disconnect(self.comm)
        else:
            _log.warning("shutdown of %r while an operation is pending that other ranks have not entered", self)
            self.abort()

    def abort(self) -> None:
        """Fail the operations that are queued and not yet running. An operation inside MPI can't be stopped; without
        MPI, those that run fail too, on all ranks."""
        self._leave_fast_paths()
        self._callback_comms.abandon()
        connected_groups.disconnect(self.comm, abort=True)

    def _leave_fast_paths(self) -> None:
        self._fast_path = self._messages = self._begun = None
        for group in [one for one, operations in list(direct_operations.items()) if operations is self]:
            del direct_operations[group]

    # Collectives.

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        if len(tensors) != 1:
            _check_single("all_reduce", tensors)
        tensor, op = tensors[0], opts.reduceOp
        # get_fast_path() inlined, as this is the most frequent call.
        fast_path = None if opts.asyncOp or profiler._is_profiler_enabled or callback_context.path else self._fast_path
        if fast_path is not None and fast_path.all_reduce(tensor, op):
            return self.blocking_result
        if opts.asyncOp:
            work = self._begin(tensors, opts, tensor, tensor, "all_reduce", get_op_name(op))
            if work is not None:
                return work
        # A method of its own, because variables of a closure would cost each call 80 ns.
        return self._run_or_start_all_reduce(tensors, op, opts)

    def _run_or_start_all_reduce(self, tensors: list[torch.Tensor], op: Any, opts: Any) -> Work | None:
        (tensor,) = tensors
        prepare = c10d_collectives.all_reduce if tensor.layout is torch.strided else sparse.all_reduce
        return self._run_or_start("all_reduce", opts, lambda comm: prepare(comm, tensor, op), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        _check_nonempty("all_reduce_coalesced", tensors)
        return self._run_or_start(
            "all_reduce_coalesced",
            opts,
            lambda comm: c10d_collectives.all_reduce_coalesced(comm, tensors, opts.reduceOp),
            tensors,
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        if len(tensors) != 1:
            _check_single("broadcast", tensors)
        tensor, root = tensors[0], opts.rootRank
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.broadcast(tensor, root):
            return self.blocking_result
        if opts.asyncOp:
            work = self._begin(tensors, opts, tensor, tensor, "broadcast", None, root)
            if work is not None:
                return work
        return self._run_or_start(
            "broadcast", opts, lambda comm: c10d_collectives.broadcast(comm, tensor, root), tensors
        )

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work | None:
        _check_single("reduce", tensors)
        tensor, op, root = tensors[0], opts.reduceOp, opts.rootRank
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.reduce(tensor, op, root):
            return self.blocking_result
        if opts.asyncOp:
            output = tensor if root == self.comm.rank else None
            work = self._begin(tensors, opts, tensor, output, "reduce", get_op_name(op), root)
            if work is not None:
                return work
        return self._run_or_start("reduce", opts, lambda comm: c10d_collectives.reduce(comm, tensor, op, root), tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work | None:
        _check_single("all_gather", inputs)
        _check_single("all_gather", outputs, "list of outputs")
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.all_gather(outputs[0], inputs[0]):
            return self.blocking_result
        return self._run_or_start(
            "all_gather", opts, lambda comm: c10d_collectives.all_gather(comm, outputs[0], inputs[0]), outputs[0]
        )

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        # outputs[i][j] receives rank i's inputs[j].
        _check_nonempty("all_gather_coalesced", inputs)
        return self._run_or_start(
            "all_gather_coalesced",
            opts,
            lambda comm: c10d_collectives.all_gather_coalesced(comm, outputs, inputs),
            [one for of in outputs for one in of],
        )

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work | None:
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.all_gather_single(output, tensor):
            return self.blocking_result
        if opts.asyncOp:
            work = self._begin([output], opts, tensor, output, "all_gather_single")
            if work is not None:
                increment_version(output)
                return work
        return self._run_or_start(
            "all_gather_single", opts, lambda comm: c10d_collectives.all_gather_single(comm, output, tensor), [output]
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        return self._run_or_start(
            "all_gather_single_coalesced",
            opts,
            lambda comm: c10d_collectives.all_gather_single_coalesced(comm, outputs, inputs),
            outputs,
        )

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work | None:
        _check_single("gather", inputs)
        into = outputs[0] if outputs else []
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.gather(into, inputs[0], opts.rootRank):
            return self.blocking_result
        return self._run_or_start(
            "gather", opts, lambda comm: c10d_collectives.gather(comm, into, inputs[0], opts.rootRank), into
        )

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work | None:
        _check_single("scatter", outputs)
        parts = inputs[0] if inputs else []
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.scatter(outputs[0], parts, opts.rootRank):
            return self.blocking_result
        return self._run_or_start(
            "scatter", opts, lambda comm: c10d_collectives.scatter(comm, outputs[0], parts, opts.rootRank), outputs
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work | None:
        _check_single("reduce_scatter", outputs)
        _check_single("reduce_scatter", inputs, "list of inputs")
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.reduce_scatter(outputs[0], inputs[0], opts.reduceOp):
            return self.blocking_result
        return self._run_or_start(
            "reduce_scatter",
            opts,
            lambda comm: c10d_collectives.reduce_scatter(comm, outputs[0], inputs[0], opts.reduceOp),
            outputs,
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work | None:
        op = opts.reduceOp
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.reduce_scatter_single(output, tensor, op):
            return self.blocking_result
        if opts.asyncOp:
            work = self._begin([output], opts, tensor, output, "reduce_scatter_single", get_op_name(op))
            if work is not None:
                increment_version(output)
                return work
        return self._run_or_start(
            "reduce_scatter_single",
            opts,
            lambda comm: c10d_collectives.reduce_scatter_single(comm, output, tensor, op),
            [output],
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Work | None:
        op = opts.reduceOp
        return self._run_or_start(
            "reduce_scatter_single_coalesced",
            opts,
            lambda comm: c10d_collectives.reduce_scatter_single_coalesced(comm, outputs, inputs, op),
            outputs,
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work | None:
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.all_to_all(outputs, inputs):
            return self.blocking_result
        return self._run_or_start(
            "all_to_all", opts, lambda comm: c10d_collectives.all_to_all(comm, outputs, inputs), outputs
        )

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Work | None:
        even = not output_splits and not input_splits
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if even and fast_path is not None and fast_path.all_to_all_single(output, tensor):
            return self.blocking_result
        if even and opts.asyncOp:
            work = self._begin([output], opts, tensor, output, "all_to_all_single")
            if work is not None:
                increment_version(output)
                return work
        return self._run_or_start(
            "all_to_all_single",
            opts,
            lambda comm: c10d_collectives.all_to_all_single(comm, output, tensor, output_splits, input_splits),
            [output],
        )

    def barrier(self, opts: Any) -> Work | None:
        """Wait until all ranks have entered the barrier.

        With a timeout (of this call, or of the group if that is shorter than MPICOLL_TIMEOUT), raise Timeout when it
        expires; the barrier is then still pending.
        """
        own = opts.timeout > UNSET_TIMEOUT
        if own or (not opts.asyncOp and self.comm.timeout < config().timeout):
            # A blocking MPI call can't be interrupted, so the barrier runs in the background.
            work = self.start("barrier", c10d_collectives.barrier, [])
            work.bound = opts.timeout.total_seconds() if own else self.comm.timeout
            if opts.asyncOp:
                return work
            work.wait()
            return self.blocking_result
        fast_path = None if opts.asyncOp else self.get_fast_path()
        if fast_path is not None and fast_path.barrier():
            return self.blocking_result
        if opts.asyncOp:
            begun = self._begin([], opts, NOTHING, None, "barrier")
            if begun is not None:
                return begun
        return self._run_or_start("barrier", opts, c10d_collectives.barrier, [])

    def run_monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 reports the ranks that did not arrive within `timeout`.

        See :meth:`mpicoll.torch.barrier_monitor.MonitoredBarrier.wait`.
        """
        core, self._num_barriers = core_of(self.comm), self._num_barriers + 1
        bound = timedelta(seconds=self.comm.timeout if timeout is None else to_seconds(timeout))
        if self.comm.size == 1:
            return
        if core.watch is None:
            raise CommunicatorError("monitored_barrier: needs ranks that are processes of an MPI job")
        explain = core.watch.reporter.request if bound.total_seconds() >= MIN_REPORTED_TIMEOUT else None
        transport = core.transport
        barrier = MonitoredBarrier(
            core.watch.mailbox, transport.key, transport.members, self.comm.rank, self._num_barriers
        )
        call = Call("monitored_barrier", collective=False)
        with core.queue.waiting(call, (bound + GRACE).total_seconds()):
            barrier.wait(bound, wait_all_ranks, explain)

    # Point-to-point operations.

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        messages = None if profiler._is_profiler_enabled else self._messages
        if messages is not None and len(tensors) == 1:
            work: Work | None = messages.start(None, tensors[0], None, "isend_work", dstRank, tag)
            if work is not None:
                return work if self._coalesced is None else self._add_coalesced(work)
        _check_single("send", tensors)
        _check_peer(core_of(self.comm), "send", "dst", dstRank)
        _check_plain(core_of(self.comm), "send", tensors[0])
        with _profile_start("send"):
            request = p2p.isend(flatten_input(tensors[0]), dstRank, tag, comm=self.comm)
        if messages is not None:
            messages.repeat("isend", tensors[0], dstRank, tag, request)
        return self._add_coalesced(create_transfer_work(request, tensors))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: N803
        return self._recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: list[torch.Tensor], src: int | None, tag: int) -> Work:
        messages = None if profiler._is_profiler_enabled else self._messages
        if messages is not None and len(tensors) == 1:
            work: Work | None = messages.start(None, None, tensors[0], "irecv_work", src, tag)
            if work is not None:
                return work if self._coalesced is None else self._add_coalesced(work)
        _check_single("recv", tensors)
        if src is not None:
            _check_peer(core_of(self.comm), "recv", "src", src)
        _check_plain(core_of(self.comm), "recv", tensors[0])
        status = p2p.Status()
        plain, restore = prepare_in_place(tensors[0])
        with _profile_start("recv"):
            request = p2p.irecv(None, src, tag, out=plain, status=status, comm=self.comm)
        if messages is not None and restore is None:
            messages.repeat("irecv", tensors[0], src, tag, request)
        return self._add_coalesced(create_transfer_work(RecvHandle(request, restore), tensors, lambda: status.source))

    # c10d's coalescing manager.

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Work:
        works, self._coalesced = self._coalesced or [], None
        outputs = [tensor for one in works for tensor in one.outputs]
        return Work(
            CoalescedHandle([one.handle for one in works]), outputs, self._callback_comms.get_current().callbacks.submit
        )

    def _add_coalesced(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Execution.

    def _begin(self, outputs: list[torch.Tensor], opts: Any, *call: Any) -> Work | None:
        """Begin an asynchronous collective like an earlier one; see :meth:`BegunCollectives.start`."""
        # What is recorded for the profiler, and the communicators of callbacks, are matters of the general path.
        if self._begun is None or profiler._is_profiler_enabled or callback_context.path:
            return None
        work = self._begun.start(outputs, opts, *call)
        return work if work is None else self._add_coalesced(work)

    def _run_or_start(self, name: str, opts: Any, prepare: PrepareTask, outputs: list[torch.Tensor]) -> Work | None:
        """Run the task of `prepare`, or start it and return its Work if `opts.asyncOp` is set."""
        # Operations on sparse tensors need intermediate results.
        place = outputs[0].device if outputs and outputs[0].is_cuda and outputs[0].layout is torch.strided else None
        if opts.asyncOp:
            work = self.start(name, prepare, outputs, place)
            if opts.timeout > UNSET_TIMEOUT:
                work.bound = opts.timeout.total_seconds()
            return work
        comm = self._callback_comms.get_current().core
        comm.check()
        task = prepare(comm) if place is None else DeferringTask(prepare(comm))
        task.call.name = name
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"{NAME}:{name}"):
                completion = comm.queue.run(task, task.call)
        else:
            completion = comm.queue.run(task, task.call)
        if completion is not None:
            block_current_stream(completion, place)
        return self.blocking_result

    def start(
        self, name: str, prepare: PrepareTask, outputs: list[torch.Tensor], place: torch.device | None = None
    ) -> Work:
        """Start the task of `prepare`, a collective that c10d knows by `name`, and return its Work. It may be left to
        complete on the CUDA device `place`, if that is not None."""
        current = self._callback_comms.get_current()
        current.core.check()
        task = prepare(current.core) if place is None else DeferringTask(prepare(current.core))
        task.call.name = name
        with _profile_start(name):
            handle: WorkHandle | None = None if task.begin is None else task.begin()
            if handle is None:
                job = current.core.queue.submit(task, task.call)
                handle = job if place is None else DeviceHandle(job, place)
        return self._add_coalesced(Work(handle, outputs, current.callbacks.submit))


def to_seconds(timeout: timedelta) -> float:
    """Convert a timeout of torch to seconds.

    torch's default, which a program without a timeout passes, means MPICOLL_TIMEOUT.
    """
    return config().timeout if timeout == dist.default_pg_timeout else timeout.total_seconds()


def _profile_start(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that records the start of an operation if the profiler is enabled.

    Only the start is recorded: an event that ends on another thread after the profiler has stopped would be written to
    memory that the profiler has freed.
    """
    return profiler.record_function(f"{NAME}:{name}") if profiler._is_profiler_enabled else nullcontext()


def _check_single(operation: str, given: Sequence[Any], what: str = "tensor") -> None:
    if len(given) != 1:
        raise ArgumentError(f"{operation}: pass one {what} on each rank, got {len(given)}")


def _check_nonempty(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ArgumentError(f"{operation}: pass at least one tensor, got an empty list")


@adds_rank_to_errors
def _check_peer(comm: CommunicatorCore, operation: str, name: str, rank: int) -> None:
    """Raise RankError, with the argument's `name` in torch, if `rank` is not one of `comm`: torch has no PROC_NULL."""
    check_rank(operation, name, rank, comm)


@adds_rank_to_errors
def _check_plain(comm: CommunicatorCore, operation: str, tensor: torch.Tensor) -> None:
    check_plain(operation, tensor)
