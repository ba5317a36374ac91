"""All interleavings of ranks that share memory: an explorer of their states, each of which is visited once.

A program is a generator that yields what a rank does with shared memory, and is sent the result. What may happen in
several ways continues in all of them.

Words (`Store`, `Load`, `Wait`) are C11 atomics. A load may return any value that was not overwritten before the latest
one that the rank has to know; with acquire, it then knows what the rank that stored it with release had done before.
Plain memory (`Write`, `Read`) has to be ordered by that: an access that is not would be a data race, where a processor
with weakly ordered memory may return old or new data, and is a `Violation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Place = Hashable
Clock = tuple[int, ...]
Program = Callable[[], Generator[Any, Any, Any]]


class Violation(AssertionError):
    """Something that the ranks must not do."""


class Store(NamedTuple):
    """Store an atomic word of this rank."""

    place: Place
    value: Hashable
    release: bool = True


class Load(NamedTuple):
    """Load an atomic word of another rank."""

    owner: int
    place: Place
    acquire: bool = True


class Wait(NamedTuple):
    """Load a word of the first of `owners` until `reached` is true of it, and return ``("reached", value)``.

    Returns ``("alarm", None)`` if its word `alarm` is not 0; ``("interrupt", None)`` while there are interrupts left;
    ``("timeout", None)`` if one of the owners has ended, and its word is not what is waited for.
    """

    owners: tuple[int, ...]
    place: Place
    reached: Callable[[Any], bool]
    alarm: Place
    acquire: bool = True


class WaitAny(NamedTuple):
    """Wait for the first of `waits`, or for one of the others, and return ``("reached", (index, value))``. What else
    may end the wait is that of the first one, if none of them is reached."""

    waits: tuple[Wait, ...]


class Write(NamedTuple):
    """Write to plain memory of this rank."""

    place: Place
    value: Hashable


class Read(NamedTuple):
    """Read plain memory of another rank."""

    owner: int
    place: Place


class Choose(NamedTuple):
    """Return False, and also True if this can still happen in this execution: see `explore`."""

    event: str


class Agree(NamedTuple):
    """State a fact, which must be the same in all statements about `subject`; no part of the program."""

    subject: Hashable
    fact: Hashable


class End(NamedTuple):
    """The end of a program, with what it has returned."""

    value: Any


DEAD = "dead"


class _Point:
    """A place in the execution of a program: what was sent to it until now, and what it asks for."""

    def __init__(self, program: Program, sent: tuple[Any, ...], running: Generator[Any, Any, Any], request: Any):
        self.program, self.sent, self.request = program, sent, request
        self.running: Generator[Any, Any, Any] | None = running
        self.following: dict[Any, _Point] = {}

    def after(self, answer: Any) -> _Point:
        if (point := self.following.get(answer)) is None:
            # A generator cannot be copied: the first continuation takes it, others repeat it from the beginning.
            running, self.running = self.running, None
            if running is None:
                running = self.program()
                for value in (None, *self.sent):
                    running.send(value)
            point = self.following[answer] = _Point(
                self.program, (*self.sent, answer), running, _resume(running, answer)
            )
        return point


def _resume(running: Generator[Any, Any, Any], answer: Any) -> Any:
    try:
        return running.send(answer)
    except StopIteration as end:
        return End(end.value)


class _Words(NamedTuple):
    """What a rank has stored, in order: place, value, and what its reader then knows of all ranks."""

    stores: tuple[tuple[Place, Hashable, Clock], ...]

    def readable(self, place: Place, known: int) -> Iterator[tuple[int, Hashable, Clock]]:
        """Yield what a load may return to a rank that knows the first `known` stores, the latest one first."""
        for number in range(len(self.stores), 0, -1):
            stored, value, clock = self.stores[number - 1]
            if stored == place:
                yield number, value, clock
                if number <= known:
                    return

    def latest(self, place: Place) -> Any:
        return next(self.readable(place, 0))[1]


class _State(NamedTuple):
    points: tuple[_Point | None, ...]  # None: dead
    words: tuple[_Words, ...]
    clocks: tuple[Clock, ...]  # of each rank, how many stores of each rank it knows
    plain: frozenset[tuple[Place, tuple[Hashable, int, Clock]]]  # value, stores of the writer, of the readers
    facts: frozenset[tuple[Hashable, Hashable]]
    events: frozenset[tuple[str, int]]


class Exploration(NamedTuple):
    states: int
    endings: set[tuple[Any, ...]]
    """What the ranks have returned, or `DEAD`."""


def explore(
    programs: Sequence[Program],
    words: Mapping[Any, Hashable],
    events: Mapping[str, int],
    check: Callable[[tuple[Any, ...]], str | None] = lambda ending: None,
    *,
    fine: bool = False,
) -> Exploration:
    """Run the `programs`, one a rank, in every interleaving, from words with these values; raise `Violation`.

    `events` is how often each of these may happen in one execution: "death" of a rank, at any of its steps;
    "interrupt" of a wait; and what programs choose. `check` returns what is wrong with an ending, or None. `fine`
    interleaves accesses to plain memory too, which detects nothing more, since a race does not depend on timing.
    """
    size = len(programs)
    begin = _Words(tuple((place, value, (0,) * size) for place, value in words.items()))
    points = []
    for program in programs:
        running = program()
        points.append(_Point(program, (), running, _resume(running, None)))
    clocks = ((len(words),) * size,) * size
    first = _State(tuple(points), (begin,) * size, clocks, frozenset(), frozenset(), frozenset(events.items()))
    ready = [first]
    for rank in range(size):
        ready = [settled for state in ready for settled in _settle(state, rank, fine)]
    origin: dict[_State, tuple[_State | None, str]] = dict.fromkeys(ready, (None, ""))
    queue = deque(ready)
    endings: set[tuple[Any, ...]] = set()
    while queue:
        state = queue.popleft()
        try:
            for following, what in _follow(state, fine):
                if following not in origin:
                    origin[following] = state, what
                    queue.append(following)
            if all(_has_ended(state, rank) for rank in range(size)):
                ending = tuple(DEAD if point is None else point.request.value for point in state.points)
                if ending not in endings and (wrong := check(ending)):
                    raise Violation(f"{wrong}: {ending}")
                endings.add(ending)
        except Violation as error:
            error.add_note("\n".join(_history(origin, state)))
            raise
    return Exploration(len(origin), endings)


def _history(origin: Mapping[_State, tuple[_State | None, str]], state: _State | None) -> list[str]:
    lines = []
    while state is not None:
        state, what = origin[state]
        lines.append(what)
    return lines[::-1]


def _follow(state: _State, fine: bool) -> Iterator[tuple[_State, str]]:
    moved = False
    for rank, what, following in _moves(state):
        moved = True
        for settled in _settle(following, rank, fine):
            yield settled, f"rank {rank}: {what}"
    if not moved and not all(_has_ended(state, rank) for rank in range(len(state.points))):
        raise Violation("ranks wait forever")


def _at(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _spend(state: _State, event: str) -> _State | None:
    """The state with one event less to come, or None if no more can come."""
    left = dict(state.events)
    if left.get(event, 0) == 0:
        return None
    left[event] -= 1
    return state._replace(events=frozenset(left.items()))


def _answer(state: _State, rank: int, answer: Any) -> _State:
    point = state.points[rank]
    assert point is not None
    return state._replace(points=_at(state.points, rank, point.after(answer)))


def _load(state: _State, rank: int, clock: Clock, acquire: bool, answer: Any) -> _State:
    if acquire:
        known = tuple(map(max, state.clocks[rank], clock))
        state = state._replace(clocks=_at(state.clocks, rank, known))
    return _answer(state, rank, answer)


def _moves(state: _State) -> Iterator[tuple[int, str, _State]]:
    """Yield what each rank can do next: the rank, a description, and the state after it."""
    for rank, point in enumerate(state.points):
        if point is None or isinstance(point.request, End):
            continue
        if (dying := _spend(state, "death")) is not None:
            yield rank, "death", dying._replace(points=_at(state.points, rank, None))
        match point.request:
            case Store(place, value, release):
                count = len(state.words[rank].stores) + 1
                clock = _at(state.clocks[rank], rank, count)
                shown = clock if release else (0,) * len(state.points)
                stores = _Words((*state.words[rank].stores, (place, value, shown)))
                stored = state._replace(words=_at(state.words, rank, stores), clocks=_at(state.clocks, rank, clock))
                yield rank, f"store {place} = {value}", _answer(stored, rank, None)
            case Load(owner, place, acquire):
                for _, value, clock in state.words[owner].readable(place, state.clocks[rank][owner]):
                    yield rank, f"load {place} of {owner}: {value}", _load(state, rank, clock, acquire, value)
            case Wait():
                for what, following in _waited(state, rank, point.request):
                    yield rank, what, following
            case WaitAny(waits):
                yield from ((rank, *move) for move in _waited_any(state, rank, waits))
            case Read() | Write():
                yield rank, f"{point.request}", _access(state, rank, point.request)
            case _:
                raise TypeError(point.request)


def _waited(state: _State, rank: int, wait: Wait) -> Iterator[tuple[str, _State]]:
    owner, known = wait.owners[0], state.clocks[rank]
    for _, value, clock in state.words[owner].readable(wait.place, known[owner]):
        if wait.reached(value):
            found = _load(state, rank, clock, wait.acquire, ("reached", value))
            yield f"has waited for {wait.place} of {owner}: {value}", found
    for _, value, clock in state.words[owner].readable(wait.alarm, known[owner]):
        if value != 0:
            yield f"load {wait.alarm} of {owner}: {value}", _load(state, rank, clock, wait.acquire, ("alarm", None))
    if (interrupted := _spend(state, "interrupt")) is not None:
        yield "interrupt", _answer(interrupted, rank, ("interrupt", None))
    if any(
        _has_ended(state, other) and not wait.reached(state.words[other].latest(wait.place)) for other in wait.owners
    ):
        yield "timeout", _answer(state, rank, ("timeout", None))


def _waited_any(state: _State, rank: int, waits: tuple[Wait, ...]) -> Iterator[tuple[str, _State]]:
    for index, wait in enumerate(waits):
        owner = wait.owners[0]
        for _, value, clock in state.words[owner].readable(wait.place, state.clocks[rank][owner]):
            if wait.reached(value):
                found = _load(state, rank, clock, wait.acquire, ("reached", (index, value)))
                yield f"has waited for {wait.place} of {owner}: {value}", found
    # A rank looks at all words before it stops waiting.
    if not any(wait.reached(state.words[wait.owners[0]].latest(wait.place)) for wait in waits):
        yield from _waited(state, rank, waits[0])


def _has_ended(state: _State, rank: int) -> bool:
    point = state.points[rank]
    return point is None or isinstance(point.request, End)


def _settle(state: _State, rank: int, fine: bool) -> Iterator[_State]:
    """Yield the states after what the rank does next that no other rank can observe at this moment."""
    ready = [state]
    while ready:
        state = ready.pop()
        point = state.points[rank]
        match point.request if point is not None else None:
            case Choose(event):
                ready.append(_answer(state, rank, False))
                if (spent := _spend(state, event)) is not None:
                    ready.append(_answer(spent, rank, True))
            case Agree(subject, fact):
                if (other := dict(state.facts).setdefault(subject, fact)) != fact:
                    raise Violation(f"rank {rank}: {subject} is {fact}, and was {other}")
                ready.append(_answer(state._replace(facts=state.facts | {(subject, fact)}), rank, None))
            case (Read() | Write()) as access if not fine:
                ready.append(_access(state, rank, access))
            case _:
                yield state


def _access(state: _State, rank: int, access: Read | Write) -> _State:
    """Read or write plain memory, which must be ordered after the last write and, for a write, after all reads."""
    owner = access.owner if isinstance(access, Read) else rank
    key = (owner, access.place)
    plain = dict(state.plain)
    value, written, readers = plain.get(key, (None, -1, (-1,) * len(state.points)))
    known = state.clocks[rank]
    if owner != rank and known[owner] <= written:
        raise Violation(f"rank {rank} reads {access.place} of {owner}, unordered with its write of {value}")
    if isinstance(access, Read):
        readers = _at(readers, rank, len(state.words[rank].stores))
    else:
        for other, read in enumerate(readers):
            if other != rank and known[other] <= read:
                raise Violation(f"rank {rank} writes {access.place} = {access.value}, unordered with a read by {other}")
        value, written, readers = access.value, len(state.words[rank].stores), (-1,) * len(state.points)
    plain[key] = (value, written, readers)
    return _answer(state._replace(plain=frozenset(plain.items())), rank, value if isinstance(access, Read) else None)
