"""``mpicoll run``: start the ranks of a program by the launcher that belongs to mpi4py's MPI library."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from mpicoll.errors import ArgumentError, SetupError
from mpicoll.transport import launch_env

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  it has no public name

_SIZE_OPTIONS = ("-np", "--np", "-n")

_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the launcher."""

_JOIN_INTERVAL = 0.2
"""Seconds between two looks whether all output is copied."""

_TAG = re.compile(rb"^\[(?:\d+,(?P<second>\d+)\]<\w+>:|(?P<first>\d+)\](?:<\w+>:)? ?)")
"""The rank before a line, as launchers print it: ``[1]<stdout>: ``, ``[0,1]<stdout>:`` or ``[1] ``."""

_PART_OF_TAG = re.compile(rb"\[[\d,]*(\](<(\w*(>(: ?)?)?)?)?)?")

_DESCRIPTION = """\
Run PROGRAM on N ranks: a Python script, -m and a module, or another command.

The launcher is the mpirun of the MPI library that mpi4py loads, with the
settings that it needs as root, in a container and with more ranks than cores.
If a rank fails, or this command is ended, all ranks are ended.
"""

_EPILOG = """\
Other options are passed to the launcher: --hostfile FILE, --host a:2,b:2,
--map-by node and so on. After one of them, PROGRAM must be a file that ends
with .py, a python, -m and a module, or stand after --.
"""


class Words(NamedTuple):
    """The parts of a command line: this command's options, the launcher's options, and the program."""

    own: list[str]
    passed: list[str]
    program: list[str]


def add(commands: Commands) -> None:
    """Add the parser of this command."""
    # The words belong to three programs. To this parser all are positional; `split_words` separates them.
    parser = commands.add_parser("run", help="run a program on several ranks", prefix_chars="\0", add_help=False)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the program, and return the launcher's exit status."""
    from mpicoll.launch.job_command import make_job_command

    words = split_words(args.words)
    parser = make_own_parser()
    own = parser.parse_args(words.own)
    if not words.program and words.passed:
        raise ArgumentError(
            f"run: there is no program in {shlex.join(args.words)!r}: put -- before it, after the launcher's options"
        )
    if not words.program:
        parser.error("there is no PROGRAM")
    if launch_env.is_launched(os.environ):
        raise SetupError(
            "run: an MPI launcher has started this process as a rank, and a job within a job would share its"
            " cores; start the program by its own name, or unset the launcher's variables (PMIX_*, PMI_*, OMPI_COMM_*)"
        )
    command = make_job_command(
        os.environ, words.program, own.np, words.passed, tag=not own.no_tag, root=os.geteuid() == 0
    )
    if own.dry_run:
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(command.variables.items())]
        print(" ".join([*settings, shlex.join(command.words)]))
        return 0
    return _run_job(command.words, os.environ | command.variables, tag=not own.no_tag)


def make_own_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's own options."""
    parser = argparse.ArgumentParser(
        prog="mpicoll run",
        usage="mpicoll run [-np N] [--no-tag] [--dry-run] [OPTIONS] [--] PROGRAM ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        *_SIZE_OPTIONS,
        type=_size,
        metavar="N",
        help="number of ranks (one per core; on named hosts or in a batch job, what the launcher takes)",
    )
    parser.add_argument("--no-tag", action="store_true", help="do not put the rank before each line of output")
    parser.add_argument("--dry-run", action="store_true", help="print the command and its variables instead")
    return parser


