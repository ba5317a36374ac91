"""``mpicoll tune``: measure all applicable algorithms, and write the fastest ones to the table of later runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting, start_ranks

if TYPE_CHECKING:
    from mpicoll.cli.bench.cases import Kind, Task
    from mpicoll.cli.bench.device_arrays import Library
    from mpicoll.cli.bench.team import Team
    from mpicoll.engine.selection.query import SelectionQuery, TunedTable

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_DESCRIPTION = """\
Measure every algorithm that can serve, and write down which one to take: by collective, size, class of dtypes, and
number of ranks and nodes. Later runs on such machines, with this MPI library, go by that table.

  mpicoll tune                        all collectives on 2 ranks
  mpicoll tune allreduce -np 2,4      one collective, on 2 ranks and then on 4
  mpirun -np 8 mpicoll tune           on the ranks that are there
  mpicoll tune --device cuda -np 4    for data on devices such as these, shared by as many ranks

What was measured before for other collectives, sizes and shapes stays in the table.
"""

_EPILOG = """\
What is taken untuned stays unless another algorithm is at least 5 % faster. A time is the median over blocks of calls
of the time of the slowest rank; algorithms take turns. In the tables, "-" is what can't serve, or was left out because
a first look showed it to take more than three times as long as the best; "good" is the time of the best divided by that
of the one that is taken.
"""

_SEGMENTS = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
"""Segment sizes, in bytes, with which ``pieces`` is measured."""

_HOPELESS = 3.0
"""Ratio to the time of the best algorithm beyond which a first look excludes an algorithm from the measurement."""

_LARGE = 64 << 10
"""Bytes of the smallest vector whose ratios predict those of larger vectors."""

_MARGIN = 0.05
"""Fraction by which another algorithm must be faster than the untuned choice to replace it."""

_TIE = 0.02
"""Fraction of the best time within which the winner of the previous size wins again."""

_BLOCK = 2e-3
"""Target duration of a block of calls in seconds."""

_BLOCKS = (7, 101)
"""Minimum and maximum number of blocks."""

_TRIAL, _BEHIND = 3, 1.5
"""Number of blocks after which algorithms slower than the best by this factor are dropped, and that factor."""

_OPEN_BELOW, _OPEN_ABOVE = 1 << 10, 16 << 20
"""Bounds in bytes: a smallest size up to the first extends its rule to all smaller sizes, a largest size from the
second on extends its rule to all larger sizes."""

_MESSAGE = 4 << 20
"""Size in bytes of the messages with which the cost per byte is measured."""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "tune",
        help="measure which algorithms to take, for later runs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("collectives", nargs="*", metavar="COLLECTIVE", help="one or more, or all (all)")
    parser.add_argument("--sizes", default="8-64m", metavar="SIZES", help="in bytes: 8-64m (times --factor), or 8,1k")
    parser.add_argument("--factor", type=int, default=4, metavar="N", help="from size to size in a range (4)")
    parser.add_argument(
        "--dtypes", default="float32", metavar="NAMES", help="one of each class to tune for, such as float32,bfloat16"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the arrays are (cpu)")
    parser.add_argument("--array", choices=("torch", "cupy"), help="what they are on a device (torch, if it has CUDA)")
    parser.add_argument("-np", metavar="N", help="ranks to start, where mpirun has not started any: 2 or 2,4,8 (2)")
    parser.add_argument("--seconds", type=float, default=0.2, metavar="S", help="to spend on each size (0.2)")
    parser.add_argument("--blocks", type=int, metavar="N", help="time exactly so many blocks, whatever it takes")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table to add to (where later runs look)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing, print the rules")
    parser.add_argument("--check", action="store_true", help="measure anew, and compare what is taken with the best")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="S", help="end a job that takes longer (3600)")
    parser.set_defaults(run=run)


@dataclass(slots=True)
class _Asked:
    """The validated arguments. `progress` and `width` describe the terminal of the process that parsed them."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    array: Library | None
    seconds: float
    blocks: int | None
    output: Path | None
    check: bool
    progress: bool
    width: int = 0


