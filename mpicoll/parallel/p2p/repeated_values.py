"""Values like the previous one of their line, which the extension sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from mpicoll.engine.core.queue import OperationQueue
from mpicoll.parallel.p2p.message_format import TensorSpec, as_bytes
from mpicoll.parallel.p2p.operations import (
    NO_BYTES,
    Inbox,
    IncomingValue,
    Outbox,
    Peer,
    PendingOperation,
    PendingRecv,
    PendingSend,
)
from mpicoll.parallel.p2p.progress import PipeProgress

if TYPE_CHECKING:
    from mpicoll._shm import Passage

NOT_PASSED: Any = object()
"""Result of :meth:`RepeatedValues.exchange` if it has neither sent nor received anything."""

_TENSOR = torch.Tensor


class _Arrived:
    """A message that has been received."""

    def test(self) -> bool:
        return True


_ARRIVED = _Arrived()


class RepeatedValues:
    """Values of CPU tensors, each like the previous one of its line, while nothing else is pending between the stages.

    The extension takes no message that the lines would not take next, and waits for as long as a peer that is in time
    takes. What is left then goes on as any other operation.
    """

    def __init__(self, progress: PipeProgress, queue: OperationQueue) -> None:
        self._progress = progress
        self._lock = progress.lock
        self._peers = progress.mux.peers
        # They are disabled in a forked process, which must not communicate.
        self._calls = queue.calls
        self._pass_values: Callable[..., Any] | None = None
        self._send_value: Callable[..., Any] | None = None
        if queue.calls is not None:
            from mpicoll._shm import pass_values, send_value

            self._pass_values, self._send_value = pass_values, send_value

    def close(self) -> None:
        """Leave all values to the lines, which raise the errors of a closed pipe."""
        self._pass_values = self._send_value = None

    def start(self, name: str, channel: int, dest: int, value: Any) -> PendingSend | None:
        """Start to send `value` to stage `dest`, in the operation `name`. Return the send, or None, before anything has
        been sent, if the lines must carry out the operation."""
        send_value = self._send_value
        if send_value is None or not self._calls.enabled or channel.__class__ is not int or dest.__class__ is not int:  # type: ignore[union-attr]
            return None
        key = channel << 2
        with self._lock:
            peer = self._peers.get(dest)
            outbox = None if peer is None or peer.closed else peer.outboxes.get(key)
            tensors = None if outbox is None else _find_tensors(outbox, value)
            if peer is None or outbox is None or outbox.repeated is None or outbox.layout is None or tensors is None:
                return None
            _, ends, places = outbox.repeated
            left = send_value(ends[0], tensors[places[0]], outbox.number)
            if left is None:
                return None
            outbox.number = (outbox.number + 1) & 3
            sending = PendingSend(name, peer, key, outbox.layout.spec, sync=False)
            if left is not True:
                sending.moving.append(ends[0].adopt(left, tensors[places[0]], None))
            self._send_rest(sending, outbox, tensors)
        return sending

    def _send_rest(self, sending: PendingSend, outbox: Outbox, tensors: list[torch.Tensor]) -> None:
        """Start to send the messages after the first one of a value with these `tensors`."""
        assert outbox.repeated is not None
        assert self._send_value is not None
        _, ends, places = outbox.repeated
        for end, place in zip(ends[1:], places[1:], strict=True):
            left = self._send_value(end, tensors[place], outbox.number)
            if left is None:  # its layout in memory is another one
                sending.moving.append(self._progress.mux.send_part(sending.peer, sending.key, tensors[place]))
                continue
            outbox.number = (outbox.number + 1) & 3
            if left is not True:
                sending.moving.append(end.adopt(left, tensors[place], None))

    def receive(self, name: str, channel: int, source: Any) -> Any:
        """Receive a value of any number of messages from stage `source`, in the operation `name`; or return NOT_PASSED,
        before anything has been received, as :meth:`exchange` does. Raises what operations on the lines raise."""
        pass_values = self._pass_values
        if pass_values is None or not self._calls.enabled or channel.__class__ is not int:  # type: ignore[union-attr]
            return NOT_PASSED
        with self._lock:
            inbox = self._find_inbox(source, channel << 2)
            if inbox is None:
                return NOT_PASSED
            assert inbox.repeated is not None
            pattern, ends, places = inbox.repeated
            targets = _make_targets(inbox)
            number, left, done = inbox.number, None, 0
            for end, place in zip(ends, places, strict=True):
                left = pass_values(None, None, 0, end, targets[place], (number + done) & 3)
                if left is not True:
                    break
                done += 1
            if left is None and done == 0:
                return NOT_PASSED
            inbox.number = (number + done) & 3
            if done == len(ends):
                return pattern.make_value(targets)
            receiving = PendingRecv(name, self._peers[source], channel << 2)
            self._continue_recv(receiving, inbox, targets, done, left)
        self._progress.complete([receiving], None)
        return receiving.value

    def exchange(
        self,
        name: str,
        channel: int,
        dest: int | None,
        out_line: int,
        value: Any,
        source: int | None,
        in_line: int,
        into: Any = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Send `value` to stage `dest`, and receive a value from stage `source`, in the operation `name`.

        Args:
            name: the operation, for errors.
            channel: the channel of both values; `out_line` and `in_line` are their lines.
            dest: the receiver; None sends nothing.
            source: the sender; None receives nothing.
            into: the tensor to fill; None makes new ones.
            shape, dtype: those that are expected of the received value; None where any is.

        Returns:
            The received value, None if nothing is received; or NOT_PASSED, before anything has been sent, if the lines
            must carry out the operation.

        Raises what operations on the lines raise.
        """
        pass_values = self._pass_values
        no_stage = dest is None and source is None  # an error where one is needed
        if pass_values is None or not self._calls.enabled or channel.__class__ is not int or no_stage:  # type: ignore[union-attr]
            return NOT_PASSED
        out = end = inbox = tensor = targets = target = None
        outbox: Outbox | None = None
        tensors: list[torch.Tensor] = []
        out_number = number = 0
        with self._lock:
            if dest is not None:
                outbox, tensors = self._find_outbox(dest, channel << 2 | out_line, value)
                if outbox is None or outbox.repeated is None or (source is not None and len(tensors) > 1):
                    return NOT_PASSED
                out, out_number = outbox.repeated.ends[0], outbox.number
                tensor = tensors[outbox.repeated.places[0]]
            if source is not None:
                alone = into is not None or shape is not None
                inbox = self._find_inbox(source, channel << 2 | in_line, shape, dtype, alone=alone)
                targets = None if inbox is None else _make_targets(inbox) if into is None else _prepare_target(into)
                if inbox is None or inbox.repeated is None or targets is None or len(targets) > 1:
                    return NOT_PASSED
                end, number, target = inbox.repeated.ends[0], inbox.number, targets[0]
            left = pass_values(out, tensor, out_number, end, target, number)
            if left is None:
                return NOT_PASSED
            if outbox is not None:
                outbox.number = (out_number + 1) & 3
            if left is True and len(tensors) < 2:
                if inbox is None or inbox.repeated is None or targets is None:
                    return None
                inbox.number = (number + 1) & 3
                return into if into is not None else inbox.repeated.pattern.make_value(targets)
            pending: list[PendingOperation] = []
            if inbox is not None and source is not None and targets is not None:
                receiving = PendingRecv(
                    name, self._peers[source], channel << 2 | in_line, into=into, shape=shape, dtype=dtype
                )
                self._continue_recv(receiving, inbox, targets, 0, left)
                pending.append(receiving)
            if outbox is not None and dest is not None:
                peer, key = self._peers[dest], channel << 2 | out_line
                pending.append(self._continue_send(name, peer, key, tensors, None if left is True else left))
        self._progress.complete(pending, None)
        return None if source is None else pending[0].value

    def _find_outbox(self, stage: int, key: int, value: Any) -> tuple[Outbox | None, list[torch.Tensor]]:
        """Return the sending end of a line to `stage`, and the tensors in `value`, if the extension may send it, to be
        acknowledged; (None, []) if it may not."""
        peer = self._find_quiet_peer(stage)
        outbox = None if peer is None else peer.outboxes.get(key)
        tensors = None if outbox is None else _find_tensors(outbox, value)
        return (None, []) if tensors is None else (outbox, tensors)

    def _find_inbox(
        self,
        stage: int,
        key: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        *,
        alone: bool = False,
    ) -> Inbox | None:
        """Return the receiving end of a line from `stage`, if the extension may receive there a value like the previous
        one, which is a tensor if it is to be `alone`, and has the expected `shape` and `dtype`."""
        peer = self._find_quiet_peer(stage)
        inbox = None if peer is None else peer.inboxes.get(key)
        if inbox is None or inbox.repeated is None or inbox.arrived or inbox.broken is not None:
            return None
        assert inbox.layout is not None
        spec = inbox.layout.spec
        if alone and not (
            isinstance(spec, TensorSpec) and shape in (None, spec.shape) and (dtype is None or dtype is spec.dtype)
        ):
            return None
        return inbox

    def _find_quiet_peer(self, stage: int) -> Peer | None:
        """Return the peer of `stage` if no message of it is needed or being received, else None."""
        peer = self._peers.get(stage) if stage.__class__ is int else None
        return None if peer is None or peer.num_needed or peer.reading is not None or peer.closed else peer

    def _continue_send(
        self, name: str, peer: Peer, key: int, tensors: list[torch.Tensor], left: Passage | None
    ) -> PendingSend:
        """Return the send of a value with these `tensors`, of whose first message the extension has `left` something to
        do, or nothing."""
        request, acknowledged, *_ = left or (None, True)
        outbox = peer.outboxes[key]
        assert outbox.layout is not None
        assert outbox.repeated is not None
        sending = PendingSend(name, peer, key, outbox.layout.spec, sync=True)
        if request is not None:
            first = tensors[outbox.repeated.places[0]]
            sending.moving.append(outbox.repeated.ends[0].adopt(request, first, None))
        self._send_rest(sending, outbox, tensors)
        sending.acknowledged = acknowledged
        if not acknowledged:
            outbox.unacknowledged.append(sending)
            peer.num_needed += 1
        return sending

    def _continue_recv(
        self, receiving: PendingRecv, inbox: Inbox, targets: list[torch.Tensor], done: int, left: Passage | None
    ) -> None:
        """Have a receive go on, of which `done` messages have been received; of the next one the extension has `left`
        something to do, or it has not found that."""
        _, _, tag, request, answer = left or (None, True, -1, None, None)
        assert inbox.repeated is not None
        _, ends, places = inbox.repeated
        if answer is not None:
            ends[done].adopt(answer, NO_BYTES, None)
        if tag < 0 and done == 0:
            self._progress.mux.post_recv(receiving)
            return
        arrival = IncomingValue(inbox.layout, sync=False, find_announced=lambda data: None)  # it is acknowledged
        if receiving.into is None:
            for place in places[: done + (tag >= 0)]:
                arrival.keep(place, targets[place])
        else:
            arrival.receive_into(receiving.name, targets[0])
        arrival.moving += [_ARRIVED] * done
        if tag >= 0:
            inbox.number = (inbox.number + 1) & 3
            into, came = targets[places[done]], (receiving.peer.stage, tag)
            arrival.moving.append(_ARRIVED if request is None else ends[done].adopt(request, as_bytes(into), came))
        arrival.complete = len(arrival.moving) == len(ends)
        arrival.receiving, receiving.arrival = receiving, arrival
        if not arrival.complete:
            inbox.arriving = arrival
            receiving.peer.num_needed += 1


