"""The MPI library, its launcher, and what a job of 2 ranks finds."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpicoll.cli.doctor.findings import INSTALL_MPI, TIME_LIMIT, Finding, FindingState

_RANKS = 4
"""Number of ranks with which the user's launcher is tested, as in most examples."""

_REFUSAL_REASONS = {
    "as root": "you are root",
    "slots": f"there are fewer cores than {_RANKS}",
}
"""Reasons for which a launcher refuses to start ranks."""


def check_mpi(job: dict[str, Any], probe: bool | None) -> Iterator[Finding]:
    """Yield findings on the library, its quirks, its launcher, a job, and the library's reductions."""
    from mpicoll.transport import launcher

    library, program = launcher.find_library(), launcher.find_launcher()
    if not isinstance(library, str):
        yield Finding("MPI", "library", "ok", f"{library.name}{', ' if library.path else ''}{library.path}")
        yield from list_quirks(library.version)
    elif (mpich := launcher.find_unlinked_mpich(library)) is not None:
        yield _describe_unlinked_mpich(library, mpich)
    else:
        yield Finding("MPI", "library", "not there", f"mpi4py loads none: {library}", INSTALL_MPI)
    if program is None:
        yield Finding("MPI", "launcher", "not there", "there is neither mpirun nor mpiexec", INSTALL_MPI)
        return
    plain = shutil.which(Path(program).name)
    other = "" if plain in (None, program) else f"; but a plain `{Path(program).name}` is {plain}"
    yield Finding("MPI", "launcher", "ok", f"{program}{other}")
    if not isinstance(library, str):
        yield check_launcher_in_path(program)
        yield run_test_job(program, job)
        if job:
            yield from check_reductions(probe)


def list_quirks(version: str) -> Iterator[Finding]:
    """Yield the known defects and limits of the MPI library with this version string."""
    from mpicoll.transport import quirks

    for one in quirks.find_quirks(version):
        yield Finding("MPI", one.name, "not there", one.problem, one.measure)


def _describe_unlinked_mpich(error: str, mpich: str) -> Finding:
    """Return the finding for an MPICH whose file has Debian's name, under which mpi4py does not search for it."""
    from mpicoll.transport import launcher

    value = f"mpi4py loads none: {error}; {mpich} is there, but mpi4py looks for it by the name libmpi.so.12"
    return Finding("MPI", "library", "problem", value, launcher.suggest_link(mpich))


def check_launcher_in_path(program: str) -> Finding:
    """Test if the launcher in PATH belongs to the library, as `program` does, and starts ranks."""
    from mpicoll.transport import launcher

    plain = next(filter(None, map(shutil.which, ("mpirun", "mpiexec"))), None)
    name = Path(program).name
    instead = f"export PATH={Path(program).parent}:$PATH" if name in ("mpirun", "mpiexec") else f"start jobs by {name}"
    if plain is None:
        return Finding("MPI", "mpirun", "not there", "there is none in PATH", instead)
    if Path(plain).resolve() != Path(program).resolve() and not _starts_one_job(plain):
        return Finding("MPI", "mpirun", "problem", f"{plain} belongs to another MPI library", instead)
    name = Path(plain).name
    options: list[str] = []
    variables: list[str] = []
    refused: list[str] = []
    while True:
        command = [plain, *options, "-np", str(_RANKS), sys.executable, "-c", ""]
        ended = launcher.run_bounded(command, launcher.strip_job_variables(os.environ), TIME_LIMIT)
        if ended.status == 0:
            break
        why = launcher.classify_refusal(ended.errors)
        if why is None or why in refused:
            said = f"no end within {TIME_LIMIT:g} s" if ended.status is None else launcher.tail(ended.errors, 3)
            return Finding("MPI", "mpirun", "problem", f"`{name} -np {_RANKS} python` fails: {said}")
        refused.append(why)
        option, settings = launcher.suggest_remedies(why, ended.errors)
        options += option.split()
        variables.append(settings)
    if not refused:
        return Finding("MPI", "mpirun", "ok", f"`{name} -np {_RANKS} python` works")
    # If only cores are missing, fewer ranks can be started.
    state: FindingState = "not there" if refused == ["slots"] else "problem"
    reasons = " and ".join(_REFUSAL_REASONS[why] for why in refused)
    return Finding(
        "MPI",
        "mpirun",
        state,
        f"`{name} -np {_RANKS} python` refuses, since {reasons}",
        f"`{name} {' '.join(options)} -np {_RANKS} python ...` works; or export {' '.join(variables)}",
    )


