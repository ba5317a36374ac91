"""Messages between pipeline stages: the class PipeP2P."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from mpicoll.collectives.allgather import allgather
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.request import Request
from mpicoll.engine.world import world
from mpicoll.errors import CommunicationError, CommunicatorError, DTypeError, RankError, ShapeError
from mpicoll.parallel import groups
from mpicoll.parallel.p2p.channels import BACKWARD, FORWARD, PLAIN, ChannelMux, line_key
from mpicoll.parallel.p2p.device_messages import connect_devices
from mpicoll.parallel.p2p.message_format import (
    BroadcastTransport,
    MessageTransport,
    SendRecvTransport,
    flatten,
    pickle_message,
)
from mpicoll.parallel.p2p.operations import Peer, PendingRecv, PendingSend
from mpicoll.parallel.p2p.progress import PipeProgress
from mpicoll.parallel.p2p.repeated_values import NOT_PASSED, RepeatedValues
from mpicoll.torch.tensors import check_plain, flatten_output

if TYPE_CHECKING:
    from typing_extensions import Self

Expected: TypeAlias = "torch.Tensor | Sequence[int] | None"
"""The tensor that a receive expects: its shape, or a tensor of its shape and dtype."""


class PipeP2P:
    """Messages between the stages of a pipeline: stage i is rank i of a communicator.

    Making an instance is collective over `group`, as is :meth:`close`.

    A send of tensors on a CUDA device waits until they are computed; the receiver gets them on the device that is
    current when it calls the receive. Between stages of one node, large tensors are copied from device to device if
    CUDA was in use on all stages when the instance was made, or the ranks have had a collective on the device; all
    others pass through host memory.

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

    Example:
        ::

            with PipeP2P() as p2p:
                x = p2p.recv_forward()  # None on the first stage
                p2p.send_forward(torch.ones(2, 4) if x is None else x + 1)
    """

    def __init__(
        self, group: Any = None, *, timeout: float | None = None, send_recv: bool = True, background: bool = False
    ) -> None:
        comm = _pipe_communicator(group)
        core = core_of(comm)
        core.check()
        self.stage = comm.rank
        self.stages = comm.size
        if background and not core.transport.background:
            raise CommunicatorError(
                "init_process_groups: background=True needs MPI_THREAD_MULTIPLE, which this MPI library does not"
                f" provide; call poll() regularly instead {groups.describe_rank(comm)}"
            )
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        stages = allgather(np.array([[world().rank, uses_cuda]]), comm=comm)
        self._ranks: list[int] = stages[:, 0].tolist()
        if stages[:, 1].all():
            connect_devices(comm, torch.device("cuda", torch.cuda.current_device()))
        self._send_recv = send_recv
        self._wire: MessageTransport = SendRecvTransport(comm) if send_recv else BroadcastTransport(comm)
        own = core_of(self._wire.comm or comm)
        if background and own.transport.traffic is not None:
            own.transport.traffic.answered = True
        self._this_stage = self._describe_stage(self.stage)
        self._mux = ChannelMux(self._wire, self._this_stage, self._describe_stage)
        self._progress = PipeProgress(
            self._mux, own.queue, comm.timeout if timeout is None else timeout, background=background
        )
        self._repeated = RepeatedValues(self._progress, own.queue)
        self._closed = False

    def __repr__(self) -> str:
        return f"<PipeP2P: {self._this_stage} of {self.stages}{', closed' if self._closed else ''}>"

    @property
    def timeout(self) -> float:
        """The default bound of each operation in seconds."""
        return self._progress.timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._progress.timeout = timeout

    def can_send_recv(self) -> bool:
        """Return True if values are sent as messages, False if they are broadcast."""
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
        if timeout is None:
            passed = self._repeated.exchange("send", channel, stage, PLAIN, value, None, PLAIN)
            if passed is not NOT_PASSED:
                return
        sending = self._start_send("send", value, stage, channel, sync=True)
        self._progress.complete([sending], timeout)

    def isend(self, value: Any, stage: int, *, channel: int = 0) -> Request:
        """Send `value` to `stage` in the background. The request completes, with None, when `value` may be changed."""
        sending = self._repeated.start("isend", channel, stage, value)
        if sending is None:
            sending = self._start_send("isend", value, stage, channel, sync=False)
        return self._progress.make_request(sending)

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
        if timeout is None:
            into, source = (None, tensor) if stage is None else (tensor, stage)
            if into is None and expect is None:
                passed = self._repeated.receive("recv", channel, source)
            else:
                shape, dtype = _expected_tensor("recv", expect if into is None else None)
                passed = self._repeated.exchange("recv", channel, None, PLAIN, None, source, PLAIN, into, shape, dtype)  # type: ignore[arg-type]
            if passed is not NOT_PASSED:
                return passed
        receiving = self._start_recv("recv", tensor, stage, channel, expect)
        self._progress.complete([receiving], timeout)
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
        return self._progress.make_request(self._start_recv("irecv", tensor, stage, channel, expect))

    def send_obj(self, obj: Any, stage: int, *, channel: int = 0, timeout: float | None = None) -> None:
        """Pickle `obj` and send it to `stage`, as :meth:`send` does. Only :meth:`recv_obj` receives it."""
        data = pickle_message("send_obj", obj)
        key = line_key("send_obj", PLAIN, channel)
        sending = PendingSend("send_obj", self._find_peer("send_obj", stage), key, data.size, sync=True)
        self._progress.post_send(sending, data)
        self._progress.complete([sending], timeout)

    def recv_obj(self, stage: int, *, channel: int = 0, timeout: float | None = None) -> Any:
        """Receive an object that `stage` sends by :meth:`send_obj`."""
        key = line_key("recv_obj", PLAIN, channel)
        receiving = PendingRecv("recv_obj", self._find_peer("recv_obj", stage), key, objects=True)
        self._progress.post_recv(receiving)
        self._progress.complete([receiving], timeout)
        return receiving.value

    def poll(self) -> int:
        """Make progress on pending operations without waiting, and return the number of those still pending."""
        self._check_open("poll")
        return self._progress.advance()

    def wait(self, timeout: float | None = None) -> None:
        """Complete all pending asynchronous operations, within `timeout` seconds for all of them together.

        When all have ended or the time is over, raises the first error that was not raised before.
        """
        self._check_open("wait")
        self._progress.complete_pending(timeout)

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
        self._repeated.close()
        pending = self._progress.close(timeout)
        peers = self._mux.peers.values()
        self._mux.discard_unreceived()
        self._wire.free()
        unreceived = [f"{peer.name} sent {what}" for peer in peers for what in peer.describe_unreceived()]
        if unreceived:
            raise CommunicationError(
                f"{self._this_stage}: close: {len(unreceived)} values were sent here and not received:"
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
        sending = PendingSend(name, self._find_peer(name, stage), line_key(name, PLAIN, channel), spec, sync=sync)
        self._progress.post_send(sending, tensors)
        return sending

    def _start_recv(self, name: str, tensor: Any, stage: int | None, channel: int, expect: Expected) -> PendingRecv:
        into, source = (None, tensor) if stage is None else (tensor, stage)
        if into is not None:
            if not isinstance(into, torch.Tensor):
                raise DTypeError(
                    f"{name}: pass a stage, or a tensor and a stage; the first argument is a {type(into).__name__}"
                )
            check_plain(name, into)
            if not into.is_contiguous():
                flatten_output(name, into)  # raises ShapeError if it can't be written to
        shape, dtype = _expected_tensor(name, expect if into is None else into)
        peer, key = self._find_peer(name, source), line_key(name, PLAIN, channel)
        receiving = PendingRecv(name, peer, key, into=into, shape=shape, dtype=dtype)
        self._progress.post_recv(receiving)
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
        if len(sends) < 2 and len(receives) < 2:
            passed = self._exchange_repeated(name, sends, receives, channel, ring, expect)
            if passed is not NOT_PASSED:
                return [passed] * len(receives)
        outgoing: list[tuple[PendingSend, list[torch.Tensor]]] = []
        for line, value in sends:
            stage = self._neighbour_stage(1 if line == FORWARD else -1, ring)
            if stage is not None:
                tensors: list[torch.Tensor] = []
                spec = flatten(name, value, tensors)
                sending = PendingSend(
                    name, self._find_peer(name, stage), line_key(name, line, channel), spec, sync=True
                )
                outgoing.append((sending, tensors))
        shape, dtype = _expected_tensor(name, expect)
        incoming: list[PendingRecv | None] = []
        for line in receives:
            stage = self._neighbour_stage(-1 if line == FORWARD else 1, ring)
            if stage is None:
                incoming.append(None)
            else:
                peer, key = self._find_peer(name, stage), line_key(name, line, channel)
                incoming.append(PendingRecv(name, peer, key, shape=shape, dtype=dtype))
        there = [one for one in incoming if one is not None]
        self._progress.post_recv(*there)
        for sending, tensors in outgoing:
            self._progress.post_send(sending, tensors)
        self._progress.complete([*there, *(sending for sending, _ in outgoing)], None)
        return [None if one is None else one.value for one in incoming]

    def _exchange_repeated(
        self,
        name: str,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[int],
        channel: int,
        ring: bool,
        expect: Expected,
    ) -> Any:
        """Exchange one value at most in each direction, as :class:`RepeatedValues` does."""
        dest = source = value = None
        out_line = in_line = PLAIN
        if sends:
            ((out_line, value),) = sends
            dest = self._neighbour_stage(1 if out_line == FORWARD else -1, ring)
        if receives:
            (in_line,) = receives
            source = self._neighbour_stage(-1 if in_line == FORWARD else 1, ring)
        shape, dtype = _expected_tensor(name, expect)
        return self._repeated.exchange(name, channel, dest, out_line, value, source, in_line, shape=shape, dtype=dtype)

    def _neighbour_stage(self, step: int, ring: bool) -> int | None:
        """Return the next or the previous stage; None past an end, unless `ring`."""
        stage = self.stage + step
        if 0 <= stage < self.stages:
            return stage
        return stage % self.stages if ring else None

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise CommunicatorError(f"{name}: {self!r} can't be used")

    def _find_peer(self, name: str, stage: Any) -> Peer:
        """Return the peer of `stage`. Raise RankError or CommunicatorError if there is none."""
        self._check_open(name)
        try:
            number = index(stage)
        except TypeError:
            number = -1
        peer = self._mux.peers.get(number)
        if peer is not None:
            return peer
        if not 0 <= number < self.stages:
            raise RankError(f"{name}: stage must be in [0, {self.stages}), got {stage!r} ({self._this_stage})")
        if number == self.stage:
            raise RankError(f"{name}: {self._this_stage} can't send to itself or receive from itself")
        raise RankError(
            f"{name}: stage {number} is not adjacent to {self._this_stage}; with send_recv=False only adjacent stages"
            " can communicate"
        )

    def _describe_stage(self, stage: int) -> str:
        return f"stage {stage} (global rank {self._ranks[stage]})"


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
