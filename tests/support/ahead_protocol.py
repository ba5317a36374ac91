"""A model of ranks that are ahead of others in shared memory, to be explored in all interleavings.

It has what :mod:`support.step_protocol` leaves out: operations in whose step a rank waits only for the ranks whose data
it reads. A rank has a ring of words and slots, and stores the word of a step when it has seen those of all ranks
`ahead` steps before. `Rules` can leave out each part, by which tests show what it is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from support.interleavings import (
    DEAD,
    Agree,
    Choose,
    Exploration,
    Read,
    Store,
    Violation,
    Wait,
    WaitAny,
    Write,
    explore,
)

FAILED, MEETING = "failed", "meeting"
OWN, COMMUNICATION, MISMATCHED = "its own error", "CommunicationError", "MismatchError"


class Call(NamedTuple):
    """An operation of one step. Without `to`, all ranks read the data of all; otherwise rank 0 sends to the others
    ("others"), or they to it ("root"), or each rank to the higher ones ("higher")."""

    name: str
    to: str = ""

    def sources(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the ranks whose data a rank reads."""
        others = tuple(other for other in range(size) if other != rank)
        if self.to == "higher":
            return tuple(range(rank))
        return {"": others, "others": others[:1] if rank else (), "root": () if rank else others}[self.to]


@dataclass(frozen=True)
class Rules:
    ahead: int = 2
    ring: int = 4
    bounded: bool = True  # a rank waits before it is further ahead
    scans: bool = True  # a rank that waits for some looks at the words of earlier steps too
    meets: bool = True  # after a difference, at a step that no rank has passed
    parts: bool = True  # ranks that may have gone on leave the others


class _Abandon(Exception):
    """This rank can no longer be synchronised with the others."""


class _Different(Exception):
    """The words of a step differ, which are its argument."""


class _Rank:
    def __init__(self, rules: Rules, rank: int, size: int) -> None:
        self.rules, self.rank, self.size = rules, rank, size
        self.others = tuple(other for other in range(size) if other != rank)
        self.step = self.seen = 0
        self.words: dict[int, tuple[Any, ...]] = {}
        self.usable = True

    def operate(self, number: int, call: Call) -> Generator[Any, Any, str | None]:
        if not self.usable:
            return COMMUNICATION
        failed = False
        try:
            if self.rules.bounded and self.step - self.seen >= self.rules.ahead:
                yield from self._wait(self.step - self.rules.ahead + 1)
            sources = call.sources(self.rank, self.size)
            slot = self._slot(self.step + 1)
            yield Write(slot, number)
            self.step += 1
            failed = yield Choose("failure")
            waits = () if failed or len(sources) == len(self.others) else (sources,)
            yield from self._store((FAILED if failed else call, *waits))
            yield from self._wait(self.step, None if not waits else sources)
            for source in sources:
                if (found := (yield Read(source, slot))) != number:
                    raise Violation(f"rank {self.rank} reads {found} of {source}, not {number}")
        except _Different as difference:
            error = yield from self._conclude(*difference.args)
            return OWN if failed else error
        except _Abandon:
            yield Store("unusable", 1)
            self.usable = False
            return OWN if failed else COMMUNICATION
        return None

    def _slot(self, step: int) -> tuple[str, int]:
        return ("slot", step % self.rules.ring)

    def _flag(self, step: int) -> tuple[str, int]:
        return ("flag", step % self.rules.ring)

    def _store(self, word: tuple[Any, ...]) -> Generator[Any, Any, None]:
        self.words[self.step] = word
        yield Store(self._flag(self.step), (self.step, word))

    def _wait(self, step: int, sources: Sequence[int] | None = None) -> Generator[Any, Any, None]:
        """Wait for `sources` in a step, or until the words of all ranks up to it have been seen."""
        missing = list(self.others if sources is None else sources)
        current: list[Any] = [self.words[self.seen + 1]]
        differs = False
        while missing if sources is not None and not differs else self.seen < step:
            scanned = self.others[len(current) - 1]
            waits = [self._await(scanned, self.seen + 1)] if self.seen < self.step else []
            if sources is not None and not differs:
                waits = [self._await(missing[0], step), *(waits if self.rules.scans else [])]
            event, found = yield WaitAny(tuple(waits))
            if event != "reached":
                raise _Abandon(event)
            index, (_, word) = found
            if sources is not None and not differs and index == 0:
                del missing[0]
                differs = word[0] != self.words[step][0]
                continue
            current.append(word)
            if len(current) == self.size:
                yield Agree(("words", self.seen + 1), tuple(sorted(map(str, current))))
                if len({one[0] for one in current}) > 1 or current[0][0] == FAILED:
                    raise _Different(self.seen + 1, tuple(current))
                self.seen += 1
                current = [self.words.get(self.seen + 1)]

    def _await(self, other: int, step: int) -> Wait:
        return Wait((other,), self._flag(step), lambda word: word[0] == step, "unusable")

    def _conclude(self, step: int, words: tuple[Any, ...]) -> Generator[Any, Any, str]:
        agreeing = [word[0] for word in words]
        parted = any(len(word) > 1 and (not word[1] or agreeing.count(word[0]) > 1) for word in words)
        error = COMMUNICATION
        if len(set(agreeing) - {FAILED}) > 1:
            meeting = step + self.rules.ahead if parted and self.rules.meets else step + 1
            if self.step >= meeting:
                raise Violation(f"rank {self.rank} has passed step {meeting}")
            self.step, self.seen = meeting, meeting - 1
            yield Write("description", step)
            yield from self._store((MEETING,))
            try:
                yield from self._wait(meeting)
            except _Abandon:
                yield Store("unusable", 1)
                self.usable = False
                return COMMUNICATION
            for other in self.others:
                if (found := (yield Read(other, "description"))) != step:
                    raise Violation(f"rank {self.rank} reads the description {found} of {other}, not {step}")
            error = MISMATCHED
        self.seen = self.step
        if parted and self.rules.parts:
            yield Store("unusable", 1)
            self.usable = False
        return error


def _run_rank(rules: Rules, rank: int, size: int, calls: Sequence[Call]) -> Generator[Any, Any, tuple[str | None, ...]]:
    state = _Rank(rules, rank, size)
    errors = []
    for number, call in enumerate(calls):
        errors.append((yield from state.operate(number, call)))
    return tuple(errors)


def explore_ahead(
    programs: Sequence[Sequence[Call]],
    rules: Rules = Rules(),
    check: Callable[[tuple[Any, ...]], str | None] | None = None,
    **events: int,
) -> Exploration:
    """Explore the calls of each rank, with as many failures and deaths as `events` states."""
    words: dict[object, Any] = {("flag", index): (0, None) for index in range(rules.ring)} | {"unusable": 0}
    ranks = [partial(_run_rank, rules, rank, len(programs), calls) for rank, calls in enumerate(programs)]
    return explore(ranks, words, events, check or partial(find_wrong_ending, programs))


def find_wrong_ending(programs: Sequence[Sequence[Call]], ending: Sequence[Any]) -> str | None:
    """Return what is wrong with the outcomes of all ranks, or None."""
    living = [errors for errors in ending if errors != DEAD]
    first = [next((error for error in errors if error is not None), None) for errors in living]
    differ = len(set(map(tuple, programs))) > 1
    if DEAD not in ending and differ and set(first) != {MISMATCHED}:
        return f"ranks should raise {MISMATCHED}"
    if not differ and MISMATCHED in first:
        return f"no rank should raise {MISMATCHED}"
    if DEAD not in ending and not differ and any(first) and not all(first):
        return "one rank should not fail alone"
    return None