def run(args: argparse.Namespace) -> int:
    """Tune on the ranks that the launcher has started, or in new jobs.

    Raises ArgumentError for arguments that cannot be tuned, SetupError if a requirement is missing or the table cannot
    be read or written.
    """
    import os

    from mpicoll.engine.selection import tuned_table
    from mpicoll.errors import ArgumentError
    from mpicoll.transport import launch_env

    asked = _checked(args)
    if asked.output is not None:
        tuned_table.existing(asked.output)  # before anything is measured
    sizes = _ranks(args.np)
    with _untuned():
        if launch_env.launched(os.environ):
            return _job(0, asked, sizes)
        if 1 in sizes:
            raise ArgumentError("tune: a single rank has nothing to choose; pass -np 2 or more")
        asked.width = formatting.terminal_width()
        jobs = [max(start_ranks.start(_job, (asked, (size,)), size, args.limit)) for size in sizes or (2,)]
    return int(max(jobs))


def _checked(args: argparse.Namespace) -> _Asked:
    import sys
    from importlib.util import find_spec

    from mpicoll.cli.bench import device_arrays
    from mpicoll.cli.bench.cases import COLLECTIVES, DTYPES
    from mpicoll.errors import ArgumentError, SetupError

    dtypes = tuple(args.dtypes.split(","))
    array = device_arrays.wanted("tune", args.device, args.array, dtypes)
    every = COLLECTIVES if array is None else tuple(name for name in COLLECTIVES if name != "barrier")
    collectives = every if args.collectives in ([], ["all"]) else tuple(args.collectives)
    for what, names, known in (("collective", collectives, every), ("dtype", dtypes, DTYPES)):
        for name in names:
            if name not in known:
                place = " on a device" if name in COLLECTIVES else ""
                raise ArgumentError(f"tune: no {what} {name!r}{place}; there are {', '.join(known)}")
    if "bfloat16" in dtypes and find_spec("torch") is None and find_spec("ml_dtypes") is None:
        raise SetupError("tune: bfloat16 needs torch or ml_dtypes, and neither is installed; leave it out of --dtypes")
    for option, number, least in (("factor", args.factor, 2), ("blocks", args.blocks or 1, 1)):
        if number < least:
            raise ArgumentError(f"tune: --{option} must be at least {least}, got {number}")
    for option, number in (("seconds", args.seconds), ("limit", args.limit)):
        if not 0 < number < float("inf"):
            raise ArgumentError(f"tune: --{option} must be a positive number of seconds, got {number}")
    try:
        sizes = tuple(formatting.sizes(args.sizes, args.factor))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"--sizes: {error}") from error
    output = None if args.dry_run else _output(args.output)
    return _Asked(
        collectives, sizes, dtypes, array, args.seconds, args.blocks, output, bool(args.check), sys.stderr.isatty()
    )


