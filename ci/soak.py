"""Whether a process that runs for long stays as it is: memory, descriptors, threads, shared memory.

    mpirun -np 2 python ci/soak.py --operations 100000
    mpirun -np 3 python ci/soak.py --operations 100000 --torch

Mixed operations: collectives in all forms (with and without ``out=``, forced, in the background, some of whose requests
are dropped), plans made and dropped, messages, groups made, used and freed, memory of mpicoll.empty, errors raised and
caught; with ``--torch`` also collectives and process groups of torch.distributed. Results are looked at, but with the
least that this can cost. A line is printed every 5 %. The exit status is 1 if after the first 20 %, the warm-up, the
resident memory of a rank grows by more than ``--growth`` MiB, or if descriptors, threads or shared mappings grow.
The 4 MiB that are allowed are 70 bytes for each of 60 000 operations, which is less than a Python object and what it
holds; until then ranks still touch new pages of their shared memory, and prepare kinds of calls that are rare.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("MPICOLL_TIMEOUT", "120")
os.environ.setdefault("MPICOLL_TUNED", "off")

import numpy as np

import mpicoll
from mpicoll.engine.selection.catalogue import algorithms_of

KEYS = (
    *[("float32", 12)] * 3,
    *[("int64", 12)] * 2,
    *[("float64", 240)] * 3,
    *[("float32", 240)] * 2,
    *[("float16", 2400)] * 2,
    ("int64", 2400),
    *[("float32", 36_000)] * 2,
    ("float64", 240_000),
)
"""Dtypes and numbers of elements; any number of ranks up to 4 divides them. Few, since a communicator keeps what it
prepared for each kind of call, up to a bound that a variety of kinds would take long to reach."""

LARGE = KEYS[-1]

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
ROOTED = ("reduce", "bcast", "gather", "scatter")

Reduce = Callable[[list[int]], int]

EXPECT: dict[str, Callable[[list[int], int, int, Reduce], Any]] = {
    "allreduce": lambda values, rank, root, reduce: (reduce(values),) * 2,
    "reduce": lambda values, rank, root, reduce: (reduce(values),) * 2 if rank == root else None,
    "reduce_scatter": lambda values, rank, root, reduce: (reduce(values),) * 2,
    "scan": lambda values, rank, root, reduce: (reduce(values[: rank + 1]),) * 2,
    "exscan": lambda values, rank, root, reduce: (reduce(values[:rank]),) * 2 if rank else None,
    "bcast": lambda values, rank, root, reduce: (values[root],) * 2,
    "scatter": lambda values, rank, root, reduce: (values[root],) * 2,
    "gather": lambda values, rank, root, reduce: (values[0], values[-1]) if rank == root else None,
    "allgather": lambda values, rank, root, reduce: (values[0], values[-1]),
    "alltoall": lambda values, rank, root, reduce: (values[0], values[-1]),
}
"""The first and the last element of the result, where each rank passes one value all over; None: there is no result,
or a neutral one."""

SAMPLES = 100
"""How often to look, but not more often than every hundred operations: all garbage is collected then."""

PAGE = os.sysconf("SC_PAGE_SIZE")


def state() -> tuple[float, int, int, int]:
    """Resident memory in MiB, descriptors, threads, pieces of memory that are shared with other processes."""
    gc.collect()
    # What is free goes back to the system, as far as it can: the C library keeps now more of it, now less.
    ctypes.CDLL(None).malloc_trim(0)
    process = Path("/proc/self")
    resident = int((process / "statm").read_text().split()[1]) * PAGE / (1 << 20)
    descriptors, threads = (sum(1 for _ in (process / folder).iterdir()) for folder in ("fd", "task"))
    lines = (process / "maps").read_text().splitlines()
    return resident, descriptors, threads, sum(1 for line in lines if line.split()[1].endswith("s"))


class Soak:
    """One rank. All ranks draw the same from `draw`, and from `own` what is for this rank to decide."""

    def __init__(self, seed: str) -> None:
        self.world = mpicoll.world()
        self.draw = Random(seed)
        self.own = Random(f"{seed} {self.world.rank}")
        self.number = 0
        self.done: Counter[str] = Counter()
        # Each rank's arrays hold its number in the world, plus one: never changed.
        self.inputs = {key: np.full(key[1], self.world.rank + 1, key[0]) for key in set(KEYS)}
        self.outputs = {key: np.zeros_like(x) for key, x in self.inputs.items()}
        self.kinds: dict[Callable[[], None], int] = {
            self.collective: 70,
            self.plan: 5,
            self.message: 10,
            self.error: 5,
            self.group: 4,
            self.memory: 2,
        }

    def step(self) -> None:
        kind = self.draw.choices(list(self.kinds), list(self.kinds.values()))[0]
        self.done[kind.__name__] += 1
        kind()
        self.number += 1

    # --- collectives

    def collective(self) -> None:
        self.call(None, tuple(range(self.world.size)))

    def call(self, comm: Any, members: tuple[int, ...]) -> None:
        """One collective on `comm`, whose ranks are these of the world."""
        draw = self.draw
        name = draw.choice(tuple(EXPECT))
        key = draw.choice(KEYS)
        op = draw.choice(("sum", "max", "min"))
        root = draw.choice((0, len(members) - 1))
        form = draw.choice(("plain", "plain", "out", "forced", "wait", "wait", "drop", "timed"))
        algorithm = draw.choice(algorithms_of(name)) if form == "forced" else None
        if form == "forced":
            key, op = ("float32", draw.choice((240, 36_000))), "sum"
        x, rank = self.inputs[key], members.index(self.world.rank)
        options: dict[str, Any] = {"comm": comm}
        if name in REDUCTIONS:
            options["op"] = op
        if name in ROOTED:
            options["root"] = root
        if name == "scatter" and rank != root:
            x = x[: len(x) // len(members)]
        if form == "out" and name in ("allreduce", "bcast", "scan", "exscan", "alltoall"):
            options["out"] = self.outputs[key]
        if form == "forced":
            options["algorithm"] = algorithm
        if form in ("wait", "drop", "timed"):
            request = getattr(mpicoll, f"i{name}")(x, **options)
            if form == "drop":
                return
            got = request.wait(None if form == "wait" else 60.0)
        else:
            try:
                got = getattr(mpicoll, name)(x, **options)
            except mpicoll.AlgorithmError:
                assert form == "forced"
                self.done["refused"] += 1
                return
        self.look(name, got, [member + 1 for member in members], rank, root, op)

    def look(self, name: str, got: Any, values: list[int], rank: int, root: int, op: str) -> None:
        want = EXPECT[name](values, rank, root, {"sum": sum, "max": max, "min": min}[op])
        if want is None:
            assert got is None or name == "exscan"
            return
        ends = (got.flat[0], got.flat[-1])
        assert ends == want, f"operation {self.number}: {name} {op} gave {ends} on rank {rank}, expected {want}"

    def plan(self) -> None:
        x = self.inputs[self.draw.choice(KEYS)]
        name = self.draw.choice(("allreduce_init", "bcast_init", "allgather_init", "scan_init"))
        runs, started = self.draw.randint(0, 4), self.draw.random() < 0.5
        plan = getattr(mpicoll, name)(x)
        for _ in range(runs):
            if started:
                plan.start()
                plan.wait()
            else:
                plan()

    # --- messages

    def message(self) -> None:
        draw, size, rank = self.draw, self.world.size, self.world.rank
        key = draw.choice(KEYS)
        way = draw.choice(("sendrecv", "requests", "drop", "any"))
        x, left = self.inputs[key], (rank - 1) % size
        right = (rank + 1) % size
        if way == "sendrecv":
            got = mpicoll.sendrecv(x, right, left)
        elif way == "any":
            request = mpicoll.isend(x, right)
            got = mpicoll.recv(x)
            request.wait()
        else:
            arriving = mpicoll.irecv(x, left)
            leaving = mpicoll.isend(x, right)
            got = arriving.wait()
            if way == "requests":
                leaving.wait()
            del leaving
        assert got[0] == got[-1] == left + 1

    # --- the rest

    def group(self) -> None:
        """Make one, use it once or some times, free it."""
        world, draw = self.world, self.draw
        kind = draw.choice(("split", "group", "duplicate", "node", "mpi4py", "unused"))
        color = draw.choice((1, 2))
        chosen = tuple(draw.sample(range(world.size), draw.randint(1, world.size)))
        calls = draw.randint(1, 4)
        everyone = tuple(range(world.size))
        members: tuple[int, ...] = everyone
        comm: Any
        if kind == "split":
            comm = world.split(world.rank % color)
            members = everyone[world.rank % color :: color]
        elif kind == "group":
            comm, members = world.group(chosen), chosen
        elif kind == "node":
            comm = world.node_comm()
            members = tuple(other for other in everyone if world.nodes[other] == world.node)
        elif kind == "mpi4py" and world.mpi is not None:
            comm = world.mpi.Dup()
        else:
            comm = world.duplicate()
        before = draw.getstate()
        if comm is not None and kind != "unused":
            for _ in range(calls):
                self.call(comm, members)
        self._as_others(before)
        if comm is not None:
            (comm.free if isinstance(comm, mpicoll.Communicator) else comm.Free)()

    def _as_others(self, before: Any) -> None:
        """After what only the members of a group have drawn, draw the same as all others again."""
        self.draw.setstate(before)
        self.draw.random()

    def memory(self) -> None:
        dtype, count = self.draw.choice(KEYS)
        x = mpicoll.empty(count, dtype)
        x[...] = 1
        if self.draw.random() < 0.5:
            assert mpicoll.allreduce(x, out=x)[-1] == self.world.size

    def error(self) -> None:
        """Found before anything leaves, or in the middle of an operation through shared memory."""
        x = self.inputs["float32", 240]
        wrong: list[tuple[Any, Callable[[], Any]]] = [
            (mpicoll.DTypeError, lambda: mpicoll.allreduce(x, "band")),
            (mpicoll.DTypeError, lambda: mpicoll.iallreduce(np.array(["text"]), "sum")),
            (mpicoll.RankError, lambda: mpicoll.bcast(x, root=self.world.size)),
            (mpicoll.ShapeError, lambda: mpicoll.allgather(x, counts=[1] * self.world.size)),
            (mpicoll.AlgorithmError, lambda: mpicoll.allreduce_init(x, algorithm="none")),
            (mpicoll.ShapeError, lambda: mpicoll.allreduce(x, out=self.outputs["float32", 12])),
            # refused where there is no shared memory; who fails later learns from the others
            ((ZeroDivisionError, mpicoll.CommunicationError, mpicoll.AlgorithmError), self._in_the_middle),
        ]
        kind, call = self.draw.choice(wrong)
        try:
            call()
        except kind:
            return
        raise AssertionError(f"operation {self.number}: nothing was raised, but expected {kind}")

    def _in_the_middle(self) -> None:
        op = mpicoll.Op(_fail, commutative=True, elementwise=True)
        mpicoll.allreduce(self.inputs["float32", 12], op, algorithm="shm_flat")


def _fail(a: Any, b: Any) -> Any:
    raise ZeroDivisionError


class TorchSoak(Soak):
    """The same, and torch's process groups."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        import torch
        import torch.distributed as dist

        dist.init_process_group("mpicoll")
        self.dist = dist
        self.tensors = {key: torch.from_numpy(x) for key, x in self.inputs.items()}
        self.filled = {key: torch.from_numpy(x) for key, x in self.outputs.items()}
        self.gathered = {
            key: torch.zeros(len(x) * self.world.size, dtype=x.dtype) for key, x in self.tensors.items() if key != LARGE
        }
        self.kinds |= {self.torch_call: 50, self.torch_message: 8, self.torch_error: 3, self.torch_group: 3}

    def torch_call(self) -> None:
        self.torch_on(None, list(range(self.world.size)))

    def torch_on(self, group: Any, members: list[int]) -> None:
        dist, draw = self.dist, self.draw
        name = draw.choice(("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce"))
        key = draw.choice(KEYS[:-1])
        form = draw.choice(("sync", "wait", "future", "drop"))
        root = draw.choice(members)
        values = [member + 1 for member in members]
        x, y = self.tensors[key], self.filled[key]
        options: dict[str, Any] = {"group": group, "async_op": form != "sync"}
        if name in ("all_reduce", "broadcast", "reduce"):
            y.copy_(x)
            want = (sum(values),) * 2
            if name == "all_reduce":
                work = dist.all_reduce(y, **options)
            elif name == "reduce":
                work = dist.reduce(y, root, **options)
                want = want if root == self.world.rank else (self.world.rank + 1,) * 2
            else:
                work = dist.broadcast(y, root, **options)
                want = (root + 1,) * 2
        elif name == "all_gather":
            y = self.gathered[key][: len(x) * len(members)]
            work = dist.all_gather_single(y, x, **options)
            want = values[0], values[-1]
        elif name == "reduce_scatter":
            y = y[: len(x) // len(members)]
            work = dist.reduce_scatter_single(y, x, **options)
            want = (sum(values),) * 2
        else:
            work = dist.all_to_all_single(y, x, **options)
            want = values[0], values[-1]
        if form == "drop":
            del work
            dist.barrier(group)  # the memory is used again
        elif form != "sync":
            (work.get_future() if form == "future" else work).wait()
        got = y[0].item(), y[-1].item()
        assert got == want, f"operation {self.number}: {name} gave {got} on rank {self.world.rank}, expected {want}"

    def torch_message(self) -> None:
        key = self.draw.choice(KEYS)
        rank, size = self.world.rank, self.world.size
        x, y = self.tensors[key], self.filled[key]
        if size == 1:
            return
        works = [self.dist.irecv(y, (rank - 1) % size), self.dist.isend(x, (rank + 1) % size)]
        if self.draw.random() < 0.2:
            works.pop()
        for work in works:
            work.wait()
        assert y[0] == y[-1] == (rank - 1) % size + 1

    def torch_error(self) -> None:
        with contextlib.suppress(mpicoll.DTypeError):
            self.dist.all_reduce(self.tensors["float32", 12], self.dist.ReduceOp.BAND)
            raise AssertionError("band of float32 was not refused")

    def torch_group(self) -> None:
        members = self.draw.sample(range(self.world.size), self.draw.randint(1, self.world.size))
        group = self.dist.new_group(members)
        before = self.draw.getstate()
        if self.world.rank in members:
            for _ in range(3):
                self.torch_on(group, sorted(members))
            self.dist.destroy_process_group(group)
        self._as_others(before)

    def close(self) -> None:
        self.dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--growth", type=float, default=4.0, metavar="MIB")
    parser.add_argument("--torch", action="store_true", help="torch.distributed as well")
    parser.add_argument("--without", nargs="+", default=[], metavar="KIND", help="of operations, to find a culprit")
    return parser.parse_args()


def growth(samples: list[float]) -> float:
    """From the first to the last quarter of what follows the warm-up, of their least values: what is in use for a
    moment only adds to a sample, but what has leaked is in all that follow."""
    after = samples[len(samples) // 5 :]
    quarter = max(1, len(after) // 4)
    return min(after[-quarter:]) - min(after[:quarter])


def run(soak: Soak, operations: int) -> np.ndarray:
    """Carry them out, and return the growth of this rank in the quantities of `state`."""
    step = max(100, operations // SAMPLES)
    samples: list[tuple[float, int, int, int]] = []
    begin = time.monotonic()
    for number in range(1, operations + 1):
        soak.step()
        if number % step:
            continue
        mpicoll.barrier()
        samples.append(state())
        if number * 20 // operations == (number - step) * 20 // operations:
            continue
        resident, descriptors, threads, shared = samples[-1]
        everyone = mpicoll.gather(np.array([resident]))
        if everyone is not None:
            print(
                f"{number:8} operations, {time.monotonic() - begin:5.0f} s: resident"
                f" {' '.join(f'{one:.1f}' for one in everyone)} MiB; {descriptors} descriptors,"
                f" {threads} threads, {shared} shared mappings",
                flush=True,
            )
    return np.array([growth([float(value) for value in column]) for column in zip(*samples, strict=True)])


def main() -> None:
    arguments = _arguments()
    soak = (TorchSoak if arguments.torch else Soak)(arguments.seed)
    for kind in list(soak.kinds):
        if kind.__name__ in arguments.without:
            del soak.kinds[kind]
    worst = mpicoll.allreduce(run(soak, arguments.operations), "max")
    if soak.world.rank == 0:
        print(f"did {dict(soak.done)}")
        print(
            f"after the warm-up, at most, on {soak.world.size} ranks: resident {worst[0]:+.2f} MiB, descriptors"
            f" {worst[1]:+g}, threads {worst[2]:+g}, shared mappings {worst[3]:+g}"
        )
    if isinstance(soak, TorchSoak):
        soak.close()
    sys.exit(int(worst[0] > arguments.growth or (worst[1:] > 0).any()))


if __name__ == "__main__":
    main()
