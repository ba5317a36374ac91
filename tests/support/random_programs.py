"""Long random programs on the native API, each operation compared with the oracle.

A program is determined by its seed and its number: every rank draws the same one, so each can compute what all others
pass. Local decisions of a rank (the order of waits, the time of sleeps) are drawn separately. tests/engine has a test
of some hundred operations, ci/random_operations.py runs any number.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

import mpicoll
from mpicoll.engine.selection.catalogue import algorithms_of
from mpicoll.engine.world import as_communicator, resolve
from mpicoll.transport.local import Delay, Fault
from support.data import (
    DTYPES,
    FLOATS,
    HALVES,
    INTEGERS,
    LIBRARIES,
    OPS,
    dtype_of,
    laid,
    means,
    numbers,
    random,
    unwrap,
    wrap,
)
from support.exercise import (
    COLLECTIVES,
    COUNTED,
    MATRICES,
    OUTS,
    REDUCTIONS,
    ROOTED,
    SCALARS,
    Call,
    Exercise,
    allowed,
    serves,
)

OPERATIONS = 40
"""Default number of operations of a program."""

PATIENCE = 100.0
"""Time limit in seconds for a request to complete."""

LAYOUTS = ("contiguous", "contiguous", "strided", "fortran", "negative", "readonly", "shared")
"""In ``shared``, the input lies in memory of mpicoll.empty."""

ROWS = (0, 1, 2, 3, 5, 7, 13, 17, 31, 64, 127, 251, 400)
LONG = (509, 1021, 1024, 1531, 4099, 8191, 10_007, 40_009)
HUGE = (131_071, 262_144, 400_009)

LOCATIONS = ("minloc", "maxloc")

REPEATABLE = 3
"""Number of the last kinds of collectives that may come again."""


@dataclass
class Place:
    """A group of ranks (of the world, in their order), and the ``comm`` of this rank: None if it is not a member."""

    members: tuple[int, ...]
    comm: Any

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass
class Kind:
    """A kind of collective: what calls that take what was prepared for one another have in common."""

    place: Place
    collective: str
    row: dict[str, Any]
    algorithm: str | None


@dataclass
class Waiting:
    """A request, the check of its value, and the plan that started it, if any."""

    request: Any
    check: Callable[[Any], None]
    place: Place
    where: str
    plan: Repeated | None = None
    transfer: bool = False


@dataclass
class Repeated:
    """A plan and its task."""

    plan: Any
    task: Exercise
    place: Place
    where: str
    running: Waiting | None = None
    runs: int = 0


def faults(seed: object, number: int, size: int) -> list[Fault]:
    """Return delays of messages for a program on threads: of all, of those of one rank, or of some pairs."""
    draw = Random(f"faults {seed} {number}")
    kind = draw.choice(("all", "source", "dest", "pairs"))
    if kind == "all":
        return [Delay(draw.choice((5e-5, 5e-4)))]
    if kind == "source":
        return [Delay(draw.uniform(0, 2e-3), source=draw.randrange(size))]
    if kind == "dest":
        return [Delay(draw.uniform(0, 2e-3), dest=draw.randrange(size))]
    return [
        Delay(draw.uniform(0, 3e-3), source=draw.randrange(size), dest=draw.randrange(size))
        for _ in range(draw.randint(1, 4))
    ]


def run(seed: object, number: int, operations: int = OPERATIONS, *, sleeps: bool = False) -> Counter[str]:
    """Run program `number` of `seed` on this rank, and return counts of its operations. Collective.

    With `sleeps`, ranks sleep before some of their calls. Raises AssertionError at the first wrong result.
    """
    return Program(seed, number, sleeps=sleeps).run(operations)


class Program:
    """A program as executed by one rank."""

    def __init__(self, seed: object, number: int, *, sleeps: bool) -> None:
        world = mpicoll.world()
        self.world = world
        self.rank = world.rank
        self.name = f"program {number} of seed {seed}"
        self.draw = Random(f"{seed} {number}")
        self.own = Random(f"{seed} {number} {self.rank}")
        self.sleeps = sleeps
        self.places = [Place(tuple(range(world.size)), world)]
        self.waiting: list[Waiting] = []
        self.plans: list[Repeated] = []
        self.kinds: list[Kind] = []
        self.done: Counter[str] = Counter()
        self.line = 0
        self.where = ""

    def run(self, operations: int) -> Counter[str]:
        try:
            for self.line in range(operations):
                self.where = ""
                self.step()
            self.where = "the end"
            self.wait(len(self.waiting))
            self.plans.clear()
            for place in reversed(self.places[1:]):
                self.free(place)
        except Exception as error:
            # with add_note this would be lost among the ranks' messages
            raise AssertionError(
                f"{self.name}, operation {self.line}, rank {self.rank} of {self.world.size}: {self.where}: {error!r}"
            ) from error
        return self.done

    def step(self) -> None:
        kinds = {
            self.collective: 60,
            self.make_plan: 6,
            self.run_plan: 10,
            self.barrier: 3,
            self.shift: 3,
            self.pair: 3,
            self.permutation: 4,
            self.to_one: 2,
            self.make_place: 5,
            self.free_one: 3,
        }
        kind = self.draw.choices(list(kinds), list(kinds.values()))[0]
        if self.sleeps and self.own.random() < 0.1:
            time.sleep(self.own.uniform(0, 2e-3))
        kind()
        if self.own.random() < 0.3:
            self.wait(self.own.randint(0, 3))

    # --- groups

    def place(self) -> Place:
        """Draw one of the groups, most often the world."""
        return self.places[0] if self.draw.random() < 0.3 else self.draw.choice(self.places)

    def make_place(self) -> None:
        parent = self.place()
        if len(self.places) > 7:
            return
        kinds = ["split", "split", "group", "node", "duplicate", *(["mpi4py"] if self.world.mpi is not None else [])]
        kind = self.draw.choice(kinds)
        colors = [self.draw.choice((0, 1, 1, None)) for _ in parent.members]
        keys = [self.draw.randint(-2, 2) for _ in parent.members]
        chosen = self.draw.sample(range(parent.size), self.draw.randint(1, parent.size))
        place = None if parent.comm is None else self.communicator(parent)
        self.where = f"{kind} of {parent.members}: {colors} {keys} {chosen}"
        self.done[f"groups: {kind}"] += 1
        if kind == "split":
            made = place and place.split(colors[place.rank], keys[place.rank])
            for color in sorted({color for color in colors if color is not None}):
                order = sorted((keys[at], at) for at in range(parent.size) if colors[at] == color)
                self.add(Place(tuple(parent.members[at] for _, at in order), made), "split")
        elif kind == "group":
            made = place and place.group(chosen)
            self.add(Place(tuple(parent.members[at] for at in chosen), made), "group")
        elif kind == "node":
            made = place and place.node_comm()
            nodes = [self.world.nodes[member] for member in parent.members]
            for node in sorted(set(nodes)):
                of_node = (member for member, at in zip(parent.members, nodes, strict=True) if at == node)
                self.add(Place(tuple(of_node), made), "node_comm")
        elif kind == "duplicate":
            self.add(Place(parent.members, place and place.duplicate()), "duplicate")
        else:
            made = place and place.mpi.Dup()
            if made is not None:
                resolve(made)  # collective at first use, which may be a message of two
            self.add(Place(parent.members, made), "mpi4py")

    def communicator(self, place: Place) -> mpicoll.Communicator:
        """Return the communicator of a place, if need be the one made from an mpi4py communicator."""
        made = as_communicator(place.comm)
        assert made.size == place.size
        return made

    def add(self, place: Place, kind: str) -> None:
        member = self.rank in place.members
        if member:
            assert place.comm is not None, f"{kind}: rank {self.rank} got none"
            assert (place.comm.rank, place.comm.size) == (place.members.index(self.rank), place.size), kind
        self.places.append(Place(place.members, place.comm if member else None))

    def free_one(self) -> None:
        if len(self.places) > 1:
            place = self.places.pop(self.draw.randrange(1, len(self.places)))
            self.kinds = [one for one in self.kinds if one.place is not place]
            self.where = f"free {place.members}"
            self.free(place)

    def free(self, place: Place) -> None:
        """Free the communicator, at times with pending collectives, which must still complete; messages end before."""
        late = self.own.random() < 0.3
        for one in [one for one in self.waiting if one.place is place]:
            if one.transfer or not late or not isinstance(place.comm, mpicoll.Communicator):
                self.finish(one)
        self.plans = [one for one in self.plans if one.place is not place]
        if place.comm is not None:
            (place.comm.free if isinstance(place.comm, mpicoll.Communicator) else place.comm.Free)()

    # --- waiting

    def finish(self, one: Waiting) -> None:
        self.waiting.remove(one)
        if one.plan is not None:
            one.plan.running = None
        here, self.where = self.where, one.where
        way = self.own.randrange(4)
        if way == 0 and one.plan is None:
            deadline = time.monotonic() + PATIENCE
            while not one.request.test():
                assert time.monotonic() < deadline, "does not complete"
                time.sleep(0)
        one.check(one.request.wait() if way < 2 else one.request.wait(PATIENCE))
        self.where = here

    def wait(self, count: int) -> None:
        """Complete `count` pending requests, in any order."""
        plain = [one for one in self.waiting if one.plan is None]
        if len(plain) > 1 and self.own.random() < 0.2:
            self.where = "waitany"
            index, value = mpicoll.waitany([one.request for one in plain], PATIENCE)
            self.waiting.remove(plain[index])
            self.where = plain[index].where
            plain[index].check(value)
        elif len(plain) > 1 and count == len(self.waiting):
            self.where = "waitall"
            for one, value in zip(plain, mpicoll.waitall([one.request for one in plain], PATIENCE), strict=True):
                self.waiting.remove(one)
                self.where = one.where
                one.check(value)
        for one in self.own.sample(self.waiting, min(count, len(self.waiting))):
            self.finish(one)

    # --- collectives

    def draw_kind(self) -> Kind:
        """Draw a new kind of collective, or one of the last with another layout of its arrays."""
        if self.kinds and self.draw.random() < 0.65:
            kind = self.draw.choice(self.kinds)
            return dataclasses.replace(kind, row=draw_places(self.draw, kind.collective, kind.row))
        kind = draw_kind(self.draw, self.place())
        self.kinds = [*self.kinds, kind][-REPEATABLE:]
        return kind

    def collective(self) -> None:
        kind = self.draw_kind()
        place, task = kind.place, make_task(kind, self.line)
        background = self.draw.random() < 0.45
        within = not background and task.row["algorithm"] is not None and self.draw.random() < 0.3
        if place.comm is None:
            return
        form = "background" if background else "blocking"
        self.where = f"{form} {task.call.collective} {task.row} on {place.members}"
        task.arguments()
        if within:
            # passed over if it can't serve
            row, name = task.row, task.call.collective
            task.row = {**row, "algorithm": None}
            with mpicoll.algorithms(**{name: row["algorithm"]}):
                task.check(self.asked(task, ""))
            self.count(task, "with algorithms")
        elif background:
            request = self.asked(task, "i")
            self.count(task, form)
            if self.own.random() < 0.95:
                self.waiting.append(Waiting(request, task.check, place, self.where))
            # otherwise it is dropped, and completes all the same
        else:
            task.check(self.asked(task, ""))
            self.count(task, form)

    def make_plan(self) -> None:
        kind = self.draw_kind()
        place, task = kind.place, make_task(kind, self.line)
        if len(self.plans) > 6:
            del self.plans[0]
        if place.comm is None:
            self.plans.append(Repeated(None, task, place, ""))
            return
        self.where = f"plan {task.call.collective} {task.row} on {place.members}"
        task.arguments()
        self.plans.append(Repeated(self.asked(task, "", "_init"), task, place, self.where))
        self.count(task, "plan")

    def run_plan(self) -> None:
        if not self.plans:
            self.make_plan()
        one = self.draw.choice(self.plans)
        background = self.draw.random() < 0.4
        one.runs += 1
        if one.place.comm is None:
            return
        if one.running is not None:
            self.finish(one.running)
        self.where = f"run {one.runs} of {one.where}"
        one.task.renew(keep=True)
        self.done["form: run of a plan"] += 1
        if background:
            one.plan.start()
            one.running = Waiting(one.plan, one.task.check, one.place, self.where, plan=one)
            self.waiting.append(one.running)
        else:
            one.task.check(one.plan())

    def asked(self, task: Task, prefix: str, suffix: str = "") -> Any:
        """Call the collective. An algorithm that refuses does so on all ranks, and another one is used then."""
        function = task.function(prefix, suffix)
        if task.row["algorithm"] is None:
            return function(*task.positional(), **task.options())
        try:
            return function(*task.positional(), **task.options())
        except mpicoll.AlgorithmError as error:
            if task.must_be_served():
                raise AssertionError(f"{task.row['algorithm']} refuses: {error}") from error
            self.done[f"refused: {task.row['algorithm'].partition('/')[0]}"] += 1
            task.row = {**task.row, "algorithm": None}
            return function(*task.positional(), **task.options())

    def count(self, task: Task, form: str) -> None:
        row = task.row
        name = str(row["algorithm"] or "default").partition("/")[0]
        kinds = {"collective": task.call.collective, "form": form, "algorithm": name}
        kinds |= {kind: task.call.row[kind] for kind in ("dtype", "library", "layout", "out")}
        if task.call.collective in REDUCTIONS:
            kinds["op"] = row["op"]
        for kind, what in kinds.items():
            self.done[f"{kind}: {what}"] += 1

    def barrier(self) -> None:
        place = self.place()
        algorithm = self.draw.choice((None, "dissemination", "shm_flat", "native"))
        background = self.draw.random() < 0.5
        if place.comm is None:
            return
        self.where = f"barrier {algorithm} on {place.members}"
        self.done["collective: barrier"] += 1
        call = mpicoll.ibarrier if background else mpicoll.barrier
        try:
            request = call(comm=place.comm, algorithm=algorithm)
        except mpicoll.AlgorithmError:
            assert algorithm in ("shm_flat", "native")
            request = call(comm=place.comm)
        if background:
            self.waiting.append(Waiting(request, _is_none, place, self.where))

    # --- messages

    def message(self, place: Place, what: object, rank: int, row: dict[str, Any]) -> Any:
        """Return the message that `rank` of `place` sends."""
        values = _message(self.name, self.line, what, rank, row["dtype"], row["shape"])
        return wrap(row["library"], laid(values, row["layout"]))

    def expecting(self, row: dict[str, Any], what: object, source: int) -> Callable[[Any], None]:
        """Return the check of an array received from `source`."""
        want = _message(self.name, self.line, what, source, row["dtype"], row["shape"])

        def check(got: Any) -> None:
            np.testing.assert_array_equal(unwrap(row["library"], got, row["dtype"], row["shape"]), want)

        return check

    def shift(self) -> None:
        """Send from every rank to the one at a distance, and receive from the one at the opposite distance."""
        place, row = self.place(), _drawn_message(self.draw)
        by = self.draw.randrange(place.size + 1)
        known = self.draw.random() < 0.7
        if place.comm is None:
            return
        rank, size = place.comm.rank, place.size
        self.where = f"sendrecv {row} by {by} on {place.members}"
        self.done["messages: sendrecv"] += 1
        source, status = (rank - by) % size, mpicoll.Status()
        x = self.message(place, "shift", rank, row)
        tag = self.line % 30_000
        got = mpicoll.sendrecv(
            x, (rank + by) % size, source if known else None, tag, tag, status=status, comm=place.comm
        )
        self.expecting(row, "shift", source)(got)
        assert (status.source, status.tag) == (source, tag)

    def pair(self) -> None:
        """Send from one rank to another, both blocking; the receiver may probe first, or use wildcards."""
        place, row = self.place(), _drawn_message(self.draw)
        way = self.draw.choice(("known", "any source", "any tag", "probe", "out"))
        if place.size < 2:
            return
        source, dest = self.draw.sample(range(place.size), 2)
        if place.comm is None:
            return
        comm, tag = place.comm, self.line % 30_000
        self.where = f"send {row} from {source} to {dest}, {way}, on {place.members}"
        if comm.rank == source:
            self.done["messages: send"] += 1
            mpicoll.send(self.message(place, "pair", source, row), dest, tag, comm=comm)
        elif comm.rank == dest:
            like = wrap(row["library"], np.empty(row["shape"], dtype_of(row["dtype"])))
            if way == "probe":
                found = mpicoll.probe(None, tag, timeout=PATIENCE, comm=comm)
                assert (found.source, found.tag) == (source, tag)
                assert found.nbytes == int(np.prod(row["shape"])) * dtype_of(row["dtype"]).itemsize
            out = {"out": like} if way == "out" else {}
            got = mpicoll.recv(
                None if out else like,
                None if way == "any source" else source,
                None if way == "any tag" else tag,
                comm=comm,
                **out,
            )
            assert not out or got is like
            self.expecting(row, "pair", source)(got)

    def permutation(self) -> None:
        """Send along a permutation of the ranks, nonblocking."""
        place, row = self.place(), _drawn_message(self.draw)
        to = self.draw.sample(range(place.size), place.size)
        if place.comm is None:
            return
        comm, tag = place.comm, self.line % 30_000
        source = to.index(comm.rank)
        self.where = f"isend and irecv {row} {to} on {place.members}"
        self.done["messages: isend"] += 1
        status = mpicoll.Status()
        like = wrap(row["library"], np.empty(row["shape"], dtype_of(row["dtype"])))
        check = self.expecting(row, "permutation", source)

        def received(got: Any) -> None:
            assert (status.source, status.tag) == (source, tag)
            check(got)

        arriving = mpicoll.irecv(like, source, tag, status=status, comm=comm)
        x = self.message(place, "permutation", comm.rank, row)
        leaving = mpicoll.isend(x, to[comm.rank], tag, comm=comm)
        self.waiting.append(Waiting(arriving, received, place, self.where, transfer=True))
        self.waiting.append(Waiting(leaving, _is_none, place, self.where, transfer=True))

    def to_one(self) -> None:
        """Send from all ranks to one, which receives with a wildcard source."""
        place, row = self.place(), _drawn_message(self.draw)
        dest = self.draw.randrange(place.size)
        if place.comm is None:
            return
        comm, tag = place.comm, self.line % 30_000
        self.where = f"send {row} from all to {dest} on {place.members}"
        self.done["messages: from any source"] += 1
        if comm.rank != dest:
            x = self.message(place, "to one", comm.rank, row)
            self.waiting.append(
                Waiting(mpicoll.isend(x, dest, tag, comm=comm), _is_none, place, self.where, None, True)
            )
            return
        like = wrap(row["library"], np.empty(row["shape"], dtype_of(row["dtype"])))
        left = set(range(place.size)) - {dest}
        while left:
            status = mpicoll.Status()
            got = mpicoll.recv(like, tag=tag, status=status, comm=comm)
            left.remove(status.source)
            self.expecting(row, "to one", status.source)(got)


def _is_none(value: Any) -> None:
    assert value is None


# --- what is drawn


def _drawn_message(draw: Random) -> dict[str, Any]:
    while True:
        row = {"dtype": draw.choice(DTYPES), "shape": _shape(draw), "library": draw.choice(("numpy", "torch", "api"))}
        row["layout"] = draw.choice(("contiguous", "strided", "fortran"))
        if _has_library(row) and (row["shape"] or row["layout"] == "contiguous"):
            return row


def _has_library(row: dict[str, Any]) -> bool:
    return allowed("bcast", {**row, "out": "none"})


@lru_cache(maxsize=64)
def _message(*what: Any) -> np.ndarray:
    dtype, shape = what[-2:]
    return numbers(random(*what), dtype, shape)


def _shape(draw: Random, *, divided: bool = False) -> tuple[int, ...]:
    kind = draw.random()
    if kind < 0.06 and not divided:
        return ()
    if kind < 0.6:
        return (draw.choice(ROWS),)
    if kind < 0.85:
        return tuple(draw.choice(ROWS[:8]) for _ in range(draw.randint(2, 3)))
    if kind < 0.985:
        return (draw.choice(LONG) // (8 if divided else 1),)
    return (draw.choice(HUGE) // (4 if divided else 1),)


def draw_kind(draw: Random, place: Place) -> Kind:
    """Draw a call that is valid, or that only its algorithm may refuse."""
    collective = draw.choice((*COLLECTIVES, *REDUCTIONS, "allreduce"))
    while True:
        row = _draw_row(draw, collective, place.size)
        if _is_valid(collective, row):
            return Kind(place, collective, row, _drawn_algorithm(draw, collective))


def draw_places(draw: Random, collective: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with another layout of the input and the output."""
    while True:
        other = {**row, "layout": draw.choice(LAYOUTS), "out": draw.choice(OUTS)}
        if _is_valid(collective, other):
            return other


