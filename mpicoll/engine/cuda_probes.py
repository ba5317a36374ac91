"""Probes of device memory, in processes that may crash or hang: ``-m mpicoll.engine.cuda_probes NAME``.

``send``, ``move`` and ``reduce`` try the classes of :data:`mpicoll.transport.cuda_awareness.CLASSES` in jobs of two
ranks, ``devices`` and ``ipc`` in a single process, what the machine has. :mod:`mpicoll.transport.probes` says how they
report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.errors import MpicollError
from mpicoll.transport import launcher, probes, reductions

if TYPE_CHECKING:
    from mpicoll.buffers.device import Device, DeviceArray
    from mpicoll.transport.base import Native, Transport

    Call = Callable[[DeviceArray, DeviceArray], object]

PROGRAM: str = __spec__.name
"""The name of this module, also where it is the main program."""

SIZES = (8, 64 << 10, 4 << 20)
"""Bytes of a rank's data: what is sent at once, what is announced first, and what is cut into pieces."""

_WHAT = "8 B, 64 KiB and 4 MiB of device memory have arrived"


# --- on two ranks


def _two_with_devices() -> tuple[Transport, Device]:
    """This rank's end of a job of two, and its device."""
    transport = probes.join_two_ranks()
    return transport, _device(transport.rank)


def _device(number: int) -> Device:
    """The device of that number, or of the numbers that there are."""
    from mpicoll.buffers.cuda.device import cuda_device
    from mpicoll.buffers.cuda.facts import facts

    return cuda_device(number % len(facts()))


class _Pair:
    """Two ranks that operate on device memory and look whether it is right."""

    def __init__(self) -> None:
        self.transport, self.device = _two_with_devices()
        self.rank = self.transport.rank
        native = self.transport.native
        assert native is not None
        self.native: Native = native
        self._serial = 0

    def check(self, what: str, call: Call, given: Any, expected: Any) -> None:
        """``call(source, target)`` makes `expected` of `given` (None: stays as it is)."""
        if self.rank == 0:
            probes.report(step=f"{what} of {given.nbytes} bytes")
        size, dtype = given.size if expected is None else expected.size, given.dtype
        with self.device.working():
            source, target = self.device.empty(given.size, dtype), self.device.empty(size, dtype)
            before = np.full(size, 7, dtype)
            np.copyto(source, given)
            np.copyto(target, before)
            self.device.synchronize()
            call(source, target)
            got = np.empty(size, dtype)
            np.copyto(got, target)
            self.device.synchronize()
        # NaN is equal to NaN here.
        if not np.array_equal(got, before if expected is None else expected, equal_nan=dtype.kind in "fc"):
            raise probes.Wrong(f"{what} of {given.nbytes} bytes of device memory gives wrong data on rank {self.rank}")

    def data(self, nbytes: int, dtype: str = "uint8") -> list[Any]:
        """What each rank has: other numbers at each call, the same on both; sums of them are exact."""
        self._serial += 1
        generator = np.random.default_rng(self._serial)
        count = nbytes // np.dtype(dtype).itemsize
        return [generator.integers(0, 100, count).astype(dtype) for _ in range(2)]

    def over(self) -> None:
        """Let the other rank finish."""
        self.native.barrier()


