"""Probe programs, which try in separate processes operations that may crash or hang, and report on stdout.

A module of probes calls :func:`run` as its main program, with functions by name; the process that starts it (see
:func:`mpicoll.transport.launcher.module_command`) reads the reports with :func:`read_reports`. A report is a line that
begins with :data:`MARK`; JSON follows, with one of these keys: the next operation (``step``), a wrong result
(``wrong``), the reason why it can't be tried (``unable``), or, at the end, the result (``done``).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpicoll.errors import MpicollError
from mpicoll.transport import launch_env, launcher

if TYPE_CHECKING:
    from mpicoll.transport.base import Transport

MARK = "mpicoll-trial "


class WrongResult(Exception):
    """A result differs from the expected one."""


class ProbeImpossible(Exception):
    """The operation can't be tried here."""


def run(probes: Mapping[str, Callable[..., Any]], name: str, *arguments: str) -> int:
    """Run ``probes[name](*arguments)``, report its result or its failure, and return the exit status."""
    try:
        report(done=probes[name](*arguments))
    except WrongResult as error:
        report(wrong=str(error))
    except (ProbeImpossible, MpicollError, ImportError) as error:
        report(unable=str(error))
    except Exception:  # noqa: BLE001  after any failure, the other rank must not wait for this one
        traceback.print_exc()
    else:
        return 0
    if "mpi4py.MPI" in sys.modules:
        from mpicoll.transport import mpi

        mpi.abort(1)
    return 1


def report(**what: Any) -> None:
    """Write a report to stdout."""
    sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


def read_reports(output: str) -> Iterator[dict[str, Any]]:
    """Yield the reports in the output of a probe program."""
    for line in output.splitlines():
        if line.startswith(MARK):
            with suppress(ValueError):  # lines of two ranks may be interleaved
                yield json.loads(line[len(MARK) :])


def merge_reports(output: str) -> dict[str, Any]:
    """Return the last value of each key of the reports in `output`."""
    merged: dict[str, Any] = {}
    for one in read_reports(output):
        merged |= one
    return merged


def describe_failure(ended: launcher.RunResult) -> str:
    """Return the launcher's message about a signal, from stderr or, as MPICH's launcher does, from stdout.

    Without such a message, returns the end of stderr.
    """
    others = [line for line in ended.output.splitlines() if not line.startswith(MARK)]
    signals = [line for line in [*others, *ended.errors.splitlines()] if "signal" in line.lower()]
    return signals[-1].strip() if signals else launcher.tail(ended.errors, 2)


def join_two_ranks() -> Transport:
    """Return this rank's end of a job of two. Raises Unable if the launcher has started another number of ranks."""
    from mpicoll.transport import mpi

    transport = mpi.world(launch_env.launched_size(os.environ))
    if transport.size != 2:
        raise ProbeImpossible(
            f"the launcher has started 2 ranks, but the MPI library sees a world of {transport.size}: they belong to"
            " different MPI installations"
        )
    return transport
