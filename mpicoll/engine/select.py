"""Which algorithm carries out a request, and why.

Forced (argument, then ``with mpicoll.algorithms(...)``, then ``MPICOLL_ALGORITHMS``) comes before what was tuned, that
before the table, the table before the schedule that should take least time, and that before whatever else can serve the
request. A rule reads ``allreduce:0-64k:native,64k-inf:ring``: byte ranges,
lower end included, upper end not; ``allreduce:ring`` is short for ``allreduce:0-inf:ring``; ``chain/8`` asks for 8
pipeline segments; rules of several collectives are separated by ``;``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mpicoll import schedules
from mpicoll.config import config
from mpicoll.engine.arena import SLOT
from mpicoll.engine.model import Rule, Rules, Site, predict
from mpicoll.engine.shared import METHODS, SLOTS
from mpicoll.errors import AlgorithmError, SetupError
from mpicoll.schedules import Algorithm

NATIVE = "native"

HIERARCHICAL = "hierarchical"

NCCL, IPC = "nccl", "ipc"

_WAYS = (NCCL, IPC)
"""Algorithms of collectives of data on a device: NVIDIA's library; and the ranks of a node that reach each other's
device memory."""

_BY_NODES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "gather", "scatter", "alltoall")
"""The collectives that have this algorithm."""

KINDS = ("float", "half", "integer", "complex", "moved", "other")
"""Classes of dtypes that are tuned apart: in what is reduced, how fast that goes; operations that only move bytes are
alike for all dtypes. Data on devices is tuned apart from the host's; see :func:`tuned_as`."""

_INSTEAD = {"integer": "float", "complex": "float"}
"""The class whose rules serve where none were tuned for the class itself: bytes are reduced about as fast."""

_ON = " on "
"""Between a class and devices."""

TABLE = (
    "allreduce:0-8k:native,0-64k:slots,0-8m:pieces,8m-inf:cma,0-inf:pieces,2m-inf:hierarchical,2m-inf:ring,0-inf:native;"
    "reduce:0-2m:native,0-64k:slots,0-inf:pieces,0-inf:native;"
    "reduce_scatter:0-32k:native,0-128k:pieces,128k-inf:cma,0-inf:pieces,0-inf:native;"
    "bcast:native,pieces;gather:native,pieces;scatter:native,pieces;allgather:native,pieces;alltoall:native,pieces;"
    "scan:native;exscan:native;barrier:native"
)
"""What is taken unless something is forced."""

DEVICE_TABLE = (
    "allreduce:0-4k:slots,0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:slots,0-inf:pieces,0-inf:hierarchical,2m-inf:ring;"
    "reduce:0-4k:slots,0-1m:ipc,0-inf:nccl,0-inf:ipc,0-64k:slots,0-inf:pieces,0-inf:hierarchical;"
    "reduce_scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:pieces,0-inf:hierarchical;"
    "bcast:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "gather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "scatter:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "allgather:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces;"
    "alltoall:0-1m:ipc,0-inf:nccl,0-inf:ipc,0-inf:native,0-inf:pieces"
)
"""The same for data on a device. MPI's own reductions there come only when asked for: libraries that have any are known
to copy to the host for them."""

FALLBACK = (
    "allreduce:0-16k:recursive_doubling,16k-inf:halving_doubling;"
    "reduce:0-64k:binomial,64k-inf:reduce_scatter_gather;"
    "bcast:0-64k:binomial,64k-inf:scatter_allgather;"
    "gather:binomial;"
    "scatter:binomial;"
    "allgather:0-64k:bruck,64k-inf:ring;"
    "reduce_scatter:0-64k:recursive_halving,64k-inf:pairwise;"
    "alltoall:0-4k:bruck,4k-inf:pairwise;"
    "scan:recursive_doubling;"
    "exscan:recursive_doubling;"
    "barrier:dissemination"
)
"""What is taken where the MPI library can't serve, or isn't there."""

_SEGMENT = 128 * 1024
"""Bytes of a pipeline segment, unless the number of segments is asked for."""

_MAX_SEGMENTS = 64

