"""The shared memory of one communicator on one node, and how its ranks keep in step there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from weakref import finalize

import numpy as np

from mpicoll.buffers.dtypes import Array
from mpicoll.engine.diagnostics.flight_recorder import ROW_MODULUS, Call
from mpicoll.engine.diagnostics.position import Executing, Position
from mpicoll.engine.diagnostics.wording import rank_list
from mpicoll.engine.selection.catalogue import SLOT_BYTES
from mpicoll.errors import CommunicationError, RankFailed
from mpicoll.transport.base import Memory, Read, Transport
from mpicoll.transport.shm import yield_core

_WORDS = 32
"""Words of 8 bytes that each rank has in the header: more than two cache lines, as processors fetch them in pairs."""

_ENDED, _ASKED, _ROWS, _TOLD = (1, 2), (3, 4), (5, 6), (8, 16)
"""Which of a rank's words hold the ends of its last two operations, what these are, what rows they move, and what it
tells the others at even and odd steps. The first one holds its step. A rank can be ahead of another by one operation,
no more."""

_SPINS = {True: 1000, False: 20}
"""Looks at a flag before the core is left to others. Where ranks share cores more of them are poison; where they don't,
less of them give the core away to whatever else runs on the machine."""

_PATIENCE = 3000
"""Looks at a flag after which whoever is late is not just late."""

_LOOKS = 64
"""Looks between two moments in which the peers are asked after, and MPI gets to move messages. They take long where the
cores are busy."""

_NAP = 50e-6

_FAILED = 1
"""The bit of a step that says that the rank has failed. Steps count by two."""

_GONE = 1 << 62
"""The step of a rank that will never be in step again."""

_BADLY = 1 << 31
"""The bit of an operation's end that says that it was a failure."""

_OPERATIONS = (1 << 31) - 1
"""Operations are counted modulo one more than this."""

_TEXT = 1024
"""Bytes, of each rank and of even and odd operations, for what a rank has called: the number of the operation, the
length of the text, and the text."""

Describe: TypeAlias = "Callable[[], str]"
"""What this rank has called, in less than 1000 bytes."""

Judge: TypeAlias = "Callable[[list[str]], Exception | None]"
"""The error for what all ranks have called (empty: not known), the same on all of them."""

CheckWait: TypeAlias = "Callable[[], None]"
"""Raises CommunicationError if the operation that runs can never complete."""

Body: TypeAlias = "Callable[[Any, Any], None]"
"""``body(source, target)`` on this rank's flat input and output; None where the collective has none here."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of each rank that all ranks of the node reach: where this rank's own lies, and that of the others."""

    address: int
    nbytes: int
    others: dict[int, Memory]


