"""Values like the previous one of their line, which the extension sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from mpicoll.engine.core.queue import OperationQueue
from mpicoll.parallel.p2p.message_format import as_bytes
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


class RepeatedValues:
    """Exchanges of single CPU tensors, each like the previous one of its line, while nothing else is pending between
    the stages.

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
        if queue.calls is not None:
            from mpicoll._shm import pass_values

            self._pass_values = pass_values

    def close(self) -> None:
        """Leave all values to the lines, which raise the errors of a closed pipe."""
        self._pass_values = None

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
            into: the tensor to fill; None makes a new one.
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
        out = end = outbox = inbox = target = None
        out_number = number = 0
        with self._lock:
            if dest is not None:
                outbox = self._find_outbox(dest, channel << 2 | out_line, value)
                if outbox is None:
                    return NOT_PASSED
                out, out_number = outbox.end, outbox.number
            if source is not None:
                inbox = self._find_inbox(source, channel << 2 | in_line, shape, dtype)
                target = None if inbox is None else _prepare_target(inbox, into)
                if inbox is None or target is None:
                    return NOT_PASSED
                end, number = inbox.end, inbox.number
            left = pass_values(out, value, out_number, end, target, number)
            if left is None:
                return NOT_PASSED
            if outbox is not None:
                outbox.number = (out_number + 1) & 3
            if left is True:
                if inbox is not None:
                    inbox.number = (number + 1) & 3
                return target
            pending: list[PendingOperation] = []
            if source is not None and inbox is not None:
                peer = self._peers[source]
                receiving = PendingRecv(name, peer, channel << 2 | in_line, into=into, shape=shape, dtype=dtype)
                self._continue_recv(receiving, inbox, target, left)
                pending.append(receiving)
            if dest is not None:
                pending.append(self._continue_send(name, self._peers[dest], channel << 2 | out_line, value, left))
        self._progress.complete(pending, None)
        return None if source is None else pending[0].value

    def _find_outbox(self, stage: int, key: int, value: Any) -> Outbox | None:
        """Return the sending end of a line to `stage`, if the extension may send `value` there."""
        peer = self._find_quiet_peer(stage)
        outbox = None if peer is None else peer.outboxes.get(key)
        if outbox is None or outbox.end is None or value.__class__ is not _TENSOR:
            return None
        assert outbox.layout is not None
        return outbox if outbox.layout.leaves[0].requires_grad is value.requires_grad else None

    def _find_inbox(
        self, stage: int, key: int, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> Inbox | None:
        """Return the receiving end of a line from `stage`, if the extension may receive there a value like the previous
        one, which has the expected `shape` and `dtype`."""
        peer = self._find_quiet_peer(stage)
        inbox = None if peer is None else peer.inboxes.get(key)
        if inbox is None or inbox.end is None or inbox.arrived or inbox.broken is not None:
            return None
        if shape is not None:
            assert inbox.layout is not None
            spec = inbox.layout.leaves[0]
            if shape != spec.shape or (dtype is not None and dtype is not spec.dtype):
                return None
        return inbox

    def _find_quiet_peer(self, stage: int) -> Peer | None:
        """Return the peer of `stage` if no message of it is needed or being received, else None."""
        peer = self._peers.get(stage) if stage.__class__ is int else None
        return None if peer is None or peer.num_needed or peer.reading is not None or peer.closed else peer

    def _continue_send(self, name: str, peer: Peer, key: int, value: torch.Tensor, left: Passage) -> PendingSend:
        """Return the send of `value`, of which the extension has left something to do."""
        request, acknowledged, *_ = left
        outbox = peer.outboxes[key]
        assert outbox.layout is not None
        assert outbox.end is not None
        sending = PendingSend(name, peer, key, outbox.layout.spec, sync=True)
        if request is not None:
            sending.moving.append(outbox.end.adopt(request, as_bytes(value), None))
        sending.acknowledged = acknowledged
        if not acknowledged:
            outbox.unacknowledged.append(sending)
            peer.num_needed += 1
        return sending

    def _continue_recv(self, receiving: PendingRecv, inbox: Inbox, target: Any, left: Passage) -> None:
        """Have a receive go on, of which the extension has left something to do; it has matched no value, or one that
        arrives in `target`."""
        _, _, tag, request, answer = left
        assert inbox.end is not None
        if answer is not None:
            inbox.end.adopt(answer, NO_BYTES, None)
        if tag < 0:
            self._progress.mux.post_recv(receiving)
            return
        inbox.number = (inbox.number + 1) & 3
        arrival = IncomingValue(inbox.layout, sync=False, find_announced=lambda data: None)  # it is acknowledged
        if receiving.into is None:
            arrival.keep(target)
        else:
            arrival.receive_into(receiving.name, target)
        if request is not None:
            arrival.moving.append(inbox.end.adopt(request, as_bytes(target), (receiving.peer.stage, tag)))
        arrival.complete = True
        arrival.receiving, receiving.arrival = receiving, arrival


def _prepare_target(inbox: Inbox, into: Any) -> torch.Tensor | None:
    """Return the tensor for a value like the previous one; None if the extension does not fill `into`."""
    if into is None:
        assert inbox.layout is not None
        leaf = inbox.layout.leaves[0]
        return leaf.empty().requires_grad_() if leaf.requires_grad else leaf.empty()
    if into.__class__ is not _TENSOR:
        return None
    # Autograd must notice that it is written to. Before, not after the message has arrived, for which others may wait.
    if not into.is_inference():
        increment_version(into)
    return into