_DIRECT_BYTES = 4096
"""From here on methods are preferred if they may find the buffers in memory that all ranks reach."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Why data on a device can't be served by each way, or None: by NCCL (`nccl`), by ranks that reach each other's
    device memory (`ipc`), by MPI's own collective (`native`), and by shared memory of the host, where the processor
    reduces (`host`). `models` says what devices the ranks have, and how many ranks share one, if they do; None until
    they have told each other."""

    nccl: str | None = None
    ipc: str | None = None
    native: str | None = None
    host: str | None = None
    models: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked of an algorithm. The same on every rank, since all must come to the same choice.

    `nbytes` is what the collective's cost is counted in: the vector, or all blocks of one buffer; None if the ranks
    can't know it from each other (alltoall with counts). `kind` is one of KINDS. `native` says why the MPI library
    can't serve it, or is None.
    """

    collective: str
    nbytes: int | None
    site: Site
    kind: str = "moved"
    root: int = 0
    commutative: bool = True
    elementwise: bool = True
    uneven: bool = False
    native: str | None = None
    unshared: str | None = "there is no shared memory"
    unread: str | None = "there is no shared memory"
    lost: str | None = None
    """Why there is no shared memory after all, as its first use has shown."""
    allocated: bool = False
    """Whether buffers may lie in memory of :func:`mpicoll.empty`."""
    device: Reach | None = None
    """For data on a device: what can be done with it."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way through shared memory (see :mod:`mpicoll.engine.shared`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Way:
    """``nccl`` or ``ipc`` (see :mod:`mpicoll.engine.device`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """In the nodes, then between them (see :mod:`mpicoll.engine.hierarchy`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm (None: the MPI library's own) and the reason why it was taken.

    `segments` is the number of pieces of a pipelined schedule; `segment`, if it was asked for, the bytes of the pieces
    of a method. `refused` says of algorithms why they can't serve, where that was asked for."""

    name: str
    algorithm: Algorithm | Method | Way | Hierarchy | None
    segments: int
    reason: str
    segment: int | None = None
    refused: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.name}: {self.reason}", *self.refused])


_forced: ContextVar[Rules] = ContextVar("mpicoll_algorithms", default=())


@contextmanager
def algorithms(**rules: str) -> Iterator[None]:
    """Force algorithms for the calls of this thread inside the ``with`` block: ``algorithms(allreduce="ring")``.

    Each keyword is a collective, each value an algorithm (``"ring"``, ``"chain/8"``, ``"native"``) or byte ranges
    (``"0-64k:native,64k-inf:ring"``). All ranks must force the same. Where the algorithm can't serve a request (an
    operation that doesn't commute, say), the next choice is taken; inner blocks go before outer ones. Raises
    AlgorithmError for unknown names.
    """
    parsed = tuple(parse(f"{collective}:{rule}")[0] for collective, rule in rules.items())
    token = _forced.set(parsed + _forced.get())
    try:
        yield
    finally:
        _forced.reset(token)


forced: Callable[[], Rules] = _forced.get
"""The rules of the surrounding ``with algorithms(...)`` blocks."""


@lru_cache(maxsize=256)
def parse(text: str) -> Rules:
    """Read rules. Raises AlgorithmError that quotes what is wrong."""
    return tuple(_collective_rules(part.strip()) for part in text.split(";") if part.strip())


def _collective_rules(text: str) -> tuple[str, tuple[Rule, ...]]:
    collective, colon, rest = text.partition(":")
    if not colon or not rest:
        raise AlgorithmError(f"rule {text!r}: expected collective:algorithm or collective:from-to:algorithm,...")
    if collective not in schedules.collectives():
        raise AlgorithmError(
            f"rule {text!r}: no collective {collective!r}; there are {', '.join(schedules.collectives())}"
        )
    return collective, tuple(_rule(collective, part.strip()) for part in rest.split(","))


def _rule(collective: str, text: str) -> Rule:
    extent, colon, name = text.rpartition(":")
    if not colon:
        low, high = 0.0, float("inf")
    else:
        match = re.fullmatch(r"(\w+)-(\w+)", extent)
        if match is None:
            raise AlgorithmError(f"rule {text!r} of {collective}: expected from-to:algorithm, such as 4k-1m:{name}")
        low, high = _bytes(match[1]), _bytes(match[2])
        if low >= high:
            raise AlgorithmError(f"rule {text!r} of {collective}: the range {extent} is empty")
    resolve(collective, name)
    return low, high, name


def _bytes(text: str) -> float:
    if text == "inf":
        return float("inf")
    match = re.fullmatch(r"(\d+)([kmg]?)", text.lower())
    if match is None:
        raise AlgorithmError(f"{text!r} is no number of bytes; write such as 0, 512, 64k, 1m, 2g or inf")
    return float(int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]])


