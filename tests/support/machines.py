"""Random programs on a simulated machine, of which it is known which ranks can never continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from mpicoll.engine.diagnostics.call_facts import describe_call
from mpicoll.engine.diagnostics.departures import make_departed_state
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from support.rank_states import SUM, State, begun, doing, message


@dataclass
class Op:
    """A statement. `needs` are the ranks without which this rank's part of a collective is not done; of a send whether
    it waits for its receiver."""

    kind: str
    key: str = ""
    call: Call = SUM
    needs: frozenset[int] = frozenset()
    waits: bool = True


@dataclass
class Rank:
    program: list[Op]
    at: int = 0
    met: Counter[str] = field(default_factory=Counter)
    number: dict[str, int] = field(default_factory=dict)
    queue: dict[str, list[Op]] = field(default_factory=dict)
    running: dict[str, Op] = field(default_factory=dict)

    @property
    def now(self) -> Op | None:
        return self.program[self.at] if self.at < len(self.program) else None

    def busy(self, key: str) -> bool:
        return key in self.running or bool(self.queue.get(key))


class Machine:
    """Ranks that carry out their programs, one small step of one of them after the other."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]], programs: Sequence[Sequence[Op]]) -> None:
        self.groups = groups
        self.ranks = [
            Rank(list(program), number={key: 0 for key, members in groups.items() if rank in members})
            for rank, program in enumerate(programs)
        ]
        self.letters: list[tuple[int, int, int]] = []  # (source, dest, tag), on their way
        self.done: set[tuple[int, str, int]] = set()  # (rank, key or "", number or statement)
        self.called: dict[tuple[str, int], dict[int, Call]] = {}  # by (key, number), then rank
        self.sent: Counter[tuple[int, int, int]] = Counter()  # by source, dest, tag
        self.received: Counter[tuple[int, int, int]] = Counter()

    def steps(self) -> list[Callable[[], None]]:
        """What could happen next."""
        return [step for me in range(len(self.ranks)) for step in (*self._in_queues(me), *self._in_program(me))]

    def _in_queues(self, me: int) -> Iterator[Callable[[], None]]:
        rank = self.ranks[me]
        for key, number in rank.number.items():
            if key in rank.running:
                come = all(self.ranks[peer].number[key] >= number for peer in rank.running[key].needs)
                if come and not self._mismatched(key, number):
                    yield partial(self._end, me, key)
            elif rank.queue.get(key):
                yield partial(self._begin, me, key)

    def _mismatched(self, key: str, number: int) -> bool:
        """Whether ranks call different collectives as this one: then those that have not ended never do."""
        return len({(call.name, call.root) for call in self.called[key, number].values()}) > 1

    def _in_program(self, me: int) -> Iterator[Callable[[], None]]:
        rank = self.ranks[me]
        op = rank.now
        if op is None:
            return
        if op.kind in ("start", "block"):
            yield partial(self._submit, me)
        elif op.kind == "wait" and not rank.busy(op.key):
            yield partial(self._next, me)
        elif op.kind == "meet":
            yield partial(self._come, me)
        elif op.kind == "met" and all(self.ranks[peer].met[op.key] >= rank.met[op.key] for peer in op.needs):
            yield partial(self._leave, me)
        elif op.kind == "recv":
            for letter in self._fitting(me, op):
                yield partial(self._take, me, letter)
        elif op.kind == "send":
            assert op.call.peer is not None
            assert op.call.tag is not None
            if not op.waits or self._takes(op.call.peer, me, op.call.tag):
                yield partial(self._send, me, op.call.peer, op.call.tag)

    def _takes(self, peer: int, source: int, tag: int) -> bool:
        op = self.ranks[peer].now
        waiting = op is not None and op.kind == "recv" and not self._fitting(peer, op)
        return waiting and op is not None and op.call.peer in (None, source) and op.call.tag in (None, tag)

    def _fitting(self, me: int, op: Op) -> list[tuple[int, int, int]]:
        """The letters that a receive could take: of each sender the first that fits."""
        fits = [
            (source, dest, tag)
            for source, dest, tag in self.letters
            if dest == me and op.call.peer in (None, source) and op.call.tag in (None, tag)
        ]
        return list({source: (source, dest, tag) for source, dest, tag in reversed(fits)}.values())

    def arriving(self) -> bool:
        """Whether somebody can take a letter."""
        return any(
            (op := rank.now) is not None and op.kind == "recv" and bool(self._fitting(me, op))
            for me, rank in enumerate(self.ranks)
        )

    def _next(self, me: int) -> None:
        self.done.add((me, "", self.ranks[me].at))
        self.ranks[me].at += 1

    def _send(self, me: int, peer: int, tag: int) -> None:
        self.letters.append((me, peer, tag))
        self.sent[me, peer, tag] += 1
        self._next(me)

    def _take(self, me: int, letter: tuple[int, int, int]) -> None:
        self.letters.remove(letter)
        self.received[letter] += 1
        self._next(me)

    def _come(self, me: int) -> None:
        rank = self.ranks[me]
        op = rank.program[rank.at]
        rank.met[op.key] += 1
        rank.program[rank.at] = Op("met", op.key, op.call, op.needs)

    def _leave(self, me: int) -> None:
        rank = self.ranks[me]
        key = rank.program[rank.at].key
        self.done.add((me, key, rank.met[key]))
        rank.at += 1

    def _submit(self, me: int) -> None:
        rank = self.ranks[me]
        op = rank.program[rank.at]
        rank.queue.setdefault(op.key, []).append(op)
        if op.kind == "start":
            rank.at += 1
        else:
            rank.program[rank.at] = Op("wait", op.key)

    def _begin(self, me: int, key: str) -> None:
        rank = self.ranks[me]
        rank.number[key] += 1
        op = rank.queue[key].pop(0)
        self.called.setdefault((key, rank.number[key]), {})[me] = op.call
        if op.needs:
            rank.running[key] = op
        else:
            self.done.add((me, key, rank.number[key]))

    def _end(self, me: int, key: str) -> None:
        rank = self.ranks[me]
        del rank.running[key]
        self.done.add((me, key, rank.number[key]))

    def finished(self, me: int) -> bool:
        rank = self.ranks[me]
        return rank.now is None and not any(rank.busy(key) for key in rank.number)

    def states(self, *, counted: bool) -> dict[int, State]:
        """What the ranks would say of themselves, with their numbers of messages if these are `counted`."""
        return {me: self._state(me, counted=counted) for me in range(len(self.ranks))}

    def _state(self, me: int, *, counted: bool) -> State:
        rank, op = self.ranks[me], self.ranks[me].now
        # A message counts as sent before its send waits for the receiver.
        waiting = op is not None and op.kind == "send" and op.waits
        leaving = Counter([(me, op.call.peer, op.call.tag)] if waiting and op is not None else [])
        sent = [[to, tag, number] for (of, to, tag), number in (self.sent + leaving).items() if of == me]
        received = [[of, tag, number] for (of, to, tag), number in self.received.items() if to == me]
        if self.finished(me):
            calls = [[key, number, by[me].name, by[me].root] for (key, number), by in self.called.items() if me in by]
            numbers = rank.number | rank.met
            return make_departed_state(
                me, "left", numbers=numbers, sent={"world": sent} if counted else None, calls=calls
            )
        queues = [
            begun((key, key, self.groups[key]), number, queued=len(rank.queue.get(key, [])))
            | {"running": key in rank.running}
            | ({"sent": sent, "received": received} if counted and key == "world" else {})
            for key, number in rank.number.items()
        ]
        called = [
            {"key": key, "number": number, "call": describe_call(by[me], Group(key, key, (), 0, 60.0))}
            for (key, number), by in self.called.items()
            if me in by and (key not in rank.running or rank.number[key] != number)
        ]
        pending = [
            doing((key, key, self.groups[key]), rank.number[key], op.call, program=False, begin=float(rank.number[key]))
            for key, op in rank.running.items()
        ]
        program: State = {"waits": "", "site": None}
        if op is not None and op.kind == "wait":
            program |= {"waits": "queue", "key": op.key}
        elif op is not None and op.kind == "met":
            program |= {"waits": "queue", "key": op.key}
            pending.append(doing((op.key, "world", tuple(sorted(op.needs))), rank.met[op.key], op.call))
        elif op is not None and op.kind in ("send", "recv") and (op.waits or op.kind == "recv"):
            program |= {"waits": "message"}
            world = ("world", "world", tuple(range(len(self.ranks))))
            pending.append(doing(world, 0, op.call, begin=float(rank.at)))
        known: State = {"queues": queues, "pending": pending, "program": program, "others": [], "started": []}
        # Of the meetings that there may be, those that nobody has asked about are not told.
        keys = {one.program[one.at].key for one in self.ranks if one.now is not None and one.now.kind == "met"}
        return known | {"called": called, "met": {key: rank.met[key] for key in keys}}


