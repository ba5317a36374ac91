"""Shared memory of one communicator on one node, and the operations that its ranks carry out in it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from mpicoll._shm import RING_BYTES, Steps
from mpicoll.buffers.dtypes import Array
from mpicoll.engine.core.arena_wait import ArenaWait, CheckWait
from mpicoll.engine.core.call_descriptions import CallDescriptions, DescribeCall, MismatchErrorOf, description_bytes
from mpicoll.engine.core.segments import SegmentTable
from mpicoll.engine.core.threads import count_threads
from mpicoll.engine.diagnostics.flight_recorder import ROW_MODULUS, Call
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.selection.catalogue import SLOT_BYTES
from mpicoll.errors import CommunicationError, RankFailed, Timeout
from mpicoll.transport.base import Memory, Transport

MESSAGE_BYTES = 1 << 20
"""Bytes of half of a rank's memory for messages of neighbours. The kernel allocates pages when they are first used."""

Body: TypeAlias = "Callable[[Any, Any], None]"
"""Function called as ``body(source, target)`` on this rank's flat input and output; each is None where the collective
has none on this rank."""


class Arena(Steps):
    """Slots of all ranks of a node, and the flags that synchronise the ranks.

    Every rank has two slots to write its data to, and the arena has two more for results: ``slots[w]`` and
    ``results[w]`` with ``w = parity``. An operation is a sequence of steps that end with :meth:`sync`. In one step a
    rank writes to the slots and results of its parity, and reads what was written in the step before. Two of each
    suffice: a rank that writes to one of them has seen the end of the step in which it was last read. Reads after an
    operation's last ``sync`` belong to the next step, so they need no further ``sync``.

    Each step compares the signatures of the ranks' operations. An operation that uses no slots, because MPI or messages
    carry it out, begins with :meth:`match`, a single step.

    All is in one piece of memory, that of rank 0: the ranks exchange one handle, and each rank maps one file. The
    kernel allocates pages of slots when they are first used, except in memory that has a name.

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
        flags = Steps.count_flag_bytes(size)
        head = flags + description_bytes(size)
        head += -head % mmap.PAGESIZE  # memory is registered with devices in whole pages
        own = 2 * SLOT_BYTES + RING_BYTES
        own += -own % mmap.PAGESIZE
        whole = transport.share(head + size * own + 2 * SLOT_BYTES if rank == 0 else 0)[0]
        super().__init__(whole[:flags].data, rank, size, transport.has_own_cores, tuple(transport.members))
        starts = [head + peer * own for peer in range(size)]
        self.slots: tuple[tuple[Memory, ...], ...] = (
            tuple(whole[start : start + SLOT_BYTES] for start in starts),
            tuple(whole[start + SLOT_BYTES : start + 2 * SLOT_BYTES] for start in starts),
        )
        self.results: tuple[Memory, ...] = tuple(whole[head + size * own :].reshape(2, SLOT_BYTES))
        if not transport.no_cma_reason:
            self.set_processes(transport.list_processes())
        even, odd = (_get_address(one) for one in self.results)
        self.set_slots([_get_address(one) for slots in self.slots for one in slots], even, odd, SLOT_BYTES)
        self.threads = count_threads(transport)
        # Waits for asynchronous copies to and from shared memory in the running operation.
        self.synchronize: Callable[[], None] | None = None
        self.segments = SegmentTable(self, transport)
        # Memory of all ranks for the messages of neighbours, from the first one on.
        self._message_memory: tuple[Memory, ...] | None = None
        self._transport = transport
        self._descriptions = CallDescriptions(whole[flags:head], rank, size, describe_call, mismatch_error)
        self._row_mismatch_error = row_mismatch_error
        self._check_wait = check_wait
        self._executing = executing or Executing()

    def match(self, call: Call) -> BaseException | None:
        """Begin an operation without further steps: return when all ranks have begun the operation with calls of the
        same signature. Calls that begin with :meth:`run` are compared there instead.

        Raises MismatchError on all ranks if they have begun different operations, after which the ranks are
        synchronised again; otherwise it raises what :meth:`run` raises. Returns the exception that a signal handler has
        raised meanwhile, which the caller raises when it has carried out the operation: the other ranks have begun it.
        """
        signature = call.signature
        if signature <= 0:
            if signature:
                return None
            if call.arrivals:
                return self._match_rows(call)
            signature = call.sign()
        self.step_signature(signature)
        return self.take_interrupt()

    def _match_rows(self, call: Call) -> BaseException | None:
        """Match an operation whose block sizes are known only to the sender and the receiver of each block. Raises
        MismatchError on all ranks if these sizes differ."""
        signature, mine = call.row_signature(self.rank)
        self.post(mine)
        self.step_signature(signature)
        if sum(row for (row,) in self.read_posted(1)) % ROW_MODULUS:
            self.raise_row_mismatch()
        return self.take_interrupt()

    def share_message_memory(self, signature: int) -> tuple[tuple[int, ...], int]:
        """Return the addresses of the memory of all ranks for the messages of neighbours, and the bytes of each of its
        two halves: none if a rank can't allocate them. Collective at first use, with the signature of the running
        operation."""
        if self._message_memory is None:
            self.step_signature(signature)  # before messages that only ranks in this operation receive
            try:
                self._message_memory = tuple(self._transport.share(2 * MESSAGE_BYTES))
            except (RankFailed, Timeout):
                raise  # not all ranks have taken part
            except CommunicationError:
                self._message_memory = ()
        if not self._message_memory:
            return (0,) * self.size, 0
        return tuple(_get_address(one) for one in self._message_memory), MESSAGE_BYTES

    def sync(self) -> None:
        """End a step: all that the ranks wrote before is visible to all ranks afterwards. Raises CommunicationError if
        another rank has failed in this operation, or carries out a different one."""
        if self.synchronize is not None:
            self.synchronize()
        self.step()

    @property
    def cma_failed_reason(self) -> str | None:
        """The reason why the ranks could not read each other's memory in the last operation for that."""
        rank = self.unreadable_rank
        return (
            None
            if rank < 0
            else f"rank {rank} forbids others to read its memory (PR_SET_DUMPABLE), or can't read theirs"
        )

    def run(
        self,
        body: Body,
        steps: int,
        source: Array | None = None,
        target: Array | None = None,
        load: Callable[[], None] | None = None,
        signature: int = 1,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """Carry out an operation of `steps` steps: ``body(source, target)``, after `load`. Each :meth:`sync` first
        calls `synchronize`, if given.

        Raises CommunicationError if ranks carry out operations of different `signature`, a number of 32 bits that is
        not 0. If one rank fails here, all ranks leave the operation at its next step, and the other ranks get
        CommunicationError, unless they already have all data that they need. The ranks remain synchronised, except
        after Timeout, when other ranks did not enter the operation: then it is the last operation of the arena, and
        ranks that enter it late get CommunicationError.
        """
        self.first = self.number
        self.last = self.number + steps & 0xFFFFFFFF
        self.left = False
        self.signature = signature
        self.synchronize = synchronize
        try:
            self.catch_up()
            if load is not None:
                load()
            body(source, target)
        except BaseException:
            if not (self.left or self.unusable or self.number == self.last):
                # What this rank has failed with is raised, not what the wait for the others may fail with.
                with suppress(CommunicationError):
                    self.step_failed()
            self._raise_interrupt()
            raise
        finally:
            self.synchronize = None
        self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        """Raise the exception that a signal handler has raised during the operation, which has ended,
        unless the caller of the operation takes it."""
        interrupt = None if self.keeps_interrupt else self.take_interrupt()
        if interrupt is not None:
            raise interrupt

    def raise_unusable(self) -> None:
        """Raise the error of operations after one that this rank has abandoned. Called by ``step``."""
        raise CommunicationError(
            f"{self._name_rank()}: an operation was abandoned, and the ranks are not synchronised any more; create"
            " another communicator"
        )

    def publish_description(self) -> None:
        """Publish the description of the running call, because the ranks have begun different operations in a step.
        Called by ``step``."""
        self._descriptions.publish(self.different_step)

    def raise_difference(self) -> None:
        """Raise the error of an operation that has ended by a failure of another rank, or because the ranks have begun
        different operations. Called by ``step``."""
        if self.different:
            repeated = [self.read_call(rank) for rank in range(self.size)]
            raise self._descriptions.mismatch_error(self.different_step, repeated) or CommunicationError(
                f"{self._name_rank()}: the ranks have called different collectives, or with another size, dtype, op,"
                " root or algorithm"
            )
        failed, what = self.list_signatures().index(0), "failed in this operation"
        if failed in self.list_unusable_ranks() and not self.unusable:
            self.abandon()
            what = "has abandoned this operation"
        raise CommunicationError(f"{self._name_rank()}: rank {failed} {what}, as its own error explains")

    def raise_row_mismatch(self) -> None:
        """Raise the error of an operation whose blocks differ in size from what their receivers expect. Called by all
        ranks, and by the extension."""
        error = None if self._row_mismatch_error is None else self._row_mismatch_error()
        raise error or CommunicationError(f"{self._name_rank()}: ranks expect other counts than are sent")

    def wait_for_late_ranks(self) -> None:
        """Wait until all ranks have reached the current step of this rank. Called by ``step``, which calls it again
        after an exception of a signal handler, unless the operation has been abandoned."""
        with ArenaWait(self._transport, self._executing, self._check_wait, self.list_late_ranks, self.sleep) as wait:
            while late := self.list_late_ranks():
                try:
                    self._check_usable(late)
                    wait.pause(late)
                except CommunicationError:
                    if not self.list_late_ranks():
                        return  # the ranks have reached the step and exited since
                    # This rank stops waiting, so it cannot stay synchronised with ranks that may still enter the
                    # operation.
                    self.abandon()
                    raise

    def compare_unseen_calls(self, seconds: float, show: Callable[[], None]) -> None:
        """Compare the calls in which this rank was ahead of others, which no later call does. Returns after `seconds`
        if ranks have not begun them until then: this is no error, and they can still do so. `show` is called again and
        again, as ranks begin calls.

        Raises MismatchError if calls differ; CommunicationError if a rank can't begin them any more.
        """
        begin = time.monotonic()
        with ArenaWait(self._transport, self._executing, self._check_wait, self.list_late_ranks, self.sleep) as wait:
            while late := self.list_late_ranks():
                if time.monotonic() - begin > seconds:
                    return
                show()
                try:
                    self._check_usable(late)
                    wait.pause(late)
                except CommunicationError:
                    if self.list_late_ranks() == late:
                        raise
                    # Ranks have begun their last calls since, and may have exited.
        self.catch_up()

    def _check_usable(self, late: Sequence[int]) -> None:
        for peer in self.list_unusable_ranks():
            if peer in late and peer in self.list_late_ranks():
                raise CommunicationError(
                    f"{self._name_rank()}: rank {peer} has abandoned an operation, as its own error explains; create"
                    " another communicator"
                )

    def _name_rank(self) -> str:
        return f"rank {self.rank} of {self.size} (of this node)"


def _get_address(memory: Memory) -> int:
    return int(memory.__array_interface__["data"][0])
