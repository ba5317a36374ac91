"""Shared functions of the commands: parsing of sizes, formatting of numbers, tables and progress bars."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.errors import ArgumentError, SetupError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f8790")
"""Colours of figures: Okabe and Ito's, which people with any kind of colour vision can distinguish, and grey."""

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}

_WIDTH = 80
"""Columns of an output that is not a terminal, such as a file or the pipe of an MPI launcher, unless COLUMNS is set."""

_NARROWEST = 10
"""Columns that a table keeps for the cells of a column, however narrow the output is."""

_PATIENCE = 1.0
"""Seconds for which a command runs before it shows a progress bar."""


def sizes(text: str, factor: int = 2) -> list[int]:
    """Read sizes in bytes, ascending: ``8,1k,1m``, or ``4k-64m`` for each power of `factor` times 4k up to 64m.

    Raises argparse.ArgumentTypeError, so that it can be the ``type`` of an argument.
    """
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first, last = _bytes(low), _bytes(high if dash else low)
        if first > last:
            raise argparse.ArgumentTypeError(f"{part!r} is an empty range")
        while first <= last:
            found.add(first)
            first *= factor
    return sorted(found)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 8, 64k, 1m, 8-64m or 8,1k,1m")
    return int(match[1]) << _UNITS[match[2]]


def nbytes(number: float) -> str:
    """Format bytes as ``64 KiB``, ``1.5 MiB``, ``12 B``."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        # 1048572 is written as 1 MiB, not as 1024 KiB
        if number / (1 << shift) >= 0.99995:
            return f"{_short(number / (1 << shift))} {unit}"
    return f"{_short(number)} B"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def seconds(time: float) -> str:
    """Format a time with three digits: ``1.23 µs``, ``45.6 ms``, ``789 s``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        # 0.9996 ms is written as 1.00 ms, not as 1000 µs
        if time * scale >= 0.9995:
            return f"{_digits(time * scale)} {unit}"
    return f"{_digits(time * 1e9)} ns"


def _digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def rate(per_second: float) -> str:
    """Format bytes per second in GB/s, the unit in which networks and memories are compared."""
    return _digits(per_second / 1e9)


def require_matplotlib() -> None:
    """Raise SetupError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SetupError("pictures need matplotlib; install it with `pip install 'mpicoll[plot]'`") from error


def terminal_width() -> int:
    """Return the columns of the terminal at stdout; 0 if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def text_width(columns: int) -> int:
    """Return the columns for an output whose :func:`terminal_width` is `columns`: elsewhere COLUMNS, or 80."""
    return columns or shutil.get_terminal_size((_WIDTH, 24)).columns


def fold(text: str, width: int) -> str:
    """Break the lines of a text at blanks so that they fit `width` columns; words that are longer stay whole."""
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
    )


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of ``--help`` that folds descriptions: paragraphs as a whole, and those with an indented line, which
    are lists of commands with remarks, line by line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n\s*\n", text.rstrip())
        return "\n\n".join(
            "\n".join(_fold_remark(line, width) for line in one.splitlines())
            if re.search(r"^\s", one, re.MULTILINE)
            else fold(" ".join(one.split()), width)
            for one in paragraphs
        )


def _fold_remark(line: str, width: int) -> str:
    """Break a line so that what follows stands below the remark, which two blanks or more separate."""
    begin = re.match(r"\s*(\S.*?\s{2,})?", line)
    below = begin.end() if begin is not None else 0
    return textwrap.fill(line, width, subsequent_indent=" " * below, break_long_words=False, break_on_hyphens=False)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``, whose value is None without it and ``-`` without a file."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=_json_target,
        metavar="FILE",
        help="write JSON to FILE, or to stdout in place of the tables",
    )


def _json_target(text: str) -> str:
    if text != "-":
        check_writable("--json", Path(text))
    return text


