"""What the commands share: reading sizes, writing numbers, tables and progress."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.progress import Progress

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


def require_rich() -> None:
    """Raise SetupError if rich is not installed."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise SetupError("tables need rich; install it with `pip install 'mpicoll[plot]'`") from error


def require_matplotlib() -> None:
    """Raise SetupError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise SetupError("pictures need matplotlib; install it with `pip install 'mpicoll[plot]'`") from error


def terminal_width() -> int:
    """Columns of the terminal that stdout is; 0 if it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def console(width: int | None = None) -> Console:
    """Where tables go: stdout. `width` is what :func:`terminal_width` says, or said in the process that started this
    one: MPI launchers hide the terminal from the ranks, or show them one that isn't there.

    Raises SetupError without rich.
    """
    require_rich()
    from rich.console import Console

    columns = terminal_width() if width is None else width
    # `highlight` would colour numbers of tables at random.
    return Console(width=columns or _WIDTH, force_terminal=columns > 0, highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str | None = None) -> Group:
    """A table to be printed by ``console()``: the first column to the left, the others to the right.

    Raises SetupError without rich.
    """
    require_rich()
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    # Text, since in a str brackets would be markup.
    for place, column in enumerate(columns):
        made.add_column(Text(column), justify="right" if place else "left", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, row))
    # Beside the table, since a title of its own would be wrapped to its width.
    below = [] if caption is None else [Text(caption + "\n", style="dim")]
    return Group(Text(title, style="bold"), made, *below)


def progress(shown: bool) -> Progress:
    """A progress bar on stderr, to be used as a context manager; one that is never seen unless `shown`.

    Raises SetupError without rich.
    """
    require_rich()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # No thread of its own redraws it: that would take time from what is being measured.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True, force_terminal=shown),
        auto_refresh=False,
        transient=True,
        disable=not shown,
    )
