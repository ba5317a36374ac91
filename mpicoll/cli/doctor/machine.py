"""Cores and shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from mpicoll.cli import formatting
from mpicoll.cli.doctor.findings import Finding, FindingState
from mpicoll.launch.job_command import SHM_PER_RANK

_NEEDED = 2 * SHM_PER_RANK
"""Bytes that the smallest job takes in /dev/shm."""


def check_machine(job: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings on cores and shared memory."""
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    here = "" if usable == cores else f", of which this process may use {usable}"
    yield Finding("machine", "cores", "ok", f"{cores}{here}")
    yield check_shm()
    if not job:
        return
    unshared, unread = job["unshared"], job["unread"]
    if unshared is None:
        yield Finding("machine", "shared memory", "ok", "the ranks of a node share memory")
        threads = "1 thread" if job["threads"] == 1 else f"up to {job['threads']} threads"
        yield Finding("machine", "threads", "ok", f"{threads} of each of 2 ranks on a large array (MPICOLL_THREADS)")
    else:
        remedy = "collectives of one node take the longer way, by messages"
        state: FindingState = "not there" if "MPICOLL_SHARED_MEMORY" in unshared else "problem"
        yield Finding("machine", "shared memory", state, unshared, remedy)
    if unread is None:
        yield Finding("machine", "reading", "ok", "the ranks of a node can read each other's private memory")
    elif unshared is None:
        remedy = (
            "vectors of megabytes take longer: in containers give CAP_SYS_PTRACE, elsewhere see"
            " kernel.yama.ptrace_scope"
        )
        yield Finding("machine", "reading", "not there", unread, remedy)


def check_shm() -> Finding:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("machine", "/dev/shm", "not there", f"{error.strerror}", "MPI takes files in TMPDIR instead")
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = f"{formatting.nbytes(total)}, of which {formatting.nbytes(free)} are free"
    if total < _NEEDED:
        remedy = (
            f"Open MPI takes {formatting.nbytes(SHM_PER_RANK)} for each rank there, and is slower without: enlarge it"
            " (--shm-size=1g of docker); or start jobs by mpicoll run, which names another directory"
        )
        return Finding("machine", "/dev/shm", "not there", text, remedy)
    if free < _NEEDED:
        return Finding("machine", "/dev/shm", "problem", text, "remove what ended programs have left there")
    return Finding("machine", "/dev/shm", "ok", text)
