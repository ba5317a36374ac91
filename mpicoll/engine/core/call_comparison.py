"""Comparison of the ranks' calls by messages."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from zlib import crc32

from mpicoll.engine.core.call_mismatch import (
    compared_fields,
    decode_mismatch_error,
    describe_call,
    encode_call,
    locate_call,
    mismatch_error,
)
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.diagnostics.flight_recorder import Call, EntryTuple
from mpicoll.engine.diagnostics.position import Position
from mpicoll.errors import CommunicationError, CommunicatorError, RankFailed
from mpicoll.transport.base import Transport
from mpicoll.wording import count

_COMPARING = Position("the comparison of the ranks' calls", polls=True)

BATCH = 64
"""Number of first collectives of a communicator that are compared one by one, and batch size for later ones."""


def compare_words(
    transport: Transport,
    queue: OperationQueue,
    raw: EntryTuple | None,
    word: int,
    text: Callable[[], str],
    interrupts: list[BaseException] | None = None,
) -> list[str] | None:
    """Return the texts of all ranks if their words differ, otherwise None. Collective; raises CommunicationError if the
    collective `raw` can never complete, RankFailed if a rank of it has died.

    An exception that a signal handler has raised meanwhile is added to `interrupts`, if given, so that this rank goes
    on with the others; otherwise it is raised when all ranks have compared their words.
    """
    watch, executing = queue.watch, queue.executing
    kept: list[BaseException] = [] if interrupts is None else interrupts

    def check_wait() -> None:
        if watch is not None and raw is not None:
            watch.check(raw)
            watch.check_deaths(raw[0])

    outer, executing.executor = executing.executor, _COMPARING
    try:
        texts = transport.compare(word, text, check_wait, kept)
    finally:
        executing.executor = outer
    if kept and interrupts is None:
        raise kept[0]
    return texts


def row_mismatch_error(transport: Transport, queue: OperationQueue, raw: EntryTuple | None) -> CommunicationError:
    """Return the error for the collective `raw`, whose blocks differ from what their receivers expect. Collective."""
    assert raw is not None  # the collective that has just begun
    entry = locate_call(raw)
    fields, _ = compared_fields(entry)
    # Words that differ make the transport exchange the texts.
    word = transport.rank + 1
    texts = compare_words(transport, queue, raw, word, lambda: json.dumps(describe_call(entry, fields)))
    error = None if texts is None else mismatch_error(entry.group, [json.loads(text) for text in texts])
    return error or CommunicationError(f"{entry.call} on {entry.group.name}: ranks expect other counts than are sent")


class BatchedComparison:
    """Comparison, at low cost, of the collectives of one communicator whose ranks share no memory.

    Each of the first BATCH collectives is compared before it begins. Most programs repeat the same calls after these,
    so later collectives are compared only before every BATCH-th one, together with all since the last comparison.
    Collectives after the last comparison are never compared.
    """

    __slots__ = ("_begun", "_entries", "_queue", "_signatures", "_transport")

    def __init__(self, transport: Transport, queue: OperationQueue) -> None:
        self._transport = transport
        self._queue = queue
        self._begun = 0
        # Collectives since the last comparison.
        self._signatures: list[int] = []
        self._entries: list[EntryTuple | None] = []

    def match(self, call: Call) -> BaseException | None:
        """Begin a collective. Raises MismatchError on all ranks if the ranks have called different collectives: if the
        mismatch is found in the collective that begins, the communicator stays usable; if it is found in an earlier
        one, all later collectives raise CommunicatorError. Returns the exception that a signal handler has raised
        meanwhile, which the caller raises when it has carried out the operation: the other ranks have begun it."""
        calls = self._queue.calls
        if calls is not None:
            # Those that the extension has begun since.
            for signature, entry in calls.take_deferred():
                self._signatures.append(signature)
                self._entries.append(entry)
                self._begun += 1
        self._begun = begun = self._begun + 1
        signature = call.signature
        self._signatures.append(signature if signature > 0 else call.sign())
        self._entries.append(self._queue.current)
        interrupt = self._compare() if begun <= BATCH or begun % BATCH == 0 else None
        if calls is not None:
            calls.deferrable = BATCH - 1 - begun % BATCH if begun >= BATCH else 0
        return interrupt

    def _compare(self) -> BaseException | None:
        queue, signatures, entries = self._queue, self._signatures, self._entries
        self._signatures, self._entries = [], []
        last = len(entries) - 1

        def encode_batch() -> str:
            calls = [encode_call(entry, runs=index == last) for index, entry in enumerate(entries)]
            return json.dumps([*zip(signatures, calls, strict=True)])

        word = crc32(array("I", signatures))
        interrupts: list[BaseException] = []
        try:
            texts = compare_words(self._transport, queue, entries[last], word, encode_batch, interrupts)
        except RankFailed:
            raise  # the transport already refuses further operations on this communicator
        except BaseException:
            self._refuse("an earlier operation was abandoned, and the ranks are not synchronised any more")
            raise
        if texts is None:
            return interrupts[0] if interrupts else None
        batches = [json.loads(text) for text in texts]
        index = next(index for index in range(last + 1) if len({batch[index][0] for batch in batches}) > 1)
        found: CommunicationError | None = decode_mismatch_error(queue.group, [batch[index][1] for batch in batches])
        if found is None:
            found = CommunicationError(
                f"rank {self._transport.rank} of {self._transport.size}: another rank has called another collective, or"
                " one of another size, dtype, op, root or algorithm"
            )
        if index < last:
            self._refuse("the ranks have called different collectives, as an earlier MismatchError reports")
            later = f"{count(last - index, 'collective')} later"
            found.args = (f"{found}\n  (found {later}: its results and those since then may be wrong)",)
        if interrupts:
            raise interrupts[0] from found
        raise found

    def _refuse(self, why: str) -> None:
        """Make all later collectives raise CommunicatorError."""
        name = self._queue.group.name

        def match(call: Call) -> None:
            raise CommunicatorError(f"{call} on {name}: {why}; create another communicator with duplicate()")

        if self._queue.calls is not None:
            self._queue.calls.deferrable = 0
        self._queue.match = match