def _send() -> str:
    """Messages between two ranks."""
    from concurrent.futures import ThreadPoolExecutor

    pair = _Pair()
    transport, other = pair.transport, 1 - pair.rank

    def blocking(source: DeviceArray, target: DeviceArray) -> None:
        for sender in (0, 1):
            if pair.rank == sender:
                transport.send(source, other, sender)
            else:
                transport.recv(target, other, sender)

    def pending(source: DeviceArray, target: DeviceArray) -> None:
        receiving = transport.irecv(target, other, 4)
        sending = transport.isend(source, other, 4)
        receiving.wait(None)
        sending.wait(None)

    def elsewhere(source: DeviceArray, target: DeviceArray) -> None:
        transfers = [transport.irecv(target, other, 5), transport.isend(source, other, 5)]

        def complete() -> None:
            while not all(one.test() for one in transfers):
                time.sleep(1e-4)

        # As transfers do that nobody waits for: in a thread that has never had to do with the device.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(complete).result()

    ways: dict[str, Call] = {
        "Send and Recv": blocking,
        "Sendrecv": lambda source, target: transport.sendrecv(source, other, 2, target, other, 2),
        "Isend and Irecv": pending,
        "Isend and Irecv that another thread completes": elsewhere,
        "Waitall": lambda source, target: transport.exchange([(other, source)], [(other, target)], 3),
    }
    for nbytes in SIZES:
        for what, call in ways.items():
            given = pair.data(nbytes)
            pair.check(what, call, given[pair.rank], given[other])
    pair.over()
    return f"{_WHAT} by {', '.join(ways)}"


def _move() -> str:
    """Collectives that move data."""
    pair = _Pair()
    native, rank = pair.native, pair.rank

    def bcast(source: DeviceArray, target: DeviceArray) -> None:
        if rank == 0:
            np.copyto(target, source)
            pair.device.synchronize()
        native.bcast(target, 0)

    for nbytes in SIZES:
        data = pair.data(nbytes)
        pair.check("Bcast", bcast, data[rank], data[0])
        data = pair.data(nbytes)
        pair.check("Allgather", lambda one, all_: native.allgather(one, all_, None), data[rank], np.concatenate(data))
        data = pair.data(nbytes)
        counts = [nbytes - 3, nbytes + 3]
        whole = np.concatenate(data)
        pair.check(
            "Allgatherv",
            partial(_allgatherv, native, counts),
            whole[: counts[0]] if rank == 0 else whole[counts[0] :],
            whole,
        )
        data = pair.data(nbytes)
        arrives = np.concatenate([one.reshape(2, -1)[rank] for one in data])
        pair.check("Alltoall", native.alltoall, data[rank], arrives)
        data = pair.data(nbytes)
        pair.check(
            "Gather",
            lambda one, all_: native.gather(one, all_ if rank == 0 else None, None, 0),
            data[rank],
            np.concatenate(data) if rank == 0 else None,
        )
        data = pair.data(nbytes)
        pair.check(
            "Scatter",
            lambda all_, one: native.scatter(all_ if rank == 0 else None, one, None, 0),
            data[0],
            data[0].reshape(2, -1)[rank],
        )
    pair.over()
    return f"{_WHAT} by Bcast, Allgather, Allgatherv, Alltoall, Gather, Scatter"


def _allgatherv(native: Native, counts: list[int], source: DeviceArray, target: DeviceArray) -> None:
    native.allgather(source, target, counts)


def _reduce() -> str:
    """Collectives that reduce."""
    pair = _Pair()
    native, rank = pair.native, pair.rank
    for nbytes in SIZES:
        for dtype in ("float32", "int32"):
            data = pair.data(nbytes, dtype)
            total = data[0] + data[1]
            pair.check("Allreduce", lambda one, all_: native.allreduce(one, all_, "sum"), data[rank], total)
            data = pair.data(nbytes, dtype)
            total = data[0] + data[1]
            pair.check(
                "Reduce",
                lambda one, all_: native.reduce(one, all_ if rank == 0 else None, "sum", 0),
                data[rank],
                total if rank == 0 else None,
            )
            data = pair.data(nbytes, dtype)
            total = (data[0] + data[1]).reshape(2, -1)[rank]
            pair.check(
                "Reduce_scatter_block",
                lambda all_, one: native.reduce_scatter(all_, one, None, "sum"),
                data[rank],
                total,
            )
            data = pair.data(nbytes, dtype)
            so_far = data[0] if rank == 0 else data[0] + data[1]
            pair.check("Scan", lambda one, all_: native.scan(one, all_, "sum"), data[rank], so_far)
        data = pair.data(nbytes, "int64")
        most = np.maximum(*data)
        pair.check("Allreduce in place", lambda one, all_: _in_place(native, one, all_), data[rank], most)
    _on_all_dtypes(pair)
    pair.over()
    return f"{_WHAT}, summed up, by Allreduce, Reduce, Reduce_scatter_block, Scan"


