"""Choice of an algorithm, with the reason.

Forced (argument, then ``with mpicoll.algorithms(...)``, then ``MPICOLL_ALGORITHMS``) comes before what was tuned, that
before the built-in rules, these before the schedule that should take least time, and that before any other algorithm
that can serve the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from mpicoll.config import config
from mpicoll.engine.selection.catalogue import (
    DEVICE,
    HIERARCHICAL,
    MAX_FLAT_BYTES,
    NCCL,
    SHARED_MEMORY,
    AnyAlgorithm,
    CompressedAlgorithm,
    DeviceAlgorithm,
    HierarchicalAlgorithm,
    SharedMemoryAlgorithm,
    algorithms_of,
    canonical_name,
    resolve_name,
    schedules_of,
)
from mpicoll.engine.selection.defaults import (
    DEFAULT_RULES,
    DEFAULT_TCP_BLOCK,
    DEVICE_RULES,
    FALLBACK_RULES,
    TCP_BLOCKS,
    TCP_PAIR_RULES,
    TCP_RULES,
)
from mpicoll.engine.selection.query import SelectionQuery, get_tuned_class
from mpicoll.engine.selection.rules import Rules, format_range, parse_built_in_rules, parse_rules
from mpicoll.errors import AlgorithmError, SetupError
from mpicoll.extension import check_rules
from mpicoll.named_tuple import NamedTuple

_SEGMENT = 128 * 1024
"""Bytes of a pipeline segment, unless the number of segments is asked for."""

_MAX_SEGMENTS = 64

_FEWER_BYTES_BY_HIERARCHY = ("allreduce", "reduce", "reduce_scatter", "bcast", "allgather")
"""Collectives of which the hierarchical algorithm sends less between nodes than schedules among all ranks."""

_DIRECT_BYTES = 4096
"""From this size on, shared-memory algorithms are preferred if the buffers may lie in memory that all ranks map."""


class Choice(NamedTuple):
    """An algorithm and the reason for the choice, as :func:`mpicoll.explain` returns it.

    Attributes:
        name: The name by which the algorithm can be forced.
        algorithm: The algorithm; None for the MPI library's own.
        segments: Number of segments of a pipelined schedule.
        segment: Bytes of a piece of a shared-memory algorithm, if that was asked for.
        reason: The rule, the measurement or the prediction that led to it.
        refused: Algorithms that can't serve the request, with the reason of each.

    Example:
        >>> with mpicoll.algorithms(allreduce="ring"):
        ...     mpicoll.explain("allreduce", 1024).reason
        'forced by `with algorithms`'
    """

    name: str
    algorithm: AnyAlgorithm
    segments: int
    reason: str
    segment: int | None = None
    refused: tuple[str, ...] = ()

    # Only queries about a choice list what it has refused.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Choice) and self[:-1] == other[:-1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-1])

    def __str__(self) -> str:
        return "\n  ".join([f"{self.name}: {self.reason}", *self.refused])


_forced: ContextVar[Rules] = ContextVar("mpicoll_algorithms", default=())


@contextmanager
def algorithms(**rules: str) -> Iterator[None]:
    """Force algorithms for the calls of this thread inside a ``with`` block.

    All ranks must force the same algorithms. Where the algorithm can't serve a request (such as an operation that does
    not commute), the next choice is used; inner blocks have priority over outer ones.

    Args:
        **rules: For each collective an algorithm (``"ring"``, ``"chain/8"``, ``"native"``) or byte ranges
            (``"0-64k:native,64k-inf:ring"``).

    Raises:
        AlgorithmError: There is no such collective or algorithm.

    Example:
        >>> def select():
        ...     with mpicoll.algorithms(allreduce="ring"):
        ...         return mpicoll.explain("allreduce", 1024).name
        >>> mpicoll.run_local(select, 2)
        ['ring', 'ring']
    """
    parsed = tuple(parse_rules(f"{collective}:{rule}")[0] for collective, rule in rules.items())
    check_rules(_forced.get)
    token = _forced.set(parsed + _forced.get())
    try:
        yield
    finally:
        _forced.reset(token)


get_forced_rules: Callable[[], Rules] = _forced.get
"""The rules of the surrounding ``with algorithms(...)`` blocks."""


def unsupported_reasons(query: SelectionQuery) -> dict[str, str | None]:
    """Return for each algorithm of the collective why it can't serve `query`, or None if it can. Algorithms for devices
    are left out for data on the host."""
    names = (name for name in algorithms_of(query.collective) if query.device is not None or name not in DEVICE)
    return {name: _find_unsupported_reason(query, resolve_name(query.collective, name)[0]) for name in names}


def choose(query: SelectionQuery, argument: str | None) -> Choice:
    """Return the algorithm for `query`. Raises AlgorithmError if `argument` names one that can't serve it."""
    return _choose(query, argument, get_forced_rules())


def is_decided(query: SelectionQuery) -> bool:
    """Return True if a forced rule or a tuned table names an algorithm for `query`."""
    return _is_decided(query, get_forced_rules())


