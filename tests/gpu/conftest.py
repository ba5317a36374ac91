"""Tests on a real device. Each is marked `gpu`, and skipped where there is no device, or no cupy to reach it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.device_bodies import Arrays, Cupy, Torch
from support.ranks import Ranks, several

__all__ = ["several"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(HERE)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)


@lru_cache(maxsize=1)
def why_not() -> str:
    """Why there is no device to test on; "" if there is one."""
    try:
        import cupy
    except Exception as error:  # noqa: BLE001  a broken CUDA raises what it likes
        return f"no cupy: {error}"
    if getattr(cupy, "is_fake", False):
        return "cupy is the one that only plays a device"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return "" if count else "no CUDA device"


@pytest.fixture(scope="session")
def device() -> int:
    """This rank's device, current in this process."""
    if why_not():
        pytest.skip(why_not())
    import cupy

    # What launchers tell; ranks that are threads share the first device.
    rank = next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), 0)
    index = rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(index).use()
    return int(index)


_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "PMIX_LOCAL_RANK")


@pytest.fixture(params=["local-1", "local-3", pytest.param("mpi", marks=pytest.mark.mpi)])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Some numbers of threads, all of which use one device; and the ranks of mpirun."""
    return Ranks(request.param)


@pytest.fixture(params=["cupy", "torch"])
def arrays(request: pytest.FixtureRequest, device: int) -> Iterator[Arrays]:
    """Arrays of a library on this rank's device."""
    import cupy

    made: Any = Cupy(cupy, played=False)
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA here")
        torch.cuda.set_device(device)
        made = Torch()
    yield made
    made.forget()
