"""The command line: ``mpicoll COMMAND``, or ``python -m mpicoll COMMAND``.

A command is a module of this package with two functions: ``add(commands)`` adds its parser, ``run(args)`` runs it and
returns the exit status. ``add`` imports nothing heavy, so that ``--help`` stays fast.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from mpicoll import __version__
from mpicoll.errors import MpicollError
from mpicoll.transport import launch_env

COMMANDS = ("run", "doctor", "bench", "tune", "simulate", "study", "algorithms", "trace", "completion")

_CLOSED_PIPE = 141
"""Exit status where the reader of stdout has closed it: what a shell reports for a program that SIGPIPE has ended."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write for which there is no room."""

_OVERVIEW = """\
mpicoll {version}
MPI collectives for numpy, cupy and torch arrays.

  mpicoll run -np 4 train.py       run a program on 4 ranks
  mpicoll doctor                   check this installation, with remedies
  mpicoll doctor --job             where the ranks of running jobs are

  mpicoll bench                    measure all-reduce beside mpi4py
  mpicoll tune                     find the fastest algorithms, for later runs
  mpicoll simulate --ranks 64      time of each algorithm on a cluster
  mpicoll study sync               parameter server or all-reduce?

  mpicoll algorithms list          the algorithms; verify, cost and draw them
  mpicoll trace summary DIR        where the time of a traced job went
  mpicoll completion bash          completion of commands and options by Tab

mpicoll COMMAND --help describes a command with all its options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: this program's arguments) and return its exit status."""
    if sys.stdout is None:  # `>&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  until the program ends
    if isinstance(sys.stdout, TextIOWrapper):
        # The encoding of a terminal may have no lines of tables, and no µ.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = _run(sys.argv[1:] if argv is None else list(argv))
        except SystemExit:  # of the parser, which may have printed help
            _flush_output()
            raise
        _flush_output()
    except BrokenPipeError:
        if launch_env.is_launched(os.environ):
            raise
        _discard_output()  # its reader wants no more of it, such as head
        return _CLOSED_PIPE
    except OSError as error:
        if error.errno not in _FULL or launch_env.is_launched(os.environ):
            raise
        with suppress(OSError):
            _flush_output()
        _discard_output()
        sys.stderr.write(f"mpicoll: the output can't be written: {error.strerror}\n")
        return 2
    return status


def _flush_output() -> None:
    # The interpreter would do so at its exit, where nothing can catch the error.
    sys.stdout.flush()


def _discard_output() -> None:
    # What is left must not fail again at the exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(words: Sequence[str]) -> int:
    if not words:
        sys.stdout.write(_OVERVIEW.format(version=__version__))
        return 0
    try:
        args = make_parser(words).parse_args(words)
        return int(args.run(args))
    except MpicollError as error:
        if launch_env.is_launched(os.environ):
            raise  # so that the ranks that wait for this one are ended
        sys.stderr.write(f"mpicoll: {error}\n")
        return 2
    except OSError as error:
        # Only for files that the user named; for other errors the traceback is more useful.
        if error.filename is None or launch_env.is_launched(os.environ):
            raise
        sys.stderr.write(f"mpicoll: {error.filename}: {error.strerror}\n")
        return 2


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of `words`. If they begin with a command, the modules of other commands are not imported."""
    parser = argparse.ArgumentParser(prog="mpicoll", description="Measure and look at MPI collectives.")
    parser.add_argument("--version", action="version", version=f"mpicoll {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in set(words[:1]) & set(COMMANDS) or COMMANDS:
        import_module(f"{__name__}.{name}").add(commands)
    return parser