def text_of(rules: Rules) -> str:
    """What :func:`parse` reads as `rules`."""
    return ";".join(
        f"{collective}:{','.join(f'{extent_text(low, high)}:{name}' for low, high, name in ranges)}"
        for collective, ranges in rules
    )


def extent_text(low: float, high: float) -> str:
    """A range of bytes as rules have it: ``4k-1m``."""
    return f"{_bytes_text(low)}-{_bytes_text(high)}"


def _bytes_text(number: float) -> str:
    if number == float("inf"):
        return "inf"
    for unit, shift in (("g", 30), ("m", 20), ("k", 10)):
        if number and number % (1 << shift) == 0:
            return f"{int(number) >> shift}{unit}"
    return str(int(number))


@lru_cache(maxsize=256)
def resolve(collective: str, text: str) -> tuple[Algorithm | Method | Way | Hierarchy | None, int | None]:
    """What `text` means: None for ``native``; a schedule's algorithm, and the number of segments behind the slash, if
    there is one; a method, and the bytes of its pieces."""
    name, slash, detail = text.partition("/")
    if name == NATIVE and not slash:
        return None, None
    if name == HIERARCHICAL and collective in _BY_NODES:
        if slash:
            raise AlgorithmError(f"{collective} algorithm {text!r}: {name} has no pieces")
        return Hierarchy(), None
    if name in _WAYS and collective in _BY_NODES:
        if slash:
            raise AlgorithmError(f"{collective} algorithm {text!r}: {name} has no pieces")
        return Way(name), None
    if name in METHODS.get(collective, ()):
        return Method(name), _piece(collective, name, detail) if slash else None
    if name not in schedules.algorithms_of(collective):
        raise AlgorithmError(
            f"{collective} has no algorithm {name!r}; there are {', '.join(algorithms_of(collective))}"
        )
    algorithm = schedules.get(collective, name)
    if not slash:
        return algorithm, None
    if not detail.isdigit() or int(detail) < 1 or not algorithm.segmented:
        raise AlgorithmError(
            f"{collective} algorithm {text!r}: "
            + ("the part behind / must be a number of segments" if algorithm.segmented else f"{name} has no segments")
        )
    return algorithm, int(detail)


def _piece(collective: str, name: str, text: str) -> int:
    """The bytes of the pieces of a method."""
    if name == "slots":
        raise AlgorithmError(f"{collective} algorithm {name}/{text}: {name} has no pieces")
    try:
        nbytes = _bytes(text)
    except AlgorithmError:
        nbytes = 0
    if not 4096 <= nbytes <= SLOT:
        raise AlgorithmError(
            f"{collective} algorithm {name}/{text}: the part behind / must be the bytes of a piece, from 4k to"
            f" {SLOT >> 10}k"
        )
    return int(nbytes)


def algorithms_of(collective: str) -> tuple[str, ...]:
    """All algorithms of a collective: native, the methods, hierarchical, the ways of devices and the schedules."""
    by_nodes = (HIERARCHICAL, *_WAYS) if collective in _BY_NODES else ()
    return (NATIVE, *METHODS.get(collective, ()), *by_nodes, *schedules.algorithms_of(collective))


