"""Python's time in collectives on a device: cupy and CUDA are replaced by stand-ins that do nothing. Needs gcc.

    mpirun -np 2 python ci/device_overhead.py
    mpirun -np 2 python ci/device_overhead.py --profile ipc     # which functions take it, on rank 0
    MPICOLL_CUDA_ORDER=stream mpirun -np 2 python ci/device_overhead.py    # where streams wait, not the host

For each algorithm it prints microseconds of one all-reduce of 4 bytes with out=: the fastest of many series, on a
machine that does nothing else, and the same without the steps, in which a rank waits for the others. A call on numpy's
arrays stands beside them. What CUDA's own calls take comes on top of it on a device.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import itertools
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import mpicoll

SERIES, CALLS = 40, 50

DRIVER = """
#include <stdint.h>
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t address) { *value = address >> 20; return 0; }
int cuMemGetAddressRange_v2(uint64_t *base, uint64_t *size, uint64_t address)
{
    *base = address >> 20 << 20;
    *size = 1 << 20;
    return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t *found, uint64_t address, unsigned flags) { *found = address; return 0; }
int cuStreamWriteValue32_v2(uint64_t stream, uint64_t address, uint32_t value, unsigned flags)
{
    *(volatile uint32_t *)address = value;
    return 0;
}
int cuStreamWaitValue32_v2(uint64_t stream, uint64_t address, uint32_t value, unsigned flags) { return 0; }
"""
"""libcuda, whose allocations have one MiB each."""

_addresses = itertools.count(1 << 40, 1 << 20)


class Memory:
    """Memory that has an address, and nothing there."""

    def __init__(self, address: int = 0, size: int = 0, owner: object = None, device_id: int = 0) -> None:
        self.ptr = address
        self.owner = owner
        self.device_id = device_id


class MemoryPointer:
    """A place in memory."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self.ptr = memory.ptr + offset
        self.mem = memory
        self.device_id = memory.device_id


class Array:
    """An array in C order."""

    def __init__(self, shape: Any, dtype: Any = float, memory: Any = None, strides: Any = None) -> None:
        host = np.empty(shape, dtype)
        self.shape, self.dtype, self.strides, self.flags = host.shape, host.dtype, host.strides, host.flags
        self.size, self.nbytes, self.ndim = host.size, host.nbytes, host.ndim
        self.data = memory or allocate(host.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr, False),
            "stream": 1,
            "strides": None,
            "version": 3,
        }


class Stream:
    """A stream, all of whose work is done."""

    def __init__(self, **options: Any) -> None:
        self.ptr = 64

    def use(self) -> Stream:
        _current[0] = self
        return self

    def record(self, event: Any = None) -> Any:
        return event or Event()

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    """An event that is done."""

    done = True

    def __init__(self, **options: Any) -> None:
        self.ptr = 128

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Kernel:
    """A kernel that does nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> None:
        pass


class Device:
    """The only device."""

    pci_bus_id = "0000:00:00.0"

    def __init__(self, index: int) -> None:
        pass


_current = [Stream()]


def allocate(nbytes: int) -> MemoryPointer:
    return MemoryPointer(Memory(next(_addresses)), 0)


def return_value(value: Any) -> Callable[..., Any]:
    return lambda *arguments: value


def install() -> ModuleType:
    """Put the stand-ins in the place of cupy and of libcuda."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        source.write_text(DRIVER)
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
        ctypes.CDLL(str(library))
    cupy, cuda, runtime = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))
    host: list[Any] = []
    values: dict[str, Any] = {
        "getDevice": 0,
        "getDeviceCount": 1,
        "getDeviceProperties": {"uuid": bytes(range(1, 17)), "name": b"nothing"},
        "streamIsCapturing": False,
        "eventQuery": 0,
        "eventCreateWithFlags": 128,
        "ipcGetMemHandle": bytes(64),
        "ipcOpenMemHandle": 1 << 44,
    }
    names = (
        "setDevice eventRecord eventSynchronize eventDestroy streamWaitEvent memcpyAsync hostRegister hostUnregister"
    )
    for name, value in {**values, **dict.fromkeys(names.split())}.items():
        setattr(runtime, name, return_value(value))

    def allocate_host(size: int, flags: int) -> int:
        host.append(np.zeros(size, np.uint8))
        return int(host[-1].ctypes.data)

    runtime.hostAlloc = allocate_host  # type: ignore[attr-defined]
    runtime.CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})  # type: ignore[attr-defined]
    runtime.memcpyDefault, runtime.streamLegacy = 4, 1  # type: ignore[attr-defined]
    vars(cuda).update(
        runtime=runtime,
        alloc=allocate,
        Device=Device,
        Event=Event,
        MemoryPointer=MemoryPointer,
        Stream=Stream,
        UnownedMemory=Memory,
        get_current_stream=lambda index=0: _current[0],
        nccl=ModuleType("cupy.cuda.nccl"),
    )
    vars(cupy).update(cuda=cuda, ndarray=Array, empty=Array, ElementwiseKernel=Kernel, RawKernel=Kernel)
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime, "cupy.cuda.nccl": cuda.nccl})
    return cupy


class Waits:
    """The seconds that this rank spends in steps, where it waits for the other ranks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def count(self, owner: type, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, call)


def measure(call: Callable[[], object], waits: Waits) -> tuple[float, float]:
    """Return the microseconds of a call in the fastest series, and in the one that is fastest without the waits."""
    best = [float("inf")] * 2
    for _ in range(SERIES):
        mpicoll.barrier()
        waits.seconds = 0.0
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        took = time.perf_counter() - begin
        best = [min(before, now) for before, now in zip(best, (took, took - waits.seconds), strict=True)]
    return best[0] / CALLS * 1e6, best[1] / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="ALGORITHM", help="print what its calls spend their time on")
    given = parser.parse_args()
    cupy = install()
    from mpicoll.engine.core.arena import Arena
    from mpicoll.engine.executors import device, peer_memory

    # Nothing has been copied or computed.
    device.find_kernel_failure = return_value(None)
    peer_memory.PeerMemory.check = return_value(None)  # type: ignore[method-assign]
    waits = Waits()
    for name in ("step", "step_signature"):
        waits.count(Arena, name)
    world = mpicoll.world()
    on_device, on_host = [cupy.empty(1, np.float32) for _ in range(2)], [np.ones(1, np.float32) for _ in range(2)]

    def all_reduce(arrays: list[Any], algorithm: str | None) -> Callable[[], object]:
        x, out = arrays
        return lambda: mpicoll.allreduce(x, out=out, algorithm=algorithm)

    rows = {"numpy": all_reduce(on_host, None)}
    for algorithm in ("ipc", "shm_flat", "ring") if world.size > 1 else ("ring",):
        rows[algorithm] = all_reduce(on_device, algorithm)
    if given.profile:
        profile = cProfile.Profile()
        for _ in range(100):
            rows[given.profile]()
        profile.runcall(measure, rows[given.profile], waits)
        if world.rank == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    for name, call in rows.items():
        took, alone = measure(call, waits)
        if world.rank == 0:
            print(f"{name:10} {took:8.1f} us, without the waits for the other ranks {alone:8.1f} us", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MPICOLL_TUNED", "off")
    main()
