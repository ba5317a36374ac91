"""A model of ranks that are ahead of others in shared memory, to be explored in all interleavings.

It has what :mod:`support.step_protocol` leaves out: operations in whose step a rank waits only for the ranks whose data
it reads, and begun calls, which a rank completes later. A rank has a ring of words and slots, and stores the word of a
step when it has seen those of all ranks `ahead` steps before. Large data does not go through the ring; its slots have
one place here, as the places in them are not needed for the protocol. `Rules` can leave out each part, by which tests
show what it is needed for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from support.interleavings import (
    DEAD,
    Agree,
    Choose,
    Exploration,
    Load,
    Read,
    Store,
    Violation,
    Wait,
    WaitAny,
    Write,
    explore,
)

FAILED, WITHDRAWN, MEETING, BEGUN = "failed", "withdrawn", "meeting", "begun"
OWN, COMMUNICATION, MISMATCHED = "its own error", "CommunicationError", "MismatchError"


class Call(NamedTuple):
    """An operation of one step. Without `to`, all ranks read the data of all; otherwise rank `root` sends to the others
    ("others"), or they to it ("root"), or each rank to the higher ones ("higher"), or to the next ones ("neighbours").
    Large data goes to one of two slots, for steps of even and odd number; a message to one place for all steps, which
    is read until the next step."""

    name: str
    to: str = ""
    root: int = 0
    large: bool = False
    message: bool = False
    begun: bool = False

    @property
    def signature(self) -> Call:
        """Return what the ranks compare: a begun call is the partner of a blocking one."""
        return self._replace(begun=False)

    def sources(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the ranks whose data a rank reads."""
        others = tuple(other for other in range(size) if other != rank)
        if self.to == "higher":
            return tuple(range(rank))
        if self.to == "neighbours":
            return tuple(other for other in others if abs(other - rank) == 1)
        sends = rank == self.root
        return {"": others, "others": () if sends else (self.root,), "root": others if sends else ()}[self.to]

    def waits_for_all(self, rank: int, size: int) -> bool:
        """Return True if a rank can't be ahead of others."""
        return (
            not self.to
            or self.large
            or (self.to == "root" and rank == self.root)
            or (self.to == "higher" and rank == size - 1)
        )


class Complete(NamedTuple):
    """Completion of all begun calls."""


class Send(NamedTuple):
    """A message to every rank that receives it, by other means than this memory."""


class Receive(NamedTuple):
    """Wait for the message of another rank, while another thread completes the begun calls."""

    source: int


Item = Call | Complete | Send | Receive


@dataclass(frozen=True)
class Rules:
    ahead: int = 2
    ring: int = 6
    outstanding: int = 2  # begun calls
    bounded: bool = True  # a rank waits before it is further ahead
    scans: bool = True  # a rank that waits for some looks at the words of earlier steps too
    parts: bool = True  # ranks that may have gone on leave the others
    passes: bool = True  # a wait may see more steps than it waits for
    describes: bool = True  # ranks that do not wait for all describe their calls at once, and need not publish them
    catches_up: bool = True  # large data is written when all ranks have reached the last step of its rank
    ends: bool = True  # a rank compares the last calls at the end of its program
    meets: bool = True  # begun ranks meet in a step that none of them has reached, otherwise in the next one
    restarts: bool = True  # begun calls after a difference are begun again, otherwise kept
    attends: bool = True  # another thread completes what was begun
    one_large: bool = True  # large data is begun when all before has been seen, and read before the next word


class _Abandon(Exception):
    """This rank can no longer be synchronised with the others."""


class _Late(Exception):
    """Ranks are late at the end of the program."""


class _Different(Exception):
    """The words of a step, by rank, differ."""


class _Begun(NamedTuple):
    number: int
    call: Call
    step: int