class Arena:
    """Slots of all ranks of a node, and flags to keep in step.

    Every rank has two slots to write its data to, and there are two more of the whole arena for results: ``slots[w]``
    and ``results[w]`` with ``w = parity``. An operation is a sequence of steps that end with :meth:`sync`. In one step
    a rank writes to the slots and results of its parity, and reads what was written in the step before. That is why
    two of each suffice: whoever writes to one of them has seen the end of the step in which it was last read. What is
    read after an operation's last ``sync`` belongs to the next step, and needs no other.

    An operation that needs no slots, since MPI or messages carry it out, begins with :meth:`matcher`, and has no step.
    Slots are made by :meth:`furnish`; until then there are only flags, which take a few KiB.

    `describe` and `judge` make words of it when ranks carry out different operations; `judge_rows`, which is
    collective, when blocks differ from what their receivers expect.
    """

    def __init__(
        self,
        transport: Transport,
        describe: Describe | None = None,
        judge: Judge | None = None,
        check_wait: CheckWait | None = None,
        executing: Executing | None = None,
        judge_rows: Callable[[], Exception] | None = None,
    ) -> None:
        rank, size = transport.rank, transport.size
        words = size * _WORDS * 8
        first = transport.share(words + 2 * size * _TEXT if rank == 0 else 0)[0]
        self.rank, self.size = rank, size
        self.furnished = False
        self.slots: tuple[tuple[Memory, ...], ...] = ()
        self.results: tuple[Memory, ...] = ()
        self.parity = 0
        # What waits for copies to and from shared memory that are another's work, in the operation that runs.
        self.settle: Callable[[], None] | None = None
        self.segments: dict[int, Segment] = {}
        self.allocated = 0
        self._scratch: list[Array] = []
        self.readers: Sequence[Read] = ()
        self._transport = transport
        self._flags = memoryview(first[:words].data).cast("B").cast("q")
        # The same, until an operation is given up.
        self._words: memoryview[int] | _GivenUp = self._flags
        self._texts = first[words : words + 2 * size * _TEXT].reshape(2, size, _TEXT)
        self._describe = describe
        self._judge = judge
        self._judge_rows = judge_rows
        self._check_wait = check_wait
        self._executing = executing or Executing()
        self._awaited: Sequence[int] | None = None  # by this rank; None: for the step in which it is
        self._step = 0
        self._operation = 0
        self._in_vain = False  # whether it was given up because others have not come
        self._mine = rank * _WORDS
        self._others = tuple(peer * _WORDS for peer in range(size) if peer != rank)
        self._fence = transport.fence
        self._spins = range(_SPINS[transport.own_cores])

    def furnish(self) -> Arena:
        """Collective: make the slots. Raises CommunicationError on all ranks if there is no memory for them."""
        own = 2 * SLOT_BYTES
        memories = self._transport.share(2 * own if self.rank == 0 else own)
        self.readers = () if self._transport.unread else self._transport.readers()
        parts = [slice(w * SLOT_BYTES, (w + 1) * SLOT_BYTES) for w in range(4)]
        self.slots = tuple(tuple(memory[part] for memory in memories) for part in parts[:2])
        self.results = tuple(memories[0][part] for part in parts[2:])
        self.furnished = True
        return self

    def matcher(self) -> Callable[[Call], None]:
        """What begins an operation that takes no steps: ``match(call)`` returns when all ranks have begun it, with
        calls of the same signature. Calls that begin by :meth:`run` are left to that.

        It raises MismatchError on all ranks if they have begun different operations, after which they are in step;
        otherwise what :meth:`run` raises."""
        spins = self._spins
        # Where even and odd operations are told: by this rank, and by the others.
        mine = tuple(self._mine + which for which in _ASKED)
        others = tuple(tuple(at + which for at in self._others) for which in _ASKED)

        # A closure, since it comes before the shortest operations, and slots of an object take longer to reach.

        def match(call: Call) -> None:
            signature = call.signature
            if signature <= 0:
                if signature:
                    return
                if call.arrivals:
                    self._match_rows(call)
                    return
                signature = call.sign()
            self._operation = operation = self._operation + 1 & _OPERATIONS
            words, odd = self._words, operation & 1
            words[mine[odd]] = word = operation << 32 | signature
            for at in others[odd]:
                if words[at] != word:
                    for _ in spins:
                        if words[at] == word:
                            break
                    else:
                        self._match_late(_ASKED[odd])
                        return

        return match

    def _match_rows(self, call: Call) -> None:
        """The same for an operation whose blocks have sizes that only their sender and their receiver know: raise
        MismatchError on all ranks if these differ."""
        signature, mine = call.row_signature(self.rank)
        self._operation = operation = self._operation + 1 & _OPERATIONS
        words, asked, rows = self._words, _ASKED[operation & 1], _ROWS[operation & 1]
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
        if sum(words[peer * _WORDS + rows] for peer in range(self.size)) % ROW_MODULUS and self._judge_rows is not None:
            raise self._judge_rows()

    def _match_late(self, which: int) -> None:
        """The same where another rank does not come soon, or has begun another operation."""
        begin = self._step
        try:
            try:
                self._await(which)
            except BaseException:
                # This rank takes no part, which those that come must see.
                self._words[self._mine + which] = self._operation << 32
                raise
            self.agree()
        except BaseException as failure:
            found = self._recover(failure, begin)
            if found is not None:
                raise found from None
            raise

    def _await(self, which: int) -> None:
        """Return when all ranks have begun this operation, or another in its place."""
        operation, words, pause = self._operation, self._words, _Pause(self._transport, self._check_wait)
        late = list(range(self.size))
        executing = self._executing
        outer, executing.executor = executing.executor, self
        try:
            while late := [peer for peer in late if words[peer * _WORDS + which] >> 32 != operation]:
                self._awaited = late
                try:
                    for peer in late:
                        if words[peer * _WORDS] >= _GONE:
                            raise CommunicationError(
                                f"rank {self.rank} of {self.size} (of this node): rank {peer} has given up an"
                                " operation; its own error says why; make another communicator"
                            )
                    pause(late)
                except RankFailed:
                    if any(words[peer * _WORDS + which] >> 32 != operation for peer in late):
                        raise  # they have not come and gone since
                except CommunicationError:
                    self._in_vain = True
                    raise
        finally:
            executing.executor, self._awaited = outer, None

    def sync(self) -> None:
        """End a step: what all ranks wrote before is there for all to read afterwards. Raises CommunicationError if
        another rank has failed in this operation."""
        if self.settle is not None:
            self.settle()
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
            if seen & _FAILED and self._failed_here(at):
                raise CommunicationError(
                    f"rank {self.rank} of {self.size} (of this node): rank {at // _WORDS} failed in this operation; its"
                    " own error says why"
                )
        if self._fence is not None:
            self._fence()

    def _failed_here(self, at: int) -> bool:
        """Whether another rank that has failed did so in this operation, and not at the beginning of the next one."""
        self._barrier()
        ended = self._words[at + _ENDED[self._operation & 1]]
        return ended >> 32 != self._operation or bool(ended & _BADLY)

    def _wait(self, at: int, step: int) -> int:
        words = self._words
        for _ in self._spins:
            seen = words[at]
            if seen >= step:
                return seen
        which = _ASKED[self._operation & 1]
        mine, pause = words[self._mine + which], _Pause(self._transport, self._check_wait)
        executing = self._executing
        outer, executing.executor = executing.executor, self
        try:
            while (seen := words[at]) < step:
                asked = words[at + which]
                if asked >> 32 == self._operation and asked != mine:
                    self.agree()  # it may take fewer steps, and never come
                try:
                    pause([at // _WORDS])
                except RankFailed:
                    if words[at] < step:  # it may have come, and gone since
                        raise
                except CommunicationError:
                    # This rank waits no longer, so it can't stay in step with those that may still come.
                    self._in_vain = True
                    raise
        finally:
            executing.executor = outer
        return seen

    def position(self, members: Sequence[int]) -> Position:
        """Return which ranks are waited for."""
        awaited = self._awaited
        late = tuple(sorted(members[peer] for peer in (self.late() if awaited is None else awaited)))
        return Position(f"shared memory{(late and f': waits for {rank_list(late)}') or ''}", late, polls=True)

    def late(self) -> list[int]:
        """The ranks that have not come to the step in which this one is."""
        return [at // _WORDS for at in self._others if self._flags[at] < self._step]

    def tell(self, *values: int) -> None:
        """Leave up to 8 numbers for the others, who read them by :meth:`told` after the next ``sync``."""
        at = self._mine + _TOLD[self.parity]
        for i, value in enumerate(values):
            self._words[at + i] = value

    def told(self, count: int) -> list[tuple[int, ...]]:
        """The first `count` numbers that each rank left in the step that has just ended."""
        first = _TOLD[1 - self.parity]
        words = self._words
        return [tuple(words[peer * _WORDS + first + i] for i in range(count)) for peer in range(self.size)]

    def run(
        self,
        body: Body,
        source: Array | None,
        target: Array | None,
        load: Callable[[], None] | None = None,
        signature: int = 0,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Carry out an operation: ``body(source, target)``, after `load`. Each step begins its end with
        `settle`, if there is one.

        Ranks that carry out operations of different `signature`, a number of 32 bits, get CommunicationError. If one
        fails here, the other ranks are let through it, and get CommunicationError, unless they have all that they need
        already. The ranks are in step again afterwards, but for Timeout, when others have not come: then it is the last
        operation, and who comes late gets CommunicationError.
        """
        begin = self._step
        self._operation = operation = self._operation + 1 & _OPERATIONS
        self._words[self._mine + _ASKED[operation & 1]] = operation << 32 | signature
        self.settle = settle
        try:
            if load is not None:
                load()
            body(source, target)
            self.agree()
        except BaseException as failure:
            found = self._recover(failure, begin)
            if found is not None:
                raise found from None
            raise
        finally:
            self.settle = None
        self._words[self._mine + _ENDED[operation & 1]] = operation << 32 | self._step - begin

    def _recover(self, failure: BaseException, begin: int) -> Exception | None:
        """After a failure: be in step with the others again. Raises if that can't be. The error for ranks that have
        begun different operations, if that is why."""
        try:
            self._leave_text()
            if self._in_vain:
                raise failure  # who has not come in all that time is not waited for again
            self._let_through(begin)
        except BaseException:
            self._step = self._words[self._mine] = _GONE | _FAILED
            self._words = _GivenUp(self.rank, self.size)
            raise
        return self._disagreement() if isinstance(failure, CommunicationError) else None

    def agree(self) -> None:
        """After a first step: raise CommunicationError if another rank carries out another operation."""
        words, which = self._words, _ASKED[self._operation & 1]
        mine = words[self._mine + which]
        for at in self._others:
            if (other := words[at + which]) != mine:
                what = (
                    "has called another collective, or one of another size, dtype, op, root or algorithm"
                    if other & (1 << 32) - 1
                    else "has given up this operation; its own error says why"
                )
                raise CommunicationError(f"rank {self.rank} of {self.size} (of this node): rank {at // _WORDS} {what}")

    def _differ(self) -> bool:
        """Whether another rank carries out another operation, which is known after a first step."""
        words, which = self._words, _ASKED[self._operation & 1]
        mine = words[self._mine + which]
        return any(words[at + which] != mine for at in self._others)

    def _leave_text(self) -> None:
        """For the others, if they may ask: what this rank has called."""
        if self._describe is None or not self._differ():
            return
        text = self._describe().encode()
        place = self._texts[self._operation & 1, self.rank]
        place[16 : 16 + len(text)] = np.frombuffer(text, np.uint8)
        place[:16].view(np.int64)[:] = self._operation, len(text)
        self._barrier()

    def _disagreement(self) -> Exception | None:
        """When all ranks have ended an operation that has failed: the error for ranks that have carried out different
        ones, if they have."""
        if self._judge is None or not self._differ():
            return None
        texts = []
        for place in self._texts[self._operation & 1]:
            operation, length = map(int, place[:16].view(np.int64))
            texts.append(place[16 : 16 + length].tobytes().decode() if operation == self._operation else "")
        return self._judge(texts)

    def _let_through(self, begin: int) -> None:
        """After a failure: hold nobody up, until all have ended this operation, however they did; then be in step with
        them."""
        words, pause = self._words, _Pause(self._transport, self._check_wait)
        words[self._mine + _ENDED[self._operation & 1]] = self._operation << 32 | _BADLY | self._step - begin
        executing = self._executing
        outer, executing.executor = executing.executor, self
        try:
            while True:
                reached = [self._reached(at, begin) for at in self._others]
                self._barrier()
                words[self._mine] = max(self._step, *(step for step, _ in reached)) | _FAILED
                late = [at // _WORDS for at, (_, ended) in zip(self._others, reached, strict=True) if not ended]
                if not late:
                    break
                self._awaited = late
                try:
                    pause(late)
                except RankFailed:
                    if not all(self._reached(peer * _WORDS, begin)[1] for peer in late):
                        raise
        finally:
            executing.executor, self._awaited = outer, None
        self._step = max(self._step, *(step for step, _ in reached))
        self.parity = self._step >> 1 & 1
        # Who waits for this rank in the next operation must not take this failure for one there.
        words[self._mine] = self._step

    def _reached(self, at: int, begin: int) -> tuple[int, bool]:
        """Which step of this operation another rank has reached, and whether it has ended it."""
        # In this order: its step is one of the next operation only if the end of this one is there to be seen.
        step = self._words[at] & ~_FAILED
        self._barrier()
        ended = self._words[at + _ENDED[self._operation & 1]]
        if step >= _GONE:
            raise CommunicationError(
                f"rank {self.rank} of {self.size} (of this node): rank {at // _WORDS} has given up an operation"
            )
        if ended >> 32 == self._operation:
            return begin + (ended & _BADLY - 1), True
        return step, False

    def _barrier(self) -> None:
        if self._fence is not None:
            self._fence()

    @property
    def scratch(self) -> list[Array]:
        """As much private memory as a slot for each rank, for the operation that runs."""
        if not self._scratch:
            self._scratch = [np.empty(SLOT_BYTES, np.uint8) for _ in range(self.size)]
        return self._scratch

    def allocate(self, nbytes: int) -> Memory:
        """Collective: memory of `nbytes` that all ranks of the node reach, for as long as what is returned lives."""
        memories = self._transport.share(max(nbytes, 1))
        number, own = self._enter(memories), memories[self.rank]
        # What the caller's arrays keep alive is what the memory belongs to, not the array that is returned here.
        finalize(own if own.base is None else own.base, self.segments.pop, number, None).atexit = False
        return own

    def adopt(self, memory: Memory, fd: int) -> int:
        """Collective: let all ranks of the node reach `memory`, the beginning of the file behind `fd`, until
        :meth:`forget` is called with the number that is returned."""
        return self._enter(self._transport.adopt(memory, fd))

    def forget(self, number: int) -> None:
        """Memory that was adopted is about to go."""
        self.segments.pop(number, None)

    def _enter(self, memories: Sequence[Memory]) -> int:
        self.allocated += 1
        own = memories[self.rank]
        others = {peer: memory for peer, memory in enumerate(memories) if peer != self.rank}
        self.segments[self.allocated] = Segment(own.__array_interface__["data"][0], own.nbytes, others)
        return self.allocated

    def find(self, array: Array | None) -> tuple[int, int]:
        """The segment in which `array` lies, and where; (0, 0) if it lies in none."""
        if array is not None:
            address = array.__array_interface__["data"][0]
            for number, segment in self.segments.copy().items():  # an array may die meanwhile
                offset = address - segment.address
                if 0 <= offset < segment.nbytes:
                    return number, offset
        return 0, 0


class _Pause:
    """What to do between two looks at a flag."""

    __slots__ = ("_begin", "_check_wait", "_transport", "_turns")

    def __init__(self, transport: Transport, check_wait: CheckWait | None) -> None:
        self._transport = transport
        self._check_wait = check_wait
        self._turns = 0

    def __call__(self, peers: Sequence[int]) -> None:
        self._turns += 1
        yield_core()
        if self._turns < _PATIENCE:
            if self._turns % _LOOKS == 0:
                self._transport.check_peers(0.0, peers)
            return
        if self._turns == _PATIENCE:
            self._begin = time.monotonic()
        self._transport.check_peers(time.monotonic() - self._begin, peers)
        if self._check_wait is not None:
            self._check_wait()
        time.sleep(_NAP)


class _GivenUp:
    """What stands in the place of the flags of a rank that will never be in step again."""

    def __init__(self, rank: int, size: int) -> None:
        self._who = f"rank {rank} of {size} (of this node)"

    def _raise(self, *args: Any) -> NoReturn:
        raise CommunicationError(
            f"{self._who}: an operation was given up, and the ranks are out of step since; make another communicator"
        )

    __getitem__ = __setitem__ = _raise