def random_groups(random: Random, size: int) -> dict[str, tuple[int, ...]]:
    groups = {"world": tuple(range(size))}
    for i in range(random.randint(1, 3)):
        groups[f"g{i}"] = tuple(random.sample(range(size), random.randint(2, size)))
    return groups


def random_collective(
    random: Random, members: tuple[int, ...], mixed: bool
) -> Callable[[int], tuple[Call, frozenset[int]]]:
    """A call, and who is needed for it on each rank: at least those whose data it is, and others as an algorithm
    pleases."""
    name = random.choice(("allreduce", "barrier", "bcast", "reduce", "scan")) if mixed else "allreduce"
    root = random.randrange(len(members))
    call = Call(name, 8, "int8", (8,), root=root if name in ("bcast", "reduce") else None)

    def on(rank: int) -> tuple[Call, frozenset[int]]:
        me, everyone = members.index(rank), set(members)
        least = {
            "allreduce": everyone,
            "barrier": everyone,
            "bcast": {members[root]},
            "reduce": everyone if me == root else set(),
            "scan": set(members[:me]),
        }[name] - {rank}
        more = {peer for peer in members if random.random() < 0.3} if random.random() < 0.5 else set()
        return call, frozenset((least | more) - {rank})

    return on


def random_machine(random: Random, *, mixed: bool, background: bool, messages: bool) -> Machine:
    """A right program, with some mistakes."""
    size = random.randint(2, 5)
    groups = random_groups(random, size)
    programs: list[list[Op]] = [[] for _ in range(size)]
    for _ in range(random.randint(1, 8)):
        if messages and random.random() < 0.5:
            source, dest = random.sample(range(size), 2)
            tag, large = random.randrange(2), random.random() < 0.6
            programs[source].append(Op("send", call=message("send", dest, tag), waits=large))
            free = random.random() < 0.2
            programs[dest].append(Op("recv", call=message("recv", None if free else source, None if free else tag)))
            continue
        if random.random() < 0.2:
            meets = frozenset(random.sample(range(size), random.randint(2, size)))
            call = Call(f"group({random.randrange(2)})", collective=False)
            for rank in meets:
                programs[rank].append(Op("meet", f"world {call.name} of {sorted(meets)}", call, meets))
            continue
        key = random.choice(list(groups))
        on = random_collective(random, groups[key], mixed)
        for rank in groups[key]:
            call, needs = on(rank)
            later = background and random.random() < 0.5
            programs[rank].append(Op("start" if later else "block", key, call, needs))
            if later and random.random() < 0.3:
                programs[rank].append(Op("wait", key))
    for _ in range(random.randint(0, 3)):
        program = random.choice(programs)
        if len(program) > 1:
            i = random.randrange(len(program))
            if random.random() < 0.7:
                j = random.randrange(len(program))
                program[i], program[j] = program[j], program[i]
            else:
                del program[i]
    for rank, program in enumerate(programs):
        program += [Op("wait", key) for key, members in groups.items() if rank in members]
    return Machine(groups, programs)