def _output(wanted: Path | None) -> Path:
    """Return the path of the table. Raise before the measurement, not after it, if it cannot be written there."""
    import os

    from mpicoll.engine.selection import tuned_table
    from mpicoll.errors import ArgumentError, SetupError

    named = os.environ.get("MPICOLL_TUNED", "off")
    output = wanted or (tuned_table.default_path() if named in ("", "off") else Path(named).expanduser())
    if output is None:
        raise SetupError("tune: there is no home directory to write to; pass --output")
    output = output.absolute()
    folder = next(one for one in output.parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ArgumentError(f"tune: {output}: nothing can be written to {folder}; pass another place by --output")
    return output


def _ranks(text: str | None) -> tuple[int, ...]:
    from mpicoll.errors import ArgumentError

    parts = text.split(",") if text else []
    if not all(part.isdigit() and int(part) for part in parts):
        raise ArgumentError(f"tune: -np {text}: must be numbers of ranks, such as 2 or 2,4")
    return tuple(map(int, parts))


@contextmanager
def _untuned() -> Iterator[None]:
    """Disable forced algorithms and tuned tables, here and in jobs started here, to compare with the untuned choice."""
    import os

    names = ("MPICOLL_TUNED", "MPICOLL_ALGORITHMS")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["MPICOLL_TUNED"] = "off"
    try:
        yield
    finally:
        del os.environ["MPICOLL_TUNED"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@dataclass(slots=True)
class _Point:
    """A task with the untuned choice, the medians that were measured, and the winner."""

    task: Task
    problem: SelectionQuery
    untuned: str
    medians: dict[str, float] = field(default_factory=dict)
    winner: str = ""

    def good(self, name: str) -> float:
        return min(self.medians.values()) / self.medians[name]

    @property
    def tuned_class(self) -> str:
        from mpicoll.engine.selection.query import tuned_class

        name = tuned_class(self.problem)
        assert name is not None  # the ranks have met on their devices
        return name

    @property
    def where(self) -> str:
        """Description of the device models, if any, and of the layout of the ranks."""
        device, shape = self.problem.device, self.problem.context.layout
        return str(shape) if device is None else f"{device.models}, {shape}"


def _job(rank: int, asked: _Asked, ranks: tuple[int, ...] = ()) -> int:
    """Tune as one rank of the job. `rank` is passed by :func:`mpicoll.spawn` and not used. Collective."""
    from datetime import datetime, timezone

    from mpicoll.cli.bench import device_arrays
    from mpicoll.cli.bench.team import Team
    from mpicoll.engine.selection import tuned_table
    from mpicoll.engine.world import world
    from mpicoll.errors import ArgumentError, SetupError

    comm = world()
    if ranks not in ((), (comm.size,)):
        raise ArgumentError(f"tune: -np {ranks[0]}, but the launcher has started {comm.size} ranks; leave -np out")
    if comm.size == 1:
        raise ArgumentError("tune: a single rank has nothing to choose; start 2 or more")
    team = Team(comm)
    try:
        device_arrays.give(team, asked.array)
    except SetupError as error:
        team.tell(error)
        # Ranks that exit with a nonzero status end the job, possibly before rank 0 has written the error.
        team.barrier()
        return 2
    groups = _groups(team, asked)
    entries: list[dict[str, Any]] = []
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _progress(team, asked, sum(map(len, groups)), "") as step:
        costs = _costs(team)
        for points in groups:
            _tune(team, points, asked, step)
            rules = ((points[0].task.collective, tuple(_rules(points))),)
            entry = tuned_table.entry_of(_library(), comm.context.layout, {points[0].tuned_class: rules}, costs, now)
            entries = tuned_table.merged(entries, entry)
            if team.rank == 0 and asked.output is not None:
                tuned_table.write(asked.output, entry)  # at once, so that an interrupted run keeps its results
    if team.rank == 0:
        _report(asked, groups, [f"{kind}: {text}" for kind, text in entries[0]["rules"].items()])
        _say_costs(asked, costs)
        if asked.output is not None:
            formatting.console(asked.width).print(f"written to {asked.output}")
    if asked.check:
        _check(team, groups, asked, tuned_table.table_of(entries, "what was just tuned"))
    return 0


def _library() -> str:
    from mpicoll.transport import mpi

    return mpi.library()


def _groups(team: Team, asked: _Asked) -> list[list[_Point]]:
    """Return the points to be measured, in ascending order of size, for each collective and class of dtypes."""
    from mpicoll.cli.bench.cases import REDUCTIONS, Task
    from mpicoll.collectives.explain import problem_of
    from mpicoll.engine.selection.selector import choose

    like = None if asked.array is None else _met(asked.array)
    groups: dict[tuple[str, str], dict[int, _Point]] = {}
    for collective in asked.collectives:
        for dtype in asked.dtypes if collective in REDUCTIONS else asked.dtypes[:1]:
            # numpy may lack bfloat16, and both half-precision dtypes belong to one class.
            known = "float16" if dtype == "bfloat16" else dtype
            for size in asked.sizes:
                task = Task(collective, size, dtype, "sum", team.size)
                problem = problem_of(collective, task.nbytes, "sum", known, 0, None, team.comm, like)
                points = groups.setdefault((collective, problem.kind), {})
                points.setdefault(task.nbytes, _Point(task, problem, choose(problem, None).name))
    return [list(points.values()) for points in groups.values()]


def _met(library: Library) -> Any:
    """Return an array on this rank's device after the ranks have exchanged the capabilities of their devices.

    Collective.
    """
    from contextlib import suppress

    import mpicoll
    from mpicoll.cli.bench import device_arrays
    from mpicoll.engine.selection.catalogue import NCCL
    from mpicoll.errors import AlgorithmError

    x = device_arrays.arrays(library).zeros(1, "float32")
    mpicoll.allreduce(x)
    # The first use of NCCL determines on all ranks alike if it is available.
    with suppress(AlgorithmError):
        mpicoll.allreduce(x, algorithm=NCCL)
    return x


def _candidates(point: _Point, size: int) -> list[str]:
    """Return the names of all applicable algorithms, without duplicates."""
    from mpicoll.engine.executors.shared_memory import piece_bytes
    from mpicoll.engine.selection.rules import format_range
    from mpicoll.engine.selection.selector import unsupported_reasons

    names = [name for name, refusal in unsupported_reasons(point.problem).items() if refusal is None]
    if "pieces" in names:
        own = piece_bytes(size)
        names += [
            f"pieces/{format_range(0, one).removeprefix('0-')}" for one in _SEGMENTS if own != one <= point.task.nbytes
        ]
    return list(dict.fromkeys([point.untuned, *names]))


def _tune(team: Team, points: Sequence[_Point], asked: _Asked, step: Callable[[str, int], None]) -> None:
    """Measure the points of one collective and class, and choose their winners."""
    ratios: dict[str, list[float]] = {}
    previous = ""
    for point in points:
        label = f"{point.task.collective} {point.task.dtype} {formatting.nbytes(point.task.nbytes)}"
        step(label, 0)
        names = [
            name
            for name in _candidates(point, team.size)
            if name == point.untuned or not _hopeless(ratios.get(name, ()))
        ]
        looks, point.medians = _measure(team, point.task, names, point.untuned, asked)
        if point.task.nbytes >= _LARGE:
            best = min(looks.values())
            for name, look in looks.items():
                ratios.setdefault(name, []).append(look / best)
        point.winner = previous = _winner(point.medians, point.untuned, previous)
        step(label, 1)


def _hopeless(ratios: Sequence[float]) -> bool:
    """Return True if `ratios`, times relative to the best at ascending sizes, exclude an algorithm from the looks."""
    return len(ratios) > 1 and min(ratios[-2:]) > _HOPELESS and ratios[-1] > 0.9 * ratios[-2]


def _winner(medians: Mapping[str, float], untuned: str, previous: str) -> str:
    best = min(medians, key=lambda name: medians[name])
    if medians[best] > (1 - _MARGIN) * medians[untuned]:
        return untuned
    if medians.get(previous, float("inf")) <= (1 + _TIE) * medians[best]:
        return previous
    return best


def _rules(points: Sequence[_Point]) -> list[tuple[float, float, str]]:
    """Return the rules for the winners of points of ascending sizes."""
    from mpicoll.engine.selection.rules import merge_adjacent

    sizes = [point.task.nbytes for point in points]
    borders = [
        0.0 if sizes[0] <= _OPEN_BELOW else float(sizes[0]),
        *(_between(low, high) for low, high in pairwise(sizes)),
        # A barrier has no bytes, so its only size has been measured.
        float("inf") if sizes[-1] >= _OPEN_ABOVE or sizes[-1] == 0 else 2.0 * sizes[-1],
    ]
    return merge_adjacent(
        [(low, high, point.winner) for low, high, point in zip(borders, borders[1:], points, strict=False)]
    )


def _between(low: int, high: int) -> float:
    """Return a short round number near the geometric mean."""
    mean = int((low * high) ** 0.5)
    shift = max(0, mean.bit_length() - 3)
    return float(min(high, max(low + 1, mean >> shift << shift)))


def _measure(
    team: Team, task: Task, names: Sequence[str], kept: str, asked: _Asked
) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds per call: of a first look at all `names`, and the median over blocks of the algorithms that the
    look did not exclude. `kept` is never excluded. All ranks return the same values."""
    import math

    import numpy as np

    from mpicoll.cli.bench.cases import Case
    from mpicoll.cli.bench.measure import timed
    from mpicoll.cli.bench.peers import candidate

    case = Case(task, team.rank, _kind(task, asked.array))
    calls = {name: candidate(name, kind=case.kind, algorithm=name).prepare(case).call for name in names}
    looks = {name: _look(team, call) for name, call in calls.items()}
    limit = _HOPELESS * min(looks.values())
    for name, look in looks.items():
        # Other load on the machine may have slowed one look down, but hardly both by so much.
        if limit < look < _HOPELESS * limit:
            looks[name] = min(look, _look(team, calls[name]))
    entered = [name for name in names if looks[name] <= limit or name == kept]
    repeats = {name: math.ceil(_BLOCK / looks[name]) for name in entered}
    lap = sum(repeats[name] * looks[name] for name in entered)
    blocks = asked.blocks or int(min(max(asked.seconds // lap, _BLOCKS[0]), _BLOCKS[1]))
    own: dict[str, list[float]] = {name: [] for name in entered}
    for turn in range(blocks):
        if turn == _TRIAL:
            trial = {name: float(np.median(team.slowest(own[name]))) for name in entered}
            entered = [name for name in entered if trial[name] <= _BEHIND * min(trial.values()) or name == kept]
        first = turn % len(entered)
        for name in entered[first:] + entered[:first]:
            own[name].append(timed(calls[name], repeats[name], team.barrier))
    return looks, {name: float(np.median(team.slowest(times))) for name, times in own.items()}


def _kind(task: Task, array: Library | None) -> Kind:
    """Return the kind of arrays on which `task` is measured."""
    from importlib.util import find_spec

    if array is not None:
        return "cuda torch" if array == "torch" else "cuda cupy"
    return "torch" if task.dtype == "bfloat16" and find_spec("torch") is not None else "numpy"


def _look(team: Team, call: Callable[[], Any]) -> float:
    """Return seconds per call of the slowest rank. A first call, which creates cached state, is not timed."""
    from mpicoll.cli.bench.measure import timed

    timed(call, 1, team.barrier)
    calls = 1
    while True:
        (per_call,) = team.slowest([min(timed(call, calls, team.barrier) for _ in range(2))])
        if per_call * calls >= _BLOCK / 4 or calls >= 1024:
            return max(per_call, 1e-9)
        calls *= 4


def _costs(team: Team) -> dict[str, Any]:
    """Measure the costs of a message inside a node and between nodes, and of reducing a byte while all ranks reduce."""
    import numpy as np

    from mpicoll.cli.bench.measure import timed

    nodes = team.comm.nodes
    near = next(((one, nodes.index(node)) for one, node in enumerate(nodes) if nodes.index(node) < one), None)
    far = next(((0, one) for one, node in enumerate(nodes) if node != nodes[0]), None)
    left, right = np.ones(1 << 18, np.float32), np.ones(1 << 18, np.float32)
    add = [timed(lambda: np.add(left, right, out=left), 8, team.barrier) for _ in range(11)]
    return {
        "node": None if near is None else _link(team, near),
        "network": None if far is None else _link(team, far),
        "gamma": float(np.median(team.slowest(add))) / left.nbytes,
    }


def _link(team: Team, pair: tuple[int, int]) -> list[float]:
    """Measure seconds per message and per byte between two ranks that both send, as in the rounds of a schedule."""
    import numpy as np

    transport, tag = team.comm.transport, team.comm.next_tag()
    times = []
    for nbytes, calls, blocks in ((8, 100, 11), (_MESSAGE, 1, 11)):
        own = [0.0] * blocks
        if team.rank in pair:
            peer = pair[0] + pair[1] - team.rank
            out, into = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            own = [_exchanged(transport, peer, out, into, tag, calls) for _ in range(blocks + 1)][1:]
        times.append(float(np.median(team.slowest(own))))
    return [times[0], max(0.0, times[1] - times[0]) / _MESSAGE]


def _exchanged(transport: Any, peer: int, out: Any, into: Any, tag: int, calls: int) -> float:
    import time

    begin = time.perf_counter()
    for _ in range(calls):
        transport.exchange([(peer, out)], [(peer, into)], tag)
    return (time.perf_counter() - begin) / calls


def _check(team: Team, groups: Sequence[Sequence[_Point]], asked: _Asked, table: TunedTable) -> None:
    """Measure again, and print the efficiency of the choices by `table` and of the untuned choices."""
    from dataclasses import replace

    from mpicoll.engine.selection.query import selection_context
    from mpicoll.engine.selection.selector import choose

    here = selection_context(team.comm.context.layout, table)
    rows = []
    goods: tuple[list[float], list[float]] = ([], [])
    with _progress(team, asked, sum(map(len, groups)), "checking ") as step:
        for point in (point for points in groups for point in points):
            label = f"{point.task.collective} {point.task.dtype} {formatting.nbytes(point.task.nbytes)}"
            step(label, 0)
            taken = choose(replace(point.problem, context=here), None).name
            names = list(dict.fromkeys([point.untuned, *point.medians, taken]))
            anew = _Point(point.task, point.problem, point.untuned)
            looks, anew.medians = _measure(team, point.task, names, taken, asked)
            # An untuned choice that the first look excluded from the blocks keeps the time of that look.
            anew.medians.setdefault(point.untuned, looks[point.untuned])
            best = min(anew.medians, key=lambda name: anew.medians[name])
            for good, name in zip(goods, (taken, point.untuned), strict=True):
                good.append(anew.good(name))
            rows.append([label, best, taken, _percent(goods[0][-1]), point.untuned, _percent(goods[1][-1])])
            step(label, 1)
    if team.rank == 0:
        tuned_good, untuned_good = goods
        caption = (
            f"geometric means: tuned {_percent(_mean(tuned_good))}, untuned {_percent(_mean(untuned_good))}; below 95 %"
            f" tuned: {_below(tuned_good, 0.95)} of {len(rows)}; below 85 % untuned: {_below(untuned_good, 0.85)}"
        )
        columns = ("measured anew", "best", "tuned", "good", "untuned", "good")
        formatting.console(asked.width).print(
            formatting.table(f"check, {groups[0][0].where}", columns, rows, caption=caption)
        )


def _report(asked: _Asked, groups: Sequence[Sequence[_Point]], rules: Sequence[str]) -> None:
    console = formatting.console(asked.width)
    for points in groups:
        names = list(dict.fromkeys(name for point in points for name in point.medians))
        rows = [
            [
                formatting.nbytes(point.task.nbytes),
                *(formatting.seconds(point.medians[name]) if name in point.medians else "-" for name in names),
                point.winner,
                point.untuned,
                _percent(point.good(point.untuned)),
            ]
            for point in points
        ]
        first = points[0]
        what = first.task.dtype if first.problem.kind != "moved" else "any dtype"
        caption = f"untuned, geometric mean: {_percent(_mean([point.good(point.untuned) for point in points]))} good"
        title = f"{first.task.collective}, {what}, {first.where}: median time per call"
        console.print(formatting.table(title, ("size", *names, "winner", "untuned", "good"), rows, caption=caption))
    for line in rules:
        console.print(line)


def _say_costs(asked: _Asked, costs: Mapping[str, Any]) -> None:
    links = [
        f"{name}: {formatting.seconds(costs[which][0])} a message,"
        f" {formatting.rate(1 / max(costs[which][1], 1e-15))} GB/s"
        for which, name in (("node", "in a node"), ("network", "between nodes"))
        if costs[which] is not None
    ]
    line = "; ".join([*links, f"sums: {formatting.rate(1 / costs['gamma'])} GB/s"])
    formatting.console(asked.width).print(line)


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _mean(goods: Sequence[float]) -> float:
    from math import exp, log

    return exp(sum(map(log, goods)) / len(goods))


def _below(goods: Sequence[float], least: float) -> int:
    return sum(good < least for good in goods)


@contextmanager
def _progress(team: Team, asked: _Asked, total: int, what: str) -> Iterator[Callable[[str, int], None]]:
    """Yield ``step(label, done)``, which advances the bar on rank 0's terminal and does nothing elsewhere."""
    with formatting.progress(team.rank == 0 and asked.progress) as bar:
        task = bar.add_task("", total=total)

        def step(label: str, done: int) -> None:
            bar.update(task, description=f"{what}{label}", advance=done)
            bar.refresh()

        yield step
