"""``mpicoll doctor``: examine the installation, test it, and print remedies for problems."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mpicoll.cli import formatting
from mpicoll.cli.doctor import cuda, machine, mpi, ports, settings, versions
from mpicoll.cli.doctor.findings import Finding
from mpicoll.wording import inflect

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name


_DESCRIPTION = """\
Check this installation: versions, MPI and its launcher, settings, shared memory, CUDA. What may crash or hang is
tried in separate processes, with a time limit. Run it without mpirun. The exit status is 1 if something is broken; it
is 0 if something is only missing.
"""


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="look whether this installation works",
        description=_DESCRIPTION,
        formatter_class=formatting.HelpFormatter,
    )
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="test again what MPI's reductions compute and whether it takes device memory; or don't test, and show what"
        " is known (once for each MPI; device memory where there is a device)",
    )
    parser.add_argument(
        "--ports",
        action="store_true",
        help="only list the sockets at which a job of 2 ranks on this machine listens, with the settings that close"
        " them; those that other hosts can reach are marked open",
    )
    parser.add_argument(
        "--job",
        nargs="?",
        const="",
        metavar="PID|JOB",
        help="only show where the ranks of the running jobs of this user are on this host, or those of one job: the"
        " operation of each rank, and for which ranks it waits",
    )
    formatting.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them is a problem."""
    if args.job is not None:
        from mpicoll.cli.doctor import job

        return job.run(args.job, args.json)
    if any(os.environ.get(name, "0") != "0" for name in ("PMIX_RANK", "PMI_RANK")):
        return 0  # one rank is enough
    found: list[Finding] = []
    with formatting.steps(formatting.shows_progress(args.json), None, measures=False) as step:
        step("a job of 2 ranks" if args.ports else "examining", 0)
        for one in ports.list_ports() if args.ports else examine(args.probe):
            if args.json != "-":
                if not found or found[-1].section != one.section:
                    print(f"\n{one.section}" if found else one.section)
                print(_format_line(one), flush=True)
            found.append(one)
            step(one.section, 1)
    broken = [one for one in found if one.state == "problem"]
    if args.json is not None:
        formatting.write_json(args.json, {"ok": not broken, "findings": [asdict(one) for one in found]})
    if args.json == "-":
        return 1 if broken else 0
    if broken:
        print(f"\n{len(broken)} of these {inflect(broken, 'is a problem', 'are problems')}.")
    else:
        print("\nNothing is broken.")
    return 1 if broken else 0


def _format_line(one: Finding) -> str:
    mark = {"ok": "ok", "not there": "-", "open": "open", "problem": "PROBLEM"}[one.state]
    begin = f"  {mark:7}  {one.name:23}  "
    value = one.value if not one.remedy or one.state == "ok" else f"{one.value} → {one.remedy}"
    width = formatting.text_width(formatting.terminal_width())
    if width < 60:
        return begin + value
    # Not below a name that is longer than the others, which would leave few columns.
    indent = " " * min(len(begin), 36)
    return textwrap.fill(value, width, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)


def examine(probe: bool | None) -> Iterator[Finding]:
    """Yield all findings, section by section. `probe`: True tests MPI's reductions and its use of device memory, False
    does not, None tests them only if no result is cached."""
    job: dict[str, Any] = {}
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": versions.check_versions,
        "MPI": lambda: mpi.check_mpi(job, probe),
        "machine": lambda: machine.check_machine(job),
        "settings": settings.check_settings,
        "CUDA": lambda: cuda.check_cuda(probe),
    }
    for section, part in parts.items():
        try:
            yield from part()
        except Exception as error:  # noqa: BLE001  the other sections are examined as well
            yield Finding(section, "examination", "problem", f"{type(error).__name__}: {error}", "please report it")
