"""``mpicoll doctor --job``: where the ranks of running jobs are, from the records of their operations.

Only the files of the processes are read: it works while ranks are stuck or stopped, and shows those that were killed as
long as another rank of their node lives.
"""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpicoll.cli import formatting
from mpicoll.engine.diagnostics.record_area import RecordedOperation, RecordedRank, read_ranks
from mpicoll.transport.record_file import LABEL
from mpicoll.wording import rank_list

_SHOWN_OPERATIONS = 10
"""Number of last operations of each rank in JSON."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this host: its number in its own PID namespace, when it has started, and its state, as in
    ``/proc/PID/stat``."""

    own_pid: int
    start: int
    state: str


@dataclass(slots=True)
class Rank:
    """A rank of a job on this host. `process` is "runs", "stopped" (by a signal), "gone" (killed, or ended without
    notice), or "left" (it makes no more calls). `operation` is the one that it is in, or its last one."""

    recorded: RecordedRank
    pid: int
    process: str
    operation: RecordedOperation | None
    waits_for: tuple[int, ...] = ()
    waits_for_count: int = 0


@dataclass(slots=True)
class Job:
    """The ranks of a job on this host, and descriptions of those that are behind others."""

    name: str
    size: int
    ranks: list[Rank] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)


def run(which: str, json_target: str | None = None) -> int:
    """Print where the ranks of the job `which` are, the number of one of its processes or its name, or those of all
    jobs if it is ""; as JSON to `json_target`, a file or ``-`` for stdout. Return 1 if there is none, or if a rank is
    gone."""
    jobs = [job for job in find_jobs() if which in ("", job.name, *(str(one.pid) for one in job.ranks))]
    if json_target is not None:
        formatting.write_json(json_target, {"jobs": [_serialize(job) for job in jobs]})
    elif not jobs:
        what = f"the job {which}" if which else "a job"
        sys.stderr.write(
            f"mpicoll: no process of this user on this host has records of {what}: it needs the extension in C and"
            " shared memory, and has to have called mpicoll\n"
        )
    else:
        for job in jobs:
            _print(job)
    return 0 if jobs and all(one.process != "gone" for job in jobs for one in job.ranks) else 1


def find_jobs() -> Iterator[Job]:
    """Yield the jobs of this user on this host."""
    jobs: dict[str, Job] = {}
    for path, holders in _find_files():
        with suppress(OSError):  # the last process has ended
            memory, again = path.read_bytes(), path.read_bytes()
            for recorded in read_ranks(memory, again):
                job = jobs.setdefault(recorded.job or f"of process {recorded.pid}", Job(recorded.job, recorded.size))
                job.ranks.append(_make_rank(recorded, holders))
    for job in jobs.values():
        job.ranks.sort(key=lambda one: one.recorded.rank)
        _compare(job)
        yield job


def _find_files() -> Iterator[tuple[Path, dict[int, Process]]]:
    """Yield the files of records that processes have open, and these processes."""
    paths: dict[tuple[int, int], Path] = {}
    holders: dict[tuple[int, int], dict[int, Process]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # of another user, or just ended
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    if LABEL not in str(descriptor.readlink()):
                        continue
                    status = descriptor.stat()
                    if not stat.S_ISREG(status.st_mode):  # reading another file might block
                        continue
                    key = status.st_dev, status.st_ino
                    paths.setdefault(key, descriptor)
                    holders.setdefault(key, {})[int(folder.name)] = _read_process(folder)
    for key, path in paths.items():
        yield path, holders[key]


def _read_process(folder: Path) -> Process:
    # The second field, the name of the program, may have spaces and brackets.
    fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    lines = (folder / "status").read_text(errors="replace").splitlines()
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [folder.name])
    return Process(int(numbers[-1]), int(fields[19]), fields[0])