def refusals(problem: Problem) -> dict[str, str | None]:
    """For each algorithm of the collective that is for data where it lies: why it can't serve `problem`, or None."""
    names = (name for name in algorithms_of(problem.collective) if problem.device is not None or name not in _WAYS)
    return {name: _refusal(problem, resolve(problem.collective, name)[0]) for name in names}


def choose(problem: Problem, argument: str | None) -> Choice:
    """The algorithm for `problem`. Raises AlgorithmError if `argument` names one that can't serve it."""
    return _choose(problem, argument, forced())


@lru_cache(maxsize=4096)
def _choose(problem: Problem, argument: str | None, context: Rules) -> Choice:
    if argument is not None:
        algorithm, segments = resolve(problem.collective, argument)
        # Memory that is lost is found so by all ranks when they use it, and another algorithm serves then.
        refusal = _refusal(replace(problem, lost=None), algorithm)
        if refusal is not None:
            raise AlgorithmError(
                f"{problem.collective}: algorithm {argument!r} can't serve this: {refusal}; leave algorithm= out to"
                " have one chosen"
            )
        return _choice(problem, argument, algorithm, segments, "forced by the argument")
    refused: list[str] = []
    asked: set[str] = set()
    for text, why in _candidates(problem, context):
        if text in asked:
            continue
        asked.add(text)
        algorithm, segments = resolve(problem.collective, text)
        refusal = _refusal(problem, algorithm)
        if refusal is None:
            return _choice(problem, text, algorithm, segments, "; ".join([*refused, why]))
        refused.append(f"not {text} ({why}): {refusal}")
    raise AlgorithmError(f"{problem.collective}: nothing can serve this: {'; '.join(refused)}")


def _candidates(problem: Problem, context: Rules) -> Iterator[tuple[str, str]]:
    """Names of algorithms and why they would be taken, in the order in which they are asked whether they can serve."""
    for rules, why in ((context, "forced by `with algorithms`"), (_environment(), "forced by MPICOLL_ALGORITHMS")):
        for name, _ in _matching(rules, problem):
            yield name, why
    if problem.allocated and (problem.nbytes or 0) >= _DIRECT_BYTES:
        for name in METHODS.get(problem.collective, ())[-2:]:
            yield name, "there is memory of mpicoll.empty, in which it needs no copies"
    yield from _tuned(problem)
    for name, extent in _matching(parse(TABLE if problem.device is None else DEVICE_TABLE), problem):
        yield name, f"table{extent}"
    yield from _cheapest(problem)
    for name, _ in _matching(parse(FALLBACK), problem):
        yield name, "fallback table"
    for name in schedules.algorithms_of(problem.collective):
        yield name, "the first one that can serve"


def _matching(rules: Rules, problem: Problem) -> Iterator[tuple[str, str]]:
    """The algorithms that `rules` have for `problem`, each with the range of its rule, if it is one of several."""
    for collective, ranges in rules:
        if collective == problem.collective:
            for low, high, name in ranges:
                if low <= (problem.nbytes or 0) < high:
                    yield name, "" if (low, high) == (0, float("inf")) else f", {extent_text(low, high)}"


def _tuned(problem: Problem) -> Iterator[tuple[str, str]]:
    shape, table = problem.site.shape, problem.site.table
    by_kind = table.rules.get(shape, {})
    for kind in (tuned_as(problem), tuned_as(problem, instead=True)):
        if kind is not None and kind in by_kind:
            for name, extent in _matching(by_kind[kind], problem):
                yield name, f"tuned for {kind}{extent} on {shape}, {table.source}"
            return


def tuned_as(problem: Problem, *, instead: bool = False) -> str | None:
    """What the rules for such problems are called in tuned tables: the class of dtypes (or the one whose rules serve
    `instead`), and for data on devices what these are; None while that isn't known yet."""
    kind = _INSTEAD.get(problem.kind, problem.kind) if instead else problem.kind
    if problem.device is None:
        return kind
    return None if problem.device.models is None else f"{kind}{_ON}{problem.device.models}"


def is_class(text: str) -> bool:
    """Whether rules in tuned tables may be called so."""
    return text.partition(_ON)[0] in KINDS