def make_task(kind: Kind, generation: int) -> Task:
    """Return the call of this rank."""
    comm = kind.place.comm
    rank = -1 if comm is None else comm.rank
    call = Drawn(kind.collective, {**kind.row, "algorithm": kind.algorithm}, rank, kind.place.size)
    return (Location if kind.row["op"] in LOCATIONS else Task)(call, comm, generation)


def _is_valid(collective: str, row: dict[str, Any]) -> bool:
    if row["op"] in LOCATIONS:
        return _locatable(collective, row)
    return allowed(collective, {**row, "layout": _plain(row["layout"])})


def _plain(layout: str) -> str:
    return "contiguous" if layout == "shared" else layout


def _draw_row(draw: Random, collective: str, size: int) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": draw.choice(DTYPES), "op": "sum"}
    if collective in REDUCTIONS:
        forbidden = {"scan": ("avg",), "exscan": ("avg",), "reduce_scatter": ("user_matmul",)}.get(collective, ())
        row["op"] = draw.choice([op for op in (*OPS, *LOCATIONS) if op not in forbidden])
    # Python numbers support few operations, and are drawn seldom.
    row["library"] = draw.choice((*LIBRARIES, "numpy", "numpy", "torch", "torch"))
    row["shape"] = draw.choice(MATRICES) if row["op"] == "user_matmul" else _shape(draw, divided=collective in COUNTED)
    if row["library"] in SCALARS:
        row["shape"] = ()
    row["layout"] = draw.choice(LAYOUTS)
    row["out"] = draw.choice(OUTS)
    row["comm"] = "drawn"  # for this rank to pass it
    if collective in ROOTED:
        row["root"] = draw.randrange(size)
    if collective in COUNTED:
        row["counts"] = draw.choice(("none", "equal", "uneven", "zeros"))
        base = row["shape"][0] if row["shape"] else 1
        row["rows"] = tuple(_drawn_rows(draw, row["counts"], base) for _ in range(size))
        if collective == "alltoall":
            row["matrix"] = tuple(
                tuple(_drawn_rows(draw, row["counts"], base) for _ in range(size)) for _ in range(size)
            )
    return row


