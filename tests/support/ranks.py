"""Run one test body on the ranks of either transport."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpicoll


def _worlds(*sizes: int) -> list[Any]:
    """Worlds of threads, and that of mpirun."""
    return [*(f"local-{size}" for size in sizes), pytest.param("mpi", marks=pytest.mark.mpi)]


class Ranks:
    """``ranks(body, *args)`` calls ``body(*args)`` on every rank: on threads here, or in each process of an MPI job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.local = 0 if name == "mpi" else int(name.removeprefix("local-"))

    def __repr__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return self.local or mpicoll.world().size

    def __call__(self, body: Callable[..., Any], *args: Any, timeout: float = 30.0) -> list[Any]:
        """Return the results of the ranks of this process: all of them, or this one under MPI."""
        if self.local:
            return mpicoll.run_local(body, self.local, *args, timeout=timeout)
        return [body(*args)]

    def share(self, path: Path) -> Path:
        """Return rank 0's `path` on every rank. Collective."""
        return path if self.local else Path(mpicoll.world()._core.transport.allgather_text(str(path))[0])


def _at_least_two(world: Ranks) -> Ranks:
    if world.size < 2:
        pytest.skip("needs two ranks")
    return world


@pytest.fixture(params=_worlds(1, 2, 3, 4))
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Any number of ranks."""
    return Ranks(request.param)


@pytest.fixture(params=_worlds(2, 3, 4))
def several(request: pytest.FixtureRequest) -> Ranks:
    """At least two ranks."""
    return _at_least_two(Ranks(request.param))


@pytest.fixture(params=_worlds(1, 3))
def some(request: pytest.FixtureRequest) -> Ranks:
    """One number of ranks or another, for what does not depend on it, such as wrong arguments."""
    return Ranks(request.param)


@pytest.fixture(params=_worlds(3))
def some_more(request: pytest.FixtureRequest) -> Ranks:
    """The same, but at least two."""
    return _at_least_two(Ranks(request.param))


class Comms:
    """The world, a part of it with the order of ranks reversed, and a group that rank 0 is no member of."""

    def __init__(self) -> None:
        world = mpicoll.world()
        self._parts = {
            "split": world.split(world.rank % 2, -world.rank),
            "group": world.group(range(world.size - 1, 0, -1) if world.size > 1 else [0]),
        }

    def __getitem__(self, name: str) -> mpicoll.Communicator | None:
        return mpicoll.world() if name == "world" else self._parts[name]

    def free(self) -> None:
        for part in self._parts.values():
            if part is not None:
                part.free()
