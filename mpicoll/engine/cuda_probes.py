"""Probes of device memory, in processes that may crash or hang: ``-m mpicoll.engine.cuda_probes NAME``.

``send``, ``move`` and ``reduce`` try the classes of :data:`mpicoll.transport.cuda_awareness.CLASSES` in jobs of two
ranks; ``devices``, ``kernel``, ``ipc`` and ``words`` examine the devices of the machine in a single process. Their
reports are those of :mod:`mpicoll.transport.probes`.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.errors import DeviceError, MpicollError
from mpicoll.transport import launcher, probes, reductions

if TYPE_CHECKING:
    from mpicoll.buffers.device import Device, DeviceArray
    from mpicoll.transport.base import Native, Transport

    Call = Callable[[DeviceArray, DeviceArray], object]

PROGRAM: str = __spec__.name
"""The name of this module, also where it is the main program."""

SIZES = (8, 64 << 10, 4 << 20)
"""Bytes of a rank's data: what is sent at once, what is announced first, and what is cut into pieces."""

KERNEL_REMEDY = (
    "cupy compiles with NVRTC: pip install nvidia-cuda-nvrtc and nvidia-cuda-runtime for cupy's version of CUDA into"
    " the environment of this Python, or set CUDA_PATH"
)

_WHAT = "8 B, 64 KiB and 4 MiB of device memory have arrived"


# --- on two ranks


def _join_with_device() -> tuple[Transport, Device]:
    """Join a job of two ranks, and return this rank's transport and device."""
    transport = probes.join_two_ranks()
    return transport, _device(transport.rank)


def _device(number: int) -> Device:
    """Return device `number`, modulo the number of devices."""
    from mpicoll.buffers.cuda.device import cuda_device
    from mpicoll.buffers.cuda.facts import list_facts

    return cuda_device(number % len(list_facts()))


class _Pair:
    """Two ranks that operate on device memory and compare the results."""

    def __init__(self) -> None:
        self.transport, self.device = _join_with_device()
        self.rank = self.transport.rank
        native = self.transport.native
        assert native is not None
        self.native: Native = native
        self._serial = 0

    def check(self, what: str, call: Call, given: Any, expected: Any) -> None:
        """Run ``call(source, target)`` with `given` as the source, and compare the target with `expected`.

        An `expected` of None means that the target must not change. Raises WrongResult if the target differs.
        """
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
            raise probes.WrongResult(
                f"{what} of {given.nbytes} bytes of device memory gives wrong data on rank {self.rank}"
            )

    def data(self, nbytes: int, dtype: str = "uint8") -> list[Any]:
        """Return the data of each rank: other numbers at each call, the same on both ranks; sums of them are exact."""
        self._serial += 1
        generator = np.random.default_rng(self._serial)
        count = nbytes // np.dtype(dtype).itemsize
        return [generator.integers(0, 100, count).astype(dtype) for _ in range(2)]

    def finish(self) -> None:
        """Wait for the other rank."""
        self.native.barrier()


def _send() -> str:
    """Check messages between two ranks."""
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

        # Transfers without a waiting caller are completed by a thread that has never used the device.
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
    pair.finish()
    return f"{_WHAT} by {', '.join(ways)}"


def _move() -> str:
    """Check collectives that move data."""
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
        received = np.concatenate([one.reshape(2, -1)[rank] for one in data])
        pair.check("Alltoall", native.alltoall, data[rank], received)
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
    pair.finish()
    return f"{_WHAT} by Bcast, Allgather, Allgatherv, Alltoall, Gather, Scatter"


def _allgatherv(native: Native, counts: list[int], source: DeviceArray, target: DeviceArray) -> None:
    native.allgather(source, target, counts)


def _reduce() -> str:
    """Check collectives that reduce."""
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
            prefix = data[0] if rank == 0 else data[0] + data[1]
            pair.check("Scan", lambda one, all_: native.scan(one, all_, "sum"), data[rank], prefix)
        data = pair.data(nbytes, "int64")
        most = np.maximum(*data)
        pair.check("Allreduce in place", lambda one, all_: _in_place(native, one, all_), data[rank], most)
    _on_all_dtypes(pair)
    pair.finish()
    return f"{_WHAT}, summed up, by Allreduce, Reduce, Reduce_scatter_block, Scan"


