"""In-order channels between pipeline stages: the matching of values with receives.

Values are sent on lines: a line delivers the values of one stage to another in order, and the n-th receive gets the
n-th value. Lines are independent of each other. Messages from a stage are received in the order in which they were
sent, as MPI guarantees, and only while an operation needs a message from that stage: other messages stay in the
transport.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import index
from typing import Any

import numpy as np
import torch

from mpicoll.errors import CommunicationError, RankError
from mpicoll.parallel.p2p.message_format import (
    MessageLayout,
    MessageTransport,
    PendingMessage,
    ValuePattern,
    as_bytes,
    describe_spec,
    pickle_message,
)
from mpicoll.parallel.p2p.operations import (
    NO_BYTES,
    Inbox,
    IncomingValue,
    Outbox,
    Peer,
    PendingRecv,
    PendingSend,
    RepeatedMessages,
    wrap_error,
)
from mpicoll.transport.base import Envelope, Memory

PLAIN, FORWARD, BACKWARD = range(3)
"""Lines of one channel between two stages. They stay separate even where the next stage is also the previous one."""

CHANNELS = 256

_HEADER, _DATA, _DATA_SYNC, _OBJECT, _OBJECT_SYNC, _ACK, _CLOSE = range(7)
"""Kinds of messages. _SYNC: the sender waits for an _ACK.