def _make_rank(recorded: RecordedRank, holders: dict[int, Process]) -> Rank:
    numbers = {one.communicator: one.number for one in recorded.operations if one.number}
    # The collectives of a communicator are carried out one after another. Those of several communicators may be within
    # one another: the innermost one is the one that waits.
    operations = recorded.operations
    running = [one for one in operations if one.is_running and one.number in (0, numbers.get(one.communicator))]
    operation = running[-1] if running else operations[-1] if operations else None
    waits, count = (operation.late, operation.late_count) if operation is not None else ((), 0)
    for pid, process in holders.items():
        if (process.own_pid, process.start) == (recorded.pid, recorded.process_start):
            state = "stopped" if process.state in "Tt" else "left" if recorded.left else "runs"
            return Rank(recorded, pid, state, operation, waits, count)
    return Rank(recorded, recorded.pid, "left" if recorded.left else "gone", operation, waits, count)


def _compare(job: Job) -> None:
    """Find the ranks that have called fewer collectives of a communicator than others."""
    reached: dict[int, dict[int, RecordedOperation]] = {}
    for one in job.ranks:
        for operation in one.recorded.operations:
            if operation.number:
                last = reached.setdefault(operation.communicator, {})
                former = last.get(one.recorded.rank)
                if former is None or former.number < operation.number:
                    last[one.recorded.rank] = operation
    for last in reached.values():
        first = max(last.values(), key=lambda operation: operation.number)
        for one in job.ranks:
            own = last.get(one.recorded.rank)
            if own is None:
                continue
            if own.number < first.number and not own.is_running:
                job.behind.append(
                    f"rank {one.recorded.rank} has not called {first}; its last collective on {own.group} is number"
                    f" {own.number}"
                )
            if own is one.operation and own.is_running and not one.waits_for:
                one.waits_for = tuple(sorted(rank for rank, other in last.items() if other.number < own.number))
                one.waits_for_count = len(one.waits_for)


_COLUMNS = ("rank", "pid", "process", "operation", "state", "bytes", "step", "since", "waits for")


def _print(job: Job) -> None:
    now = time.monotonic()
    others = job.size - len(job.ranks)
    title = f"Job {job.name}: {job.size} ranks" + (
        f", {others} of them not on this host or without records" if others else ""
    )
    rows = [_make_row(one, now) for one in job.ranks]
    formatting.console().print(formatting.table(title, _COLUMNS, rows), *job.behind)


def _make_row(one: Rank, now: float) -> tuple[str, ...]:
    begin = str(one.recorded.rank), str(one.pid), one.process
    operation = one.operation
    if operation is None:
        return *begin, "none yet", "", "", "", "", ""
    since = now - (operation.begin if operation.end is None else operation.end)
    more = one.waits_for_count - len(one.waits_for)
    waits = rank_list(one.waits_for) + (f" and {more} others" if more > 0 else "") if one.waits_for else ""
    return (
        *begin,
        str(operation),
        operation.state,
        "" if operation.nbytes is None else formatting.nbytes(operation.nbytes),
        str(operation.step or ""),
        formatting.seconds(max(since, 0.0)),
        waits,
    )


def _serialize(job: Job) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "job": job.name,
        "size": job.size,
        "behind": job.behind,
        "ranks": [
            {
                "rank": one.recorded.rank,
                "pid": one.pid,
                "process": one.process,
                "waits_for": one.waits_for,
                "waits_for_count": one.waits_for_count,
                "operations": [
                    _serialize_operation(operation, now)
                    for operation in _choose_operations(one.recorded.operations, one.operation)
                ],
            }
            for one in job.ranks
        ],
    }


def _choose_operations(
    operations: Sequence[RecordedOperation], current: RecordedOperation | None
) -> list[RecordedOperation]:
    """Return the last operations, the one that is in progress as the last one."""
    chosen = [one for one in operations[-_SHOWN_OPERATIONS:] if one is not current]
    return chosen if current is None else [*chosen, current]


def _serialize_operation(operation: RecordedOperation, now: float) -> dict[str, Any]:
    since = now - (operation.begin if operation.end is None else operation.end)
    return asdict(operation) | {"text": str(operation), "since": round(since, 6)}
