"""Sockets at which a job listens."""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.cli.doctor.findings import INSTALL_MPI, TIME_LIMIT, Finding
from mpicoll.cli.doctor.mpi import make_job_environment


def list_ports() -> Iterator[Finding]:
    """Yield the sockets at which a job of 2 ranks listens, by owner."""
    from mpicoll.cli import job_probe, listening
    from mpicoll.transport import launcher, probes

    program = launcher.find_launcher()
    if program is None:
        yield Finding("ports", "job", "not there", "there is neither mpirun nor mpiexec", INSTALL_MPI)
        return
    command = [program, "-np", "2", *launcher.module_command(job_probe.__name__, "ports")]
    ended = launcher.run_bounded(command, make_job_environment(), 4 * TIME_LIMIT)
    report = probes.merge_reports(ended.output)
    found = next((one["done"] for one in probes.read_reports(ended.output) if one.get("done")), None)
    if found is None:
        problem = report.get("unable") or launcher.tail(ended.errors, 3)
        yield Finding("ports", "job", "problem", problem, "see what `mpicoll doctor` says about a job of 2 ranks")
        return
    for one in listening.describe(found["ports"], found["library"]):
        yield Finding("ports", one.owner, "open" if one.is_open else "ok", one.text, one.setting)
    yield find_control_addresses()


def find_control_addresses() -> Finding:
    """Return the addresses of this host at which the control network of a job on several hosts would listen."""
    from mpicoll.config import config
    from mpicoll.errors import SetupError
    from mpicoll.transport.control.interfaces import find_addresses, select_addresses

    name = "control, several hosts"
    try:
        usable = select_addresses(config().interface) if config().interface else find_addresses()
    except (SetupError, ValueError) as error:
        return Finding("ports", name, "problem", str(error), "change or unset MPICOLL_INTERFACE")
    if not usable:
        return Finding("ports", name, "not there", "this host has no interface that other hosts can reach")
    listed = ", ".join(f"{one.interface} ({one.address})" for one in usable)
    text = f"one address that all hosts reach, of {listed}" if len(usable) > 1 else listed
    return Finding("ports", name, "open", text, "MPICOLL_INTERFACE selects the interfaces")