@lru_cache(maxsize=4096)
def _is_decided(query: SelectionQuery, context: Rules) -> bool:
    forced = (*_match_rules(context, query), *_match_rules(_parse_environment(), query))
    return bool(forced) or next(_iter_tuned(query), None) is not None


@lru_cache(maxsize=4096)
def _choose(query: SelectionQuery, argument: str | None, context: Rules) -> Choice:
    refused: list[str] = []
    tried: set[str] = set()
    if argument is not None:
        argument = canonical_name(argument)
        algorithm, segments = resolve_name(query.collective, argument)
        refusal = _find_unsupported_reason(query._replace(shm_failed_reason=None), algorithm)
        if refusal is not None:
            raise AlgorithmError(
                f"{query.collective}: algorithm {argument!r} can't serve this: {refusal}; leave algorithm= out to"
                " have one chosen"
            )
        lost = _find_unsupported_reason(query, algorithm)
        if lost is None:
            return _make_choice(query, argument, algorithm, segments, "forced by the argument")
        # Shared memory is lost at its first use, which may come before or after the choice.
        tried.add(argument)
        refused.append(f"not {argument} (forced by the argument): {lost}")
    for text, why in _iter_candidates(query, context):
        if text in tried:
            continue
        tried.add(text)
        algorithm, segments = resolve_name(query.collective, text)
        refusal = _find_unsupported_reason(query, algorithm)
        if refusal is None:
            return _make_choice(query, text, algorithm, segments, "; ".join([*refused, why]))
        refused.append(f"not {text} ({why}): {refusal}")
    raise AlgorithmError(f"{query.collective}: no algorithm can serve this: {'; '.join(refused)}")


def _iter_candidates(query: SelectionQuery, context: Rules) -> Iterator[tuple[str, str]]:
    """Yield names of algorithms in order of preference, each with the reason."""
    for rules, why in (
        (context, "forced by `with algorithms`"),
        (_parse_environment(), "forced by MPICOLL_ALGORITHMS"),
    ):
        for name, _ in _match_rules(rules, query):
            yield name, why
    if query.allocated and (query.nbytes or 0) >= _DIRECT_BYTES:
        names = () if query.collective in ("scan", "exscan") else SHARED_MEMORY.get(query.collective, ())
        served = query.has_kernel and "cma" in names
        for name in ("shm_pipelined", "cma") if served else ():
            yield name, "memory of mpicoll.empty exists, where it needs no copies"
    if query.nbytes is None and query.collective == "alltoall" and query.no_shm_reason is query.no_cma_reason is None:
        yield "cma", "with counts, ranks read large blocks, whose sizes are known to their sender and receiver only"
    yield from _iter_tuned(query)
    if query.context.connects and query.device is None:
        text = TCP_PAIR_RULES if query.context.layout.nodes == 2 else TCP_RULES
        for name, extent in _match_rules(parse_built_in_rules(text, query.collective), query):
            if _pays(query, name):
                yield name, f"table for TCP{extent}"
    text = DEFAULT_RULES if query.device is None else DEVICE_RULES
    for name, extent in _match_rules(parse_built_in_rules(text, query.collective), query):
        yield name, f"table{extent}"
    yield from _predict_schedules(query)
    for name, _ in _match_rules(parse_built_in_rules(FALLBACK_RULES, query.collective), query):
        yield name, "fallback table"
    for name in schedules_of(query.collective):
        yield name, "first schedule that can serve the request"


def _pays(query: SelectionQuery, name: str) -> bool:
    """Return False if the schedule of a rule for TCP is not expected to pay: with small blocks, or among all ranks
    where the hierarchical algorithm can serve and sends less between nodes."""
    if (query.nbytes or 0) // query.context.layout.ranks < TCP_BLOCKS.get(name, DEFAULT_TCP_BLOCK):
        return False
    if name == HIERARCHICAL or query.collective not in _FEWER_BYTES_BY_HIERARCHY:
        return True
    return _unsupported_by_hierarchy(query) is not None


def _match_rules(rules: Rules, query: SelectionQuery) -> Iterator[tuple[str, str]]:
    """Yield the algorithms of the rules that match `query`, each with the range of its rule if there are several."""
    for collective, ranges in rules:
        if collective == query.collective:
            for low, high, name in ranges:
                if low <= (query.nbytes or 0) < high:
                    yield name, "" if (low, high) == (0, float("inf")) else f", {format_range(low, high)}"


def _iter_tuned(query: SelectionQuery) -> Iterator[tuple[str, str]]:
    shape, table = query.context.layout, query.context.table
    by_kind = table.rules.get(shape, {})
    for kind in (get_tuned_class(query), get_tuned_class(query, substitute=True)):
        if kind is not None and kind in by_kind:
            for name, extent in _match_rules(by_kind[kind], query):
                yield name, f"tuned for {kind}{extent} on {shape}, {table.source}"
            return


