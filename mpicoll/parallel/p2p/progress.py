"""Progress of the pending operations of a pipe: polls, waits and their bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

import torch

from mpicoll.engine.core.arrays import do_nothing
from mpicoll.engine.core.poller import poller
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.registered_wait import RegisteredWait
from mpicoll.engine.core.request import Request
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicationError, Timeout
from mpicoll.parallel.p2p.channels import ChannelMux
from mpicoll.parallel.p2p.operations import Peer, PendingOperation, PendingRecv, PendingSend, pop_completed
from mpicoll.transport.base import Memory
from mpicoll.transport.waiting import SPINS, Backoff

_SLEEPS_PER_CHECK = 20
"""Number of sleeps of a wait between two checks that the other stage is alive."""


class PipeProgress:
    """Pending operations of a pipe, which any thread may start, test and wait for.

    Args:
        mux: this stage's ends of all lines.
        queue: the queue of the communicator, to which waits are published.
        timeout: the default bound of a wait in seconds.
        background: the poller makes progress on asynchronous operations.
    """

    def __init__(self, mux: ChannelMux, queue: OperationQueue, timeout: float, *, background: bool) -> None:
        self.mux = mux
        self.queue = queue
        self.timeout = timeout
        self.lock = threading.RLock()
        self._background = background
        self._pending: dict[PendingOperation, None] = {}
        self._prune_above = 64

    def post_send(self, sending: PendingSend, payload: list[torch.Tensor] | Memory) -> None:
        """Send tensors, or the bytes of an object."""
        try:
            with self.lock:
                self.mux.post_send(sending, payload)
        except CommunicationError as error:
            raise sending.peer.explain(sending, error) from error

    def post_recv(self, *receives: PendingRecv) -> None:
        """Match each receive with the next value of its line."""
        with self.lock:
            for receiving in receives:
                self.mux.post_recv(receiving)

    def advance(self) -> int:
        """Make progress without waiting, and return the number of asynchronous operations that are still pending."""
        with self.lock:
            self.mux.pump()
            self._prune()
            return len(self._pending)

    def complete_pending(self, timeout: float | None) -> None:
        """Complete all asynchronous operations, within `timeout` seconds for all of them together."""
        with self.lock:
            self._prune()
            pending = list(self._pending)
        if not pending:
            return
        try:
            self.complete(pending, timeout)
        finally:
            with self.lock:
                self._prune()

    def close(self, timeout: float | None) -> list[PendingOperation]:
        """Complete the sends, wait until all stages have closed, and return the operations that were pending.

        Raises Timeout if another stage does not close, RankFailed if its process has exited.
        """
        bound = self.timeout if timeout is None else timeout
        with self.lock:
            closing = self.mux.send_close()
            pending, self._pending = list(self._pending), {}
        peers = self.mux.peers.values()
        sends = [one for one in pending if isinstance(one, PendingSend)]

        def ready() -> bool:
            alone = all(peer.closed or peer.failure for peer in peers)
            return alone and pop_completed(closing) and all(one.has_ended() for one in sends)

        in_time = self._wait_until(
            ready,
            lambda: [peer for peer in peers if not (peer.closed or peer.failure)],
            bound,
            lambda: f"PipeP2P.close of {self.mux.this_stage}",
            bounded=timeout is not None,
        )
        if not in_time:
            late = ", ".join(peer.name for peer in peers if not peer.closed)
            raise Timeout(f"{self.mux.this_stage}: close: {late or 'a message'} did not complete within {bound:g} s")
        failure = next((peer.failure for peer in peers if peer.failure), None)
        if failure is not None:
            raise failure
        return pending

    def make_request(self, operation: PendingOperation) -> Request:
        """Return a request for `operation`, which has been started."""
        if isinstance(operation, PendingSend) and operation.has_ended() and operation.error is None:
            return Request(_Handle(self, operation), do_nothing)
        with self.lock:
            if len(self._pending) >= self._prune_above:
                self._prune()
                self._prune_above = max(64, 2 * len(self._pending))
            self._pending[operation] = None
        request = Request(_Handle(self, operation), lambda: operation.value)
        if self._background:
            poller.watch(request)
        return request

    def _prune(self) -> None:
        """Forget pending operations that have ended, except those with an error that was not raised yet."""
        for one in list(self._pending):
            if one.has_ended() and (one.error is None or one.reported):
                del self._pending[one]

    def complete_request(self, operation: PendingOperation, timeout: float | None, requested: float | None) -> None:
        """Wait for the operation of a request. `timeout` may be the rest of the bound that was `requested`."""
        try:
            self.complete([operation], timeout, cancel_receives=False, requested=requested)
        finally:
            with self.lock:
                if operation.has_ended():
                    self._pending.pop(operation, None)

    def complete(
        self,
        operations: Sequence[PendingOperation],
        timeout: float | None,
        *,
        cancel_receives: bool = True,
        requested: float | None = None,
    ) -> None:
        """Wait until all operations have ended, then raise the first error.

        After the bound, receives are cancelled if `cancel_receives`, else all operations stay pending.
        """
        with self.lock:
            self.mux.pump()
            left = [one for one in operations if not one.has_ended()]
        bound = self.timeout if timeout is None else timeout
        try:
            in_time = not left or self._wait_until(
                lambda: _remove_ended(left),
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
                raise Timeout(
                    self._format_timeout(
                        left[0], bound if requested is None else requested, cancel_receives=cancel_receives
                    )
                )
        finally:
            if cancel_receives and left:
                with self.lock:
                    for one in left:
                        if isinstance(one, PendingRecv):
                            self.mux.cancel(one)

    def _wait_until(
        self,
        ready: Callable[[], bool],
        peers: Callable[[], list[Peer]],
        bound: float,
        what: Callable[[], str],
        *,
        bounded: bool,
    ) -> bool:
        """Receive messages until `ready` returns True, for at most `bound` seconds, and return True if it did.

        A message from each of `peers` is needed. `what` names the wait in reports; `bounded` is True if the program
        passed the bound.
        """
        deadline = time.monotonic() + bound
        backoff = Backoff()
        for turn in count():
            with self.lock:
                self.mux.pump()
                if ready():
                    return True
            if time.monotonic() > deadline:
                return False
            if turn > SPINS and not backoff.yield_core():
                break
        ended = None
        while ended is None:
            with self.lock:
                call = self._describe_wait(what(), [] if bounded else peers())
            with self.queue.waiting(call, bound) as waiting:
                ended = self._sleep_until(ready, peers, deadline, call, waiting, backoff)
        return ended

    def _sleep_until(
        self,
        ready: Callable[[], bool],
        peers: Callable[[], list[Peer]],
        deadline: float,
        call: Call,
        waiting: RegisteredWait,
        backoff: Backoff,
    ) -> bool | None:
        """Do the same, sleeping between polls. Return None when `call` no longer describes the wait."""
        turns = 0
        while True:
            with self.lock:
                self.mux.pump()
                if ready():
                    return True
                if turns % _SLEEPS_PER_CHECK == 0:
                    late = peers()
                    for peer in late:
                        self.mux.check_peer(peer)
                    if call.parts and self._describe_wait("", late).takes != call.takes:
                        return None
            waiting.check()
            if time.monotonic() > deadline:
                return False
            turns += 1
            backoff.sleep()

    def _describe_wait(self, what: str, late: list[Peer]) -> Call:
        """Describe a wait for a message from each of `late`, for the reports of other ranks."""
        parts = tuple(Call("recv", peer=stage, collective=False) for stage in sorted({peer.stage for peer in late}))
        takes = tuple(stage for stage, peer in self.mux.peers.items() if peer.num_needed)
        return Call(what, parts=parts, takes=takes, collective=False)

    def test(self, operation: PendingOperation) -> bool:
        with self.lock:
            if not operation.has_ended():
                self.mux.pump()
            return operation.has_ended()

    def _format_timeout(self, operation: PendingOperation, bound: float, *, cancel_receives: bool) -> str:
        peer = operation.peer
        if isinstance(operation, PendingSend):
            text = f"the value was not received within {bound:g} s; the send is still pending"
        elif operation.arrival is None:
            text = f"received nothing within {bound:g} s; expected {operation.expected}"
        else:
            text = f"the value was not completely received within {bound:g} s"
            text += ", and is lost" if cancel_receives else ""
        with self.lock:
            unreceived = ", ".join(peer.describe_unreceived())
        if unreceived:
            text += f". That stage has sent {unreceived}, which was not received here: receive it, or use isend"
        return f"{self.mux.this_stage}: {operation}: {text}"


class _Handle:
    """A pending operation, as the handle of its request."""

    __slots__ = ("_operation", "_progress")

    def __init__(self, progress: PipeProgress, operation: PendingOperation) -> None:
        self._progress = progress
        self._operation = operation

    def test(self) -> bool:
        return self._progress.test(self._operation)

    @property
    def awaited(self) -> tuple[OperationQueue, Call]:
        return self._progress.queue, Call(f"PipeP2P.{self._operation}", collective=False)

    @property
    def limit(self) -> float:
        return self._progress.timeout

    def wait(self, timeout: float | None, bound: float | None = None) -> None:
        self._progress.complete_request(self._operation, timeout, bound)


def _remove_ended(operations: list[PendingOperation]) -> bool:
    """Remove ended operations from the list, and return True if it is empty."""
    operations[:] = [one for one in operations if not one.has_ended()]
    return not operations
