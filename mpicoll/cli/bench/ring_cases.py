"""Cases of ranks that communicate with the next ones in a ring: collectives of neighbours, and calls of windows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mpicoll
from mpicoll.cli.bench.cases import Case

Prepared = tuple[Callable[[], Any], Any]
"""The call that runs a case, and its result."""


class _Opened(threading.local):
    """Functions that free what the cases of this thread, which may be a rank, have created, in this order."""

    def __init__(self) -> None:
        self.frees: list[Callable[[], None]] = []


_opened = _Opened()


def close() -> None:
    """Free the communicators and the windows. Collective."""
    while _opened.frees:
        _opened.frees.pop(0)()


def prepare(case: Case, *, start: bool) -> Prepared:
    """Return the call of mpicoll for `case`, which with `start` starts a collective of neighbours. Collective."""
    name, x, out = case.workload.collective, case.x, case.out
    world = mpicoll.world()
    if name in ("put", "get", "accumulate"):
        like = "torch" if case.kind.endswith("torch") else "numpy"
        window = mpicoll.Window(case.workload.rows, x.dtype, like=like)
        _opened.frees.append(window.free)
        right = (world.rank + 1) % world.size
        if name == "get":
            window.local[:] = x
            mpicoll.barrier()
            return partial(window.get, right, out=out), out
        return _snapshot(partial(getattr(window, name), x, right), window.local)
    ring = world.cart([world.size], periods=True)
    assert ring is not None
    _opened.frees.append(ring.free)
    function = getattr(mpicoll, f"i{name}" if start else name)
    if name == "exchange_halo":
        layers = x.reshape(-1, case.workload.rows)
        exchange = partial(function, layers, out=layers, comm=ring)
        if start:
            return exchange, x

        def call() -> None:
            exchange()

        return call, x
    return partial(function, x, out=out, comm=ring), out


def prepare_mpi4py(case: Case, comm: Any) -> Prepared:
    """Return the call of mpi4py for `case` on its communicator `comm`; those of windows are between Lock and Unlock.
    Collective."""
    from mpi4py import MPI

    name, x, out = case.workload.collective, case.x, case.out
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if name in ("put", "get", "accumulate"):
        window = MPI.Win.Allocate(max(1, case.workload.nbytes), 1, comm=comm)
        _opened.frees.append(window.Free)
        local = _view_like(x, window.tomemory())
        local[:] = x if name == "get" else 0
        comm.Barrier()
        method, more = getattr(window, name.capitalize()), (None, MPI.SUM) if name == "accumulate" else ()

        def access() -> None:
            window.Lock(right, MPI.LOCK_SHARED)
            method(out if name == "get" else x, right, *more)
            window.Unlock(right)

        return (access, out) if name == "get" else _snapshot(access, local, comm.Barrier)
    ring = comm.Create_cart([comm.size], periods=[True])
    _opened.frees.append(ring.Free)
    if name == "exchange_halo":
        layers = x.reshape(-1, case.workload.rows)

        def exchange() -> None:
            ring.Sendrecv(layers[1], left, 0, layers[-1], right, 0)
            ring.Sendrecv(layers[-2], right, 1, layers[0], left, 1)

        return exchange, x
    return partial(getattr(ring, name.capitalize()), x, out), out


def _view_like(x: Any, memory: Any) -> Any:
    """Return an array like `x` on `memory`."""
    import numpy as np

    if isinstance(x, np.ndarray):
        return np.frombuffer(memory, x.dtype, x.size)
    import torch

    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel())


def _snapshot(call: Callable[[], Any], local: Any, barrier: Callable[[], Any] = mpicoll.barrier) -> Prepared:
    """Return `call`, and a copy of `local` after all ranks have called it once."""
    call()
    barrier()
    found = local.clone() if hasattr(local, "clone") else local.copy()
    barrier()
    return call, found
