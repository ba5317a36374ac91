"""Tests of the MPI library's own reductions, made once for each library.

Libraries in use compare unsigned integers as signed ones, saturate sums of small integers, or lose a NaN, some of them
only in the part of an array that their vector instructions cover. MPI_Reduce_local runs the functions of a library's
collectives in one process, without a message, so all operations are tried on all dtypes when the first communicator is
made: some milliseconds, once for each library and processor, since the result is kept in a file of the user's.
``mpicoll doctor`` also tries the collectives themselves, in a job of two ranks, and adds the results to that file.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
from time import strftime
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpicoll import user_cache
from mpicoll.errors import MpicollError
from mpicoll.proc_files import read_file
from mpicoll.transport import quirks
from mpicoll.transport.base import Memory
from mpicoll.ufuncs import UFUNCS

if TYPE_CHECKING:
    from mpicoll.transport import launcher

Reduce: TypeAlias = Callable[[str, Memory, Memory], object]
"""``reduce(op, source, target)`` stores `op` of the two arrays in `target`, as MPI_Reduce_local does."""

Defects: TypeAlias = "dict[str, str]"
"""Reductions that must not be done by the MPI library, by :func:`format_pair`, with the reason."""

_LOGIC = ("land", "lor", "lxor")

_OF_KIND = {
    "b": _LOGIC,
    "i": tuple(UFUNCS),
    "u": tuple(UFUNCS),
    "f": ("sum", "prod", "min", "max"),
    "c": ("sum", "prod"),
}

# By character: where C has two integers of the same size, MPI has two datatypes.
_DTYPES = "?bBhHiIlLqQfdFD"

PAIRS = tuple((op, np.dtype(char)) for char in _DTYPES for op in _OF_KIND[np.dtype(char).kind])
"""All operations and dtypes for which the MPI library's own reductions may be taken."""

_NAMES = frozenset(f"{op} {dtype.char}" for op, dtype in PAIRS)

_VECTOR = 64
"""Bytes of the longest vectors of processors."""

_FIELDS = ("wrong", "collectives", "in_place", "tried")


def _is_valid(entry: Mapping[str, Any]) -> bool:
    wrong = entry.get("wrong")
    return (
        isinstance(wrong, dict)
        and _NAMES.issuperset(wrong)
        and all(isinstance(value, str) for value in wrong.values())
        and isinstance(entry.get("tried"), str)
        and isinstance(entry.get("collectives"), bool)
        and entry.get("in_place") in (None, True, False)
    )


FILE = user_cache.Entries("mpi-reductions.json", "mpicoll MPI reductions", 1, _FIELDS, _is_valid)
"""The file of the results."""


def format_pair(op: str, dtype: np.dtype[Any]) -> str:
    """Return the name of `op` on `dtype` in files and tables."""
    return f"{op} {dtype.char}"


def describe_pair(text: str) -> str:
    """Return an operation and dtype of :func:`format_pair` in readable form."""
    op, _, char = text.partition(" ")
    return f"{op} of {np.dtype(char).name}"


def find_defect(wrong: Mapping[str, str], op: str, dtype: np.dtype[Any]) -> str | None:
    """Return the reason why `op` on `dtype` must not be done by a library with the defects `wrong`, or None."""
    what = format_pair(op, dtype)
    if what not in _NAMES:
        return f"{op} of {dtype.name} was not tested with the MPI library"
    return wrong.get(what)


def find_defects(reduce: Reduce) -> Defects:
    """Return the defects of the library of this process: those found before, else those that :func:`try_all` finds."""
    here = read_conditions()
    entry = FILE.read(here)
    if entry is None:
        entry = make_entry(here, try_all(reduce))
        FILE.write(entry)
    wrong: Defects = entry["wrong"]
    return wrong


def read_entry() -> dict[str, Any] | None:
    """Return the file's entry for the MPI library of this process, or for the one that it would load."""
    return FILE.read(read_conditions())


def make_entry(found_under: Mapping[str, Any], wrong: Defects) -> dict[str, Any]:
    """Return an entry of the file, for the defects that :func:`try_all` has found."""
    now = strftime("%Y-%m-%d %H:%M:%S")
    return {**found_under, "wrong": wrong, "collectives": False, "in_place": None, "tried": now}


@lru_cache(maxsize=1)
def reduces_in_place() -> bool:
    """Return True if MPI_Reduce of this process' library may work in place at a root other than rank 0."""
    entry = read_entry()
    if entry is not None and entry["in_place"] is not None:
        return bool(entry["in_place"])
    library = _find_library()
    return library is not None and not quirks.REDUCE_IN_PLACE.applies_to(library.version)


def read_conditions() -> dict[str, Any]:
    """Return the conditions on which a library's reductions depend."""
    library = _find_library()
    path = "" if library is None else library.path
    return {
        "machine": platform.machine(),
        "processor": _read_processor(),
        "mpi": "" if library is None else library.version,
        "library": path,
        "built": _build_of(path),
        "mpi4py": "" if library is None else library.mpi4py,
        "settings": {key: value for key, value in os.environ.items() if key.startswith("OMPI_MCA_op")},
    }


