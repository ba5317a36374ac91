"""Collectives of several nodes: in the nodes, then between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data import DTYPES, LAYOUTS, LIBRARIES, NON_COMMUTATIVE, OPS, covering
from exercise import COUNTED, FORMS, OUTS, REDUCTIONS, ROOTED, allowed, exercise
from launch import ROOT

import mpicoll
from mpicoll.errors import CommunicationError
from mpicoll.transport.local import Delay, Drop, World

COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "gather", "scatter", "alltoall")
SHAPES = ((), (0,), (1,), (3, 0), (4, 3), (13, 2, 5), (130, 9), (2, 2), (1200,))
WORLDS = ((4, 2), (6, 3), (6, 2), (8, 2))
"""Ranks, and ranks per node."""

BY_NODES = "hierarchical"


def _orders(size: int, local: int) -> dict[str, list[int]]:
    """Ways to number the ranks: node after node, the nodes in turn, and neither."""
    nodes = size // local
    return {
        "block": list(range(size)),
        "cyclic": [node * local + rank for rank in range(local) for node in range(nodes)],
        "mixed": [0, *range(size - 1, 0, -1)],
    }


class Orders:
    """Communicators of all ranks, in different orders."""

    def __init__(self) -> None:
        world = mpicoll.world()
        orders = _orders(world.size, world.local_size)
        self._comms = {name: world.group(order) for name, order in orders.items() if name != "block"}

    def __getitem__(self, name: str) -> Any:
        return mpicoll.world() if name == "block" else self._comms[name]

    def free(self) -> None:
        for comm in self._comms.values():
            assert comm is not None
            comm.free()


def _rows(collective: str) -> list[dict[str, Any]]:
    axes: dict[str, Any] = {"dtype": ("float64", *(name for name in DTYPES if name != "float64"))}
    if collective in REDUCTIONS:
        axes["op"] = [op for op in OPS if op not in NON_COMMUTATIVE]
    axes |= {"library": LIBRARIES, "shape": SHAPES, "layout": LAYOUTS, "out": OUTS, "form": FORMS}
    axes["algorithm"] = (BY_NODES,)
    axes["comm"] = ("block", "cyclic", "mixed")
    if collective in ROOTED:
        axes["root"] = ("first", "last", "middle")
    if collective in COUNTED:
        axes["counts"] = ("none",) if collective == "alltoall" else ("none", "equal", "uneven", "zeros")
    return covering(axes, lambda row: allowed(collective, {**row, "algorithm": None}))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("size", "local"), WORLDS)
def test_rows(collective: str, size: int, local: int) -> None:
    def body() -> None:
        comms = Orders()
        for row in _rows(collective):
            exercise(collective, row, comms)  # type: ignore[arg-type]
        comms.free()

    mpicoll.run_local(body, size, ranks_per_node=local)


def _lengths(size: int) -> list[int]:
    """Around the numbers of ranks, a line, and the pieces that go through shared memory."""
    around = (0, size, 16 * size, 1 << 12, 1 << 17, 3 << 17)
    return sorted({max(0, n + d) for n in around for d in (-1, 0, 1)})


@pytest.mark.parametrize("order", ["block", "cyclic", "mixed"])
@pytest.mark.parametrize(("size", "local"), WORLDS)
def test_every_length(size: int, local: int, order: str) -> None:
    """Whole numbers, so that sums are exact."""

    def body() -> None:
        comms = Orders()
        comm = comms[order]
        rank = comm.rank
        for n in _lengths(size):
            inputs = [np.arange(n, dtype="float32") % 1000 * (peer + 1) for peer in range(size)]
            total = sum(inputs)
            root = n % size
            given = {"comm": comm, "algorithm": BY_NODES}
            np.testing.assert_array_equal(mpicoll.allreduce(inputs[rank], **given), total)
            reduced = mpicoll.reduce(inputs[rank], root=root, **given)
            assert (reduced is None) == (rank != root)
            assert reduced is None or (reduced == total).all()
            np.testing.assert_array_equal(mpicoll.bcast(inputs[rank], root, **given), inputs[root])
        comms.free()

    mpicoll.run_local(body, size, ranks_per_node=local)


@pytest.mark.parametrize("name", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("order", ["block", "cyclic"])
def test_the_same_bits_everywhere_and_always(name: str, order: str) -> None:
    def body() -> list[bytes]:
        comms = Orders()
        comm = comms[order]
        x = np.random.default_rng(comm.rank).standard_normal(70_001).astype(name)
        given = {"comm": comm, "algorithm": BY_NODES}
        every = [mpicoll.allreduce(x, op, **given).tobytes() for op in ("sum", "avg", "sum", "avg")]
        assert every[:2] == every[2:]
        parts = mpicoll.reduce_scatter(np.resize(x, 70_002), **given)
        assert parts.tobytes() == mpicoll.reduce_scatter(np.resize(x, 70_002), **given).tobytes()
        comms.free()
        return every

    first, *rest = mpicoll.run_local(body, 6, ranks_per_node=2)
    assert rest == [first] * 5


def test_half_precision_is_rounded_once() -> None:
    """A sum of which every part within a node would be rounded away."""

    def body() -> None:
        rank = mpicoll.world().rank
        x = np.full(5000, [2048.0, 1.0, -2048.0, 0.5][rank], np.float16)
        np.testing.assert_array_equal(mpicoll.allreduce(x, algorithm=BY_NODES), np.full(5000, 1.5, np.float16))

    mpicoll.run_local(body, 4, ranks_per_node=2)


def test_places_of_extremes() -> None:
    def body() -> None:
        world = mpicoll.world()
        every = [np.random.default_rng(rank).integers(-5, 5, 999) for rank in range(world.size)]
        best, where = mpicoll.allreduce((every[world.rank], np.full(999, world.rank)), "minloc", algorithm=BY_NODES)
        np.testing.assert_array_equal(best, np.min(every, 0))
        np.testing.assert_array_equal(where, np.argmin(every, 0))

    mpicoll.run_local(body, 6, ranks_per_node=3)


# --- what crosses the links

N = 12_000
"""Bytes."""


def _calls() -> dict[str, tuple[Callable[[], Any], float]]:
    """For 3 nodes of 2 ranks and N bytes: a call, and the bytes that all links together must carry at least."""
    x, root = np.zeros(N, np.uint8), 1
    part = x[: N // 6]
    given = {"algorithm": BY_NODES}
    return {
        "allreduce": (lambda: mpicoll.allreduce(x, "bor", **given), 2 * 2 * N),
        "reduce": (lambda: mpicoll.reduce(x, "bor", root, **given), 2 * N),
        "bcast": (lambda: mpicoll.bcast(x, root, **given), 2 * N),
        "reduce_scatter": (lambda: mpicoll.reduce_scatter(x, "bor", **given), 2 * N),
        "allgather": (lambda: mpicoll.allgather(part, **given), 2 * N),
        "gather": (lambda: mpicoll.gather(part, root, **given), N * 2 / 3),
        "scatter": (lambda: mpicoll.scatter(x, root, **given), N * 2 / 3),
        "alltoall": (lambda: mpicoll.alltoall(x, **given), 6 * N * 2 / 3),
    }


@pytest.mark.parametrize("order", ["block", "cyclic", "mixed"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_no_byte_crosses_more_often_than_it_has_to(
    monkeypatch: pytest.MonkeyPatch, collective: str, order: str
) -> None:
    crossed = inside = 0
    deliver = World.deliver

    def counting(self: World, context: int, source: int, dest: int, letter: Any) -> None:
        nonlocal crossed, inside
        if source // 2 != dest // 2:
            crossed += len(letter.data)
        else:
            inside += len(letter.data)
        deliver(self, context, source, dest, letter)

    monkeypatch.setattr(World, "deliver", counting)

    # Between nodes, what carries as little as can be.
    lanes = {"allreduce": "ring", "bcast": "linear", "alltoall": "pairwise", "allgather": "ring"}
    lanes |= {"gather": "linear", "scatter": "linear", "reduce": "linear", "reduce_scatter": "pairwise"}

    def body() -> float:
        comms = Orders()
        with mpicoll.algorithms(**{collective: f"0-inf:{lanes[collective]}"}):
            call, least = _call_on(comms[order], collective)
            call()
        comms.free()
        return least

    least = mpicoll.run_local(body, 6, ranks_per_node=2)[0]
    assert crossed == least
    assert inside == 0  # that goes through shared memory


def _call_on(comm: Any, collective: str) -> tuple[Callable[[], Any], float]:
    call, least = _calls()[collective]
    function = call.__closure__
    assert function is not None
    for cell in function:
        if isinstance(cell.cell_contents, dict):
            cell.cell_contents["comm"] = comm
    return call, least