def _on_all_dtypes(pair: _Pair) -> None:
    """Check the reductions that MPI computes correctly on the host."""
    for op, dtype in reductions.PAIRS:
        if pair.transport.find_native_defect("allreduce", op, dtype) is None:
            both = reductions.make_operands(op, dtype, SIZES[1] // dtype.itemsize)
            total = reductions.combine(op, *both)
            what = f"Allreduce ({reductions.describe_pair(reductions.format_pair(op, dtype))})"
            pair.check(what, partial(_allreduce, pair.native, op), both[pair.rank], total)


def _allreduce(native: Native, op: str, source: DeviceArray, target: DeviceArray) -> None:
    native.allreduce(source, target, op)


def _in_place(native: Native, source: DeviceArray, target: DeviceArray) -> None:
    np.copyto(target, source)
    target.on.synchronize()
    native.allreduce(target, target, "max")


# --- alone


def _devices() -> dict[str, Any]:
    """Return facts about the devices, and the version of NCCL."""
    from mpicoll.buffers.cuda.facts import list_facts

    found: dict[str, Any] = {"devices": list_facts()}
    try:
        from mpicoll.buffers.cuda import nccl

        found["nccl"] = nccl.version()
    except (ImportError, AttributeError, RuntimeError, MpicollError) as error:
        found["no nccl"] = str(error)
    return found


def _kernel() -> str:
    """Check that kernels are compiled and run."""
    from mpicoll.buffers.device import find_kernel_failure

    device = _device(0)
    failure = find_kernel_failure(device)
    if failure is not None:
        raise probes.ProbeImpossible(failure)
    return f"a kernel was compiled for {device.name} and ran there"


def _ipc() -> str:
    """Check that another process can read and write device memory of this one."""
    device, count = _device(0), 1 << 20
    here, there = np.random.default_rng(1).integers(0, 256, (2, count), np.uint8)
    with device.working():
        memory = device.empty(count, np.dtype(np.uint8))
        np.copyto(memory, here)
        device.synchronize()
        export = device.export(memory)
    if export is None:
        raise probes.ProbeImpossible(f"memory of {device.name} can't be exported")
    description = json.dumps(export._asdict() | {"handle": export.handle.hex()})
    probes.report(step="opening memory of another process")
    ended = launcher.run_bounded(launcher.module_command(PROGRAM, "ipc-peer", description), os.environ, 20.0)
    reports = probes.merge_reports(ended.output)
    if "wrong" in reports:
        raise probes.WrongResult(reports["wrong"])
    if "done" not in reports:
        late = "the other process did not end within 20 s"
        raise probes.ProbeImpossible(
            late if ended.status is None else reports.get("unable", launcher.tail(ended.errors, 3))
        )
    got = np.empty(count, np.uint8)
    with device.working():
        np.copyto(got, memory)
        device.synchronize()
    if not np.array_equal(got, there):
        raise probes.WrongResult(f"memory of {device.name} does not contain what another process has written to it")
    return f"another process has read and written memory of {device.name}"


def _ipc_peer(description: str) -> str:
    """Read and write the exported memory by copies, and if kernels can be compiled read it by one, in the other
    process."""
    from mpicoll.buffers.device import Export, find_kernel_failure

    device = _device(0)
    here, there = np.random.default_rng(1).integers(0, 256, (2, 1 << 20), np.uint8)
    fields = json.loads(description)
    export = Export(**fields | {"handle": bytes.fromhex(fields["handle"])})
    with device.working():
        memory = device.reach(export)[export.offset : export.offset + here.size]
        got = np.empty(here.size, np.uint8)
        np.copyto(got, memory)
        device.synchronize()
        if not np.array_equal(got, here):
            raise probes.WrongResult(
                f"memory of another process on {device.name} can be opened, but contains wrong data"
            )
        if find_kernel_failure(device) is None:
            scratch = device.empty(here.size, memory.dtype)
            device.fold("max", [memory], [scratch], "uint8")
            np.copyto(got, scratch)
            device.synchronize()
            if not np.array_equal(got, here):
                raise probes.WrongResult(f"a kernel on {device.name} reads wrong data in memory of another process")
        np.copyto(memory, there)
        device.synchronize()
    return "it is right"


def _words() -> str:
    """Check that streams write words of host memory, and wait for them."""
    device, line = _device(0), 64
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    try:
        words = device.make_words(memory)
        with device.working():
            words.write(0, 1)
            words.wait(0, 1)
            words.write(line, 2)
    except DeviceError as error:
        raise probes.ProbeImpossible(str(error)) from error
    if memory[line] != 2:
        raise probes.WrongResult(f"the host does not see what a stream of {device.name} has written to its memory")
    return f"streams of {device.name} write words of host memory, and wait for them"


_PROBES: dict[str, Callable[..., Any]] = {
    "send": _send,
    "move": _move,
    "reduce": _reduce,
    "devices": _devices,
    "kernel": _kernel,
    "ipc": _ipc,
    "ipc-peer": _ipc_peer,
    "words": _words,
}
if __name__ == "__main__":
    sys.exit(probes.run(_PROBES, *sys.argv[1:]))
