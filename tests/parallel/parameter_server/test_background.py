"""Servers and workers over MPI, whose messages a thread of the extension moves."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.parallel.parameter_server import SGD, ParameterServer, Worker
from mpicoll.parallel.parameter_server.transfers import BACKGROUND_BYTES, BackgroundTransfers, PolledTransfers

pytestmark = pytest.mark.mpi

STEPS = 4


def train(size: int, servers: int, prefetch: bool | None = None, **options: Any) -> tuple[Any, np.ndarray]:
    """The transfers of this rank, and the first worker's weights after some steps; each worker's gradient is its
    number, counted from 1, plus the weights."""
    world = mpicoll.world()
    weights = np.zeros(size, np.float32)
    if world.rank < servers:
        server = ParameterServer(SGD(lr=0.5), **options)
        server.run()
        transfers = server._links.transfers
    else:
        with Worker({"w": weights}, prefetch=prefetch) as worker:
            for _ in range(STEPS):
                worker.pull_weights()
                worker.push_gradients({"w": weights + (world.rank - servers + 1)})
            worker.pull_weights()
        transfers = worker._connection.transfers
    return transfers, mpicoll.bcast(weights, root=servers)


def expect(workers: int) -> float:
    weight = 0.0
    for _ in range(STEPS):
        weight -= 0.5 * (weight + (workers + 1) / 2)
    return weight


@pytest.mark.extension
@pytest.mark.parametrize("prefetch", [None, False])
def test_large_models_are_moved_by_a_thread(prefetch: bool | None) -> None:
    world = mpicoll.world()
    for servers in range(1, world.size):
        size = servers * BACKGROUND_BYTES // 4 + 5
        transfers, weights = train(size, servers, prefetch)
        assert isinstance(transfers, BackgroundTransfers)
        assert transfers.test(), "nothing is left"
        assert (weights == np.float32(expect(world.size - servers))).all()


def test_small_models_are_moved_by_those_who_wait() -> None:
    world = mpicoll.world()
    if world.size > 1:
        transfers, weights = train(1000, 1)
        assert isinstance(transfers, PolledTransfers)
        assert (weights == np.float32(expect(world.size - 1))).all()


@pytest.mark.extension
def test_messages_that_are_too_large_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpicoll.transport.mpi.background_messages import MpiBackgroundQueue

    monkeypatch.setattr(MpiBackgroundQueue, "max_bytes", 100_000)
    world = mpicoll.world()
    if world.size > 1:
        transfers, weights = train(BACKGROUND_BYTES // 4, 1)
        assert isinstance(transfers, BackgroundTransfers)
        assert (weights == np.float32(expect(world.size - 1))).all()


@pytest.mark.extension
def test_one_rank_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others send their messages in pieces only to those that receive pieces."""
    from mpicoll.transport.mpi import MpiTransport

    world = mpicoll.world()
    if world.size > 1:
        if world.rank == world.size - 1:
            monkeypatch.setattr(MpiTransport, "bind_background_messages", lambda *args: None)
        transfers, weights = train(BACKGROUND_BYTES // 4, 1)
        assert isinstance(transfers, PolledTransfers)
        assert (weights == np.float32(expect(world.size - 1))).all()


@pytest.mark.extension
def test_a_pull_does_not_wait_for_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing announces it again."""
    pauses = [0]
    pause = BackgroundTransfers.pause

    def count(self: BackgroundTransfers, seen: int, seconds: float) -> None:
        pauses[0] += 1
        pause(self, seen, seconds)

    monkeypatch.setattr(BackgroundTransfers, "pause", count)
    world = mpicoll.world()
    weights = np.zeros(BACKGROUND_BYTES // 4, np.float32)
    if world.size > 1 and world.rank == 0:
        ParameterServer(SGD(lr=0.5), bucket_bytes=1 << 15).run()
    elif world.size > 1:
        with Worker({"w": weights}, prefetch=True) as worker:
            worker.pull_weights()
            worker.push_gradients({"w": weights})
            early = worker._early
            assert early is not None
            assert len(early.pending) > 30
            limit = time.monotonic() + 30
            while any(one.test() is None for one in early.pending.values()):
                assert time.monotonic() < limit
                time.sleep(1e-3)
            pauses[0] = 0
            worker.pull_weights()
            assert pauses[0] == 0


@pytest.mark.extension
def test_modes_whose_pulls_get_copies() -> None:
    """A server changes weights while it sends them to another worker."""
    world = mpicoll.world()
    if world.size > 1:
        transfers, weights = train(BACKGROUND_BYTES // 4, 1, mode="ssp", staleness=0)
        assert isinstance(transfers, BackgroundTransfers)
        assert len(np.unique(weights)) == 1
