"""The traces in a folder: merged files, and the parts of jobs that ended before the file was made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpicoll import atomic_files
from mpicoll.engine.tracing import chrome_format, parts
from mpicoll.engine.tracing.table import TraceTable
from mpicoll.errors import SetupError


def merge(folder: Path) -> Path:
    """Make one file of the parts in `folder`, beside it, and return its path.

    Raises SetupError if there is no part, or one that is damaged elsewhere than at its end.
    """
    with _invalid_content_as_setup_error(folder):
        table = parts.load_parts(folder)
        target = folder.with_name(f"{table.job}.json")
        atomic_files.write(target, chrome_format.format_events(table))
    return target


def load(path: Path) -> TraceTable:
    """Return the operations of a file, of a folder of parts, or of the newest trace in a folder of traces.

    Raises SetupError if there is none, or if it is damaged.
    """
    found = find_traces(path)
    if not found:
        raise SetupError(f"{path}: there is no trace")
    newest = found[-1]
    with _invalid_content_as_setup_error(newest):
        return parts.load_parts(newest) if newest.is_dir() else chrome_format.load_file(newest)


@contextmanager
def _invalid_content_as_setup_error(path: Path) -> Iterator[None]:
    """Raise SetupError for what a file may raise that was not written by mpicoll."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        why = f"{type(error).__name__}: {error}"
        raise SetupError(f"{path} is not a trace that mpicoll has made, or it is damaged ({why})") from error


def find_traces(path: Path) -> list[Path]:
    """Return the traces in `path`, oldest first: files, and folders of parts without a file."""
    if not path.is_dir() or parts.find_parts(path):
        return [path]
    found = {one.stem: one for one in path.glob("*.json")}
    for one in path.iterdir():
        if one.is_dir() and parts.find_parts(one):
            found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: one.stat().st_mtime)
