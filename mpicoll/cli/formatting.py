"""Shared functions of the commands: parsing of sizes, formatting of numbers, tables and progress bars."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mpicoll.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}

_WIDTH = 1000
"""Columns of an output that is not a terminal, such as a file or the pipe of an MPI launcher, to prevent truncation."""


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


class Table:
    """A table of :func:`table`. Columns beyond the width follow below, after a repetition of the first column."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None) -> None:
        self._title = title
        self._columns = columns
        self._rows = rows
        self._caption = caption
        self._widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def _parts(self, width: int) -> list[list[int]]:
        """Group the columns that fit beside each other. Each column needs three more places than its cells in rich."""
        parts: list[list[int]] = []
        room = 0
        for place in range(1, len(self._columns)):
            needed = self._widths[place] + 3
            if not parts or needed > room:
                parts.append([0])
                room = width - self._widths[0] - 3
            parts[-1].append(place)
            room -= needed
        return parts or [[0]]

    def lines(self, width: int) -> list[str]:
        """Return the table as lines of plain text."""
        made = [self._title, ""]
        for places in self._parts(width):
            widths = [self._widths[place] for place in places]
            rule = ["─" * one for one in widths]
            for cells in (self._columns, None, *self._rows):
                texts = rule if cells is None else [cells[place] for place in places]
                first, *others = zip(texts, widths, strict=True)
                line = "   ".join([first[0].ljust(first[1]), *(text.rjust(one) for text, one in others)])
                made.append(f"  {line}".rstrip())
            made.append("")
        return made if self._caption is None else [*made, self._caption, ""]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        # Text, since brackets in a str would be markup. The title is printed separately, since a title of the table
        # would be wrapped to the width of the table.
        yield Text(self._title, style="bold")
        for places in self._parts(options.max_width):
            made = RichTable(box=box.SIMPLE_HEAD)
            for place in places:
                made.add_column(Text(self._columns[place]), justify="right" if place else "left", overflow="fold")
            for row in self._rows:
                made.add_row(*(Text(row[place]) for place in places))
            yield made
        if self._caption is not None:
            yield Text(self._caption + "\n", style="dim")


class Screen:
    """Output to stdout, through rich where it is installed, otherwise as plain text."""

    def __init__(self, columns: int) -> None:
        self._width = columns or _WIDTH
        self._console: Console | None = None
        with suppress(ImportError):
            from rich.console import Console

            # `highlight` would colour numbers of tables at random.
            self._console = Console(width=self._width, force_terminal=columns > 0, highlight=False)

    def print(self, *what: Table | str) -> None:
        """Print tables and texts, each on a new line; the terminal wraps the texts."""
        for one in what:
            if self._console is None:
                print(one if isinstance(one, str) else "\n".join(one.lines(self._width)))
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


@contextmanager
def steps(shown: bool, total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield ``step(label, done)``, which advances a progress bar of `total` steps on stderr.

    It does nothing unless `shown` is true and rich is installed.
    """
    if not shown or find_spec("rich") is None:
        yield lambda label, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # A thread that refreshes the bar would take time from the measurement.
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, force_terminal=True),
        auto_refresh=False,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total)

        def step(label: str, done: int) -> None:
            bar.update(task, description=label, advance=done)
            bar.refresh()

        yield step