def _find_tensors(outbox: Outbox, value: Any) -> list[torch.Tensor] | None:
    """Return the tensors of `value` if it is like the previous one of the line, as far as the extension does not find
    that out; else None."""
    tensors = None if outbox.repeated is None else outbox.repeated.pattern.find_tensors(value)
    if tensors is None or outbox.layout is None:
        return None
    alone = len(tensors) == 1
    for tensor, leaf in zip(tensors, outbox.layout.leaves, strict=True):
        if tensor.requires_grad is not leaf.requires_grad:
            return None
        # Before the first one is sent.
        if not alone and (tensor.shape != leaf.shape or tensor.dtype is not leaf.dtype or not tensor.is_cpu):
            return None
    return tensors


def _make_targets(inbox: Inbox) -> list[torch.Tensor]:
    """Return tensors for a value like the previous one."""
    assert inbox.layout is not None
    return [leaf.empty().requires_grad_() if leaf.requires_grad else leaf.empty() for leaf in inbox.layout.leaves]


def _prepare_target(into: Any) -> list[torch.Tensor] | None:
    """Return `into`, a tensor to fill; None if the extension does not."""
    if into.__class__ is not _TENSOR:
        return None
    # Autograd must notice that it is written to. Before, not after the message has arrived, for which others may wait.
    if not into.is_inference():
        increment_version(into)
    return [into]
