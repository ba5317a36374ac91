"""What may crash or hang the process that tries it, each in processes of its own: ``-m mpicoll.cli.probes NAME``.

``job``, ``reductions``, ``in-place``, ``send``, ``move`` and ``reduce`` are for two ranks, which a launcher has
started; ``devices`` and ``ipc`` for a single process. What they find they say in lines of stdout; see
:data:`mpicoll.transport.cuda_awareness.MARK`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.errors import MpicollError
from mpicoll.transport import cuda_awareness, launch_env, launcher, reductions

if TYPE_CHECKING:
    from mpicoll.buffers.device import Device, DeviceArray
    from mpicoll.transport.base import Native, Transport

    Call = Callable[[DeviceArray, DeviceArray], object]

SIZES = (8, 64 << 10, 4 << 20)
"""Bytes of a rank's data: what is sent at once, what is announced first, and what is cut into pieces."""

_WHAT = "8 B, 64 KiB and 4 MiB of device memory have arrived"


class Wrong(Exception):
    """Something else has come out than should have."""


class Unable(Exception):
    """It can't be tried."""


def main(name: str, *arguments: str) -> int:
    """Carry out a trial, and return the exit status."""
    try:
        tell(done=_TRIALS[name](*arguments))
    except Wrong as error:
        tell(wrong=str(error))
    except (Unable, MpicollError, ImportError) as error:
        tell(unable=str(error))
    except Exception:  # noqa: BLE001  whatever it is, the other rank must not wait
        traceback.print_exc()
    else:
        return 0
    if "mpi4py.MPI" in sys.modules:
        from mpicoll.transport import mpi

        mpi.abort(1)
    return 1


def tell(**what: Any) -> None:
    """Say something to the process that wants to know."""
    sys.stdout.write(f"{cuda_awareness.MARK}{json.dumps(what)}\n")
    sys.stdout.flush()


# --- on two ranks


def _job() -> dict[str, Any]:
    """A job of this library, which sums something up."""
    import mpicoll

    world = mpicoll.world()
    tell(step="allreduce")
    total = mpicoll.allreduce(np.arange(1000.0) + world.rank)
    if total.tolist() != (np.arange(1000.0) * world.size + sum(range(world.size))).tolist():
        raise Wrong(f"allreduce gives {total[:3].tolist()}... on rank {world.rank} of {world.size}")
    return {"ranks": world.size, "unshared": world.transport.unshared, "unread": world.transport.unread}


def _two() -> Transport:
    """This rank's end of a job of two."""
    from mpicoll.transport import mpi

    transport = mpi.world(launch_env.launched_size(os.environ))
    if transport.size != 2:
        raise Unable(f"the launcher gives worlds of {transport.size}; it belongs to another MPI library")
    return transport


COUNTS = (33, 5000)
"""Elements of a rank that are reduced: some vectors and a rest, and what is sent in other ways."""


def _reductions(skip: str) -> dict[str, Any]:
    """What the MPI library's own reductions of host memory compute, on all dtypes but those that `skip`, JSON, has
    already found out about; by MPI_Reduce_local and by each collective."""
    from mpicoll.transport import mpi

    transport = _two()
    wrong: reductions.Defects = {**reductions.attempt(mpi.reduce_local), **json.loads(skip)}
    # Both ranks must leave out the same.
    known = {what for text in transport.texts(json.dumps(wrong)) for what in json.loads(text)}
    for op, dtype in reductions.PAIRS:
        what = reductions.name(op, dtype)
        if what in known:
            continue
        if transport.rank == 0:
            tell(step=what)
        for count in COUNTS:
            why = _collectives(transport, op, dtype, count)
            if why is not None:
                wrong.setdefault(what, why)
    return {"wrong": wrong}