def _drawn_rows(draw: Random, kind: str, base: int) -> int:
    if kind in ("none", "equal"):
        return base
    return draw.randint(0, base + 2) if kind == "uneven" else draw.choice((0, base))


def _drawn_algorithm(draw: Random, collective: str) -> str | None:
    if draw.random() < 0.35:
        return None
    name = draw.choice(algorithms_of(collective))
    if name in ("shm_pipelined", "cma", "shm_or_cma") and collective != "barrier" and draw.random() < 0.5:
        return f"{name}/{draw.choice(('4k', '5000', '16k', '64k', '256k'))}"
    schedule = mpicoll.schedules.algorithms_of(collective).get(name)
    if schedule is not None and schedule.segmented and draw.random() < 0.6:
        return f"{name}/{draw.randint(1, 7)}"
    return name


def _locatable(collective: str, row: dict[str, Any]) -> bool:
    """Return True if minloc and maxloc are defined: real numbers in arrays of libraries that have them."""
    if row["dtype"] not in (*INTEGERS, *HALVES, *FLOATS) or row["library"] not in ("numpy", "torch"):
        return False
    if row["layout"] in ("readonly", "shared") or row["out"] in ("strided", "overlap"):
        return False
    plain = {**row, "op": "min"}
    return means("min", row["dtype"]) and allowed(collective, plain)