def _find_library() -> launcher.MpiLibrary | None:
    """Return the MPI library of this process, or the one that it would load; None if there is none."""
    from mpicoll.transport import launcher  # late: only one rank of a node needs it

    library = launcher.find_library()
    return None if isinstance(library, str) else library


def _build_of(path: str) -> list[int]:
    """Return size and modification time of the file, which distinguish builds of one version."""
    try:
        status = os.stat(path)  # noqa: PTH116  "" is no path of a file
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


@lru_cache(maxsize=1)
def _read_processor() -> list[str]:
    """Return model and instruction sets of the first core: libraries choose their functions by these."""
    telling = ("model name", "flags", "Features", "CPU implementer", "CPU part", "cpu model", "isa")
    try:
        first = read_file("/proc/cpuinfo", 8192).partition("\n\n")[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.startswith(telling)]


def try_all(reduce: Reduce) -> Defects:
    """Return the defects of `reduce` among all :data:`PAIRS`."""
    wrong = {format_pair(op, dtype): why for op, dtype in PAIRS if (why := _try_pair(reduce, op, dtype)) is not None}
    _lay_out.cache_clear()
    return wrong


def _try_pair(reduce: Reduce, op: str, dtype: np.dtype[Any]) -> str | None:
    """Return the reason why `op` on `dtype` can't be done by `reduce`; None if all its results are right."""
    source, before, pieces = _lay_out(dtype, logic=op in _LOGIC)
    target = before.copy()
    try:
        for start, stop in pieces:
            reduce(op, source[start:stop], target[start:stop])
    except MpicollError as error:
        return f"the MPI library has no {op} of {dtype.name}: {error}"
    expected = combine(op, source, before)
    between = [stop for _, stop in pieces]
    expected[between] = before[between]
    return describe_difference(op, expected, target, source, before)


def combine(op: str, left: Memory, right: Memory) -> Memory:
    """Return the right result of `op` for the two arrays."""
    with np.errstate(all="ignore"):
        return np.asarray(UFUNCS[op](left, right).astype(left.dtype, copy=False))


def describe_difference(op: str, expected: Memory, got: Memory, left: Memory, right: Memory) -> str | None:
    """Return a description of the first element of `got` that differs from `expected`; None if there is none.

    `left` and `right` are the operands.
    """
    equal = expected == got
    if expected.dtype.kind in "fc":
        equal |= np.isnan(expected) & np.isnan(got)
    if equal.all():
        return None
    at = int(np.argmin(equal))
    return (
        f"the MPI library computes {op} of {expected.dtype.name} wrongly: {left[at]} and {right[at]} give {got[at]},"
        f" not {expected[at]}"
    )


def make_operands(op: str, dtype: np.dtype[Any], count: int) -> tuple[Memory, Memory]:
    """Return two arrays of `count` elements, in which each edge value of the dtype is paired with each other one."""
    values = _edge_values(dtype, logic=op in _LOGIC)
    return np.resize(np.repeat(values, values.size), count), np.resize(np.tile(values, values.size), count)


def _edge_values(dtype: np.dtype[Any], *, logic: bool) -> Memory:
    """Return an odd number of values: in a long array each pair of values is then in each place of a vector."""
    if dtype.kind == "b" or logic:
        return np.array([0, 1, 1], dtype)  # operands are converted to truth values before
    if dtype.kind == "c":
        return np.array([0, 1, 1j, 2 + 3j, -1 - 4j, 5, -2j], dtype)  # products of which are exact in any order
    if dtype.kind == "f":
        bounds = np.finfo(dtype)
        return np.array([0, 1, -1, 2.5, np.inf, -np.inf, bounds.max, bounds.smallest_subnormal, np.nan], dtype)
    limits = np.iinfo(dtype)
    some = [limits.min, limits.max, 0, 1, 2, limits.max // 2, limits.max // 2 + 1, limits.max - 1, 5]
    return np.array(some if dtype.kind == "u" else [*some, -1, -2], dtype)


@lru_cache(maxsize=32)
def _lay_out(dtype: np.dtype[Any], *, logic: bool) -> tuple[Memory, Memory, list[tuple[int, int]]]:
    """Return two arrays, and the pieces of them that are to be reduced.

    The pieces have all lengths up to two vectors and a part of a third, then a long one. Between pieces is an
    element that must stay unchanged.
    """
    width = max(1, _VECTOR // dtype.itemsize)
    long = width * _edge_values(dtype, logic=logic).size ** 2 + width // 2 + 1
    pieces, end = [], 0
    for count in chain(range(1, 2 * width + width // 2 + 2), (long,)):
        pieces.append((end, end + count))
        end += count + 1
    source, target = make_operands("land" if logic else "", dtype, end + 1)
    # Offset by one element, so that their alignments differ.
    return source[1:], target[:-1], pieces