def _cheapest(problem: Problem) -> Iterator[tuple[str, str]]:
    """The schedule that should take least time, if that can be told."""
    if problem.nbytes is None or problem.site.shape.ranks == 1:
        return
    costs = problem.site.table.costs
    segments = default_segments(problem)
    expected: list[tuple[float, str]] = []
    for name in schedules.algorithms_of(problem.collective):
        algorithm = schedules.get(problem.collective, name)
        if _refusal(problem, algorithm) is None:
            expected.append((predict(algorithm, problem.site.shape, problem.nbytes, segments, costs), name))
    if expected:
        (time, name), *others = sorted(expected)
        following = "".join(f", {other} {_microseconds(later)}" for later, other in others[:1])
        kind = "measured" if costs.measured else "typical"
        yield name, f"cost model with {kind} costs: {_microseconds(time)}{following}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} µs"


@lru_cache(maxsize=1)
def _environment() -> Rules:
    try:
        return parse(config().algorithms)
    except AlgorithmError as error:
        raise SetupError(f"MPICOLL_ALGORITHMS={config().algorithms!r}: {error}") from error


def _refusal(problem: Problem, algorithm: Algorithm | Method | Way | Hierarchy | None) -> str | None:
    """Why `algorithm` can't serve `problem`, or None if it can."""
    if algorithm is None:
        return problem.native or (None if problem.device is None else problem.device.native)
    if isinstance(algorithm, Method):
        return _refusal_of_method(problem, algorithm.name)
    if isinstance(algorithm, Way):
        return _refusal_of_way(problem, algorithm.name)
    if isinstance(algorithm, Hierarchy):
        return _refusal_by_nodes(problem)
    if not problem.commutative and not algorithm.keeps_order(problem.root):
        return "the operation does not commute, and this algorithm changes the order of ranks"
    if not problem.elementwise and algorithm.schedule(0, problem.site.shape.ranks, problem.root).chunks > 1:
        return "the operation is not elementwise, and this algorithm splits the array"
    if problem.uneven and not algorithm.uneven:
        return "the blocks differ in size"
    return None


def _refusal_of_method(problem: Problem, name: str) -> str | None:
    if problem.unshared is not None or problem.lost is not None:
        return problem.unshared or problem.lost
    if name == "cma" and (problem.unread is not None or problem.device is not None):
        return problem.unread or "the data is on a device"
    if problem.device is not None and problem.device.host is not None:
        return problem.device.host
    if problem.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks" if problem.collective != "barrier" else None
    if name == "slots":
        return f"{problem.nbytes} bytes are more than the {SLOTS} of slots" if problem.nbytes > SLOTS else None
    if not problem.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _refusal_of_way(problem: Problem, name: str) -> str | None:
    if problem.device is None:
        return "the data is on the host"
    refusal = problem.device.nccl if name == NCCL else problem.device.ipc or problem.lost
    if refusal is not None:
        return refusal
    if problem.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks"
    if not problem.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _refusal_by_nodes(problem: Problem) -> str | None:
    shape = problem.site.shape
    if shape.nodes == 1:
        return "the ranks are on one node"
    if shape.per_node == 1:
        return "each rank has a node of its own"
    if not shape.even:
        return "the nodes differ in their number of ranks"
    if problem.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks"
    if not problem.commutative:
        return "the operation does not commute, and this algorithm changes the order of ranks"
    if not problem.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _choice(
    problem: Problem,
    text: str,
    algorithm: Algorithm | Method | Way | Hierarchy | None,
    segments: int | None,
    reason: str,
) -> Choice:
    if isinstance(algorithm, Method | Way | Hierarchy):
        return Choice(text, algorithm, 1, reason, segments)
    return Choice(text, algorithm, default_segments(problem) if segments is None else segments, reason)


def default_segments(problem: Problem) -> int:
    """The number of pieces of a pipelined schedule where none is asked for."""
    # A pipeline of whole-array operations has a single segment.
    wanted = (problem.nbytes or 0) // _SEGMENT if problem.elementwise else 1
    return max(1, min(_MAX_SEGMENTS, wanted))
