"""Which algorithm carries out a request, and why.

Forced (argument, then ``with mpicoll.algorithms(...)``, then ``MPICOLL_ALGORITHMS``) comes before the table, and the
table before whatever else can serve the request. A rule reads ``allreduce:0-64k:native,64k-inf:ring``: byte ranges,
lower end included, upper end not; ``allreduce:ring`` is short for ``allreduce:0-inf:ring``; ``chain/8`` asks for 8
pipeline segments; rules of several collectives are separated by ``;``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from mpicoll import schedules
from mpicoll.config import config
from mpicoll.engine.arena import SLOT
from mpicoll.engine.shared import METHODS, SLOTS
from mpicoll.errors import AlgorithmError, SetupError
from mpicoll.schedules import Algorithm

NATIVE = "native"

Rule: TypeAlias = tuple[float, float, str]
"""From, to (bytes), algorithm."""

Rules: TypeAlias = tuple[tuple[str, tuple[Rule, ...]], ...]
"""Rules by collective. A tuple, so that it can be a cache key."""

TABLE = (
    "allreduce:native;reduce:native;bcast:native;gather:native;scatter:native;allgather:native;"
    "reduce_scatter:native;alltoall:native;scan:native;exscan:native;barrier:native"
)
"""What is taken unless something is forced."""

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


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked of an algorithm. The same on every rank, since all must come to the same choice.

    `nbytes` is what the collective's cost is counted in: the vector, or all blocks of one buffer; None if the ranks
    can't know it from each other (alltoall with counts). `native` says why the MPI library can't serve it, or is None.
    """

    collective: str
    nbytes: int | None
    size: int
    root: int = 0
    commutative: bool = True
    elementwise: bool = True
    uneven: bool = False
    native: str | None = None
    unshared: str | None = "there is no shared memory"
    unread: str | None = "there is no shared memory"


@dataclass(frozen=True, slots=True)
class Method:
    """A way through shared memory (see :mod:`mpicoll.engine.shared`)."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm (None: the MPI library's own) and the reason why it was taken.

    `segments` is the number of pieces of a pipelined schedule; `segment`, if it was asked for, the bytes of the pieces
    of a method."""

    name: str
    algorithm: Algorithm | Method | None
    segments: int
    reason: str
    segment: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


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


@lru_cache(maxsize=256)
def resolve(collective: str, text: str) -> tuple[Algorithm | Method | None, int | None]:
    """What `text` means: None for ``native``; a schedule's algorithm, and the number of segments behind the slash, if
    there is one; a method, and the bytes of its pieces."""
    name, slash, detail = text.partition("/")
    if name == NATIVE and not slash:
        return None, None
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
    nbytes = _bytes(text)
    if not 4096 <= nbytes <= SLOT:
        raise AlgorithmError(
            f"{collective} algorithm {name}/{text}: the part behind / must be the bytes of a piece, from 4k to"
            f" {SLOT >> 10}k"
        )
    return int(nbytes)


def algorithms_of(collective: str) -> tuple[str, ...]:
    """All algorithms of a collective: native, the methods and the schedules."""
    return (NATIVE, *METHODS.get(collective, ()), *schedules.algorithms_of(collective))


def choose(problem: Problem, argument: str | None) -> Choice:
    """The algorithm for `problem`. Raises AlgorithmError if `argument` names one that can't serve it."""
    return _choose(problem, argument, forced())


@lru_cache(maxsize=4096)
def _choose(problem: Problem, argument: str | None, context: Rules) -> Choice:
    if argument is not None:
        algorithm, segments = resolve(problem.collective, argument)
        refusal = _refusal(problem, algorithm)
        if refusal is not None:
            raise AlgorithmError(
                f"{problem.collective}: algorithm {argument!r} can't serve this: {refusal}; leave algorithm= out to"
                " have one chosen"
            )
        return _choice(problem, argument, algorithm, segments, "forced by the argument")
    refused: list[str] = []
    for text, why in _candidates(problem, context):
        algorithm, segments = resolve(problem.collective, text)
        refusal = _refusal(problem, algorithm)
        if refusal is None:
            return _choice(problem, text, algorithm, segments, "; ".join([*refused, why]))
        refused.append(f"not {text} ({why}): {refusal}")
    raise AlgorithmError(f"{problem.collective}: nothing can serve this: {'; '.join(refused)}")


def _candidates(problem: Problem, context: Rules) -> Iterator[tuple[str, str]]:
    for rules, why in (
        (context, "forced by `with algorithms`"),
        (_environment(), "forced by MPICOLL_ALGORITHMS"),
        (parse(TABLE), "table"),
        (parse(FALLBACK), "fallback table"),
    ):
        for collective, ranges in rules:
            if collective == problem.collective:
                for low, high, name in ranges:
                    if low <= (problem.nbytes or 0) < high:
                        yield name, why
    for name in schedules.algorithms_of(problem.collective):
        yield name, "the first one that can serve"


@lru_cache(maxsize=1)
def _environment() -> Rules:
    try:
        return parse(config().algorithms)
    except AlgorithmError as error:
        raise SetupError(f"MPICOLL_ALGORITHMS={config().algorithms!r}: {error}") from error


def _refusal(problem: Problem, algorithm: Algorithm | Method | None) -> str | None:
    """Why `algorithm` can't serve `problem`, or None if it can."""
    if algorithm is None:
        return problem.native
    if isinstance(algorithm, Method):
        return _refusal_of_method(problem, algorithm.name)
    if not problem.commutative and not algorithm.keeps_order(problem.root):
        return "the operation does not commute, and this algorithm changes the order of ranks"
    if not problem.elementwise and algorithm.schedule(0, problem.size, problem.root).chunks > 1:
        return "the operation is not elementwise, and this algorithm splits the array"
    if problem.uneven and not algorithm.uneven:
        return "the blocks differ in size"
    return None


def _refusal_of_method(problem: Problem, name: str) -> str | None:
    if problem.unshared is not None:
        return problem.unshared
    if name == "cma" and problem.unread is not None:
        return problem.unread
    if problem.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks" if problem.collective != "barrier" else None
    if name == "slots":
        return f"{problem.nbytes} bytes are more than the {SLOTS} of slots" if problem.nbytes > SLOTS else None
    if not problem.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _choice(
    problem: Problem, text: str, algorithm: Algorithm | Method | None, segments: int | None, reason: str
) -> Choice:
    if isinstance(algorithm, Method):
        return Choice(text, algorithm, 1, reason, segments)
    if segments is None:
        # A pipeline of whole-array operations has a single segment.
        wanted = (problem.nbytes or 0) // _SEGMENT if problem.elementwise else 1
        segments = max(1, min(_MAX_SEGMENTS, wanted))
    return Choice(text, algorithm, segments, reason)
