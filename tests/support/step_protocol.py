"""A model of how the ranks of a node synchronise in shared memory, to be explored in all interleavings.

A rank has two words, with the number of a step and the signature of the call; a word for whether it can be used; and
two slots for data. `Rules` can leave out each part of the protocol, by which tests show what it is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from support.interleavings import DEAD, Agree, Choose, Exploration, Load, Read, Store, Violation, Wait, Write, explore

FAILED, MISMATCH = 0, "mismatch"
OWN, COMMUNICATION, MISMATCHED = "its own error", "CommunicationError", "MismatchError"


class Call(NamedTuple):
    """An operation. If it is direct, ranks read each other's arrays after the first of its two steps."""

    signature: str
    steps: int = 1
    direct: bool = False


class Outcome(NamedTuple):
    """How an operation has ended on a rank."""

    error: str | None = None
    failed: int | None = None  # the step in which the rank itself has failed; the number of steps if after them
    interrupted: bool = False
    abandoned: bool = False


@dataclass(frozen=True)
class Rules:
    modulus: int = 8  # of the number of a step
    slots: int = 2
    release: bool = True
    acquire: bool = True
    skipped: tuple[int, int] | None = None  # a rank, and a rank for which it does not wait
    failed_publishes: bool = True  # a rank that has failed publishes the step
    failed_waits: bool = True  # and waits for the others
    failed_differs: bool = True  # that all ranks have failed is not an agreement
    withdraws: bool = True  # a rank that abandons a step replaces the signature of its word
    unusable_release: bool = True  # which happens before it can be seen to be unusable
    looks_again: bool = True  # at the word of a rank that is unusable
    fences: bool = True  # after reading arrays of others, and before changing the own one
    numbered: bool = True  # a signature includes the number of the step in its operation
    sleeps: bool = False  # a rank that waits sleeps until it is woken
    bounded: bool = True  # for a bounded time only
    checks: bool = True  # it looks at the word after it has stated that it sleeps


class _Abandon(Exception):
    """This rank can no longer be synchronised with the others."""


class _Rank:
    def __init__(self, rules: Rules, rank: int, size: int) -> None:
        self.rules, self.rank = rules, rank
        self.others = tuple(other for other in range(size) if other != rank)
        self.step = 0
        self.usable = True
        self.interrupted = False

    def operate(self, number: int, call: Call) -> Generator[Any, Any, Outcome]:
        if not self.usable:
            return Outcome(COMMUNICATION, abandoned=True)
        self.interrupted = False
        try:
            error, failed = yield from self._run(number, call)
        except _Abandon as reason:
            return Outcome(str(reason), None, self.interrupted, abandoned=True)
        return Outcome(error, failed, self.interrupted)

    def _run(self, number: int, call: Call) -> Generator[Any, Any, tuple[str | None, int | None]]:
        spoiled, failed = False, None
        if call.direct:
            yield Store("array", number)
        for index in range(call.steps):
            self.step += 1
            slot = ("slot", self.step % self.rules.slots)
            yield Write(slot, (number, index))
            if failed is None and (yield Choose("failure")):
                failed = index
                if not (self.rules.failed_publishes and self.rules.failed_waits):
                    yield from self._leave_early()
                    return OWN, failed
            signature = (call.signature, index if self.rules.numbered else 0)
            words = set((yield from self._synchronise(FAILED if failed is not None else signature)))
            if len(words - {FAILED}) > 1:
                yield from self._describe()
                return (MISMATCHED if failed is None else OWN), failed
            if FAILED in words and (self.rules.failed_differs or len(words) > 1):
                return (COMMUNICATION if failed is None else OWN), failed
            yield Agree(("operation of step", self.step), number)
            yield from self._read(slot, (number, index))
            if call.direct and index == 0:
                spoiled = yield from self._read_arrays(number)
        if (yield Choose("failure")):
            return OWN, call.steps
        if spoiled:
            raise Violation(f"rank {self.rank} has read an array that its owner had changed, and succeeded")
        return None, failed

    def _leave_early(self) -> Generator[Any, Any, None]:
        if self.rules.failed_publishes:
            step = self.step % self.rules.modulus
            yield Store(("flag", step & 1), (step, FAILED))

    def _describe(self) -> Generator[Any, Any, None]:
        """Exchange descriptions of the calls. One place is enough: two such steps never follow each other."""
        self.step += 1
        yield Write("description", self.step)
        yield from self._synchronise(MISMATCH)
        yield from self._read("description", self.step)

    def _read(self, place: str | tuple[str, int], expected: object) -> Generator[Any, Any, None]:
        for other in self.others:
            if (found := (yield Read(other, place))) != expected:
                raise Violation(f"rank {self.rank} reads {found} in {place} of {other}, not {expected}")

    def _read_arrays(self, number: int) -> Generator[Any, Any, bool]:
        """Read the arrays of others, and return whether one was no longer what was passed to the call."""
        spoiled = False
        for other in self.others:
            spoiled |= (yield Load(other, "array", self.rules.fences)) != number
        return spoiled

    def _synchronise(self, signature: object) -> Generator[Any, Any, list[object]]:
        step = self.step % self.rules.modulus
        yield Agree(("published", self.rank, self.step), True)
        yield Store(("flag", step & 1), (step, signature), self.rules.release)
        yield from self._wake()
        awaited = [other for other in self.others if (self.rank, other) != self.rules.skipped]
        words = [signature]
        while awaited:
            word = yield from self._wait(tuple(awaited), step)
            words.append(word)
            del awaited[0]
        return words

    def _wait(self, awaited: tuple[int, ...], step: int) -> Generator[Any, Any, object]:
        def reached(word: tuple[int, object]) -> bool:
            return word[0] == step

        flag = ("flag", step & 1)
        while True:
            yield from self._sleep(awaited[0], flag, reached)
            event, word = yield Wait(awaited, flag, reached, "unusable", self.rules.acquire)
            if event == "alarm" and self.rules.looks_again:
                word = yield Load(awaited[0], flag, self.rules.acquire)
                event = "reached" if reached(word) else event
            if event == "reached":
                return word[1]
            if event == "interrupt" and not self.interrupted:
                self.interrupted = True
                continue
            if event == "alarm":
                yield Agree(("published", awaited[0], self.step), False)
            if self.rules.withdraws:
                yield Store(flag, (step, FAILED), self.rules.release)
            yield Store("unusable", 1, self.rules.unusable_release)
            self.usable = False
            raise _Abandon(COMMUNICATION if event == "alarm" else event)

    def _wake(self) -> Generator[Any, Any, None]:
        """Wake the ranks that sleep until this one has stored its word. Without a fence, loads may pass the store."""
        for other in self.others if self.rules.sleeps else ():
            if (yield Load(other, "sleeps")) == self.step:
                yield Store("wakes", self.step)

    def _sleep(self, other: int, flag: object, reached: Callable[[Any], bool]) -> Generator[Any, Any, None]:
        """Sleep until `other` wakes this rank. A bounded sleep may end at any time, so the rank just looks again."""
        if not self.rules.sleeps:
            return
        yield Store("sleeps", self.step)
        # The kernel's lock orders this look at the word, and the sleep, with what a rank that wakes others did before.
        woken = yield Load(other, "wakes")
        if (self.rules.checks and reached((yield Load(other, flag)))) or self.rules.bounded:
            return
        yield Wait((other,), "wakes", lambda wakes: wakes != woken, "unusable")


