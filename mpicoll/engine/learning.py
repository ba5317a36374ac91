"""Calls that learn which algorithm is the fastest, on ranks that share no memory."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from math import inf
from time import perf_counter
from typing import TypeAlias

import numpy as np

from mpicoll.config import config
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.engine.diagnostics.position import Position
from mpicoll.engine.selection.candidates import keeps_results, list_candidates
from mpicoll.engine.selection.layout import NodeLayout
from mpicoll.engine.selection.query import SelectionQuery
from mpicoll.engine.selection.rules import Rule, merge_adjacent
from mpicoll.engine.selection.selector import Choice, choose, is_decided
from mpicoll.engine.selection.trials import Trials
from mpicoll.errors import SetupError
from mpicoll.logs import get_logger
from mpicoll.wording import count

Bind: TypeAlias = Callable[[Operation, Choice], Callable[[], None]]

_MAX_KINDS = 256
"""Largest number of kinds of calls of a communicator for which algorithms are tried."""

_MIN_BYTES = 1 << 20
"""Bytes from which algorithms are tried. Of smaller calls a trial shows Python's part, which later calls of MPI's own
algorithm do not have in the extension, by how much the ranks differ in when they begin, and a network
that is idle before: links let short bursts through at a higher rate."""

_WATCHED_BYTES = 1 << 20
"""Bytes from which times between nodes are watched after the trials. Preparing smaller calls again, which that takes,
would cost more than a few percent of their time."""

_KEPT = ("moved", "integer")
"""Classes of dtypes of which all algorithms give the same bits, so that later jobs may take what was learned."""

_Results: TypeAlias = "dict[tuple[NodeLayout, str, str, float], str]"

results: _Results = {}
"""Algorithms that rank 0 of the job has learned and that are kept: by layout, class of dtypes, collective, and the
smallest number of bytes; from there to twice as many."""

_AGREEING = Position("the exchange of the times of earlier calls")


def is_learnable(operation: Operation) -> bool:
    """Return True if algorithms are tried for such calls. Equal on all ranks."""
    comm, query = operation.comm, operation.query
    return (
        comm.tune != "off"
        and comm.no_shm_reason is not None
        and comm.size > 1
        and operation.on is None
        and operation.algorithm is None
        and not operation.compresses
        and (query.nbytes or 0) >= _MIN_BYTES
        and not operation.arrivals
        and (comm.tune == "any" or keeps_results(query, operation.arrays.reduction))
        and not is_decided(query)
    )


def get_final_choice(operation: Operation) -> Choice | None:
    """Return the algorithm that such calls have learned and will keep; None if that is not known yet.

    If it is known on this rank, it is known on the other ranks when they come to the call, since all of them carry out
    the same calls before it.
    """
    trials = operation.comm.trials.get(operation.query)
    return None if trials is None or not trials.final else _make_choice(operation.query, trials, trials.winner)


def describe_learning(call: Call) -> Call:
    """Return `call` with the signature of a call whose algorithm is chosen when it runs: ranks that have bound it to
    the algorithm before, and ranks that have not, compare it."""
    algorithm, call.algorithm = call.algorithm, ""
    call.signature = call.sign()
    call.algorithm = algorithm
    return call


def explain_learning(comm: CommunicatorCore, query: SelectionQuery) -> Choice | None:
    """Return the algorithm that the latest trials for `query` have led to, with their times as the reason; None if none
    were made. Sends nothing."""
    trials = comm.trials.get(query)
    return None if trials is None or len(trials.names) == 1 else _make_choice(query, trials, trials.winner)


class LearnedCall:
    """A call whose algorithm is chosen when it runs, in the order of the queue, which is the same on all ranks.

    `bind` binds the operation to an algorithm. In trials, the ranks first exchange the times of the latest trial: they
    agree on the time of the slowest rank, and begin the next trial together, so that a rank that comes late does not
    make an algorithm look slow.
    """

    __slots__ = ("_bind", "_call", "_context", "_operation")

    def __init__(self, operation: Operation, call: Call, bind: Bind) -> None:
        self._operation = operation
        self._call = call
        self._bind = bind
        # Every thread that runs it must make the same choices as the other ranks.
        self._context = copy_context()

    def __call__(self) -> None:
        self._context.copy().run(self._run)

    def _run(self) -> None:
        operation = self._operation
        comm, query = operation.comm, operation.query
        trials = comm.trials.get(query)
        if trials is None:
            names = list_candidates(query) if len(comm.trials) < _MAX_KINDS else (choose(query, None).name,)
            watched = query.context.layout.nodes > 1 and (query.nbytes or 0) >= _WATCHED_BYTES
            trials = Trials(names, watched=watched)
            if len(comm.trials) < _MAX_KINDS:
                comm.trials[query] = trials
        if trials.meets:
            trials.agree(_find_largest(comm, trials.seconds))
            if trials.settled:
                _keep(comm, query, trials.winner)
        choice = _make_choice(query, trials, trials.begin())
        self._call.algorithm = choice.name
        seconds = inf
        begin = perf_counter()
        try:
            # Later calls are bound each time too.
            self._bind(operation, choice)()
            seconds = perf_counter() - begin
        finally:
            # Also after a failure, which other ranks may not have noticed: all ranks count the same calls.
            trials.end(seconds)


def _keep(comm: CommunicatorCore, query: SelectionQuery, name: str) -> None:
    """Keep the algorithm for later jobs, if this is rank 0 of the job.

    Results of one node are not kept: later ranks of it may share memory. Nor are those on which the bits of results
    depend, which a job that does not allow that would take.
    """
    shape, kind = query.context.layout, query.kind
    exact = kind in _KEPT or (kind == "float" and shape.ranks == 2)
    if exact and shape.nodes > 1 and query.nbytes and comm.members[comm.rank] == 0:
        results[shape, kind, query.collective, float(1 << (query.nbytes.bit_length() - 1))] = name


def write_results(library: str) -> None:
    """Add what was learned with the MPI library `library` to the tuned table at its default path, for later jobs.

    Does nothing if MPICOLL_TUNED names a table, which then stays as it is, or is ``off``, nor in jobs that do without
    shared memory or connections beside MPI: jobs with these would take what was the fastest without. If the table can't
    be written, that is logged: the program has its results, and the next job can learn again.
    """
    settings = config()
    if not results or settings.tuned or "off" in (settings.shared_memory, settings.sockets):
        return
    # Late: most programs learn nothing.
    from datetime import datetime, timezone

    from mpicoll.engine.selection import tuned_table

    path = tuned_table.get_default_path()
    if path is None:
        return
    ranges: dict[NodeLayout, dict[str, dict[str, list[Rule]]]] = {}
    for (shape, kind, collective, low), name in sorted(results.items()):
        ranges.setdefault(shape, {}).setdefault(kind, {}).setdefault(collective, []).append((low, 2 * low, name))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        for shape, by_kind in ranges.items():
            rules = {
                kind: tuple((collective, tuple(merge_adjacent(found))) for collective, found in by_collective.items())
                for kind, by_collective in by_kind.items()
            }
            tuned_table.write(path, tuned_table.make_entry(library, shape, rules, None, now))
    except SetupError as error:
        get_logger().warning("what was learned about algorithms is not kept: %s", error)


def _make_choice(query: SelectionQuery, trials: Trials, name: str) -> Choice:
    times = ", ".join(
        f"{one} {seconds * 1e6:.1f} µs" for one, seconds in sorted(trials.typical.items(), key=lambda item: item[1])
    )
    if len(trials.names) == 1:
        return choose(query, None)
    what = "learned from" if trials.settled else "so far, of trials in"
    reason = f"{what} {count(trials.calls, 'call')}: {times or 'nothing timed yet'}"
    return choose(query, name)._replace(reason=reason)


def _find_largest(comm: CommunicatorCore, value: float) -> float:
    """Return the largest `value` of all ranks. Collective.

    Each rank exchanges it with those at distances of 1, 2, 4 and so on: as in the dissemination barrier of Hensgen,
    Finkel and Manber (1988), no rank returns before all have come.
    """
    tag = comm.next_tag()
    executing = comm.queue.executing
    outer, executing.executor = executing.executor, _AGREEING
    mine, other = np.array([value]), np.empty(1)
    distance = 1
    try:
        while distance < comm.size:
            to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
            comm.transport.exchange([(to, mine.view(np.uint8))], [(source, other.view(np.uint8))], tag)
            np.maximum(mine, other, out=mine)
            distance *= 2
    finally:
        executing.executor = outer
    return float(mine[0])
