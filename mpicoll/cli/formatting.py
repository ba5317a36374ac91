"""What the commands share: reading sizes, writing numbers, tables and progress."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from mpicoll.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from typing_extensions import Self

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}

_WIDTH = 1000
"""Columns of what is no terminal, such as a file or the pipe of an MPI launcher: nothing is cut off there."""


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
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write such as 8, 64k, 1m, 8-64m or 8,1k,1m")
    return int(match[1]) << _UNITS[match[2]]


def nbytes(number: float) -> str:
    """``64 KiB``, ``1.5 MiB``, ``12 B``."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        # 1048572 is written as 1 MiB, not as 1024 KiB
        if number / (1 << shift) >= 0.99995:
            return f"{_short(number / (1 << shift))} {unit}"
    return f"{_short(number)} B"


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def seconds(time: float) -> str:
    """``1.23 µs``, ``45.6 ms``, ``789 s``: three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        # 0.9996 ms is written as 1.00 ms, not as 1000 µs
        if time * scale >= 0.9995:
            return f"{_digits(time * scale)} {unit}"
    return f"{_digits(time * 1e9)} ns"


def _digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def rate(per_second: float) -> str:
    """Bytes per second in GB/s, as networks and memories are compared."""
    return _digits(per_second / 1e9)


def require_matplotlib() -> None:
    """Raise SetupError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SetupError("pictures need matplotlib; install it with `pip install 'mpicoll[plot]'`") from error


def terminal_width() -> int:
    """Columns of the terminal that stdout is; 0 if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


class Table:
    """A table as :func:`table` makes it. Columns that don't fit into the width go below, behind the first one again."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None) -> None:
        self._title = title
        self._columns = columns
        self._rows = rows
        self._caption = caption
        self._widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def _parts(self, width: int) -> list[list[int]]:
        """Which columns stand beside each other. Each takes three more places than its cells, as rich draws it."""
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
        """The table as plain text."""
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

        # Text, since in a str brackets would be markup. The title is beside the table, to whose width it would be
        # wrapped as a title of its own.
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
    """Where tables and lines go: stdout, by rich where it is installed, else as plain text."""

    def __init__(self, columns: int) -> None:
        self._width = columns or _WIDTH
        self._console: Console | None = None
        with suppress(ImportError):
            from rich.console import Console

            # `highlight` would colour numbers of tables at random.
            self._console = Console(width=self._width, force_terminal=columns > 0, highlight=False)

    def print(self, *what: Table | str) -> None:
        """Print tables, and text that the terminal wraps, each on a line of its own."""
        for one in what:
            if self._console is None:
                print(one if isinstance(one, str) else "\n".join(one.lines(self._width)))
            elif isinstance(one, str):
                self._console.print(one, markup=False, soft_wrap=True)
            else:
                self._console.print(one)


def console(width: int | None = None) -> Screen:
    """Where tables go: stdout. `width` is what :func:`terminal_width` says, or said in the process that started this
    one: MPI launchers hide the terminal from the ranks, or show them one that isn't there."""
    return Screen(terminal_width() if width is None else width)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str | None = None) -> Table:
    """A table to be printed by ``console()``: the first column to the left, the others to the right."""
    return Table(title, columns, rows, caption)


class Bar(Protocol):
    """A progress bar, as far as the commands use rich's."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    def add_task(self, description: str, *, total: int) -> Any: ...

    def update(self, task: Any, *, description: str = "", advance: int) -> None: ...

    def refresh(self) -> None: ...


class _NoBar:
    """What stands for a progress bar that nobody sees."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        """It has shown nothing."""

    def add_task(self, description: str, *, total: int) -> Any:
        """No task."""

    def update(self, task: Any, *, description: str = "", advance: int) -> None:
        """Nothing to see."""

    def refresh(self) -> None:
        """Nothing to see."""


def progress(shown: bool) -> Bar:
    """A progress bar on stderr, to be used as a context manager; one that is never seen unless `shown`, and rich is
    installed."""
    if not shown:
        return _NoBar()
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return _NoBar()
    # No thread of its own redraws it: that would take time from what is being measured.
    bar: Any = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, force_terminal=True),
        auto_refresh=False,
        transient=True,
    )
    return bar  # type: ignore[no-any-return]