class Drawn(Call):
    """A call with random root and counts."""

    @property
    def root(self) -> int:
        return int(self.row["root"])

    def rows(self) -> list[int]:
        return list(self.row["rows"])

    def matrix(self) -> list[list[int]]:
        return [list(line) for line in self.row["matrix"]]

    def inputs(self, generation: object) -> list[np.ndarray]:
        row = {name: value for name, value in self.row.items() if name != "algorithm"}
        return _inputs(self.collective, tuple(row.items()), self.size, generation)


@lru_cache(maxsize=64)
def _inputs(collective: str, row: tuple[tuple[str, Any], ...], size: int, generation: object) -> list[np.ndarray]:
    """Create the inputs once for all ranks that are threads of one process."""
    call = Drawn(collective, dict(row), 0, size)
    return [
        numbers(random(collective, row, generation, rank), call.name, call.input_shape(rank), call.op)
        for rank in range(size)
    ]


class Task(Exercise):
    """A call on this rank: its arrays, and the expected result."""

    def __init__(self, call: Drawn, comm: Any, generation: int) -> None:
        super().__init__(call, comm)
        self.generation = 1000 * generation

    def arguments(self) -> None:
        if self.row["layout"] != "shared":
            super().arguments()
            return
        self.row = {**self.row, "layout": "contiguous"}
        super().arguments()
        if self.row["out"] == "overlap":
            return
        memory = mpicoll.empty(self.view.shape, self.view.dtype, comm=self.comm)
        memory[...] = self.view
        if self.out_view is self.view:
            self.out_view = memory
        self.view = memory
        self.x = wrap(self.library, memory)
        if self.row["out"] == "inplace" and self.out is not None:
            self.out = self.x

    def must_be_served(self) -> bool:
        """Return True if the forced algorithm has no reason to refuse."""
        collective, name = self.call.collective, self.row["algorithm"].partition("/")[0]
        if name not in mpicoll.schedules.algorithms_of(collective) or self.row.get("counts", "none") != "none":
            return False
        return self.row["op"] in LOCATIONS or serves(collective, name, self.row["op"], self.row["dtype"])


