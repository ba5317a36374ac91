"""Elements of a schedule: an algorithm as data.

An algorithm is a generator that yields, round by round, the actions of ONE rank. It names peers and *chunks*, never
bytes or dtypes. The meaning of a chunk depends on the collective (see :mod:`mpicoll.schedules.specs`):

* vector collectives (allreduce, reduce, bcast, scan, exscan): chunk ``c`` is the ``c``-th of ``chunks`` nearly equal
  consecutive pieces of the vector;
* block collectives (allgather, gather, scatter, reduce_scatter): chunk ``i`` is the block of rank ``i``;
* alltoall: chunk ``d`` is the block for rank ``d``, chunk ``size + s`` the block from rank ``s``;
* barrier: there are no chunks; a message without chunks is a token.

Chunks behind those are scratch, in the number that the algorithm requests.

Meaning of a round: all its messages are posted at once; sends read what the chunks held when the round began; when
every message of the round has completed, the received parts that are to be reduced are combined in the order in which
they are listed, and then the local steps run in order. Both chunks of a local step have the same size. Two messages
from one rank to another are matched in the order in which they were posted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from mpicoll.collective_kinds import BLOCKS, ROOTED
from mpicoll.errors import AlgorithmError, RankError
from mpicoll.schedules.formula import check_formula

Chunks: TypeAlias = range | tuple[int, ...]
"""Chunk indices in the order in which they travel. Consecutive ones lie side by side in memory, so prefer ranges.

Example:
    >>> send = mpicoll.schedules.Send(to=1, chunks=range(2, 4))
    >>> isinstance(send.chunks, mpicoll.schedules.Chunks)
    True
"""


@dataclass(frozen=True, slots=True)
class Send:
    """Send `chunks` to rank `to`. No chunks: an empty message, a token.

    Example:
        >>> mpicoll.schedules.Send(to=1, chunks=(0, 2)).to
        1
    """

    to: int
    chunks: Chunks = ()


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive `chunks` from rank `source`, replacing what they held or, with `reduce`, combining with it.

    The part of the lower rank is the left operand, which keeps the order of ranks wherever an algorithm combines
    neighbouring intervals of ranks only.

    Example:
        >>> mpicoll.schedules.Recv(source=1, chunks=range(2, 4), reduce=True).chunks
        range(2, 4)
    """

    source: int
    chunks: Chunks = ()
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Local step: copy chunk `src` to chunk `dst`.

    Example:
        >>> mpicoll.schedules.Round(then=(mpicoll.schedules.Copy(src=0, dst=1),)).then
        (Copy(src=0, dst=1),)
    """

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Local step: set chunk `dst` to ``src ⊕ dst`` or, with `src_right`, to ``dst ⊕ src``.

    Example:
        >>> mpicoll.schedules.Reduce(src=1, dst=0).src_right
        False
    """

    src: int
    dst: int
    src_right: bool = False


Local: TypeAlias = Copy | Reduce
"""Step of a rank by itself, which follows the messages of a round.

Example:
    >>> first = mpicoll.schedules.get("alltoall", "pairwise").schedule(0, 4).rounds[0]
    >>> first.then, isinstance(first.then[0], mpicoll.schedules.Local)
    ((Copy(src=0, dst=4),), True)
"""


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that are in flight together, then local steps.

    Example:
        >>> first = mpicoll.schedules.get("allreduce", "ring").schedule(0, 4).rounds[0]
        >>> first.sends, first.recvs
        ((Send(to=1, chunks=(0,)),), (Recv(source=3, chunks=(3,), reduce=True),))
    """

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()
    then: tuple[Local, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of rank `rank` of `size`. `chunks` carry data, ``scratch`` further chunks are temporary.

    Example:
        >>> schedule = mpicoll.schedules.get("allreduce", "ring").schedule(0, 4)
        >>> schedule.rank, schedule.chunks, len(schedule.rounds)
        (0, 4, 6)
    """

    collective: str
    algorithm: str
    rank: int
    size: int
    root: int
    chunks: int
    scratch: int
    rounds: tuple[Round, ...]


Generator: TypeAlias = Callable[..., Iterator[Round]]
Count: TypeAlias = Callable[[int, int], int]


@dataclass(frozen=True, slots=True, eq=False)
class Algorithm:
    """A named algorithm of a collective.

    `chunks` and `scratch` map ``(size, segments)`` to a count. `segmented` generators take ``segments`` as a keyword:
    the number of pieces of a pipeline. `uneven` permits blocks of different sizes. `ordered` promises that, at least
    for root 0, operands are combined in the order of ranks, so an operation need not commute; `verify` proves it.
    `any_root` promises the same for every root. `rounds` and `sent` are the closed forms of the cost (see
    :mod:`mpicoll.schedules.formula`) in ``P``, ``S`` (segments), ``lg`` (the ceiling of the binary logarithm of P),
    ``p2`` (the largest power of two up to P) and ``r`` (``P - p2``). They give the rounds on the critical path, and
    the bytes that the busiest rank sends as a multiple of the bytes of the whole vector or of all blocks of one buffer;
    ``closed_form`` evaluates them exactly.

    Example:
        >>> ring = mpicoll.schedules.get("allreduce", "ring")
        >>> ring.rounds, ring.sent
        ('2 * (P - 1)', '2 * (P - 1) / P')
    """

    collective: str
    name: str
    generate: Generator
    chunks: Count
    scratch: Count
    segmented: bool
    uneven: bool
    ordered: bool
    any_root: bool
    rounds: str
    sent: str
    doc: str = field(repr=False)

    def keeps_order(self, root: int) -> bool:
        """Return True if operands are combined in the order of ranks for this root."""
        return self.ordered and (root == 0 or self.any_root)

    def schedule(self, rank: int, size: int, root: int = 0, segments: int = 1) -> Schedule:
        """Return the schedule of `rank` of `size`; built once for each set of arguments."""
        self._check(rank, size, root, segments)
        return _build(self, rank, size, root, segments if self.segmented else 1)

    def steps(self, rank: int, size: int, root: int = 0, segments: int = 1) -> Iterator[Round]:
        """Yield the rounds of :meth:`schedule` without caching, for more ranks than fit in memory."""
        self._check(rank, size, root, segments)
        return _generate(self, rank, size, root, segments)

    def slots(self, size: int, segments: int = 1) -> tuple[int, int]:
        """Return the numbers of data chunks (for alltoall: of input and output together) and of scratch chunks."""
        segments = segments if self.segmented else 1
        chunks = size if self.collective in BLOCKS else self.chunks(size, segments)
        return chunks * 2 if self.collective == "alltoall" else chunks, self.scratch(size, segments)

    def _check(self, rank: int, size: int, root: int, segments: int) -> None:
        if not 0 <= rank < size or not 0 <= root < size:
            raise RankError(
                f"{self.collective}/{self.name}: rank {rank} and root {root} must be in [0, {size}) for size {size}"
            )
        if segments < 1:
            raise AlgorithmError(f"{self.collective}/{self.name}: segments must be at least 1, got {segments}")