def _collectives(transport: Transport, op: str, dtype: np.dtype[Any], count: int) -> str | None:
    """What is wrong with the collectives that reduce; None if nothing is."""
    native, rank = transport.native, transport.rank
    assert native is not None
    both = reductions.operands(op, dtype, 2 * count)
    mine, (left, right) = both[rank], both
    total = reductions.combine(op, left, right)
    half = slice(rank * count, (rank + 1) * count)
    so_far = (left, total)[rank]
    everything, whole, block = slice(None), np.empty_like(mine), np.empty(count, dtype)
    found: list[tuple[str, Any, Any, slice]] = []

    def look(name: str, expected: Any, got: Any, where: slice = everything) -> None:
        found.append((name, expected.copy(), got.copy(), where))

    native.allreduce(mine, whole, op)
    look("Allreduce", total, whole)
    whole[:] = mine
    native.allreduce(whole, whole, op)
    look("Allreduce in place", total, whole)
    for root in (0, 1):
        whole[:] = 0
        native.reduce(mine, whole if rank == root else None, op, root)
        look(f"Reduce to rank {root}", total if rank == root else whole, whole)
    whole[:] = mine
    native.reduce(whole, whole if rank == 0 else None, op, 0)
    look("Reduce in place", total if rank == 0 else mine, whole)
    native.scan(mine, whole, op)
    look("Scan", so_far, whole)
    whole[:] = mine
    native.scan(whole, whole, op)
    look("Scan in place", so_far, whole)
    whole[:] = 0
    native.exscan(mine, whole, op)
    look("Exscan", left if rank == 1 else whole, whole)
    native.reduce_scatter(mine, block, None, op)
    look("Reduce_scatter_block", total[half], block, half)
    native.reduce_scatter(mine, block, [count, count], op)
    look("Reduce_scatter", total[half], block, half)
    for name, expected, got, where in found:
        why = reductions.differs(op, expected, got, left[where], right[where])
        if why is not None:
            return f"{why} (by {name} of {mine.size} elements on rank {rank} of 2)"
    return None


def _in_place_anywhere() -> str:
    """MPI_Reduce in place, at a root other than rank 0."""
    from mpicoll.transport import mpi

    rank = _two().rank
    from_both = np.arange(max(COUNTS) * 4.0)
    for count in (*COUNTS, from_both.size):
        memory = from_both[:count] + rank
        mpi.reduce_in_place(memory, "sum", 1)
        if rank == 1 and not np.array_equal(memory, from_both[:count] * 2 + 1):
            raise Wrong(f"Reduce in place of {count} float64 to rank 1 gives wrong data")
    return "Reduce works in place at rank 1"


def _two_with_devices() -> tuple[Transport, Device]:
    """This rank's end of a job of two, and its device."""
    transport = _two()
    return transport, _device(transport.rank)


def _device(number: int) -> Device:
    """The device of that number, or of the numbers that there are."""
    from mpicoll.buffers.cuda.device import cuda_device
    from mpicoll.buffers.cuda.facts import facts

    return cuda_device(number % len(facts()))


class _Trial:
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
            tell(step=f"{what} of {given.nbytes} bytes")
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
            raise Wrong(f"{what} of {given.nbytes} bytes of device memory gives wrong data on rank {self.rank}")

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
    trial = _Trial()
    transport, other = trial.transport, 1 - trial.rank

    def blocking(source: DeviceArray, target: DeviceArray) -> None:
        for sender in (0, 1):
            if trial.rank == sender:
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
            given = trial.data(nbytes)
            trial.check(what, call, given[trial.rank], given[other])
    trial.over()
    return f"{_WHAT} by {', '.join(ways)}"


def _move() -> str:
    """Collectives that move data."""
    trial = _Trial()
    native, rank = trial.native, trial.rank

    def bcast(source: DeviceArray, target: DeviceArray) -> None:
        if rank == 0:
            np.copyto(target, source)
            trial.device.synchronize()
        native.bcast(target, 0)

    for nbytes in SIZES:
        data = trial.data(nbytes)
        trial.check("Bcast", bcast, data[rank], data[0])
        data = trial.data(nbytes)
        trial.check("Allgather", lambda one, all_: native.allgather(one, all_, None), data[rank], np.concatenate(data))
        data = trial.data(nbytes)
        counts = [nbytes - 3, nbytes + 3]
        whole = np.concatenate(data)
        trial.check(
            "Allgatherv",
            partial(_allgatherv, native, counts),
            whole[: counts[0]] if rank == 0 else whole[counts[0] :],
            whole,
        )
        data = trial.data(nbytes)
        arrives = np.concatenate([one.reshape(2, -1)[rank] for one in data])
        trial.check("Alltoall", native.alltoall, data[rank], arrives)
        data = trial.data(nbytes)
        trial.check(
            "Gather",
            lambda one, all_: native.gather(one, all_ if rank == 0 else None, None, 0),
            data[rank],
            np.concatenate(data) if rank == 0 else None,
        )
        data = trial.data(nbytes)
        trial.check(
            "Scatter",
            lambda all_, one: native.scatter(all_ if rank == 0 else None, one, None, 0),
            data[0],
            data[0].reshape(2, -1)[rank],
        )
    trial.over()
    return f"{_WHAT} by Bcast, Allgather, Allgatherv, Alltoall, Gather, Scatter"


