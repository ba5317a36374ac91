"""Collectives and messages on a real device: the bodies of device_bodies.py, whatever the number of ranks on it.

One process has worlds of one and of several threads; ``mpirun -np 4 python -m pytest --with-mpi -m "gpu and mpi"`` has
one of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import device_bodies as bodies
from support.device_bodies import DTYPES, SOME_DTYPES, Arrays
from support.exercise import COLLECTIVES
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.timeout(300)  # kernels are compiled when they are first met
def test_rows(ranks: Ranks, arrays: Arrays, collective: str) -> None:
    ranks(bodies.run_rows, arrays, collective, timeout=280)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.timeout(300)
def test_each_op_in_each_way(ranks: Ranks, arrays: Arrays, dtype: str) -> None:
    if arrays.name == "torch" and dtype not in (*SOME_DTYPES, "bfloat16"):
        pytest.skip("what computes is the same as for cupy's arrays, and takes its time")
    ranks(bodies.each_op_in_each_way, arrays, dtype, timeout=280)


@pytest.mark.parametrize("body", bodies.EVERYWHERE, ids=lambda body: body.__name__)
def test_body(ranks: Ranks, arrays: Arrays, body: Callable[[Arrays], Any]) -> None:
    ranks(body, arrays, timeout=100)


@pytest.mark.parametrize("body", bodies.MESSAGES, ids=lambda body: body.__name__)
def test_messages_by_ipc(
    several: Ranks, arrays: Arrays, body: Callable[[Arrays], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages after a collective, in which ranks find out if they reach each other's memory."""
    monkeypatch.setattr("mpicoll.engine.executors.peer_messages.MIN_SHARED_BYTES", 0)
    several(bodies.after_a_collective, arrays, body, timeout=100)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_single(ranks: Ranks, arrays: Arrays, dtype: str) -> None:
    ranks(bodies.half_precision_is_summed_in_single, arrays, dtype)


def test_64_mebibytes(ranks: Ranks, arrays: Arrays) -> None:
    ranks(bodies.large, arrays, 16 << 20, timeout=100)


def test_an_odd_large_number_of_elements(ranks: Ranks, arrays: Arrays) -> None:
    ranks(bodies.large, arrays, 3_000_001, timeout=100)


def test_memory_does_not_grow(ranks: Ranks, arrays: Arrays) -> None:
    # Processes that share a device take turns on it.
    ranks(bodies.memory_does_not_grow, arrays, 1000 if ranks.local else 200, timeout=100)


@pytest.mark.parametrize("arrays", ["cupy"], indirect=True)
def test_memory_that_cannot_be_shared(ranks: Ranks, arrays: bodies.Cupy) -> None:
    ranks(bodies.memory_that_cannot_be_shared, arrays)


def test_memory_on_another_device_than_before(ranks: Ranks, arrays: Arrays) -> None:
    """A communicator has one device on each rank; the error names both, and a duplicate may have the other one."""
    import cupy

    if arrays.devices < 2 or arrays.name != "cupy":
        pytest.skip("needs two devices")

    def body() -> None:
        comm = mpicoll.world().duplicate()
        mpicoll.allreduce(arrays.put(np.ones(3)), comm=comm)
        with cupy.cuda.Device((cupy.cuda.runtime.getDevice() + 1) % arrays.devices):
            x = arrays.put(np.ones(3))
            with pytest.raises(mpicoll.DeviceError, match=r"cuda:\d.*cuda:\d"):
                mpicoll.allreduce(x, comm=comm)
            other = mpicoll.world().duplicate()
            np.testing.assert_array_equal(arrays.get(mpicoll.allreduce(x, comm=other)), np.full(3, comm.size))

    ranks(body)


EXPANDABLE = """
import numpy as np
import torch

import mpicoll

world = mpicoll.world()
torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
for count in (10, 3_000_000):
    x = torch.full((count,), float(world.rank + 1), device="cuda")
    for algorithm in (None, "ipc", "shm_pipelined"):
        try:
            got = mpicoll.allreduce(x, algorithm=algorithm)
        except mpicoll.AlgorithmError:
            assert algorithm == "ipc"
            continue
        assert (got == 3).all(), (count, algorithm)
print("right")
"""


def test_expandable_segments(device: int, tmp_path: Path) -> None:
    """torch's allocator with memory that has no handles of the old kind."""
    pytest.importorskip("torch")
    script = tmp_path / "expandable.py"
    script.write_text(EXPANDABLE)
    settings = "expandable_segments:True"
    done = mpirun(2, script, PYTORCH_ALLOC_CONF=settings, PYTORCH_CUDA_ALLOC_CONF=settings)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("right") == 2