def check_writable(option: str, path: Path) -> None:
    """Raise ArgumentError if the file `path`, the value of `option`, can't be written. Commands check this before they
    measure, not after it."""
    folder = path.absolute().parent
    if path.is_dir():
        raise ArgumentError(f"{option} {path}: it is a directory; name a file")
    if not folder.is_dir():
        raise ArgumentError(f"{option} {path}: there is no directory {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(f"{option} {path}: this user may not write there; name another file")


def write_json(target: str | Path, content: Any) -> None:
    """Write `content` as JSON to a file, or to stdout if `target` is ``-``. Raises SetupError if the file can't be
    written."""
    text = json.dumps(content, indent=1) + "\n"
    if str(target) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        try:
            Path(target).write_text(text)
        except OSError as error:
            raise SetupError(f"--json {target}: {error.strerror}") from error


class Table:
    """A table of :func:`table`. Columns beyond the width follow below, after a repetition of the first column. Cells
    that are too wide even so are folded."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None) -> None:
        self._title = title
        self._columns = columns
        self._rows = rows
        self._caption = caption
        self._widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def _parts(self, width: int) -> list[dict[int, int]]:
        """Group the columns that fit beside each other: the width of each, by its place. Each column needs three more
        places than its cells in rich."""
        widths = [max(1, one) for one in self._widths]
        others = max(widths[1:], default=-3)
        if widths[0] + others + 6 > width:
            # The first column, which is repeated, gets what the widest of the others leaves of it, at least a half: its
            # names would be broken anywhere, while the others fold at blanks.
            least = max(_NARROWEST, width // 2)
            widths[0] = min(widths[0], max(least, width - others - 6))
            widths[1:] = [min(one, max(_NARROWEST, width - widths[0] - 6)) for one in widths[1:]]
        parts: list[dict[int, int]] = []
        room = 0
        for place in range(1, len(widths)):
            needed = widths[place] + 3
            if not parts or needed > room:
                parts.append({0: widths[0]})
                room = width - widths[0] - 3
            parts[-1][place] = widths[place]
            room -= needed
        return parts or [{0: min(widths[0], max(_NARROWEST, width - 3))}]

    def lines(self, width: int) -> list[str]:
        """Return the table as lines of plain text."""
        made = [*fold(self._title, width).splitlines(), ""]
        for part in self._parts(width):
            made += self._fold_row(self._columns, part)
            made.append(("  " + "   ".join("─" * one for one in part.values())).rstrip())
            for row in self._rows:
                made += self._fold_row(row, part)
            made.append("")
        return made if self._caption is None else [*made, *fold(self._caption, width).splitlines(), ""]

    @staticmethod
    def _fold_row(row: Sequence[str], part: dict[int, int]) -> Iterator[str]:
        """Yield the lines of the cells of a row that are in `part`."""
        folded = [
            [row[place]] if len(row[place]) <= width else textwrap.wrap(row[place], width, break_on_hyphens=False)
            for place, width in part.items()
        ]
        for cells in zip_longest(*folded, fillvalue=""):
            (first, width), *others = zip(cells, part.values(), strict=True)
            line = "   ".join([first.ljust(width), *(text.rjust(one) for text, one in others)])
            yield f"  {line}".rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        # Text, since brackets in a str would be markup. The title is printed separately, since a title of the table
        # would be wrapped to the width of the table.
        yield Text(fold(self._title, options.max_width), style="bold")
        for part in self._parts(options.max_width):
            made = RichTable(box=box.SIMPLE_HEAD)
            for place, width in part.items():
                made.add_column(
                    Text(self._columns[place]), justify="right" if place else "left", overflow="fold", max_width=width
                )
            for row in self._rows:
                made.add_row(*(Text(row[place]) for place in part))
            yield made
        if self._caption is not None:
            yield Text(fold(self._caption, options.max_width) + "\n", style="dim")


class Screen:
    """Output to stdout, through rich where it is installed, otherwise as plain text."""

    def __init__(self, columns: int) -> None:
        self.width = text_width(columns)
        self._console: Console | None = None
        with suppress(ImportError):
            from rich.console import Console

            class Output(Console):
                def on_broken_pipe(self) -> None:
                    raise BrokenPipeError  # which mpicoll.cli.main handles; rich would exit with status 1

            # `highlight` would colour numbers of tables at random.
            self._console = Output(width=self.width, force_terminal=columns > 0, highlight=False)

    def print(self, *what: Table | str) -> None:
        """Print tables and texts, each on a new line; the terminal wraps the texts."""
        for one in what:
            if self._console is None:
                print(one if isinstance(one, str) else "\n".join(one.lines(self.width)))
            elif isinstance(one, str):
                self._console.print(one, markup=False, soft_wrap=True)
            else:
                self._console.print(one)


def console(width: int | None = None) -> Screen:
    """Return the output for tables. `width` is the value of :func:`terminal_width`, possibly that of the process that
    started this one: MPI launchers hide the terminal from the ranks, or give them a pseudo-terminal."""
    return Screen(terminal_width() if width is None else width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str | None = None) -> Table:
    """Return a table for ``console().print``: the first column is aligned left, the others right."""
    return Table(title, columns, rows, caption)


def shows_progress(json_target: str | Path | None = None) -> bool:
    """Return True if a progress bar would be seen, and nothing else: stdout and stderr are terminals, and JSON is not
    written to stdout."""
    return sys.stderr.isatty() and sys.stdout.isatty() and str(json_target) != "-"


@contextmanager
def steps(
    shown: bool, total: int | None, *, measures: bool = True, patience: float = _PATIENCE
) -> Iterator[Callable[[str, int], None]]:
    """Yield ``step(label, done)``, which advances a progress bar of `total` steps on stderr; None: of unknown length.

    It does nothing unless `shown` is true and rich is installed, nor in the first `patience` seconds. If the command
    `measures`, the bar is drawn only in ``step``; otherwise a thread draws it too.
    """
    if not shown or find_spec("rich") is None:
        yield lambda label, done: None
        return
    from threading import Timer

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # A thread that refreshes the bar would take time from the measurement.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *(() if total is None else (MofNCompleteColumn(),)),
        TimeElapsedColumn(),
        console=Console(stderr=True, force_terminal=True),
        auto_refresh=not measures,
        refresh_per_second=4,
        transient=True,
    )
    task = bar.add_task("", total=total)
    timer = None if measures else Timer(patience, bar.start)
    due = time.monotonic() + patience

    def step(label: str, done: int) -> None:
        bar.update(task, description=label, advance=done)
        if measures and time.monotonic() >= due:
            bar.start()  # does nothing if it has been started
            bar.refresh()

    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield step
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()
        if bar.live.is_started:
            bar.stop()
