"""Shared memory of one communicator on one node, and the synchronisation of its ranks through flags in that memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arena_layout import (
    ENDED,
    FAILED,
    FAILED_END,
    OPERATIONS,
    POSTED,
    ROWS,
    SIGNATURES,
    UNUSABLE,
    WORDS,
    UnusableFlags,
)
from mpicoll.engine.core.arena_wait import SPINS, ArenaWait, CheckWait
from mpicoll.engine.core.call_descriptions import CallDescriptions, DescribeCall, MismatchErrorOf, description_bytes
from mpicoll.engine.core.segments import SegmentTable
from mpicoll.engine.diagnostics.flight_recorder import ROW_MODULUS, Call
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.selection.catalogue import SLOT_BYTES
from mpicoll.errors import CommunicationError, RankFailed
from mpicoll.transport.base import Memory, Reader, Transport

Body: TypeAlias = "Callable[[Any, Any], None]"
"""Function called as ``body(source, target)`` on this rank's flat input and output; each is None where the collective
has none on this rank."""


class Arena:
    """Slots of all ranks of a node, and the flags that synchronise the ranks.

    Every rank has two slots to write its data to, and the arena has two more for results: ``slots[w]`` and
    ``results[w]`` with ``w = parity``. An operation is a sequence of steps that end with :meth:`sync`. In one step a
    rank writes to the slots and results of its parity, and reads what was written in the step before. Two of each
    suffice: a rank that writes to one of them has seen the end of the step in which it was last read. Reads after an
    operation's last ``sync`` belong to the next step, so they need no further ``sync``.

    An operation that uses no slots, because MPI or messages carry it out, begins with :meth:`matcher` and has no step.
    :meth:`allocate_slots` allocates the slots; before that the arena has only flags, which take a few KiB.

    `describe_call` and `mismatch_error` produce the error when ranks carry out different operations;
    `row_mismatch_error`, which is collective, does so when blocks differ from what their receivers expect.
    """

    def __init__(
        self,
        transport: Transport,
        describe_call: DescribeCall | None = None,
        mismatch_error: MismatchErrorOf | None = None,
        check_wait: CheckWait | None = None,
        executing: Executing | None = None,
        row_mismatch_error: Callable[[], Exception] | None = None,
    ) -> None:
        rank, size = transport.rank, transport.size
        words = size * WORDS * 8
        first = transport.share(words + description_bytes(size) if rank == 0 else 0)[0]
        self.rank, self.size = rank, size
        self.has_slots = False
        self.slots: tuple[tuple[Memory, ...], ...] = ()
        self.results: tuple[Memory, ...] = ()
        self.parity = 0
        # Waits for asynchronous copies to and from shared memory in the running operation.
        self.synchronize: Callable[[], None] | None = None
        self.segments = SegmentTable(transport)
        self._scratch: list[Array] = []
        self.readers: Sequence[Reader] = ()
        # Reason why the ranks could not read each other's memory in the last operation for that.
        self.cma_failed_reason: str | None = None
        self._transport = transport
        self._flags = memoryview(first[:words].data).cast("B").cast("q")
        # Replaced by UnusableFlags when an operation is abandoned.
        self._words: memoryview[int] | UnusableFlags = self._flags
        self._descriptions = CallDescriptions(first[words:], rank, size, describe_call, mismatch_error)
        self._row_mismatch_error = row_mismatch_error
        self._check_wait = check_wait
        self._executing = executing or Executing()
        self._step = 0
        self._operation = 0
        self._abandoned = False  # the wait was abandoned because other ranks did not enter the operation
        self._mine = rank * WORDS
        self._others = tuple(peer * WORDS for peer in range(size) if peer != rank)
        self._fence = transport.memory_fence
        self._spins = range(SPINS[transport.has_own_cores])

    def allocate_slots(self) -> Arena:
        """Allocate the slots. Collective. Raises CommunicationError on all ranks if there is no memory for them."""
        own = 2 * SLOT_BYTES
        memories = self._transport.share(2 * own if self.rank == 0 else own)
        self.readers = () if self._transport.no_cma_reason else self._transport.open_readers()
        parts = [slice(w * SLOT_BYTES, (w + 1) * SLOT_BYTES) for w in range(4)]
        self.slots = tuple(tuple(memory[part] for memory in memories) for part in parts[:2])
        self.results = tuple(memories[0][part] for part in parts[2:])
        self.has_slots = True
        return self

    def matcher(self) -> Callable[[Call], None]:
        """Return the function that begins an operation without steps: ``match(call)`` returns when all ranks have begun
        the operation with calls of the same signature. Calls that begin with :meth:`run` are compared there instead.

        ``match`` raises MismatchError on all ranks if they have begun different operations, after which the ranks are
        synchronised again; otherwise it raises what :meth:`run` raises.
        """
        spins = self._spins
        # Positions of the signatures of even and odd operations: of this rank, and of the other ranks.
        mine = tuple(self._mine + which for which in SIGNATURES)
        others = tuple(tuple(at + which for at in self._others) for which in SIGNATURES)

        # A closure, because it precedes the shortest operations and attribute access is slower.

        def match(call: Call) -> None:
            signature = call.signature
            if signature <= 0:
                if signature:
                    return
                if call.arrivals:
                    self._match_rows(call)
                    return
                signature = call.sign()
            self._operation = operation = self._operation + 1 & OPERATIONS
            words, odd = self._words, operation & 1
            words[mine[odd]] = word = operation << 32 | signature
            for at in others[odd]:
                if words[at] != word:
                    for _ in spins:
                        if words[at] == word:
                            break
                    else:
                        self._match_late(SIGNATURES[odd])
                        return

        return match

    def _match_rows(self, call: Call) -> None:
        """Match an operation whose block sizes are known only to the sender and the receiver of each block. Raises
        MismatchError on all ranks if these sizes differ."""
        signature, mine = call.row_signature(self.rank)
        self._operation = operation = self._operation + 1 & OPERATIONS
        words, asked, rows = self._words, SIGNATURES[operation & 1], ROWS[operation & 1]
        words[self._mine + rows] = mine
        if self._fence is not None:
            self._fence()
        words[self._mine + asked] = word = operation << 32 | signature
        for at in self._others:
            if words[at + asked] != word and not any(words[at + asked] == word for _ in self._spins):
                self._match_late(asked)
                break
        if self._fence is not None:
            self._fence()
        if (
            sum(words[peer * WORDS + rows] for peer in range(self.size)) % ROW_MODULUS
            and self._row_mismatch_error is not None
        ):
            raise self._row_mismatch_error()

    def _match_late(self, which: int) -> None:
        """Match an operation when another rank is late or has begun a different operation."""
        begin = self._step
        try:
            try:
                self._await(which)
            except BaseException:
                # Ranks that enter the operation later must see that this rank has left it.
                self._words[self._mine + which] = self._operation << 32
                raise
            self.check_same_operation()
        except BaseException as failure:
            self._recover(failure, begin)
            raise

    def _await(self, which: int) -> None:
        """Return when all ranks have begun this operation, or a different one in its place."""
        operation, words = self._operation, self._words
        late = list(range(self.size))
        with self._wait_for(lambda: late) as wait:
            while late := [peer for peer in late if words[peer * WORDS + which] >> 32 != operation]:
                try:
                    for peer in late:
                        if words[peer * WORDS] >= UNUSABLE:
                            raise CommunicationError(
                                f"rank {self.rank} of {self.size} (of this node): rank {peer} has abandoned an"
                                " operation, as its own error explains; create another communicator"
                            )
                    wait.pause(late)
                except RankFailed:
                    if any(words[peer * WORDS + which] >> 32 != operation for peer in late):
                        raise  # otherwise the ranks have entered the operation and exited since
                except CommunicationError:
                    self._abandoned = True
                    raise

    def sync(self) -> None:
        """End a step: all that the ranks wrote before is visible to all ranks afterwards. Raises CommunicationError if
        another rank has failed in this operation."""
        if self.synchronize is not None:
            self.synchronize()
        self._step = step = self._step + 2
        self.parity = step >> 1 & 1
        words = self._words
        if self._fence is not None:
            self._fence()
        words[self._mine] = step
        for at in self._others:
            seen = words[at]
            if seen < step:
                seen = self._wait(at, step)
            if seen & FAILED and self._failed_here(at):
                raise CommunicationError(
                    f"rank {self.rank} of {self.size} (of this node): rank {at // WORDS} failed in this operation, as"
                    " its own error explains"
                )
        if self._fence is not None:
            self._fence()

    def _failed_here(self, at: int) -> bool:
        """Return True if another rank has failed in this operation, not at the beginning of the next one."""
        self._barrier()
        ended = self._words[at + ENDED[self._operation & 1]]
        return ended >> 32 != self._operation or bool(ended & FAILED_END)

    def _wait(self, at: int, step: int) -> int:
        words = self._words
        for _ in self._spins:
            seen = words[at]
            if seen >= step:
                return seen
        which = SIGNATURES[self._operation & 1]
        mine = words[self._mine + which]
        with self._wait_for(self._late_ranks) as wait:
            while (seen := words[at]) < step:
                asked = words[at + which]
                if asked >> 32 == self._operation and asked != mine:
                    self.check_same_operation()  # a different operation may have fewer steps and never reach this one
                try:
                    wait.pause([at // WORDS])
                except RankFailed:
                    if words[at] < step:  # otherwise the rank has reached the step and exited since
                        raise
                except CommunicationError:
                    # This rank stops waiting, so it cannot stay synchronised with ranks that may still enter the
                    # operation.
                    self._abandoned = True
                    raise
        return seen

    def _wait_for(self, late: Callable[[], Sequence[int]]) -> ArenaWait:
        """Return a wait for the ranks that `late` returns."""
        return ArenaWait(self._transport, self._executing, self._check_wait, late)

    def _late_ranks(self) -> list[int]:
        """Return the ranks that have not reached the current step of this rank."""
        return [at // WORDS for at in self._others if self._flags[at] < self._step]

    def post(self, *values: int) -> None:
        """Publish up to 8 numbers, which the other ranks read with :meth:`read_posted` after the next ``sync``."""
        at = self._mine + POSTED[self.parity]
        for i, value in enumerate(values):
            self._words[at + i] = value

    def read_posted(self, count: int) -> list[tuple[int, ...]]:
        """Return the first `count` numbers that each rank published in the step that has just ended."""
        first = POSTED[1 - self.parity]
        words = self._words
        return [tuple(words[peer * WORDS + first + i] for i in range(count)) for peer in range(self.size)]

    def run(
        self,
        body: Body,
        source: Array | None,
        target: Array | None,
        load: Callable[[], None] | None = None,
        signature: int = 0,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Carry out an operation: ``body(source, target)``, after `load`. Each :meth:`sync` first calls
        `synchronize`, if given.

        Raises CommunicationError if ranks carry out operations of different `signature`, a number of 32 bits. If one
        rank fails here, the other ranks are released from the operation and get CommunicationError, unless they already
        have all data that they need. The ranks are synchronised again afterwards, except after Timeout, when other
        ranks did not enter the operation: then it is the last operation of the arena, and ranks that enter it late get
        CommunicationError.
        """
        begin = self._step
        self._operation = operation = self._operation + 1 & OPERATIONS
        self._words[self._mine + SIGNATURES[operation & 1]] = operation << 32 | signature
        self.synchronize = synchronize
        try:
            if load is not None:
                load()
            body(source, target)
            self.check_same_operation()
        except BaseException as failure:
            self._recover(failure, begin)
            raise
        finally:
            self.synchronize = None
        self._words[self._mine + ENDED[operation & 1]] = operation << 32 | self._step - begin

    def _recover(self, failure: BaseException, begin: int) -> None:
        """Synchronise with the other ranks after a failure. Raises if that is impossible, or with the error for ranks
        that have begun different operations, if that is the cause."""
        try:
            if self._operations_differ():
                self._descriptions.publish(self._operation)
                self._barrier()
            if self._abandoned:
                raise failure  # do not wait a second time for ranks that exceeded the timeout
            self._release_waiters(begin)
        except BaseException:
            self._step = self._words[self._mine] = UNUSABLE | FAILED
            self._words = UnusableFlags(self.rank, self.size)
            raise
        if isinstance(failure, CommunicationError) and self._operations_differ():
            found = self._descriptions.mismatch_error(self._operation)
            if found is not None:
                raise found from None

    def check_same_operation(self) -> None:
        """Raise CommunicationError if another rank carries out a different operation. Valid after a first step."""
        words, which = self._words, SIGNATURES[self._operation & 1]
        mine = words[self._mine + which]
        for at in self._others:
            if (other := words[at + which]) != mine:
                what = (
                    "has called another collective, or one of another size, dtype, op, root or algorithm"
                    if other & (1 << 32) - 1
                    else "has abandoned this operation, as its own error explains"
                )
                raise CommunicationError(f"rank {self.rank} of {self.size} (of this node): rank {at // WORDS} {what}")

    def _operations_differ(self) -> bool:
        """Return True if another rank carries out a different operation. Valid after a first step."""
        words, which = self._words, SIGNATURES[self._operation & 1]
        mine = words[self._mine + which]
        return any(words[at + which] != mine for at in self._others)

    def _release_waiters(self, begin: int) -> None:
        """Release the other ranks after a failure: block none of them until all have ended this operation, successfully
        or not, then synchronise with them."""
        words = self._words
        words[self._mine + ENDED[self._operation & 1]] = self._operation << 32 | FAILED_END | self._step - begin
        late: list[int] = []
        with self._wait_for(lambda: late) as wait:
            while True:
                reached = [self._reached(at, begin) for at in self._others]
                self._barrier()
                words[self._mine] = max(self._step, *(step for step, _ in reached)) | FAILED
                late = [at // WORDS for at, (_, ended) in zip(self._others, reached, strict=True) if not ended]
                if not late:
                    break
                try:
                    wait.pause(late)
                except RankFailed:
                    if not all(self._reached(peer * WORDS, begin)[1] for peer in late):
                        raise
        self._step = max(self._step, *(step for step, _ in reached))
        self.parity = self._step >> 1 & 1
        # A rank that waits for this one in the next operation must not attribute this failure to that operation.
        words[self._mine] = self._step

    def _reached(self, at: int, begin: int) -> tuple[int, bool]:
        """Return the step of this operation that another rank has reached, and True if that rank has ended the
        operation."""
        # Read in this order: the step belongs to the next operation only if the end of this operation is visible.
        step = self._words[at] & ~FAILED
        self._barrier()
        ended = self._words[at + ENDED[self._operation & 1]]
        if step >= UNUSABLE:
            raise CommunicationError(
                f"rank {self.rank} of {self.size} (of this node): rank {at // WORDS} has abandoned an operation"
            )
        if ended >> 32 == self._operation:
            return begin + (ended & FAILED_END - 1), True
        return step, False

    def _barrier(self) -> None:
        if self._fence is not None:
            self._fence()

    @property
    def scratch(self) -> list[Array]:
        """Private memory for the running operation: one array of the size of a slot for each rank."""
        if not self._scratch:
            self._scratch = [np.empty(SLOT_BYTES, np.uint8) for _ in range(self.size)]
        return self._scratch