class _Rank:
    def __init__(self, rules: Rules, rank: int, size: int) -> None:
        self.rules, self.rank, self.size = rules, rank, size
        self.others = tuple(other for other in range(size) if other != rank)
        self.step = self.seen = 0
        self.words: dict[int, tuple[Any, ...]] = {}
        self.usable = True
        self.begun: list[_Begun] = []
        self.errors: dict[int, str | None] = {}

    def run(self, number: int, item: Item) -> Generator[Any, Any, None]:
        if isinstance(item, Call) and item.begun:
            yield from self._begin(number, item)
        elif isinstance(item, Call):
            yield from self.complete()
            self.errors[number] = yield from self._operate(number, item)
        elif isinstance(item, Complete):
            yield from self.complete()
        elif isinstance(item, Send):
            yield Store("message", 1)
        else:
            yield from self._receive(item.source)

    def _begin(self, number: int, call: Call) -> Generator[Any, Any, None]:
        """Begin a call where it may be begun, or after what was begun before, which the queue waits for."""
        if self.begun and (yield Choose("test")):
            yield from self._test()
        late = bool(self.begun) or self.seen < self.step
        if (
            len(self.begun) >= self.rules.outstanding
            or (self.rules.bounded and self.step - self.seen >= self.rules.ahead)
            or (self.rules.one_large and late and (call.large or any(one.call.large for one in self.begun)))
        ):
            yield from self.complete()
            self.errors[number] = yield from self._operate(number, call._replace(begun=False))
        else:
            yield from self._start(number, call)

    def _start(self, number: int, call: Call) -> Generator[Any, Any, None]:
        yield Write(self._place(call, self.step + 1), number)
        self.step += 1
        yield Write(self._text(self.step), self.step)
        self.begun.append(_Begun(number, call, self.step))
        yield from self._store((call.signature, BEGUN))

    def _test(self) -> Generator[Any, Any, None]:
        """Complete what can be completed without waiting for other ranks."""
        with suppress(_Different):  # raised again where that step is completed, after those before it
            yield from self._look()
        while self.begun and self.begun[0].step <= self.seen:
            yield from self._complete_oldest()

    def complete(self) -> Generator[Any, Any, None]:
        while self.begun:
            yield from self._complete_oldest()

    def _complete_oldest(self) -> Generator[Any, Any, None]:
        number, call, step = self.begun[0]
        error = None
        try:
            if self.usable:
                yield from self._wait(step)
                yield from self._read(number, call, step)
            else:
                error = COMMUNICATION
            del self.begun[0]
        except _Different as difference:
            error = yield from self._conclude(*difference.args)
            again, self.begun = self.begun[1:], []
            for later in again:
                if self.usable and self.rules.restarts:
                    yield from self._start(later.number, later.call)
                else:
                    self.begun.append(later)
        except _Abandon:
            for one in self.begun:
                yield from self._store((WITHDRAWN,), one.step)
            yield from self._leave()
            error = COMMUNICATION
            del self.begun[0]
        self.errors[number] = error

    def _receive(self, source: int) -> Generator[Any, Any, None]:
        message = Wait((source,), "message", bool, "none")
        current: dict[int, Any] = {}
        while self.begun and self.usable and self.rules.attends:
            if self.seen >= self.begun[0].step:
                yield from self._complete_oldest()
                continue
            current = current or {self.rank: self.words[self.seen + 1]}
            word = self._await(self.others[len(current) - 1], self.seen + 1)
            event, found = yield WaitAny((word, message))
            if event == "reached" and found[0] == 1:
                return
            try:
                if event != "reached":
                    raise _Abandon
                yield from self._see(current, found[1][1])
            except (_Different, _Abandon):
                yield from self.complete()
                current = {}
        yield WaitAny((message,))

    def _read(self, number: int, call: Call, step: int) -> Generator[Any, Any, None]:
        for source in call.sources(self.rank, self.size):
            if (found := (yield Read(source, self._place(call, step)))) != number:
                raise Violation(f"rank {self.rank} reads {found} of {source}, not {number}")

    def _place(self, call: Call, step: int) -> tuple[str, int]:
        if call.message:
            return "message", 0
        return ("large", step % 2) if call.large else ("slot", step % self.rules.ring)

    def _operate(self, number: int, call: Call) -> Generator[Any, Any, str | None]:
        if not self.usable:
            return COMMUNICATION
        failed = False
        try:
            sources = call.sources(self.rank, self.size)
            if call.large and self.rules.catches_up:
                yield from self._wait(self.step)
            yield Write(self._place(call, self.step + 1), number)
            if self.rules.bounded and self.step - self.seen >= self.rules.ahead:
                yield from self._wait(self.step - self.rules.ahead // 2)
            self.step += 1
            failed = yield Choose("failure")
            waits = () if failed or call.waits_for_all(self.rank, self.size) else (sources,)
            if waits and self.rules.describes:
                yield Write(self._text(self.step), self.step)
            yield from self._store((FAILED if failed else call.signature, *waits))
            yield from self._wait(self.step, None if not waits else sources)
            yield from self._read(number, call, self.step)
        except _Different as difference:
            error = yield from self._conclude(*difference.args)
            return OWN if failed else error
        except _Abandon:
            yield from self._leave()
            return OWN if failed else COMMUNICATION
        return None

    def end(self) -> Generator[Any, Any, str | None]:
        """Compare the calls that this rank was ahead in, unless other ranks are late."""
        if not self.usable or not self.rules.ends:
            return None
        try:
            yield from self._wait(self.step, at_end=True)
        except _Different as difference:
            return (yield from self._conclude(*difference.args))
        except _Abandon:
            return COMMUNICATION
        except _Late:
            pass
        return None

    def _leave(self) -> Generator[Any, Any, None]:
        yield Store("unusable", 1)
        self.usable = False

    def _slot(self, step: int) -> tuple[str, int]:
        return ("slot", step % self.rules.ring)

    def _text(self, step: int) -> tuple[str, int]:
        return ("text", step % self.rules.ring)

    def _flag(self, step: int) -> tuple[str, int]:
        return ("flag", step % self.rules.ring)

    def _store(self, word: tuple[Any, ...], step: int | None = None) -> Generator[Any, Any, None]:
        step = self.step if step is None else step
        self.words[step] = word
        yield Store(self._flag(step), (step, word))

    def _wait(
        self, step: int, sources: Sequence[int] | None = None, *, at_end: bool = False
    ) -> Generator[Any, Any, None]:
        """Wait for `sources` in a step, or until the words of all ranks up to it have been seen."""
        missing = list(self.others if sources is None else sources)
        current: dict[int, Any] = {}
        differs = False
        while missing if sources is not None and not differs else self._waits_for(step):
            if self.seen > self.step:
                raise Violation(f"rank {self.rank} waits for step {step}, and has seen {self.seen}")
            current = current or {self.rank: self.words.get(self.seen + 1)}
            waits = [self._await(self.others[len(current) - 1], self.seen + 1)] if self.seen < self.step else []
            if sources is not None and not differs:
                waits = [self._await(missing[0], step), *(waits if self.rules.scans else [])]
            if not waits:
                raise Violation(f"rank {self.rank} waits for step {step}, and has seen {self.seen}")
            event, found = yield WaitAny(tuple(waits))
            if event == "interrupt":
                if at_end:
                    raise _Late
                continue
            if event != "reached":
                raise _Abandon(event)
            index, (_, word) = found
            if sources is not None and not differs and index == 0:
                del missing[0]
                differs = word[0] != self.words[step][0]
                continue
            yield from self._see(current, word)
            if not current and sources is None and not self.begun and (yield Choose("look")):
                yield from self._look()

    def _waits_for(self, step: int) -> bool:
        return self.seen < step if self.rules.passes else self.seen != step

    def _see(self, current: dict[int, Any], word: tuple[Any, ...]) -> Generator[Any, Any, None]:
        """See the word of the next rank in the first step that has not been seen."""
        current[self.others[len(current) - 1]] = word
        if len(current) < self.size:
            return
        words = tuple(current[rank] for rank in range(self.size))
        current.clear()
        if (WITHDRAWN,) not in words:
            yield Agree(("words", self.seen + 1), words)
        if len({one[0] for one in words}) > 1 or words[0][0] == FAILED:
            raise _Different(self.seen + 1, words)
        self.seen += 1

    def _look(self) -> Generator[Any, Any, None]:
        """See the words of further steps, as far as they have been stored."""
        current: dict[int, Any] = {}
        while self.seen < self.step:
            current = current or {self.rank: self.words[self.seen + 1]}
            number, word = yield Load(self.others[len(current) - 1], self._flag(self.seen + 1))
            if number != self.seen + 1:
                return
            yield from self._see(current, word)

    def _await(self, other: int, step: int) -> Wait:
        return Wait((other,), self._flag(step), lambda word: word[0] == step, "unusable")

    def _conclude(self, step: int, words: tuple[Any, ...]) -> Generator[Any, Any, str]:
        called = [word[0] for word in words]
        ahead = [word for word in words if len(word) > 1 and word[1] != BEGUN]
        parted = any(not word[1] or called.count(word[0]) > 1 for word in ahead)
        described = [len(word) > 1 and self.rules.describes for word in words]
        begun = any(word[1:] == (BEGUN,) for word in words) and self.rules.meets
        different = len(set(called) - {FAILED, WITHDRAWN}) > 1
        error = COMMUNICATION
        if different or (begun and not parted):
            meeting = step + (self.rules.ahead if parted else self.rules.outstanding if begun else 1)
            if self.step >= meeting:
                raise Violation(f"rank {self.rank} has passed step {meeting}")
            self.step, self.seen = meeting, meeting - 1
            if different and not described[self.rank]:
                yield Write("description", step)
            if not parted or not described[self.rank]:
                yield from self._store((MEETING,))
            for other in self.others:
                while not parted or not described[other]:
                    event, _ = yield WaitAny((self._await(other, meeting),))
                    if event == "reached":
                        break
                    if event != "interrupt":
                        yield from self._leave()
                        return COMMUNICATION
            for other in self.others if different else ():
                found = yield Read(other, self._text(step) if described[other] else "description")
                if found != step:
                    raise Violation(f"rank {self.rank} reads the description {found} of {other}, not {step}")
            error = MISMATCHED if different else COMMUNICATION
        self.seen = self.step
        if parted and self.rules.parts:
            yield from self._leave()
        return error


def _run_rank(rules: Rules, rank: int, size: int, items: Sequence[Item]) -> Generator[Any, Any, tuple[str | None, ...]]:
    state = _Rank(rules, rank, size)
    number = -1
    for item in items:
        if isinstance(item, Call):
            number += 1
        yield from state.run(number, item)
    yield from state.complete()
    end = yield from state.end()
    return (*(state.errors[one] for one in range(number + 1)), end)


def explore_ahead(
    programs: Sequence[Sequence[Item]],
    rules: Rules = Rules(),
    check: Callable[[tuple[Any, ...]], str | None] | None = None,
    **events: int,
) -> Exploration:
    """Explore the calls of each rank and the end of its program, with as many failures, deaths, looks at further steps
    and interrupts as `events` states. An interrupt at the end stands for other ranks that are too late."""
    words: dict[object, Any] = {("flag", index): (0, None) for index in range(rules.ring)}
    words |= {"unusable": 0, "message": 0, "none": 0}
    ranks = [partial(_run_rank, rules, rank, len(programs), calls) for rank, calls in enumerate(programs)]
    wrong = check or partial(find_wrong_ending, programs, interrupted=events.get("interrupt", 0) > 0)
    return explore(ranks, words, events, wrong)


def find_wrong_ending(
    programs: Sequence[Sequence[Item]], ending: Sequence[Any], *, interrupted: bool = False
) -> str | None:
    """Return what is wrong with the outcomes of all ranks, or None."""
    living = [errors for errors in ending if errors != DEAD]
    first = [next((error for error in errors if error is not None), None) for errors in living]
    calls = {tuple(one.signature for one in items if isinstance(one, Call)) for items in programs}
    differ = len(calls) > 1
    if not differ and MISMATCHED in first:
        return f"no rank should raise {MISMATCHED}"
    if DEAD in ending:
        return None
    if differ and set(first) != {MISMATCHED} and not (interrupted and MISMATCHED in first):
        return f"ranks should raise {MISMATCHED}"
    if not differ and any(first) and not all(first):
        return "one rank should not fail alone"
    return None
