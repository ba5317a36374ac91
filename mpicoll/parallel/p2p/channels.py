"""In-order channels between pipeline stages: pending values, and their matching with receives.

Values travel on lines: a line delivers the values of one stage to another in order, and the n-th receive gets the n-th
value. Lines are independent of each other. Messages from a stage are received in the order in which they were sent, as
MPI guarantees, and only while an operation needs a message from that stage: other messages stay in the transport, as
far as it holds them back.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import index
from typing import Any, TypeAlias

import numpy as np
import torch

from mpicoll.errors import CommunicationError, DeviceError, RankError, RankFailed
from mpicoll.parallel.p2p.message_format import (
    HostPlace,
    MessageLayout,
    MessagePart,
    MessageTransport,
    PendingMessage,
    Spec,
    TensorSpec,
    copy_from_host,
    describe,
    host_buffer,
    memory,
    pickle_message,
    unflatten,
)
from mpicoll.torch.tensors import flat_output
from mpicoll.transport.base import Envelope, Memory

PLAIN, FORWARD, BACKWARD = range(3)
"""Lines of one channel between two stages. They stay separate even where the next stage is also the previous one."""

_LINE_FORMS = ("", " by a send_forward form", " by a send_backward form")
"""Descriptions of the calls that send on these lines."""

CHANNELS = 256

_HEADER, _DATA, _DATA_SYNC, _OBJECT, _OBJECT_SYNC, _ACK, _CLOSE = range(7)
"""Kinds of messages. _SYNC: the sender waits for an _ACK.

