"""The running collective of a communicator, whose calls the ranks compare in shared memory."""

from __future__ import annotations

from mpicoll.engine.core.queue import OperationQueue
from mpicoll.transport.base import Transport

# The modules of comparisons are imported where calls differ: the start of a job does not need them.


class RunningCall:
    """The running collective of a communicator, for its arena, which must have no reference to the communicator.

    `queue` is that of the communicator, or of the one on behalf of which it runs operations as one of its levels.
    """

    __slots__ = ("_own_queue", "_transport", "queue")

    def __init__(self, transport: Transport, queue: OperationQueue) -> None:
        self.queue = self._own_queue = queue
        self._transport = transport

    def describe(self) -> str:
        """Return a description of the call, for ranks that have called a different collective."""
        from mpicoll.engine.core.call_mismatch import encode_call

        return encode_call(self.queue.current)

    def check_wait(self) -> None:
        """Raise CommunicationError if the collective can never complete."""
        if self.queue.watch is not None:
            self.queue.watch.check(self.queue.current)

    def mismatch_error(self, texts: list[str]) -> Exception | None:
        """Return the error for these descriptions of all ranks, or None if they are equal."""
        from mpicoll.engine.core.call_mismatch import decode_mismatch_error

        return decode_mismatch_error(self._own_queue.group, texts)

    def row_mismatch_error(self) -> Exception:
        """Return the error for blocks that differ from what their receivers expect. Collective."""
        from mpicoll.engine.core.call_comparison import row_mismatch_error

        return row_mismatch_error(self._transport, self._own_queue, self.queue.current)
