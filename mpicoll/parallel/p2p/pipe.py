"""Messages between pipeline stages: the class PipeP2P, and functions that use a default instance."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.poller import poller
from mpicoll.engine.core.queue import Progress, Waiting
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.world import world
from mpicoll.errors import CommunicationError, CommunicatorError, DTypeError, RankError, ShapeError, Timeout
from mpicoll.parallel import groups
from mpicoll.parallel.p2p.channels import (
    BACKWARD,
    FORWARD,
    PLAIN,
    ChannelMux,
    Operation,
    Peer,
    PendingRecv,
    PendingSend,
    all_complete,
    line_key,
)
from mpicoll.parallel.p2p.message_format import (
    BroadcastTransport,
    MessageTransport,
    SendRecvTransport,
    flatten,
    pickle_message,
)
from mpicoll.torch.tensors import check_plain, flat_output
from mpicoll.transport.base import Memory

if TYPE_CHECKING:
    from typing_extensions import Self

Expected: TypeAlias = "torch.Tensor | Sequence[int] | None"
"""The tensor that a receive expects: its shape, or a tensor of its shape and dtype."""

_SPINS = 1000
"""Number of polls of a wait before it begins to sleep between polls."""

_NAPS_PER_CHECK = 20
"""Number of sleeps of a wait between two checks that the other stage is alive."""


class PipeP2P:
    """Messages between the stages of a pipeline: stage i is rank i of a communicator.

    Making an instance is collective over `group`, as is :meth:`close`.

    Tensors on a CUDA device travel through host memory, so a send waits until they are computed; they arrive on the
    device that is current when the receive is called.

    :meth:`send` and the combined forms return when the other stage has begun to receive: so a program does not hang or
    succeed depending on message sizes, and a send to a stage that does not receive raises Timeout. The request of
    :meth:`isend` completes when the value may be changed; :meth:`close` reports values that were not received.

    Args:
        group: a grid, whose "pipe" axis is used, or anything that :func:`mpicoll.parallel.groups.communicator` accepts.
        timeout: the bound of each operation in seconds, by default the communicator's.
        send_recv: send messages; if False, broadcast each value between the two stages, for libraries whose
            point-to-point messages are worse. Then only adjacent stages can communicate (the last and the first are
            adjacent).
        background: a thread makes progress on pending operations while the program computes.

    Raises:
        RankError, DTypeError, DeviceError, CommunicatorError: an argument is invalid; raised before any message leaves.
        CommunicationError: a value does not match what the receiver expects. It is removed from the line, which remains
            usable; a blocking send raises the error, too.
        Timeout: the other stage does not answer.
        RankFailed: the process of the other stage has exited.

        All messages name the operation, the stages, and the value that was sent or expected.
    """

    def __init__(
        self, group: Any = None, *, timeout: float | None = None, send_recv: bool = True, background: bool = False
    ) -> None:
        comm = _pipe_communicator(group)
        comm.check()
        self.stage = comm.rank
        self.stages = comm.size
        self.timeout = comm.timeout if timeout is None else timeout
        self._background = background
        if background and not comm.transport.background:
            raise CommunicatorError(
                "init_process_groups: background=True needs an MPI library that lets several threads communicate"
                f" (MPI_THREAD_MULTIPLE); call poll() now and then instead (rank {comm.rank} of {comm.size})"
            )
        self._ranks: list[int] = allgather(np.array([world().rank]), comm=comm).tolist()
        self._send_recv = send_recv
        self._wire: MessageTransport = SendRecvTransport(comm) if send_recv else BroadcastTransport(comm)
        self._comm = self._wire.comm or comm
        if background and self._comm.transport.traffic is not None:
            self._comm.transport.traffic.answered = True
        self._here = self._name(self.stage)
        self._mux = ChannelMux(self._wire, self._here, self._name)
        self._lock = threading.RLock()
        self._pending: dict[Operation, None] = {}
        self._limit = 64
        self._closed = False

    def __repr__(self) -> str:
        return f"<PipeP2P: {self._here} of {self.stages}{', closed' if self._closed else ''}>"

    def can_send_recv(self) -> bool:
        """Return True if values travel as messages, False for broadcasts."""
        return self._send_recv

    def send(self, value: Any, stage: int, *, channel: int = 0, timeout: float | None = None) -> None:
        """Send `value` to `stage`; return when that stage has begun to receive it and `value` may be changed.

        Two stages that both send before they receive wait for each other until Timeout.

        Args:
            value: a tensor, None, or nested tuples, lists, dicts and namedtuples of these.
            stage: the receiver.
            channel: a number in [0, 256).
            timeout: the bound in seconds, by default that of this object.
        """
        sending = self._start_send("send", value, stage, channel, sync=True)
        self._complete([sending], timeout)

    def isend(self, value: Any, stage: int, *, channel: int = 0) -> Request:
        """Send `value` to `stage` in the background. The request completes, with None, when `value` may be changed."""
        return self._as_request(self._start_send("isend", value, stage, channel, sync=False))

    def recv(
        self,
        tensor: torch.Tensor | int | None = None,
        stage: int | None = None,
        *,
        channel: int = 0,
        expect: Expected = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive the next value from a stage: ``recv(stage)`` into new tensors, ``recv(tensor, stage)`` into `tensor`.

        After Timeout with no arrival, nothing was removed from the line. A value that was arriving by then is lost, and
        may still be written to `tensor`.

        Args:
            tensor: the tensor to fill, of the shape and dtype of the value; or the stage, if `stage` is None.
            stage: the sender.
            channel: a number in [0, 256).
            expect: the shape of the value, or a tensor of its shape and dtype; another value raises CommunicationError.
            timeout: the bound in seconds, by default that of this object.

        Returns:
            The value; `tensor` if it is given.
        """
        receiving = self._start_recv("recv", tensor, stage, channel, expect)
        self._complete([receiving], timeout)
        return receiving.value

    def irecv(
        self,
        tensor: torch.Tensor | int | None = None,
        stage: int | None = None,
        *,
        channel: int = 0,
        expect: Expected = None,
    ) -> Request:
        """Start :meth:`recv` in the background. The value of the request is the received value."""
        return self._as_request(self._start_recv("irecv", tensor, stage, channel, expect))

    def send_obj(self, obj: Any, stage: int, *, channel: int = 0, timeout: float | None = None) -> None:
        """Pickle `obj` and send it to `stage`, as :meth:`send` does. Only :meth:`recv_obj` receives it."""
        data = pickle_message("send_obj", obj)
        key = line_key("send_obj", PLAIN, channel)
        sending = PendingSend("send_obj", self._peer("send_obj", stage), key, data.size, sync=True)
        self._post(sending, data)
        self._complete([sending], timeout)

    def recv_obj(self, stage: int, *, channel: int = 0, timeout: float | None = None) -> Any:
        """Receive an object that `stage` sends by :meth:`send_obj`."""
        key = line_key("recv_obj", PLAIN, channel)
        receiving = PendingRecv("recv_obj", self._peer("recv_obj", stage), key, objects=True)
        with self._lock:
            self._mux.post_recv(receiving)
        self._complete([receiving], timeout)
        return receiving.value

    def poll(self) -> int:
        """Make progress on pending operations without waiting, and return the number of those still pending."""
        self._check("poll")
        with self._lock:
            self._mux.pump()
            self._prune()
            return len(self._pending)

    def wait(self, timeout: float | None = None) -> None:
        """Complete all pending asynchronous operations, within `timeout` seconds for all of them together.

        When all have ended or the time is over, raises the first error that was not raised before.
        """
        self._check("wait")
        with self._lock:
            self._prune()
            pending = list(self._pending)
        try:
            self._complete(pending, timeout)
        finally:
            with self._lock:
                self._prune()

    def recv_forward(self, expect: Expected = None, *, channel: int = 0, ring: bool = False) -> Any:
        """Receive the next value that the previous stage sends forward; None on the first stage.

        With `ring` the last stage is the one before the first.
        """
        return self._exchange("recv_forward", (), (FORWARD,), channel, ring, expect)[0]

    def recv_backward(self, expect: Expected = None, *, channel: int = 0, ring: bool = False) -> Any:
        """Receive the next value that the next stage sends backward; None on the last stage, unless `ring`."""
        return self._exchange("recv_backward", (), (BACKWARD,), channel, ring, expect)[0]

    def send_forward(self, output: Any, *, channel: int = 0, ring: bool = False) -> None:
        """Send `output` to the next stage; the last stage sends nothing, unless `ring`."""
        self._exchange("send_forward", ((FORWARD, output),), (), channel, ring)

    def send_backward(self, grad: Any, *, channel: int = 0, ring: bool = False) -> None:
        """Send `grad` to the previous stage; the first stage sends nothing, unless `ring`."""
        self._exchange("send_backward", ((BACKWARD, grad),), (), channel, ring)

    def send_forward_recv_backward(
        self, output: Any, expect: Expected = None, *, channel: int = 0, ring: bool = False
    ) -> Any:
        """Run :meth:`send_forward` and :meth:`recv_backward` concurrently."""
        sends = ((FORWARD, output),)
        return self._exchange("send_forward_recv_backward", sends, (BACKWARD,), channel, ring, expect)[0]

    def send_backward_recv_forward(
        self, grad: Any, expect: Expected = None, *, channel: int = 0, ring: bool = False
    ) -> Any:
        """Run :meth:`send_backward` and :meth:`recv_forward` concurrently."""
        sends = ((BACKWARD, grad),)
        return self._exchange("send_backward_recv_forward", sends, (FORWARD,), channel, ring, expect)[0]

    def send_forward_recv_forward(
        self, output: Any, expect: Expected = None, *, channel: int = 0, ring: bool = False
    ) -> Any:
        """Run :meth:`send_forward` and :meth:`recv_forward` concurrently."""
        sends = ((FORWARD, output),)
        return self._exchange("send_forward_recv_forward", sends, (FORWARD,), channel, ring, expect)[0]

    def send_backward_recv_backward(
        self, grad: Any, expect: Expected = None, *, channel: int = 0, ring: bool = False
    ) -> Any:
        """Run :meth:`send_backward` and :meth:`recv_backward` concurrently."""
        sends = ((BACKWARD, grad),)
        return self._exchange("send_backward_recv_backward", sends, (BACKWARD,), channel, ring, expect)[0]

    def send_forward_backward_recv_forward_backward(
        self, output: Any, grad: Any, expect: Expected = None, *, channel: int = 0, ring: bool = False
    ) -> tuple[Any, Any]:
        """Run all four concurrently; return the values from the previous stage and from the next one."""
        name = "send_forward_backward_recv_forward_backward"
        sends = ((FORWARD, output), (BACKWARD, grad))
        forward, backward = self._exchange(name, sends, (FORWARD, BACKWARD), channel, ring, expect)
        return forward, backward

    def close(self, timeout: float | None = None) -> None:
        """Complete pending operations and free the communicator. Collective; closing twice does nothing.

        Raises:
            CommunicationError: another stage has sent values that were not received here, or receives are pending for
                which nothing was sent.
            Timeout: another stage does not close; nothing is freed then.
        """
        if self._closed:
            return
        self._closed = True
        bound = self.timeout if timeout is None else timeout
        with self._lock:
            leaving = self._mux.send_close()
            pending, self._pending = list(self._pending), {}
        peers = self._mux.peers.values()
        sends = [one for one in pending if isinstance(one, PendingSend)]

        def ready() -> bool:
            alone = all(peer.closed or peer.lost for peer in peers)
            return alone and all_complete(leaving) and all(one.ended() for one in sends)

        in_time = self._until(
            ready,
            lambda: [peer for peer in peers if not (peer.closed or peer.lost)],
            bound,
            lambda: f"PipeP2P.close of {self._here}",
            bounded=timeout is not None,
        )
        if not in_time:
            late = ", ".join(peer.name for peer in peers if not peer.closed)
            raise Timeout(f"{self._here}: close: {late or 'a message'} did not come to its end within {bound:g} s")
        lost = next((peer.lost for peer in peers if peer.lost), None)
        if lost is not None:
            raise lost
        self._wire.free()
        unreceived = [f"{peer.name} sent {what}" for peer in peers for what in peer.unreceived()]
        if unreceived:
            raise CommunicationError(
                f"{self._here}: close: {len(unreceived)} values were sent here and not received:"
                f" {'; '.join(unreceived[:5])}"
            )
        failed = next((one.error for one in pending if one.error is not None and not one.reported), None)
        if failed is not None:
            raise failed

    free = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing is collective: after an error on this stage alone, it would wait for stages that don't call it.
        if kind is None:
            self.close()

    def _start_send(self, name: str, value: Any, stage: int, channel: int, *, sync: bool) -> PendingSend:
        tensors: list[torch.Tensor] = []
        spec = flatten(name, value, tensors)
        sending = PendingSend(name, self._peer(name, stage), line_key(name, PLAIN, channel), spec, sync=sync)
        self._post(sending, tensors)
        return sending

    def _post(self, sending: PendingSend, payload: list[torch.Tensor] | Memory) -> None:
        try:
            with self._lock:
                self._mux.post_send(sending, payload)
        except CommunicationError as error:
            raise sending.peer.explain(sending, error) from error

    def _start_recv(self, name: str, tensor: Any, stage: int | None, channel: int, expect: Expected) -> PendingRecv:
        into, source = (None, tensor) if stage is None else (tensor, stage)
        if into is not None:
            if not isinstance(into, torch.Tensor):
                raise DTypeError(f"{name}: takes a stage, or a tensor and a stage, got a {type(into).__name__} first")
            check_plain(name, into)
            if not into.is_contiguous():
                flat_output(name, into)  # raises if it can't be written to
        shape, dtype = _expected_tensor(name, expect if into is None else into)
        peer, key = self._peer(name, source), line_key(name, PLAIN, channel)
        receiving = PendingRecv(name, peer, key, into=into, shape=shape, dtype=dtype)
        with self._lock:
            self._mux.post_recv(receiving)
        return receiving

    def _exchange(
        self,
        name: str,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[int],
        channel: int,
        ring: bool,
        expect: Expected = None,
    ) -> list[Any]:
        """Start all sends and receives, then wait for them. Lines past an end of the pipeline are left out."""
        outgoing: list[tuple[PendingSend, list[torch.Tensor]]] = []
        for line, value in sends:
            stage = self._neighbour_stage(1 if line == FORWARD else -1, ring)
            if stage is not None:
                tensors: list[torch.Tensor] = []
                spec = flatten(name, value, tensors)
                sending = PendingSend(name, self._peer(name, stage), line_key(name, line, channel), spec, sync=True)
                outgoing.append((sending, tensors))
        shape, dtype = _expected_tensor(name, expect)
        incoming: list[PendingRecv | None] = []
        for line in receives:
            stage = self._neighbour_stage(-1 if line == FORWARD else 1, ring)
            if stage is None:
                incoming.append(None)
            else:
                peer, key = self._peer(name, stage), line_key(name, line, channel)
                incoming.append(PendingRecv(name, peer, key, shape=shape, dtype=dtype))
        there = [one for one in incoming if one is not None]
        with self._lock:
            for receiving in there:
                self._mux.post_recv(receiving)
        for sending, tensors in outgoing:
            self._post(sending, tensors)
        self._complete([*there, *(sending for sending, _ in outgoing)], None)
        return [None if one is None else one.value for one in incoming]

    def _neighbour_stage(self, step: int, ring: bool) -> int | None:
        """Return the next or the previous stage; None past an end, unless `ring`."""
        stage = self.stage + step
        if 0 <= stage < self.stages:
            return stage
        return stage % self.stages if ring else None

    def _as_request(self, operation: Operation) -> Request:
        """Return a request for `operation`, which has been started."""
        with self._lock:
            if len(self._pending) >= self._limit:
                self._prune()
                self._limit = max(64, 2 * len(self._pending))
            self._pending[operation] = None
        request = Request(_Handle(self, operation), lambda: operation.value)
        if self._background:
            poller.watch(request)
        return request

    def _prune(self) -> None:
        """Forget pending operations that have ended, except those with an error that was not raised yet."""
        for one in list(self._pending):
            if one.ended() and (one.error is None or one.reported):
                del self._pending[one]

    def _wait_for(self, operation: Operation, timeout: float | None, given: float | None) -> None:
        """Wait for the operation of a request. `timeout` may be the rest of the bound that was `given`."""
        try:
            self._complete([operation], timeout, give_up=False, given=given)
        finally:
            with self._lock:
                if operation.ended():
                    self._pending.pop(operation, None)

    def _complete(
        self,
        operations: Sequence[Operation],
        timeout: float | None,
        *,
        give_up: bool = True,
        given: float | None = None,
    ) -> None:
        """Wait until all operations have ended, then raise the first error.

        After the bound, receives are withdrawn if `give_up`, else all operations stay pending.
        """
        with self._lock:
            self._mux.pump()
            left = [one for one in operations if not one.ended()]
        bound = self.timeout if timeout is None else timeout
        try:
            in_time = not left or self._until(
                lambda: _all_ended(left),
                lambda: [one.peer for one in left],
                bound,
                lambda: ", ".join(f"PipeP2P.{one}" for one in left),
                bounded=timeout is not None,
            )
            failed = next((one for one in operations if one.error is not None), None)
            if failed is not None and failed.error is not None:
                failed.reported = True
                raise failed.error
            if not in_time:
                raise Timeout(self._timeout_text(left[0], bound if given is None else given, give_up=give_up))
        finally:
            if give_up and left:
                with self._lock:
                    for one in left:
                        if isinstance(one, PendingRecv):
                            self._mux.withdraw(one)

    def _until(
        self,
        ready: Callable[[], bool],
        peers: Callable[[], list[Peer]],
        bound: float,
        what: Callable[[], str],
        *,
        bounded: bool,
    ) -> bool:
        """Take what comes until `ready`, for `bound` seconds; whether it came about. It needs a message from each of
        `peers`, and is called `what` in reports; `bounded` if the program has given the bound."""
        deadline = time.monotonic() + bound
        for turn in range(_SPINS):
            with self._lock:
                self._mux.pump()
                if ready():
                    return True
            if time.monotonic() > deadline:
                return False
            if turn > 20:
                os.sched_yield()
        ended = None
        while ended is None:
            with self._lock:
                call = self._call(what(), [] if bounded else peers())
            with self._comm.progress.waiting(call, bound) as waiting:
                ended = self._nap(ready, peers, deadline, call, waiting)
        return ended

    def _nap(
        self,
        ready: Callable[[], bool],
        peers: Callable[[], list[Peer]],
        deadline: float,
        call: Call,
        waiting: Waiting,
    ) -> bool | None:
        """The same with naps; None when `call` does not describe any more what it waits for."""
        turns = 0
        while True:
            with self._lock:
                self._mux.pump()
                if ready():
                    return True
                if turns % _NAPS_PER_CHECK == 0:
                    late = peers()
                    for peer in late:
                        self._mux.check_peer(peer)
                    if call.parts and self._call("", late).takes != call.takes:
                        return None
            waiting.check()
            if time.monotonic() > deadline:
                return False
            turns += 1
            time.sleep(50e-6)

    def _call(self, what: str, late: list[Peer]) -> Call:
        """A wait for a message from each of `late`, as published to other ranks."""
        parts = tuple(Call("recv", peer=stage, collective=False) for stage in sorted({peer.stage for peer in late}))
        takes = tuple(stage for stage, peer in self._mux.peers.items() if peer.wants)
        return Call(what, parts=parts, takes=takes, collective=False)

    def _test(self, operation: Operation) -> bool:
        with self._lock:
            if not operation.ended():
                self._mux.pump()
            return operation.ended()

    def _timeout_text(self, operation: Operation, bound: float, *, give_up: bool) -> str:
        peer = operation.peer
        if isinstance(operation, PendingSend):
            text = f"{self._here}: {operation}: not received within {bound:g} s; it is still on its way"
        elif operation.arrival is None:
            text = f"{self._here}: {operation}: nothing came within {bound:g} s; expected {operation.expected}"
        else:
            text = f"{self._here}: {operation}: what came is not complete within {bound:g} s"
            text += ", and is lost" if give_up else ""
        with self._lock:
            unreceived = ", ".join(peer.unreceived())
        if unreceived:
            text += f". It has sent {unreceived}, which was not received here: receive that, or use isend"
        return text

    def _check(self, name: str) -> None:
        if self._closed:
            raise CommunicatorError(f"{name}: {self!r} can't be used any more")

    def _peer(self, name: str, stage: Any) -> Peer:
        """Return the peer of `stage`. Raise RankError or CommunicatorError if there is none."""
        self._check(name)
        try:
            number = index(stage)
        except TypeError:
            number = -1
        peer = self._mux.peers.get(number)
        if peer is not None:
            return peer
        if not 0 <= number < self.stages:
            raise RankError(f"{name}: stage must be in [0, {self.stages}), got {stage!r} ({self._here})")
        if number == self.stage:
            raise RankError(f"{name}: {self._here} can't send to itself or receive from itself")
        raise RankError(f"{name}: stage {number} is not adjacent to {self._here}; broadcasts reach adjacent ones only")

    def _name(self, stage: int) -> str:
        return f"stage {stage} (global rank {self._ranks[stage]})"