def _size(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; write for example 4")
    return int(text)


def split_words(words: Sequence[str]) -> Words:
    """Separate the words of a command line into the parts of :class:`Words`.

    Which options of a launcher take a value is not known here, so a word after an unknown option is taken for its value
    unless it can only be the program.
    """
    own: list[str] = []
    passed: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return Words(own, passed, list(words[position + 1 :]))
        name = word.partition("=")[0]
        if word in _SIZE_OPTIONS:
            own += words[position : position + 2]
            position += 1
        elif name in ("--np", "--no-tag", "--dry-run", "-h", "--help"):
            own.append(word)
        elif word == "-m" or (not word.startswith("-") and (not passed or _must_be_program(word))):
            return Words(own, passed, list(words[position:]))
        else:
            passed.append(word)
        position += 1
    return Words(own, passed, [])


def _must_be_program(word: str) -> bool:
    return word.endswith(".py") or re.fullmatch(r"python[\d.]*t?", word.rpartition("/")[2]) is not None


def _run_job(command: Sequence[str], environ: dict[str, str], *, tag: bool) -> int:
    """Run the launcher and wait for it. No process of the job is left when this one has ended, whatever its end."""
    import signal
    import subprocess
    import tempfile

    from mpicoll.transport import launcher

    pipe = subprocess.PIPE if tag else None
    received: list[int] = []
    with tempfile.TemporaryDirectory(prefix="mpicoll-run-") as directory:
        process = subprocess.Popen(
            [*launcher.guard_command(_GRACE, directory), *command],
            env=environ,
            stdout=pipe,
            stderr=pipe,
            # A signal of the terminal must reach only this process, which then ends the job.
            start_new_session=True,
        )

        def end(number: int, _: Any) -> None:
            received.append(number)
            process.terminate()  # the guard bounds the time that the job takes to end

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                signal.signal(number, end)
        outputs = [
            _Output(source, sink)
            for source, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer))
            if source is not None
        ]
        status = process.wait()
        for output in outputs:
            output.join()
    return 128 + received[0] if received else status


def _strip_tags(text: bytes, tag: bytes) -> bytes:
    """Return a piece of a line without the tags after its beginning.

    MPICH and Open MPI 4 put one before each piece that they have read, so also before a line's end. Within a line only
    that of Open MPI 4 can't be part of the program's output.
    """
    if b"<" in tag:
        return text.replace(tag, b"")
    return text[: -len(tag) - 1] + b"\n" if tag and text.endswith(tag + b"\n") else text


def _count_held(text: bytes, tag: bytes) -> int:
    """Return the number of bytes at the end of `text` that may be a tag when more has arrived."""
    return next((number for number in range(len(tag), 0, -1) if text.endswith(tag[:number])), 0)


class _Output:
    """A thread that copies a job's output, with the rank before each line in one form for all launchers."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        import threading

        self._source = source
        self._sink = sink
        self._reading_since: float | None = None
        self._thread = threading.Thread(target=self._copy, name="mpicoll-run-output", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all output is copied, however slowly it is read, after the job has ended.

        A process outside of the job that holds the pipe open is waited for only briefly.
        """
        ended = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(_JOIN_INTERVAL)
            since = self._reading_since
            if since is not None and time.monotonic() - max(since, ended) > _GRACE:
                return

    def _copy(self) -> None:
        rest, raw, begins_line = b"", b"", True
        with self._source:
            while data := self._read():
                pieces, rest = (rest + data).splitlines(keepends=True), b""
                if _PART_OF_TAG.fullmatch(pieces[-1]):
                    rest = pieces.pop()
                for number, piece in enumerate(pieces):
                    prefix, text = b"", piece
                    if begins_line:
                        found = _TAG.match(piece)
                        raw = found[0] if found else b""
                        prefix = b"[%b] " % (found["first"] or found["second"]) if found else b""
                        text = piece[len(raw) :]
                    text = _strip_tags(text, raw)
                    if number == len(pieces) - 1 and (held := _count_held(text, raw)):
                        text, rest = text[:-held], text[-held:]
                    self._write(prefix + text)
                    begins_line = piece.endswith(b"\n")  # \r does not end a line: it redraws a progress bar
        if not _TAG.fullmatch(rest):  # Open MPI may print the rank alone at the end
            self._write(rest)

    def _read(self) -> bytes:
        self._reading_since = time.monotonic()
        data = os.read(self._source.fileno(), 1 << 16)
        self._reading_since = None
        return data

    def _write(self, data: bytes) -> None:
        try:
            self._sink.write(data)
            self._sink.flush()
        except (OSError, ValueError):
            pass  # closed; the ranks must be able to write on
