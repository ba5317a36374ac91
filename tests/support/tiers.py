"""Tiers: how much of the tests a run takes. A plugin that conftest.py registers, with the option ``--tier``.

``long``     every test: what pytest does by itself
``default``  without tests and parameters marked `long`; of a product of three or more parameters, rows in which any two
             values of two parameters meet; ranks as threads at the sizes that `SIZES` names, which share the rows, as
             mpirun runs all of them, unless a test is marked `every_size`; half of the rows of a table at two and at
             four ranks, where a test asks `take_share`
``quick``    of that, one item of each test function, without tests marked `slow`

A test that hangs on its parameters in another way says so by a mark on the test, or on one of its parameters. A fixture
may ask for the tier to do less outside of the long one, as tests/parallel/test_layouts.py does. Where the command line
names tests by their ids only, all of them run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pytest

Row = TypeVar("Row")

TIERS = ("quick", "default", "long")

_selected = "long"

SIZES = {"ranks": ("local-1", "local-3"), "several": ("local-2", "local-3"), "some": ("local-1", "local-3")}
"""The worlds of threads outside of the long tier, by the name of the fixture: one and odd, or even and odd."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="long", help="how much of the tests to run (default: all)")


def pytest_configure(config: pytest.Config) -> None:
    global _selected  # noqa: PLW0603  what tests do in other threads has no fixtures
    _selected = config.getoption("--tier")


def takes_all() -> bool:
    """Return True in the long tier."""
    return _selected == "long"


def take_share(rows: Sequence[Row], size: int) -> Sequence[Row]:
    """Rows of a test, for a world of `size` ranks: outside of the long tier, worlds of two and four take a half each of
    what the others do all."""
    return rows if takes_all() or size not in (2, 4) else rows[size // 2 - 1 :: 2]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "long" or all("::" in argument for argument in config.args):
        return
    chosen = [item for item in items if item.get_closest_marker("long") is None and _is_usual_size(item)]
    chosen = list(_thinned(chosen, to_one=tier == "quick"))
    if tier == "quick":
        chosen = [item for item in chosen if item.get_closest_marker("slow") is None]
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _is_usual_size(item: pytest.Item) -> bool:
    if item.get_closest_marker("every_size") is not None:
        return True
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return all(
        not str(values.get(fixture, "")).startswith("local-") or values[fixture] in sizes
        for fixture, sizes in SIZES.items()
    )


def _thinned(items: Iterable[pytest.Item], *, to_one: bool) -> Iterator[pytest.Item]:
    functions: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    for item in items:
        # What runs under mpirun is another run of the same test.
        functions[item.nodeid.partition("[")[0], item.get_closest_marker("mpi") is not None].append(item)
    for (name, _), rows in functions.items():
        if to_one:
            # Neither always the first value, which is the simplest, nor one that depends on chance.
            yield rows[len(name) % len(rows)]
        else:
            yield from _covering(rows)


def _covering(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Items of a test function in which any two values of two parameters meet as they do in all of the `items`. Only
    the worlds of threads need not meet all others; each is there about equally often."""
    params = [item.callspec.params if hasattr(item, "callspec") else {} for item in items]
    # Values by their identity, as not all can be compared; each is the same object in all rows that have it.
    columns = [_numbered(column) for column in zip(*(map(id, row.values()) for row in params), strict=True)]
    # Parameters that are given together, in one tuple, change together; one that is always the same is none.
    axes = [axis for axis in dict.fromkeys(columns) if len(set(axis)) > 1]
    every_size = any(item.get_closest_marker("every_size") for item in items)
    worlds = [axis for name, axis in zip(params[0], columns, strict=True) if name in SIZES and not every_size]
    shared = {axes.index(axis) for axis in worlds if axis in axes}
    if len(axes) < (2 if shared else 3):
        yield from items
        return
    rows = list(zip(*axes, strict=True))
    meetings = [
        {(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(axes)), 2) if not {a, b} & shared}
        | {(a, row[a]) for a in range(len(axes))}
        for row in rows
    ]
    missing = set().union(*meetings)
    kept: list[int] = []
    uses = Counter[tuple[int, ...]]()
    while missing:
        best = max(
            range(len(items)),
            key=lambda number: (len(meetings[number] & missing), -uses[tuple(rows[number][a] for a in shared)]),
        )
        missing -= meetings[best]
        uses[tuple(rows[best][a] for a in shared)] += 1
        kept.append(best)
    yield from (items[number] for number in sorted(kept))


def _numbered(column: Iterable[int]) -> tuple[int, ...]:
    """The values of a parameter in all rows, numbered in the order in which they first come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in column)