def run_rank(rules: Rules, rank: int, size: int, calls: Sequence[Call]) -> Generator[Any, Any, tuple[Outcome, ...]]:
    """Run the `calls` of a rank one after the other, whatever becomes of each."""
    state = _Rank(rules, rank, size)
    outcomes = []
    for number, call in enumerate(calls):
        outcomes.append((yield from state.operate(number, call)))
        if call.direct:
            # The caller may change it now. A rank that reads this knows what was stored before it, if there are fences.
            yield Store("array", "changed", rules.fences)
    return tuple(outcomes)


def explore_steps(
    programs: Sequence[Sequence[Call]],
    rules: Rules = Rules(),
    check: Callable[[tuple[Any, ...]], str | None] | None = None,
    *,
    fine: bool = False,
    **events: int,
) -> Exploration:
    """Explore the calls of each rank, with as many failures, interrupts and deaths as `events` states."""
    words: dict[object, Any] = {("flag", 0): (0, FAILED), ("flag", 1): (0, FAILED), "unusable": 0, "array": None}
    words |= {"sleeps": 0, "wakes": 0}
    return explore(
        [partial(run_rank, rules, rank, len(programs), calls) for rank, calls in enumerate(programs)],
        words,
        events,
        check or partial(find_wrong_outcome, programs),
        fine=fine,
    )


def find_wrong_outcome(programs: Sequence[Sequence[Call]], ending: Sequence[Any]) -> str | None:
    """Return what is wrong with the outcomes of all ranks, or None."""
    lost = any(outcomes == DEAD or any(outcome.abandoned for outcome in outcomes) for outcomes in ending)
    for number in range(max(map(len, programs))):
        calls = [calls[number] if number < len(calls) else None for calls in programs]
        outcomes = {rank: ranks[number] for rank, ranks in enumerate(ending) if ranks != DEAD and number < len(ranks)}
        failed = {outcome.failed for outcome in outcomes.values()} - {None}
        steps = min(call.steps for call in calls if call is not None)
        expected = None
        if len({call for rank, call in enumerate(calls) if rank not in outcomes or outcomes[rank].failed != 0}) > 1:
            expected = MISMATCHED
        elif failed and min(failed) < steps:
            expected = COMMUNICATION
        for rank, outcome in outcomes.items():
            right = expected if outcome.failed is None else OWN
            if outcome.error != right and not (lost and _is_allowed_when_lost(outcome, expected)):
                return f"operation {number}: rank {rank} should raise {right}"
            if outcome.abandoned and any(later.error is None for later in ending[rank][number:]):
                return f"operation {number}: rank {rank} has abandoned it, and continues"
    return None


def _is_allowed_when_lost(outcome: Outcome, expected: str | None) -> bool:
    """Whether an operation may end in this way after a rank was lost, which other ranks see sooner or later."""
    return outcome.error is not None and (outcome.error != MISMATCHED or expected == MISMATCHED)