def _starts_one_job(plain: str) -> bool:
    """Return True if the ranks that this launcher starts belong to one job."""
    from mpicoll.cli import job_probe
    from mpicoll.transport import launcher, probes

    environ = launcher.local_job_environment(os.environ, root=os.geteuid() == 0) | {"MPICOLL_REPORT": "off"}
    ended = launcher.run_bounded(
        [plain, "-np", "2", *launcher.module_command(job_probe.__name__, "job")], environ, TIME_LIMIT
    )
    ranks = [one["done"]["ranks"] for one in probes.read_reports(ended.output) if "done" in one]
    return ended.status == 0 and ranks == [2, 2]


def run_test_job(program: str, job: dict[str, Any]) -> Finding:
    from mpicoll.cli import job_probe
    from mpicoll.transport import launcher, probes

    begin = time.monotonic()
    command = [program, "-np", "2", *launcher.module_command(job_probe.__name__, "job")]
    ended = launcher.run_bounded(command, make_job_environment(), TIME_LIMIT)
    report = probes.merge_reports(ended.output)
    if ended.status == 0 and "done" in report and report["done"]["ranks"] == 2:
        job |= report["done"]
        return Finding("MPI", "a job of 2 ranks", "ok", f"works, and took {time.monotonic() - begin:.1f} s")
    if ended.status is None:
        problem = f"it did not end within {TIME_LIMIT:g} s"
    elif "done" in report:
        problem = f"the ranks are not in one job: the world of one has {report['done']['ranks']}"
    else:
        problem = report.get("wrong") or report.get("unable") or launcher.tail(ended.errors, 3)
    return Finding("MPI", "a job of 2 ranks", "problem", problem, "see whether mpirun belongs to the library above")


def make_job_environment() -> dict[str, str]:
    """Return the environment of a test job, which writes neither traces nor reports."""
    from mpicoll.transport import launcher

    settings = {name: value for name, value in os.environ.items() if name != "MPICOLL_TRACE"} | {
        "MPICOLL_REPORT": "off"
    }
    return launcher.local_job_environment(settings, root=os.geteuid() == 0)


def check_reductions(probe: bool | None) -> Iterator[Finding]:
    """Yield the reductions that the library computes wrongly, which mpicoll computes itself."""
    from mpicoll.transport import reduction_probes, reductions

    entry = None if probe else reductions.read_entry()
    source = "" if entry is None else f"tried on {entry['tried']}, stored in {reductions.FILE.path}"
    if probe or (probe is None and (entry is None or not entry["collectives"])):
        entry, source = reduction_probes.probe_reductions()
        source = source if entry is None else f"tried now, {source}"
    if entry is None:
        yield Finding("MPI", "reductions", "not there", source or "not tried", "run mpicoll doctor --probe")
        return
    right = f"right in {len(reductions.PAIRS) - len(entry['wrong'])} of {len(reductions.PAIRS)} cases"
    yield Finding("MPI", "reductions", "ok", f"{right}; mpicoll's own algorithms serve where they are not; {source}")
    # C has two integer types of 64 bits, which are one dtype in numpy.
    for what, why in {reductions.describe_pair(one): why for one, why in entry["wrong"].items()}.items():
        yield Finding("MPI", what, "not there", why)
    if entry["in_place"] is False:
        value = "MPI_Reduce fails in place where the root is not rank 0"
        yield Finding("MPI", "reduce in place", "not there", value, "the operand is copied there")
