"""What collectives on a device cost: calls of CUDA, and how often the host waits for the device."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import numpy as np
import pytest
from support.cuda_calls import count_cuda_calls

import mpicoll
from mpicoll.config import config

CALLS = 10

WAITS = ("eventSynchronize", "streamSynchronize", "deviceSynchronize")

BUDGETS = (
    ("allreduce", "ipc", "host", 17, 1),
    ("allreduce", "ipc", "stream", 20, 0),
    ("allreduce", "shm_flat", "host", 18, 2),
    ("bcast", "ipc", "host", 17, 1),
    ("bcast", "ipc", "stream", 21, 0),
)
"""Collective, algorithm, MPICOLL_CUDA_ORDER, and for each rank and call the maximum of CUDA's calls and of waits for a
device."""


@pytest.fixture
def counted(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_cuda_calls(cuda, monkeypatch)


@pytest.mark.parametrize(("collective", "algorithm", "order", "calls", "waits"), BUDGETS)
@pytest.mark.extension
def test_budgets(
    cuda: ModuleType,
    counted: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    collective: str,
    algorithm: str,
    order: str,
    calls: int,
    waits: int,
) -> None:
    setting = config()._replace(cuda_order=order)
    monkeypatch.setattr("mpicoll.engine.executors.device.config", lambda: setting)

    def main() -> None:
        world = mpicoll.world()
        x, out = cuda.asarray(np.ones(1000)), cuda.zeros(1000)
        cuda.cuda.get_current_stream().synchronize()
        call = getattr(mpicoll, collective)

        def repeat(count: int) -> None:
            for _ in range(count):
                call(x, algorithm=algorithm, **({} if collective == "bcast" else {"out": out}))

        repeat(3)
        assert (world._core.devices._no_order is None) == (order == "stream"), world._core.devices._no_order
        mpicoll.barrier()
        if world.rank == 0:
            counted.clear()
        mpicoll.barrier()
        repeat(CALLS)
        mpicoll.barrier()
        if world.rank == 0:
            per_call = {name: count / CALLS / world.size for name, count in counted.items()}
            assert sum(per_call.values()) <= calls, per_call
            assert sum(per_call.get(name, 0) for name in WAITS) <= waits, per_call
        mpicoll.barrier()

    mpicoll.run_local(main, 2, timeout=60)