class Location(Task):
    """minloc or maxloc of few different values, so that there are ties."""

    def _pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        shapes = [self.call.input_shape(rank) for rank in range(self.call.size)]
        return _pairs(self.call.name, tuple(shapes), self.generation)

    def arguments(self) -> None:
        pairs = self._pairs()
        self.want = self._best(pairs)
        mine = pairs[self.comm.rank]
        self.views = tuple(laid(part, self.row["layout"]) for part in mine)
        self.x = self._wrapped(self.views)
        self._keep()
        self.out_views, self.out = None, None
        if self.call.receives and self.row["out"] == "inplace":
            self.out_views, self.out = self.views, self.x
        elif self.call.receives and self.row["out"] == "given":
            shape = mine[0].shape if self.want is None else self.want[0].shape
            self.out_views = tuple(np.ones(shape, part.dtype) for part in mine)
            self.out = self._wrapped(self.out_views)

    def _wrapped(self, parts: Sequence[np.ndarray]) -> tuple[Any, ...]:
        return tuple(wrap(self.library, part) for part in parts)

    def _keep(self) -> None:
        self.before = b"".join(view.tobytes() for view in self.views)

    def renew(self, *, keep: bool = False) -> None:
        assert keep
        self.generation += 1
        pairs = self._pairs()
        self.want = self._best(pairs)
        for view, part in zip(self.views, pairs[self.comm.rank], strict=True):
            view[...] = part
        self._keep()

    def _best(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the oracle's result: NaN before everything, then the extreme value, then its lowest index."""
        rank = self.call.rank
        if not self.call.receives or (self.call.collective == "exscan" and rank == 0):
            return None
        if self.call.collective in ("scan", "exscan"):
            pairs = pairs[: rank + (self.call.collective == "scan")]
        values, indices = (np.stack([pair[part] for pair in pairs]) for part in (0, 1))
        wide = values.astype(np.float64)
        key = np.where(np.isnan(wide), -np.inf, wide if self.row["op"] == "minloc" else -wide)
        best = key.min(0)
        lowest = np.where(key == best, indices, np.iinfo(indices.dtype).max).min(0)
        with np.errstate(invalid="ignore"):
            made = np.where(best == -np.inf, np.nan, np.abs(best)).astype(values.dtype), lowest
        if self.call.collective != "reduce_scatter":
            return made
        ends = [0, *accumulate(self.call.rows())]
        return made[0][ends[rank] : ends[rank + 1]], made[1][ends[rank] : ends[rank + 1]]

    def check(self, result: Any) -> None:
        if self.want is None:
            assert result is None
            return
        if self.out is not None:
            assert result is self.out or all(a is b for a, b in zip(result, self.out, strict=True))
        for got, want in zip(result, self.want, strict=True):
            name = "bfloat16" if want.dtype == dtype_of("bfloat16") else want.dtype.name
            wide = unwrap(self.library, got, name, want.shape).astype(np.float64)
            np.testing.assert_array_equal(wide, want.astype(np.float64))  # float64, in which numpy recognises NaN
        if self.row["out"] != "inplace":
            assert self.before == b"".join(view.tobytes() for view in self.views), "the input was changed"


@lru_cache(maxsize=64)
def _pairs(dtype: str, shapes: tuple[tuple[int, ...], ...], generation: object) -> list[tuple[np.ndarray, np.ndarray]]:
    made = []
    for rank, shape in enumerate(shapes):
        rng = random("pairs", dtype, generation, rank)
        values = rng.integers(0, 4, shape).astype(dtype_of(dtype))
        if dtype in (*HALVES, *FLOATS):
            values = np.where(rng.random(shape) < 0.1, np.nan, values).astype(values.dtype)
        made.append((np.asarray(values), np.asarray(rng.integers(0, 100, shape), np.int64)))
    return made