The tag holds channel, line, sequence number modulo 4, and kind; it is below 32768, the smallest range that MPI
guarantees.
"""

_NOTHING = np.empty(0, np.uint8)


def line_key(operation: str, line: int, channel: int) -> int:
    """Return the number of a line. Raise RankError if there is no such channel."""
    try:
        number = index(channel)
    except TypeError:
        number = -1
    if not 0 <= number < CHANNELS:
        raise RankError(f"{operation}: channel must be in [0, {CHANNELS}), got {channel!r}")
    return number << 2 | line


class PendingSend:
    """A value being sent. `spec` is its structure; of an object, the number of its bytes."""

    __slots__ = ("acknowledged", "error", "key", "moving", "name", "peer", "reported", "spec", "sync", "value")

    def __init__(self, name: str, peer: Peer, key: int, spec: Spec | int, *, sync: bool) -> None:
        self.name = name
        self.peer = peer
        self.key = key
        self.spec = spec
        self.sync = sync
        self.acknowledged = not sync
        self.moving: list[PendingMessage] = []
        self.value = None
        self.error: Exception | None = None
        self.reported = False

    def ended(self) -> bool:
        """Return True if it has completed or failed."""
        if self.error is not None:
            return True
        if not self.acknowledged:
            return False
        try:
            return all_complete(self.moving)
        except CommunicationError as error:
            self.error = self.peer.explain(self, error)
            return True

    def __str__(self) -> str:
        return f"{self.name} of {_describe_sent(self.spec)} to {self.peer.name}{_format_channel(self.key)}"


class PendingRecv:
    """A receive. `into` is the tensor to fill; `shape` and `dtype` are those expected of the value.

    ``stream`` is torch's current stream of the calling thread, if CUDA is initialized there: tensors are made for it.
    """

    __slots__ = (
        "_ended",
        "arrival",
        "dtype",
        "error",
        "into",
        "key",
        "name",
        "objects",
        "peer",
        "reported",
        "shape",
        "stream",
        "value",
    )

    def __init__(
        self,
        name: str,
        peer: Peer,
        key: int,
        *,
        into: torch.Tensor | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        objects: bool = False,
    ) -> None:
        self.name = name
        self.peer = peer
        self.key = key
        self.into = into
        self.shape = shape
        self.dtype = dtype
        self.objects = objects
        self.stream = _stream(into)
        self.arrival: _Arrival | None = None
        self.value: Any = None
        self.error: Exception | None = None
        self.reported = False
        self._ended = False

    def ended(self) -> bool:
        """Return True if its value is complete, or it has failed."""
        if self._ended or self.error is not None:
            return True
        arrival = self.arrival
        if arrival is None or not arrival.complete:
            return False
        try:
            if not all_complete(arrival.moving):
                return False
            with self.on_stream():
                self.value = arrival.value(self.into)
        except CommunicationError as error:
            self.error = self.peer.explain(self, error)
        except DeviceError as error:
            self.error = CommunicationError(f"{self.peer.here}: {self}: what came can't be put on a device: {error}")
            self.error.__cause__ = error
        except Exception as error:  # noqa: BLE001  the wait of this receive raises what unpickling raised
            self.error = CommunicationError(
                f"{self.peer.here}: {self}: what came can't be unpickled ({type(error).__name__}: {error})"
            )
            self.error.__cause__ = error
        self._ended = True
        self.arrival = None
        return True

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the stream is torch's current one, on any thread."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @property
    def place(self) -> torch.device | None:
        """The CUDA device of the stream, or None."""
        return None if self.stream is None else self.stream.device

    def refuses(self, arrival: _Arrival) -> bool:
        """Return True if the arriving value does not match the expected one."""
        if self.objects or arrival.layout is None:
            return self.objects != (arrival.layout is None)
        if self.shape is None:
            return False
        spec = arrival.layout.spec
        return not (isinstance(spec, TensorSpec) and spec.shape == self.shape and self.dtype in (None, spec.dtype))

    @property
    def expected(self) -> str:
        """Description of the expected value."""
        if self.objects:
            return "an object, sent by send_obj"
        if self.shape is None:
            return f"tensors, sent{_LINE_FORMS[self.key & 3] or ' by send or isend'}"
        dtype = "a tensor of shape" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.shape}"

    def __str__(self) -> str:
        return f"{self.name} from {self.peer.name}{_format_channel(self.key)}"


Operation: TypeAlias = "PendingSend | PendingRecv"


class _Arrival:
    """A value being received. `layout` is None for an object."""

    __slots__ = (
        "_direct",
        "_packed",
        "_restore",
        "_staged",
        "_tensors",
        "complete",
        "layout",
        "moving",
        "receiving",
        "sync",
    )

    def __init__(self, layout: MessageLayout | None, *, sync: bool) -> None:
        self.layout = layout
        self.sync = sync
        self.receiving: PendingRecv | None = None
        self.moving: list[PendingMessage] = []
        self.complete = False
        self._direct = False
        self._restore: Callable[[], None] | None = None
        self._tensors: dict[int, torch.Tensor] = {}
        self._staged: list[tuple[Memory, tuple[MessagePart, ...]]] = []
        self._packed: Memory = _NOTHING

    def fill(self, name: str, into: torch.Tensor) -> None:
        """Receive the tensor directly into `into`, which is on the CPU. No message of it has been received yet."""
        if into.is_contiguous() and not into.is_conj() and not into.is_neg():
            self._tensors[0] = into
        else:
            self._tensors[0], self._restore = flat_output(name, into)
        self._direct = True

    def next_buffer(self, nbytes: int) -> Memory | None:
        """Return the buffer for the next message, of `nbytes`; None if a message of another size must come."""
        if self.layout is None:
            self._packed = np.empty(nbytes, np.uint8)
            self.complete = True
            return self._packed
        messages, leaves = self.layout.messages, self.layout.leaves
        expected, parts = messages[len(self.moving)]
        if nbytes != expected:
            return None
        self.complete = len(self.moving) + 1 == len(messages)
        alone = parts[0].index if len(parts) == 1 else None
        if alone is not None and (self._direct or leaves[alone].device == "cpu"):
            if alone not in self._tensors:
                self._tensors[alone] = leaves[alone].empty()
            return memory(self._tensors[alone])
        there = any(leaves[part.index].device != "cpu" for part in parts)
        place = self.receiving.place if there and self.receiving is not None else None
        try:
            staged = host_buffer("recv", nbytes, place)
        except DeviceError:  # the copy raises it when the value is taken
            staged = host_buffer("recv", nbytes, None)
        self._staged.append((staged, parts))
        return staged

    def value(self, into: torch.Tensor | None) -> Any:
        """Return the received value; `into`, filled with it, if that is given."""
        if self.layout is None:
            return pickle.loads(self._packed.data)
        if into is not None:
            self._store(into)
            return into
        leaves = self.layout.leaves
        self._unpack()
        tensors = [self._tensors[index] for index in range(len(leaves))]
        for leaf, tensor in zip(leaves, tensors, strict=True):
            if leaf.requires_grad:
                tensor.requires_grad_()
        return unflatten(self.layout.spec, iter(tensors))

    def _unpack(self) -> None:
        """Make the tensors that were received in shared or staged messages."""
        assert self.layout is not None
        leaves = self.layout.leaves
        if any(leaf.device != "cpu" for leaf in leaves) and not torch.cuda.is_available():
            raise CommunicationError(
                "what came was on a CUDA device, and this process has none; send it from the CPU (.cpu()), or receive"
                " into a tensor"
            )
        places: list[HostPlace] = []
        for staged, parts in self._staged:
            for number, start, stop in parts:
                self._tensors[number] = leaves[number].empty()
                places.append((self._tensors[number], staged[start:stop]))
        copy_from_host(places)

    def _store(self, into: torch.Tensor) -> None:
        if not self._direct:
            flat, self._restore = flat_output("recv", into)
            copy_from_host([(flat, self._staged[0][0] if self._staged else memory(self._tensors[0]))])
        if self._restore is not None:
            self._restore()
        elif not into.is_inference():
            # Autograd must notice that it was written to.
            torch.autograd.graph.increment_version(into)


def _stream(into: torch.Tensor | None) -> Any:
    if into is not None and into.is_cuda:
        return torch.cuda.current_stream(into.device)
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


class _Outbox:
    """The sending end of a line on this stage."""

    __slots__ = ("layout", "number", "unacknowledged")

    def __init__(self) -> None:
        self.layout: MessageLayout | None = None
        self.number = 0
        self.unacknowledged: deque[PendingSend] = deque()


class _Inbox:
    """The receiving end of a line on this stage: receives without a value, or values without a receive."""

    __slots__ = ("arrived", "arriving", "broken", "layout", "number", "waiting")

    def __init__(self) -> None:
        self.layout: MessageLayout | None = None
        self.number = 0
        self.waiting: deque[PendingRecv] = deque()
        self.arrived: deque[_Arrival] = deque()
        self.arriving: _Arrival | None = None
        self.broken: str | None = None


class Peer:
    """Another stage. `wants` counts the messages needed from it: messages are received only while it is positive."""

    def __init__(self, stage: int, name: str, here: str) -> None:
        self.stage = stage
        self.name = name
        self.here = here
        self.wants = 0
        self.closed = False
        self.lost: CommunicationError | None = None
        self.reading: tuple[PendingMessage, Memory, Callable[[Memory], None]] | None = None
        self.inboxes: dict[int, _Inbox] = {}
        self.outboxes: dict[int, _Outbox] = {}

    def inbox(self, key: int) -> _Inbox:
        found = self.inboxes.get(key)
        if found is None:
            found = self.inboxes[key] = _Inbox()
        return found

    def outbox(self, key: int) -> _Outbox:
        found = self.outboxes.get(key)
        if found is None:
            found = self.outboxes[key] = _Outbox()
        return found

    def explain(self, operation: Operation, error: CommunicationError) -> CommunicationError:
        """Return an error of the type of `error` that names `operation`."""
        return wrap_error(f"{self.here}: {operation}: {error}", error)

    def unreceived(self) -> Iterator[str]:
        """Yield descriptions of values that arrived and were not received."""
        for key, inbox in self.inboxes.items():
            for one in inbox.arrived:
                what = "an object" if one.layout is None else describe(one.layout.spec)
                yield f"{what}{_LINE_FORMS[key & 3]}{_format_channel(key)}"


class ChannelMux:
    """This stage's ends of all lines. Its methods must be called by one thread at a time."""

    def __init__(self, wire: MessageTransport, here: str, names: Callable[[int], str]) -> None:
        self._wire = wire
        self.here = here
        self.peers = {stage: Peer(stage, names(stage), here) for stage in wire.peers}

    def post_send(self, sending: PendingSend, payload: list[torch.Tensor] | Memory) -> None:
        """Send tensors, or the bytes of an object."""
        peer, key, moving = sending.peer, sending.key, sending.moving
        if peer.closed:
            sending.error = CommunicationError(_describe_unreceived_send(sending))
            return
        outbox = peer.outbox(key)
        if isinstance(payload, np.ndarray):
            kind = _OBJECT_SYNC if sending.sync else _OBJECT
            moving.append(self._send(peer, outbox, key, kind, payload))
        else:
            layout = outbox.layout
            spec: Any = sending.spec
            if layout is None or layout.spec != spec:
                moving.append(self._send(peer, outbox, key, _HEADER, pickle_message(sending.name, spec)))
                layout = outbox.layout = MessageLayout(spec)
            kind = _DATA_SYNC if sending.sync else _DATA
            for data in layout.outgoing(payload):
                moving.append(self._send(peer, outbox, key, kind, data))
        if sending.sync:
            outbox.unacknowledged.append(sending)
            peer.wants += 1

    def _send(self, peer: Peer, outbox: _Outbox, key: int, kind: int, data: Memory) -> PendingMessage:
        number = outbox.number
        outbox.number = (number + 1) & 3
        return self._wire.isend(data, peer.stage, key << 5 | number << 3 | kind)

    def post_recv(self, receiving: PendingRecv) -> None:
        """Match `receiving` with the next value of its line."""
        peer = receiving.peer
        inbox = peer.inbox(receiving.key)
        if inbox.arrived:
            arrival = inbox.arrived.popleft()
            self._match(receiving, arrival)
            if not arrival.complete:
                peer.wants += 1
        elif inbox.broken is not None:
            receiving.error = CommunicationError(f"{self.here}: {receiving}: {inbox.broken}")
        elif peer.closed:
            receiving.error = CommunicationError(_describe_closed_peer(receiving))
        else:
            inbox.waiting.append(receiving)
            peer.wants += 1

    def withdraw(self, receiving: PendingRecv) -> None:
        """Cancel `receiving`, if no value has arrived for it."""
        waiting = receiving.peer.inbox(receiving.key).waiting
        if receiving in waiting:
            waiting.remove(receiving)
            receiving.peer.wants -= 1

    def send_close(self) -> list[PendingMessage]:
        """Announce to all stages that this one sends nothing more, and wait for their announcements."""
        for peer in self.peers.values():
            peer.wants += not peer.closed
        return [self._wire.isend(_NOTHING, stage, _CLOSE) for stage in self.peers]

    def pump(self) -> None:
        """Receive available messages from the stages from which a message is needed."""
        for peer in self.peers.values():
            if peer.wants:
                try:
                    self._drain(peer)
                except CommunicationError as error:
                    self.fail(peer, error)

    def check_peer(self, peer: Peer) -> None:
        """Fail the operations that wait for `peer` if its process has exited."""
        try:
            self._wire.check(peer.stage)
        except CommunicationError as error:
            self.fail(peer, error)

    def fail(self, peer: Peer, error: CommunicationError) -> None:
        """Fail the operations that wait for `peer`, which sends nothing more."""
        peer.wants = 0
        peer.lost = wrap_error(f"{self.here}: {peer.name}: {error}", error)
        for inbox in peer.inboxes.values():
            receivers = [*inbox.waiting]
            inbox.waiting.clear()
            if inbox.arriving is not None and inbox.arriving.receiving is not None:
                receivers.append(inbox.arriving.receiving)
            for receiving in receivers:
                receiving.error = receiving.error or peer.explain(receiving, error)
        for outbox in peer.outboxes.values():
            for sending in outbox.unacknowledged:
                sending.error = peer.explain(sending, error)
            outbox.unacknowledged.clear()

    def _drain(self, peer: Peer) -> None:
        while peer.wants:
            if peer.reading is not None:
                moving, data, then = peer.reading
                if not moving.test():
                    return
                peer.reading = None
                then(data)
                continue
            envelope = self._wire.iprobe(peer.stage, None)
            if envelope is None:
                return
            self._take(peer, envelope)

    def _take(self, peer: Peer, envelope: Envelope) -> None:
        kind, key = envelope.tag & 7, envelope.tag >> 5
        if kind == _ACK:
            self._read(peer, envelope, lambda data: self._on_acknowledgement(peer, key, data))
            return
        if kind == _CLOSE:
            self._read(peer, envelope, lambda _: self._on_close(peer))
            return
        inbox = peer.inbox(key)
        number = envelope.tag >> 3 & 3
        if number != inbox.number:
            self._fail_line(peer, inbox, "a message from it was lost")
        inbox.number = (number + 1) & 3
        if inbox.broken is not None:
            self._read(peer, envelope, lambda _: None)
        elif kind == _HEADER:
            self._read(peer, envelope, lambda data: setattr(inbox, "layout", MessageLayout(pickle.loads(data.data))))
        else:
            self._arrive(peer, inbox, kind, envelope)

    def _read(self, peer: Peer, envelope: Envelope, then: Callable[[Memory], None]) -> None:
        """Receive a message that must be complete before the next one is probed."""
        data = np.empty(envelope.nbytes, np.uint8)
        peer.reading = self._wire.irecv(data, peer.stage, envelope.tag), data, then

    def _arrive(self, peer: Peer, inbox: _Inbox, kind: int, envelope: Envelope) -> None:
        arrival = inbox.arriving
        if arrival is None:
            objects = kind in (_OBJECT, _OBJECT_SYNC)
            arrival = inbox.arriving = _Arrival(
                None if objects else inbox.layout, sync=kind in (_DATA_SYNC, _OBJECT_SYNC)
            )
            if inbox.waiting:
                self._match(inbox.waiting.popleft(), arrival, fresh=True)
            else:
                inbox.arrived.append(arrival)
        data = arrival.next_buffer(envelope.nbytes)
        if data is None:
            self._fail_line(peer, inbox, f"a message of {envelope.nbytes} bytes that it can't mean came from it")
            self._read(peer, envelope, lambda _: None)
            return
        arrival.moving.append(self._wire.irecv(data, peer.stage, envelope.tag))
        if arrival.complete:
            inbox.arriving = None
            if arrival.receiving is not None:
                peer.wants -= 1

    def _match(self, receiving: PendingRecv, arrival: _Arrival, *, fresh: bool = False) -> None:
        """Give `receiving` the arriving value, or fail it on a mismatch; acknowledge either to a waiting sender."""
        refusal = ""
        if receiving.refuses(arrival):
            sent = "an object, sent by send_obj" if arrival.layout is None else describe(arrival.layout.spec)
            refusal = f"{receiving.peer.name} sent {sent}, but {self.here} expected {receiving.expected}"
            receiving.error = CommunicationError(f"{self.here}: {receiving}: {refusal}; that was taken off the line")
        else:
            receiving.arrival = arrival
            if fresh and receiving.into is not None and receiving.into.is_cpu:
                arrival.fill(receiving.name, receiving.into)
        arrival.receiving = receiving
        if arrival.sync:
            text = np.frombuffer(refusal.encode(), np.uint8) if refusal else _NOTHING
            with suppress(CommunicationError):  # a stage that has exited needs no answer
                self._wire.isend(text, receiving.peer.stage, receiving.key << 5 | _ACK)

    def _on_acknowledgement(self, peer: Peer, key: int, data: Memory) -> None:
        sending = peer.outbox(key).unacknowledged.popleft()
        peer.wants -= 1
        sending.acknowledged = True
        if data.size:
            sending.error = CommunicationError(f"{self.here}: {sending}: {data.tobytes().decode()}")

    def _on_close(self, peer: Peer) -> None:
        peer.closed = True
        peer.wants = 0
        for inbox in peer.inboxes.values():
            for receiving in inbox.waiting:
                receiving.error = CommunicationError(_describe_closed_peer(receiving))
            inbox.waiting.clear()
        for outbox in peer.outboxes.values():
            for sending in outbox.unacknowledged:
                sending.error = CommunicationError(_describe_unreceived_send(sending))
            outbox.unacknowledged.clear()

    def _fail_line(self, peer: Peer, inbox: _Inbox, why: str) -> None:
        """Fail all receives of a line whose messages can't be interpreted any more."""
        inbox.broken = f"{why}; the line can't be used any more"
        receivers = [*inbox.waiting]
        if inbox.arriving is not None:
            if inbox.arriving.receiving is not None:
                receivers.append(inbox.arriving.receiving)
            elif inbox.arrived:
                inbox.arrived.pop()
        inbox.arriving = None
        inbox.waiting.clear()
        peer.wants -= len(receivers)
        for receiving in receivers:
            receiving.error = receiving.error or CommunicationError(f"{self.here}: {receiving}: {inbox.broken}")


def all_complete(moving: list[PendingMessage]) -> bool:
    """Remove completed messages from the end of the list, and return True if it is empty."""
    while moving:
        if not moving[-1].test():
            return False
        moving.pop()
    return True


def wrap_error(text: str, error: CommunicationError) -> CommunicationError:
    """Return an error of the type of `error` with the message `text`, and `error` as its cause."""
    other = RankFailed(text, error.ranks) if isinstance(error, RankFailed) else type(error)(text)
    other.__cause__ = error
    return other


def _describe_sent(spec: Spec | int) -> str:
    return f"an object of {spec} bytes" if isinstance(spec, int) else describe(spec)


def _format_channel(key: int) -> str:
    return f", channel {key >> 2}" if key >> 2 else ""


def _describe_closed_peer(receiving: PendingRecv) -> str:
    return f"{receiving.peer.here}: {receiving}: nothing more comes, {receiving.peer.name} has closed its end"


def _describe_unreceived_send(sending: PendingSend) -> str:
    return f"{sending.peer.here}: {sending}: {sending.peer.name} has closed without receiving it"