def _generate(algorithm: Algorithm, rank: int, size: int, root: int, segments: int) -> Iterator[Round]:
    arguments: tuple[int, ...] = (rank, size, root) if algorithm.collective in ROOTED else (rank, size)
    options = {"segments": segments} if algorithm.segmented else {}
    return algorithm.generate(*arguments, **options)


@lru_cache(maxsize=4096)
def _build(algorithm: Algorithm, rank: int, size: int, root: int, segments: int) -> Schedule:
    chunks, scratch = algorithm.slots(size, segments)
    return Schedule(
        collective=algorithm.collective,
        algorithm=algorithm.name,
        rank=rank,
        size=size,
        root=root,
        chunks=chunks,
        scratch=scratch,
        rounds=tuple(_generate(algorithm, rank, size, root, segments)),
    )


_REGISTRY: dict[str, dict[str, Algorithm]] = {}


def algorithm(
    collective: str,
    *,
    rounds: str,
    sent: str,
    name: str | None = None,
    chunks: int | Count = 1,
    scratch: int | Count = 0,
    segmented: bool = False,
    uneven: bool = True,
    ordered: bool = False,
    any_root: bool = False,
) -> Callable[[Generator], Generator]:
    """Register the decorated generator as an algorithm of `collective`; see :class:`Algorithm` for the fields.

    Raises AlgorithmError if `rounds` or `sent` is not a valid closed form.

    Example:
        >>> @mpicoll.schedules.algorithm("barrier", rounds="2 * (P - 1)", sent="0")
        ... def ring_of_tokens(rank, size, root, segments):
        ...     for _ in range(2):
        ...         for source in range(size - 1):
        ...             yield mpicoll.schedules.Round(
        ...                 sends=(mpicoll.schedules.Send(source + 1),) if rank == source else (),
        ...                 recvs=(mpicoll.schedules.Recv(source),) if rank == source + 1 else (),
        ...             )
        >>> ring_of_tokens.__name__
        'ring_of_tokens'
    """
    for text in (rounds, sent):
        check_formula(text, ("P", "S", "lg", "p2", "r"))

    def register(generate: Generator) -> Generator:
        own = name or generate.__name__
        _REGISTRY.setdefault(collective, {})[own] = Algorithm(
            collective=collective,
            name=own,
            generate=generate,
            chunks=_count(chunks),
            scratch=_count(scratch),
            segmented=segmented,
            uneven=uneven,
            ordered=ordered,
            any_root=any_root,
            rounds=rounds,
            sent=sent,
            doc=generate.__doc__ or "",
        )
        return generate

    return register


def _count(value: int | Count) -> Count:
    return value if callable(value) else lambda size, segments: value


def get(collective: str, name: str) -> Algorithm:
    """Return the algorithm `name` of `collective`. Raise AlgorithmError with the names that exist.

    Example:
        >>> mpicoll.schedules.get("allreduce", "ring").collective
        'allreduce'
    """
    try:
        return _REGISTRY[collective][name]
    except KeyError:
        known = _REGISTRY.get(collective)
        if known is None:
            raise AlgorithmError(f"no collective {collective!r}; there are {', '.join(sorted(_REGISTRY))}") from None
        raise AlgorithmError(
            f"{collective} has no algorithm {name!r}; there are native, {', '.join(sorted(known))}"
        ) from None


def find(algorithm: Algorithm | str) -> Algorithm:
    """Return `algorithm` itself, or the one named by a string such as ``"allreduce/ring"``. Raise AlgorithmError.

    Example:
        >>> mpicoll.schedules.find("allreduce/ring").name
        'ring'
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    collective, slash, name = algorithm.partition("/")
    if not slash:
        raise AlgorithmError(f"{algorithm!r} is not an algorithm: write collective/name, such as 'allreduce/ring'")
    return get(collective, name)


def algorithms_of(collective: str) -> dict[str, Algorithm]:
    """Return all schedules of `collective` by name.

    Example:
        >>> mpicoll.schedules.algorithms_of("barrier")["dissemination"].rounds
        'lg'
    """
    return dict(_REGISTRY.get(collective, {}))


def collectives() -> tuple[str, ...]:
    """Return the collectives that have schedules.

    Example:
        >>> "allreduce" in mpicoll.schedules.collectives()
        True
    """
    return tuple(sorted(_REGISTRY))