class _Handle:
    """A pending operation, as the handle of its request."""

    __slots__ = ("_operation", "_p2p")

    def __init__(self, p2p: PipeP2P, operation: Operation) -> None:
        self._p2p = p2p
        self._operation = operation

    def test(self) -> bool:
        return self._p2p._test(self._operation)  # noqa: SLF001  it is a part of it

    @property
    def awaited(self) -> tuple[Progress, Call]:
        return self._p2p._comm.progress, Call(f"PipeP2P.{self._operation}", collective=False)  # noqa: SLF001

    @property
    def limit(self) -> float:
        return self._p2p.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        self._p2p._wait_for(self._operation, timeout, bound)  # noqa: SLF001


def _all_ended(operations: list[Operation]) -> bool:
    """Remove ended operations from the list, and return True if it is empty."""
    operations[:] = [one for one in operations if not one.ended()]
    return not operations


def _expected_tensor(name: str, expect: Expected) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Return the shape and dtype that `expect` demands. Raise ShapeError if it is neither a shape nor a tensor."""
    if expect is None:
        return None, None
    if isinstance(expect, torch.Tensor):
        return tuple(expect.shape), expect.dtype
    try:
        return tuple(index(extent) for extent in expect), None
    except TypeError:
        raise ShapeError(f"{name}: expect must be a shape or a tensor, got {expect!r}") from None


def _pipe_communicator(group: Any) -> Communicator:
    """Return the communicator of the stages: the "pipe" axis if `group` is a grid."""
    if not isinstance(group, Communicator) and hasattr(group, "communicator"):
        return cast(groups.Grid, group).communicator("pipe")
    return groups.communicator(group, "pipe")


_default: ContextVar[PipeP2P | None] = ContextVar("mpicoll_parallel_p2p", default=None)


def init_process_groups(
    grid: Any = None, *, send_recv: bool = True, timeout: float | None = None, background: bool = False
) -> PipeP2P:
    """Make the :class:`PipeP2P` of `grid`, and let the functions of this module use it. Collective.

    Arguments are those of :class:`PipeP2P`. It is the default in the current context; a thread that starts later has
    its own.
    """
    p2p = PipeP2P(grid, timeout=timeout, send_recv=send_recv, background=background)
    _default.set(p2p)
    return p2p


def _current_pipe(name: str) -> PipeP2P:
    p2p = _default.get()
    if p2p is None:
        raise CommunicatorError(f"{name}: call mpicoll.parallel.p2p.init_process_groups(grid) first, in this thread")
    return p2p


def can_send_recv() -> bool:
    """Call :meth:`PipeP2P.can_send_recv`."""
    return _current_pipe("can_send_recv").can_send_recv()


def send(value: Any, stage: int, **options: Any) -> None:
    """Call :meth:`PipeP2P.send`."""
    _current_pipe("send").send(value, stage, **options)


def isend(value: Any, stage: int, **options: Any) -> Request:
    """Call :meth:`PipeP2P.isend`."""
    return _current_pipe("isend").isend(value, stage, **options)


def recv(tensor: Any = None, stage: int | None = None, **options: Any) -> Any:
    """Call :meth:`PipeP2P.recv`: ``recv(stage)`` or ``recv(tensor, stage)``."""
    return _current_pipe("recv").recv(tensor, stage, **options)


def irecv(tensor: Any = None, stage: int | None = None, **options: Any) -> Request:
    """Call :meth:`PipeP2P.irecv`: ``irecv(stage)`` or ``irecv(tensor, stage)``."""
    return _current_pipe("irecv").irecv(tensor, stage, **options)


def send_obj(obj: Any, stage: int, **options: Any) -> None:
    """Call :meth:`PipeP2P.send_obj`."""
    _current_pipe("send_obj").send_obj(obj, stage, **options)


def recv_obj(stage: int, **options: Any) -> Any:
    """Call :meth:`PipeP2P.recv_obj`."""
    return _current_pipe("recv_obj").recv_obj(stage, **options)


def wait(timeout: float | None = None) -> None:
    """Call :meth:`PipeP2P.wait`."""
    _current_pipe("wait").wait(timeout)
