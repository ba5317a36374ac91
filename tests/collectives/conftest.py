"""The ranks that a test body runs on."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import NAMES, Ranks


def _params(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.mpi) if name == "mpi" else name for name in names]


@pytest.fixture(params=_params(*NAMES))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Any number of ranks."""
    return Ranks(request.param)


@pytest.fixture(params=_params(*NAMES[1:]))
def several(request: pytest.FixtureRequest) -> Ranks:
    """At least two ranks."""
    return _at_least_two(Ranks(request.param))


@pytest.fixture(params=_params("local-1", "local-3", "mpi"))
def some(request: pytest.FixtureRequest) -> Ranks:
    """One number of ranks or another, for what does not depend on it, such as wrong arguments."""
    return Ranks(request.param)


@pytest.fixture(params=_params("local-3", "mpi"))
def some_more(request: pytest.FixtureRequest) -> Ranks:
    """The same, but at least two."""
    return _at_least_two(Ranks(request.param))


def _at_least_two(ranks: Ranks) -> Ranks:
    if ranks.size < 2:
        pytest.skip("needs two ranks")
    return ranks