def _allgatherv(native: Native, counts: list[int], source: DeviceArray, target: DeviceArray) -> None:
    native.allgather(source, target, counts)


def _reduce() -> str:
    """Collectives that reduce."""
    trial = _Trial()
    native, rank = trial.native, trial.rank
    for nbytes in SIZES:
        for dtype in ("float32", "int32"):
            data = trial.data(nbytes, dtype)
            total = data[0] + data[1]
            trial.check("Allreduce", lambda one, all_: native.allreduce(one, all_, "sum"), data[rank], total)
            data = trial.data(nbytes, dtype)
            total = data[0] + data[1]
            trial.check(
                "Reduce",
                lambda one, all_: native.reduce(one, all_ if rank == 0 else None, "sum", 0),
                data[rank],
                total if rank == 0 else None,
            )
            data = trial.data(nbytes, dtype)
            total = (data[0] + data[1]).reshape(2, -1)[rank]
            trial.check(
                "Reduce_scatter_block",
                lambda all_, one: native.reduce_scatter(all_, one, None, "sum"),
                data[rank],
                total,
            )
            data = trial.data(nbytes, dtype)
            so_far = data[0] if rank == 0 else data[0] + data[1]
            trial.check("Scan", lambda one, all_: native.scan(one, all_, "sum"), data[rank], so_far)
        data = trial.data(nbytes, "int64")
        most = np.maximum(*data)
        trial.check("Allreduce in place", lambda one, all_: _in_place(native, one, all_), data[rank], most)
    _on_all_dtypes(trial)
    trial.over()
    return f"{_WHAT}, summed up, by Allreduce, Reduce, Reduce_scatter_block, Scan"


def _on_all_dtypes(trial: _Trial) -> None:
    """What MPI computes rightly on the host it is to compute rightly on a device."""
    for op, dtype in reductions.PAIRS:
        if trial.transport.misreduces(op, dtype) is None:
            both = reductions.operands(op, dtype, SIZES[1] // dtype.itemsize)
            total = reductions.combine(op, *both)
            what = f"Allreduce ({reductions.words(reductions.name(op, dtype))})"
            trial.check(what, partial(_allreduce, trial.native, op), both[trial.rank], total)


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
        raise Unable(f"memory of {device.name} can't be exported")
    said = json.dumps(asdict(export) | {"handle": export.handle.hex()})
    tell(step="opening memory of another process")
    ended = launcher.attempt(launcher.module(cuda_awareness.TRIALS, "ipc-peer", said), os.environ, 20.0)
    told: dict[str, str] = {}
    for one in cuda_awareness.told_by(ended.output):
        told |= one
    if "wrong" in told:
        raise Wrong(told["wrong"])
    if "done" not in told:
        late = "the other process did not end within 20 s"
        raise Unable(late if ended.status is None else told.get("unable", launcher.last_lines(ended.errors, 3)))
    got = np.empty(count, np.uint8)
    with device.working():
        np.copyto(got, memory)
        device.synchronize()
    if not np.array_equal(got, there):
        raise Wrong(f"what another process has written to memory of {device.name} is not there")
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
            raise Wrong(f"memory of another process on {device.name} can be opened, but what is there is wrong")
        np.copyto(memory, there)
        device.synchronize()
    return "it is right"


_TRIALS: dict[str, Callable[..., Any]] = {
    "job": _job,
    "reductions": _reductions,
    "in-place": _in_place_anywhere,
    "send": _send,
    "move": _move,
    "reduce": _reduce,
    "devices": _devices,
    "ipc": _ipc,
    "ipc-peer": _ipc_peer,
}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
