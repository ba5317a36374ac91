"""Memory that the ranks share for tensors; ``test_backend.py`` has the tests of backends that use it."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.torch.tensor_pool import TensorPool
from mpicoll.transport.local import LocalTransport
from mpicoll.transport.waiting import wait_for

pytestmark = pytest.mark.extension


def test_a_block_that_all_ranks_have_free_is_taken_again() -> None:
    def body() -> tuple[int, int, int]:
        core = core_of(mpicoll.world())
        pool = TensorPool(core)
        for _ in range(3):
            pool.allocate(5000, torch.float32)
        arena = core.arena()
        assert arena is not None
        alone = arena.segments.allocated
        kept = pool.allocate(5000, torch.float32)
        other = pool.allocate(5000, torch.float32)
        if core.rank == 0:
            del other
        pool.allocate(5000, torch.float32)  # another rank has no free block
        del kept
        return alone, arena.segments.allocated, pool._num_blocks[32768]

    assert mpicoll.run_local(body, 2) == [(1, 3, 3)] * 2


def test_a_failure_of_shared_memory_that_one_rank_notices_later(monkeypatch: pytest.MonkeyPatch) -> None:
    allocating = threading.Event()

    def share(transport: LocalTransport, nbytes: int) -> NoReturn:
        assert transport.rank == 0 or allocating.wait(20)
        raise mpicoll.CommunicationError("there is no memory")

    monkeypatch.setattr(LocalTransport, "share", share)

    def body() -> list[float]:
        core = core_of(mpicoll.world())
        pool, run = TensorPool(core), core.queue.run

        def run_after_release(*args: Any) -> Any:
            allocating.set()
            return run(*args)

        request = mpicoll.iallreduce(np.ones(2))
        if core.rank == 0:
            assert wait_for(lambda: core.shm_failed_reason, 20)
        else:
            monkeypatch.setattr(core.queue, "run", run_after_release)
        pool.allocate(1000, torch.float32)
        return [mpicoll.allreduce(np.ones(2))[0], request.wait()[0]]

    assert mpicoll.run_local(body, 2, timeout=20) == [[2.0, 2.0]] * 2


def test_an_abandoned_communicator_is_reported() -> None:
    def body() -> None:
        world = mpicoll.world()
        core = core_of(world)
        pool = TensorPool(core)
        mpicoll.barrier()

        def match(call: Call) -> NoReturn:
            raise mpicoll.CommunicationError("it was abandoned")

        core.queue.match = match
        with pytest.raises(mpicoll.CommunicationError, match="abandoned"):
            pool.allocate(1000, torch.float32)

    mpicoll.run_local(body, 2)
