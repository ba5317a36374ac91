"""Probes of MPI's reducing collectives, in jobs of two ranks that may crash: ``-m mpicoll.transport.reduction_probes``.

``reductions`` compares the results of all collectives with the right ones; ``in-place`` tries MPI_Reduce in place at
rank 1."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.transport import launcher, probes, reductions

if TYPE_CHECKING:
    from mpicoll.transport.base import Transport

PROGRAM: str = __spec__.name
"""The name of this module, also where it is the main program."""

_SECONDS = 60.0
"""Maximum seconds for a job that tries the collectives."""

_CRASHES = 8
"""Operations and dtypes that crash, past which a library is not tried further."""


def probe_reductions() -> tuple[dict[str, Any] | None, str]:
    """Try the collectives themselves, in jobs of two ranks that may crash, and keep what was found. Returns the entry,
    and where it is kept; or None, and why they can't be tried."""
    program = launcher.find_launcher()
    if program is None:
        return None, "there is neither mpirun nor mpiexec to try it"
    wrong: reductions.Defects = {}
    while True:
        ended, reports = _start(program, "reductions", json.dumps(wrong))
        found = [one["done"]["wrong"] for one in reports if "done" in one]
        if ended.status == 0 and found:
            break
        # Whatever it was doing is not for this library; the rest is tried again without it.
        step = next((one["step"] for one in reversed(reports) if "step" in one), None)
        unable = next((one["unable"] for one in reports if "unable" in one), None)
        if unable is not None or step is None or step in wrong or len(wrong) == _CRASHES:
            return None, unable or f"a job of two ranks fails: {probes.describe_failure(ended)}"
        how = f"did not end within {_SECONDS:g} s" if ended.status is None else probes.describe_failure(ended)
        wrong[step] = f"the MPI library fails in {reductions.describe_pair(step)}: {how}"
    for one in found:
        wrong = one | wrong
    ended, reports = _start(program, "in-place")
    in_place = ended.status == 0 and any("done" in one for one in reports)
    entry = reductions.make_entry(reductions.read_conditions(), wrong) | {"collectives": True, "in_place": in_place}
    return entry, reductions.FILE.write(entry)


def _start(program: str, *arguments: str) -> tuple[launcher.RunResult, list[dict[str, Any]]]:
    """Run a probe in a job of two ranks; return how it ended, and its reports."""
    ended = launcher.run_bounded(
        [program, "-np", "2", *launcher.module_command(PROGRAM, *arguments)],
        launcher.local_job_environment(os.environ, root=os.geteuid() == 0),
        _SECONDS,
    )
    return ended, list(probes.read_reports(ended.output))


# --- the program

COUNTS = (33, 5000)
"""Elements of a rank that are reduced: some vectors and a rest, and what is sent in other ways."""


def _check_collectives(skip: str) -> dict[str, Any]:
    """Return the defects of the MPI library's own reductions of host memory, on all dtypes.

    They are tried by MPI_Reduce_local and by each collective, except the defects in `skip`, JSON, which are known
    already.
    """
    from mpicoll.transport import mpi

    transport = probes.join_two_ranks()
    wrong: reductions.Defects = {**reductions.try_all(mpi.reduce_local), **json.loads(skip)}
    # Both ranks must leave out the same.
    known = {what for text in transport.allgather_text(json.dumps(wrong)) for what in json.loads(text)}
    for op, dtype in reductions.PAIRS:
        what = reductions.format_pair(op, dtype)
        if what in known:
            continue
        if transport.rank == 0:
            probes.report(step=what)
        for count in COUNTS:
            why = _collective_defect(transport, op, dtype, count)
            if why is not None:
                wrong.setdefault(what, why)
    return {"wrong": wrong}


def _collective_defect(transport: Transport, op: str, dtype: np.dtype[Any], count: int) -> str | None:
    """Return a description of a wrong result of the collectives that reduce; None if all are right."""
    native, rank = transport.native, transport.rank
    assert native is not None
    both = reductions.make_operands(op, dtype, 2 * count)
    mine, (left, right) = both[rank], both
    total = reductions.combine(op, left, right)
    half = slice(rank * count, (rank + 1) * count)
    so_far = (left, total)[rank]
    everything, whole, block = slice(None), np.empty_like(mine), np.empty(count, dtype)
    found: list[tuple[str, Any, Any, slice]] = []

    def look(name: str, expected: Any, got: Any, where: slice = everything) -> None:
        found.append((name, expected.copy(), got.copy(), where))

    native.allreduce(mine, whole, op)
    look("Allreduce", total, whole)
    whole[:] = mine
    native.allreduce(whole, whole, op)
    look("Allreduce in place", total, whole)
    for root in (0, 1):
        whole[:] = 0
        native.reduce(mine, whole if rank == root else None, op, root)
        look(f"Reduce to rank {root}", total if rank == root else whole, whole)
    whole[:] = mine
    native.reduce(whole, whole if rank == 0 else None, op, 0)
    look("Reduce in place", total if rank == 0 else mine, whole)
    native.scan(mine, whole, op)
    look("Scan", so_far, whole)
    whole[:] = mine
    native.scan(whole, whole, op)
    look("Scan in place", so_far, whole)
    whole[:] = 0
    native.exscan(mine, whole, op)
    look("Exscan", left if rank == 1 else whole, whole)
    native.reduce_scatter(mine, block, None, op)
    look("Reduce_scatter_block", total[half], block, half)
    native.reduce_scatter(mine, block, [count, count], op)
    look("Reduce_scatter", total[half], block, half)
    for name, expected, got, where in found:
        why = reductions.describe_difference(op, expected, got, left[where], right[where])
        if why is not None:
            return f"{why} (by {name} of {mine.size} elements on rank {rank} of 2)"
    return None


def _check_in_place() -> str:
    """Try MPI_Reduce in place, at a root other than rank 0."""
    from mpicoll.transport import mpi

    rank = probes.join_two_ranks().rank
    from_both = np.arange(max(COUNTS) * 4.0)
    for count in (*COUNTS, from_both.size):
        memory = from_both[:count] + rank
        mpi.reduce_in_place(memory, "sum", 1)
        if rank == 1 and not np.array_equal(memory, from_both[:count] * 2 + 1):
            raise probes.WrongResult(f"Reduce in place of {count} float64 to rank 1 gives wrong data")
    return "Reduce works in place at rank 1"


_PROBES: dict[str, Callable[..., Any]] = {"reductions": _check_collectives, "in-place": _check_in_place}

if __name__ == "__main__":
    sys.exit(probes.run(_PROBES, *sys.argv[1:]))