def _on_all_dtypes(pair: _Pair) -> None:
    """What MPI computes rightly on the host it is to compute rightly on a device."""
    for op, dtype in reductions.PAIRS:
        if pair.transport.misreduces(op, dtype) is None:
            both = reductions.operands(op, dtype, SIZES[1] // dtype.itemsize)
            total = reductions.combine(op, *both)
            what = f"Allreduce ({reductions.words(reductions.name(op, dtype))})"
            pair.check(what, partial(_allreduce, pair.native, op), both[pair.rank], total)


def _allreduce(native: Native, op: str, source: DeviceArray, target: DeviceArray) -> None:
    native.allreduce(source, target, op)


def _in_place(native: Native, source: DeviceArray, target: DeviceArray) -> None:
    np.copyto(target, source)
    target.on.synchronize()
    native.allreduce(target, target, "max")


# --- alone


def _devices() -> dict[str, Any]:
    """What there is."""
    from mpicoll.buffers.cuda.facts import facts

    found: dict[str, Any] = {"devices": facts()}
    try:
        from mpicoll.buffers.cuda import nccl

        found["nccl"] = nccl.version()
    except (ImportError, AttributeError, RuntimeError, MpicollError) as error:
        found["no nccl"] = str(error)
    return found


def _ipc() -> str:
    """Device memory of this process that another one reads and writes."""
    from dataclasses import asdict

    device, count = _device(0), 1 << 20
    here, there = np.random.default_rng(1).integers(0, 256, (2, count), np.uint8)
    with device.working():
        memory = device.empty(count, np.dtype(np.uint8))
        np.copyto(memory, here)
        device.synchronize()
        export = device.export(memory)
    if export is None:
        raise probes.Unable(f"memory of {device.name} can't be exported")
    said = json.dumps(asdict(export) | {"handle": export.handle.hex()})
    probes.report(step="opening memory of another process")
    ended = launcher.attempt(launcher.module(PROGRAM, "ipc-peer", said), os.environ, 20.0)
    told = probes.merged_reports(ended.output)
    if "wrong" in told:
        raise probes.Wrong(told["wrong"])
    if "done" not in told:
        late = "the other process did not end within 20 s"
        raise probes.Unable(late if ended.status is None else told.get("unable", launcher.last_lines(ended.errors, 3)))
    got = np.empty(count, np.uint8)
    with device.working():
        np.copyto(got, memory)
        device.synchronize()
    if not np.array_equal(got, there):
        raise probes.Wrong(f"what another process has written to memory of {device.name} is not there")
    return f"another process has read and written memory of {device.name}"


def _ipc_peer(said: str) -> str:
    """The other process."""
    from mpicoll.buffers.device import Export

    device = _device(0)
    here, there = np.random.default_rng(1).integers(0, 256, (2, 1 << 20), np.uint8)
    fields = json.loads(said)
    export = Export(**fields | {"handle": bytes.fromhex(fields["handle"])})
    with device.working():
        memory = device.reach(export)[export.offset : export.offset + here.size]
        got = np.empty(here.size, np.uint8)
        np.copyto(got, memory)
        device.synchronize()
        if not np.array_equal(got, here):
            raise probes.Wrong(f"memory of another process on {device.name} can be opened, but what is there is wrong")
        np.copyto(memory, there)
        device.synchronize()
    return "it is right"


_PROBES: dict[str, Callable[..., Any]] = {
    "send": _send,
    "move": _move,
    "reduce": _reduce,
    "devices": _devices,
    "ipc": _ipc,
    "ipc-peer": _ipc_peer,
}

if __name__ == "__main__":
    sys.exit(probes.run(_PROBES, *sys.argv[1:]))