def _predict_schedules(query: SelectionQuery) -> Iterator[tuple[str, str]]:
    """Yield the schedule with the least predicted time, if the sizes are known."""
    if query.nbytes is None or query.context.layout.ranks == 1:
        return
    # Not at module level, as it loads the schedules.
    from mpicoll.engine.selection.cost_model import predict

    costs = query.context.table.costs
    segments = get_default_segments(query)
    expected: list[tuple[float, str]] = []
    for name, algorithm in schedules_of(query.collective).items():
        if _find_unsupported_reason(query, algorithm) is None:
            expected.append((predict(algorithm, query.context.layout, query.nbytes, segments, costs), name))
    if expected:
        (time, name), *others = sorted(expected)
        following = "".join(f", {other} {_microseconds(later)}" for later, other in others[:1])
        kind = "measured" if costs.measured else "typical"
        yield name, f"cost model with {kind} costs: {_microseconds(time)}{following}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} µs"


@lru_cache(maxsize=1)
def _parse_environment() -> Rules:
    try:
        return parse_rules(config().algorithms)
    except AlgorithmError as error:
        raise SetupError(f"MPICOLL_ALGORITHMS={config().algorithms!r}: {error}") from error


def _find_unsupported_reason(query: SelectionQuery, algorithm: AnyAlgorithm) -> str | None:
    """Return the reason why `algorithm` can't serve `query`; None if it can."""
    if algorithm is None:
        return query.native or (None if query.device is None else query.device.native)
    if isinstance(algorithm, SharedMemoryAlgorithm):
        return _unsupported_by_shared_memory(query, algorithm.name)
    if isinstance(algorithm, DeviceAlgorithm):
        return _unsupported_by_device(query, algorithm.name)
    if isinstance(algorithm, HierarchicalAlgorithm):
        return _unsupported_by_hierarchy(query)
    if isinstance(algorithm, CompressedAlgorithm):
        return "messages are compressed only where the argument compression demands it"
    if not query.commutative and not algorithm.keeps_order(query.root):
        return "the operation does not commute, and this algorithm changes the order of ranks"
    if not query.elementwise and algorithm.schedule(0, query.context.layout.ranks, query.root).chunks > 1:
        return "the operation is not elementwise, and this algorithm splits the array"
    if query.uneven and not algorithm.uneven:
        return "the blocks differ in size"
    return None


def _unsupported_by_shared_memory(query: SelectionQuery, name: str) -> str | None:
    if query.no_shm_reason is not None or query.shm_failed_reason is not None:
        return query.no_shm_reason or query.shm_failed_reason
    if name in ("cma", "shm_or_cma") and (query.no_cma_reason is not None or query.device is not None):
        return query.no_cma_reason or "the data is on a device"
    if query.device is not None and query.device.host is not None:
        return query.device.host
    if query.nbytes is None:
        # Of alltoall with counts, the ranks exchange the sizes with the blocks.
        known = query.collective == "barrier" or query.device is None
        return None if known else "the ranks don't know the sizes of each other's blocks"
    if query.collective in ("scan", "exscan") and query.device is not None:
        return "the data is on a device"
    if query.collective in ("scan", "exscan") and not query.has_kernel:
        return "the reduction is a function of Python, minloc or maxloc"
    if name == "shm_flat":
        return (
            f"{query.nbytes} bytes are more than the {MAX_FLAT_BYTES} that shm_flat accepts"
            if query.nbytes > MAX_FLAT_BYTES
            else None
        )
    if not query.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    if name in ("cma", "shm_or_cma") and not query.has_kernel:
        return "the reduction is a function of Python, minloc or maxloc"
    return None


def _unsupported_by_device(query: SelectionQuery, name: str) -> str | None:
    if query.device is None:
        return "the data is on the host"
    reason = query.device.nccl if name == NCCL else query.device.ipc or query.shm_failed_reason
    if reason is not None:
        return reason
    if query.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks"
    if not query.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _unsupported_by_hierarchy(query: SelectionQuery) -> str | None:
    shape = query.context.layout
    if shape.nodes == 1:
        return "the ranks are on one node"
    if shape.per_node == 1:
        return "each node has a single rank"
    if not shape.even:
        return "the nodes differ in their number of ranks"
    if query.nbytes is None:
        return "the ranks don't know the sizes of each other's blocks"
    if not query.commutative:
        return "the operation does not commute, and this algorithm changes the order of ranks"
    if not query.elementwise:
        return "the operation is not elementwise, and this algorithm splits the array"
    return None


def _make_choice(
    query: SelectionQuery,
    text: str,
    algorithm: AnyAlgorithm,
    segments: int | None,
    reason: str,
) -> Choice:
    if isinstance(algorithm, SharedMemoryAlgorithm | DeviceAlgorithm | HierarchicalAlgorithm):
        return Choice(text, algorithm, 1, reason, segments)
    return Choice(text, algorithm, get_default_segments(query) if segments is None else segments, reason)


def get_default_segments(query: SelectionQuery) -> int:
    """Return the number of segments of a pipelined schedule, unless the caller specifies one."""
    # A pipeline of whole-array operations has a single segment.
    segments = (query.nbytes or 0) // _SEGMENT if query.elementwise else 1
    return max(1, min(_MAX_SEGMENTS, segments))