The tag holds channel, line, sequence number modulo 4, and kind; it is below 32768, the smallest range that MPI
guarantees.
"""


def line_key(operation: str, line: int, channel: int) -> int:
    """Return the number of a line. Raise RankError if there is no such channel."""
    try:
        number = index(channel)
    except TypeError:
        number = -1
    if not 0 <= number < CHANNELS:
        raise RankError(f"{operation}: channel must be in [0, {CHANNELS}), got {channel!r}")
    return number << 2 | line


_NO_TAG = -1


def _list_tags(key: int, kind: int) -> tuple[int, ...]:
    """Return the tags of messages of a line, by sequence number."""
    return tuple(key << 5 | number << 3 | kind for number in range(4))


class ChannelMux:
    """This stage's ends of all lines. Its methods must be called by one thread at a time."""

    def __init__(self, wire: MessageTransport, this_stage: str, names: Callable[[int], str]) -> None:
        self._wire = wire
        self.this_stage = this_stage
        self.peers = {stage: Peer(stage, names(stage), this_stage) for stage in wire.peers}
        # Values that no receive takes, of which memory of their senders is to be given back.
        self._discarded: list[IncomingValue] = []

    def post_send(self, sending: PendingSend, payload: list[torch.Tensor] | Memory) -> None:
        """Send tensors, or the bytes of an object."""
        peer, key, moving = sending.peer, sending.key, sending.moving
        if peer.closed:
            sending.error = CommunicationError(_describe_unreceived_send(sending))
            return
        outbox = peer.get_outbox(key)
        if isinstance(payload, np.ndarray):
            kind = _OBJECT_SYNC if sending.sync else _OBJECT
            moving.append(self._send(peer, outbox, key, kind, payload))
        else:
            layout = outbox.layout
            spec: Any = sending.spec
            if layout is None or layout.spec != spec:
                moving.append(self._send(peer, outbox, key, _HEADER, pickle_message(sending.name, spec)))
                layout = outbox.layout = MessageLayout(spec)
                outbox.repeated = self._bind_repeated(peer, key, layout)
            kind = _DATA_SYNC if sending.sync else _DATA
            for data in layout.pack(payload, partial(self._wire.announce, dest=peer.stage)):
                moving.append(self._send(peer, outbox, key, kind, data))
        if sending.sync:
            outbox.unacknowledged.append(sending)
            peer.num_needed += 1

    def _send(self, peer: Peer, outbox: Outbox, key: int, kind: int, data: Memory) -> PendingMessage:
        number = outbox.number
        outbox.number = (number + 1) & 3
        return self._wire.isend(data, peer.stage, key << 5 | number << 3 | kind)

    def post_recv(self, receiving: PendingRecv) -> None:
        """Match `receiving` with the next value of its line."""
        peer = receiving.peer
        inbox = peer.get_inbox(receiving.key)
        if inbox.arrived:
            arrival = inbox.arrived.popleft()
            self._match(receiving, arrival)
            if not arrival.complete:
                peer.num_needed += 1
        elif inbox.broken is not None:
            receiving.error = CommunicationError(f"{self.this_stage}: {receiving}: {inbox.broken}")
        elif peer.closed:
            receiving.error = CommunicationError(_describe_closed_peer(receiving))
        else:
            inbox.waiting.append(receiving)
            peer.num_needed += 1

    def cancel(self, receiving: PendingRecv) -> None:
        """Cancel `receiving`. A value that is arriving for it is lost."""
        waiting = receiving.peer.get_inbox(receiving.key).waiting
        if receiving in waiting:
            waiting.remove(receiving)
            receiving.peer.num_needed -= 1
        elif receiving.arrival is not None:
            self._discarded.append(receiving.arrival)
            receiving.arrival = None

    def send_close(self) -> list[PendingMessage]:
        """Announce to all stages that this one sends nothing more, and wait for their announcements."""
        for peer in self.peers.values():
            peer.num_needed += not peer.closed
        return [self._wire.isend(NO_BYTES, stage, _CLOSE) for stage in self.peers]

    def pump(self) -> None:
        """Receive available messages from the stages from which a message is needed."""
        if self._discarded:
            self._discarded = [one for one in self._discarded if not one.discard()]
        for peer in self.peers.values():
            if peer.num_needed:
                try:
                    self._drain(peer)
                except CommunicationError as error:
                    self.fail(peer, error)

    def discard_unreceived(self) -> None:
        """Give memory of values that were not received back to their senders, after all stages have closed."""
        unreceived = [
            arrival for peer in self.peers.values() for one in peer.inboxes.values() for arrival in one.arrived
        ]
        for arrival in (*self._discarded, *unreceived):
            arrival.discard()

    def check_peer(self, peer: Peer) -> None:
        """Fail the operations that wait for `peer` if its process has exited."""
        try:
            self._wire.check(peer.stage)
        except CommunicationError as error:
            self.fail(peer, error)

    def fail(self, peer: Peer, error: CommunicationError) -> None:
        """Fail the operations that wait for `peer`, which sends nothing more."""
        peer.num_needed = 0
        peer.failure = wrap_error(f"{self.this_stage}: {peer.name}: {error}", error)
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
        while peer.num_needed:
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
            self._dispatch(peer, envelope)

    def _dispatch(self, peer: Peer, envelope: Envelope) -> None:
        kind, key = envelope.tag & 7, envelope.tag >> 5
        if kind == _ACK:
            self._read(peer, envelope, lambda data: self._on_acknowledgement(peer, key, data))
            return
        if kind == _CLOSE:
            self._read(peer, envelope, lambda _: self._on_close(peer))
            return
        inbox = peer.get_inbox(key)
        number = envelope.tag >> 3 & 3
        if number != inbox.number:
            self._fail_line(peer, inbox, "a message was lost")
        inbox.number = (number + 1) & 3
        if inbox.broken is not None:
            self._read(peer, envelope, lambda _: None)
        elif kind == _HEADER:
            self._read(peer, envelope, lambda data: self._on_header(peer, key, data))
        else:
            self._receive_message(peer, inbox, kind, envelope)

    def _on_header(self, peer: Peer, key: int, data: Memory) -> None:
        inbox = peer.get_inbox(key)
        inbox.layout = MessageLayout(pickle.loads(data.data))
        inbox.repeated = self._bind_repeated(peer, key, inbox.layout)

    def _bind_repeated(self, peer: Peer, key: int, layout: MessageLayout) -> RepeatedMessages | None:
        """Return what passes values of tensors on the CPU, each of which is a message; None for others, and without the
        extension."""
        places = tuple(parts[0].index for _, parts in layout.messages if len(parts) == 1)
        if len(places) != len(layout.messages) or any(leaf.device != "cpu" for leaf in layout.leaves):
            return None
        try:
            pattern = ValuePattern(layout.spec)
        except ValueError:
            return None
        ends = []
        sync_tags, plain_tags, acknowledgement = _list_tags(key, _DATA_SYNC), _list_tags(key, _DATA), key << 5 | _ACK
        for place in places:
            end = self._wire.bind_end(peer.stage, layout.leaves[place], sync_tags, plain_tags, acknowledgement)
            if end is None:
                return None
            ends.append(end)
            acknowledgement = _NO_TAG  # a value is acknowledged when its first message arrives
        return RepeatedMessages(pattern, tuple(ends), places)

    def send_part(self, peer: Peer, key: int, tensor: torch.Tensor) -> PendingMessage:
        """Send the next message of a value that is not acknowledged."""
        return self._send(peer, peer.get_outbox(key), key, _DATA, as_bytes(tensor))

    def _read(self, peer: Peer, envelope: Envelope, then: Callable[[Memory], None]) -> None:
        """Receive a message that must be complete before the next one is probed."""
        data = np.empty(envelope.nbytes, np.uint8)
        peer.reading = self._wire.irecv(data, peer.stage, envelope.tag), data, then

    def _receive_message(self, peer: Peer, inbox: Inbox, kind: int, envelope: Envelope) -> None:
        arrival = inbox.arriving
        if arrival is None:
            objects = kind in (_OBJECT, _OBJECT_SYNC)
            arrival = inbox.arriving = IncomingValue(
                None if objects else inbox.layout,
                sync=kind in (_DATA_SYNC, _OBJECT_SYNC),
                find_announced=self._wire.find_announced,
            )
            if inbox.waiting:
                self._match(inbox.waiting.popleft(), arrival, fresh=True)
            else:
                inbox.arrived.append(arrival)
        data = arrival.next_buffer(envelope.nbytes)
        if data is None:
            self._fail_line(peer, inbox, f"received a message of unexpected size, {envelope.nbytes} bytes")
            self._read(peer, envelope, lambda _: None)
            return
        arrival.moving.append(self._wire.irecv(data, peer.stage, envelope.tag))
        if arrival.complete:
            inbox.arriving = None
            if arrival.receiving is not None:
                peer.num_needed -= 1

    def _match(self, receiving: PendingRecv, arrival: IncomingValue, *, fresh: bool = False) -> None:
        """Give `receiving` the arriving value, or fail it on a mismatch; acknowledge either to a waiting sender."""
        mismatch = ""
        if receiving.is_mismatch(arrival):
            sent = "an object, sent by send_obj" if arrival.layout is None else describe_spec(arrival.layout.spec)
            mismatch = f"{receiving.peer.name} sent {sent}, but {self.this_stage} expected {receiving.expected}"
            receiving.error = CommunicationError(f"{self.this_stage}: {receiving}: {mismatch}; the value was discarded")
            self._discarded.append(arrival)
        else:
            receiving.arrival = arrival
            if fresh and receiving.into is not None and receiving.into.is_cpu:
                arrival.receive_into(receiving.name, receiving.into)
        arrival.receiving = receiving
        if arrival.sync:
            text = np.frombuffer(mismatch.encode(), np.uint8) if mismatch else NO_BYTES
            with suppress(CommunicationError):  # a stage that has exited needs no acknowledgement
                self._wire.isend(text, receiving.peer.stage, receiving.key << 5 | _ACK)

    def _on_acknowledgement(self, peer: Peer, key: int, data: Memory) -> None:
        sending = peer.get_outbox(key).unacknowledged.popleft()
        peer.num_needed -= 1
        sending.acknowledged = True
        if data.size:
            sending.error = CommunicationError(f"{self.this_stage}: {sending}: {data.tobytes().decode()}")

    def _on_close(self, peer: Peer) -> None:
        peer.closed = True
        peer.num_needed = 0
        for inbox in peer.inboxes.values():
            for receiving in inbox.waiting:
                receiving.error = CommunicationError(_describe_closed_peer(receiving))
            inbox.waiting.clear()
        for outbox in peer.outboxes.values():
            for sending in outbox.unacknowledged:
                sending.error = CommunicationError(_describe_unreceived_send(sending))
            outbox.unacknowledged.clear()

    def _fail_line(self, peer: Peer, inbox: Inbox, why: str) -> None:
        """Fail all receives of a line whose further messages can't be interpreted."""
        inbox.broken = f"{why}; the line is no longer usable"
        receivers = [*inbox.waiting]
        if inbox.arriving is not None:
            if inbox.arriving.receiving is not None:
                receivers.append(inbox.arriving.receiving)
            elif inbox.arrived:
                inbox.arrived.pop()
        inbox.arriving = None
        inbox.waiting.clear()
        peer.num_needed -= len(receivers)
        for receiving in receivers:
            receiving.error = receiving.error or CommunicationError(f"{self.this_stage}: {receiving}: {inbox.broken}")


def _describe_closed_peer(receiving: PendingRecv) -> str:
    peer = receiving.peer
    return f"{peer.this_stage}: {receiving}: {peer.name} has closed its pipe and sends no more values"


def _describe_unreceived_send(sending: PendingSend) -> str:
    peer = sending.peer
    return f"{peer.this_stage}: {sending}: {peer.name} has closed its pipe without receiving the value"
