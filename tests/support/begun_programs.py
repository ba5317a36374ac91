"""Random programs of blocking and nonblocking calls, and what they should return.

All ranks draw the same collectives from a seed; each draws for itself in which form it calls them, when it waits, and
how late it is. In a part of the collectives one rank calls another one than the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import mpicoll

COUNTS = (0, 1, 5, 60, 128, 700, 9000, 40_000)
"""Elements of 8 bytes of a rank's block: for small slots, ring slots, slots, alone in a slot, and deferred."""

AHEAD = ("bcast", "scatter", "gather", "reduce", "scan")
"""Blocking calls after which a rank may go on before others have begun them."""

KINDS = ("allreduce", "allgather", "alltoall", "reduce_scatter", "barrier", *AHEAD)


class Collective(NamedTuple):
    kind: str
    count: int
    root: int = 0
    op: str = "sum"
    in_place: bool = False


def _fill(count: int, rank: int, number: int) -> np.ndarray[Any, Any]:
    return (np.arange(count) % 7 + 10.0 * rank + number).astype(np.float64)


def call(comm: mpicoll.Communicator, one: Collective, number: int, *, begins: bool) -> Any:
    """Return the result of a collective, or its request."""
    kind, size, rank, root = one.kind, comm.size, comm.rank, one.root % comm.size
    name = f"i{kind}" if begins else kind
    if kind == "barrier":
        return getattr(mpicoll, name)(comm=comm)
    blocks = size if kind in ("alltoall", "reduce_scatter") or (kind == "scatter" and rank == root) else 1
    x = _fill(one.count * blocks, rank, number)
    kwargs: dict[str, Any] = {"comm": comm}
    if kind in ("allreduce", "reduce", "scan", "reduce_scatter"):
        kwargs["op"] = one.op
    if kind in ("bcast", "scatter", "gather", "reduce"):
        kwargs["root"] = root
    if one.in_place and kind in ("allreduce", "alltoall", "scan"):
        kwargs["out"] = x
    return getattr(mpicoll, name)(x, **kwargs)


def find_result(one: Collective, number: int, rank: int, size: int) -> Any:
    """Return what a rank gets; None for no result."""
    kind, count, root = one.kind, one.count, one.root % size
    blocks = size if kind in ("alltoall", "reduce_scatter") else 1
    sizes = [count * (size if kind == "scatter" and peer == root else blocks) for peer in range(size)]
    inputs = [_fill(some, peer, number) for peer, some in enumerate(sizes)]
    reduce = np.sum if one.op == "sum" else np.max
    if kind == "barrier" or (kind in ("gather", "reduce") and rank != root):
        return None
    if kind in ("allreduce", "reduce"):
        return reduce(inputs, axis=0)
    if kind == "scan":
        return reduce(inputs[: rank + 1], axis=0)
    if kind == "reduce_scatter":
        return reduce(inputs, axis=0)[rank * count : (rank + 1) * count]
    if kind in ("allgather", "gather"):
        return np.concatenate(inputs)
    if kind == "bcast":
        return inputs[root]
    if kind == "scatter":
        return inputs[root][rank * count : (rank + 1) * count]
    assert kind == "alltoall"
    return np.concatenate([every[rank * count : (rank + 1) * count] for every in inputs])


class Step(NamedTuple):
    comm: int
    usual: Collective
    odd: int | None = None
    theirs: Collective | None = None


def draw(seed: int, size: int, length: int, *, mismatches: float = 0.0, comms: int = 1) -> list[Step]:
    """Return the collectives of a program."""
    rng = random.Random(seed)
    kinds = [
        Collective(
            rng.choice(KINDS), rng.choice(COUNTS), rng.randrange(size), rng.choice(("sum", "max")), rng.random() < 0.2
        )
        for _ in range(5)
    ]
    kinds.append(Collective("allreduce", 1))
    steps = []
    for _ in range(length):
        usual, comm = rng.choice(kinds), rng.randrange(comms)
        theirs = rng.choice(kinds)
        differs = theirs._replace(in_place=False) != usual._replace(in_place=False)
        differs = differs and _describe(theirs) != _describe(usual)
        if differs and comm == 0 and rng.random() < mismatches:
            steps.append(Step(comm, usual, rng.randrange(size), theirs))
        else:
            steps.append(Step(comm, usual))
    return steps


def _describe(one: Collective) -> tuple[Any, ...]:
    """Return what ranks compare."""
    rooted = one.root if one.kind in ("bcast", "scatter", "gather", "reduce") else 0
    op = one.op if one.kind in ("allreduce", "reduce", "scan", "reduce_scatter") else ""
    return one.kind, 0 if one.kind == "barrier" else one.count, rooted, op


class _Program:
    """The calls of one rank, and what is wrong with their results."""

    def __init__(self, comms: Sequence[mpicoll.Communicator]) -> None:
        self.comms = comms
        self.rank = comms[0].rank
        self.pending: list[tuple[int, Step, mpicoll.Request]] = []
        self.texts: list[str] = []
        self.wrong: list[str] = []

    def get_own(self, step: Step) -> Collective:
        return step.theirs if step.odd == self.rank and step.theirs is not None else step.usual

    def begin(self, number: int, step: Step) -> mpicoll.Request:
        request: mpicoll.Request = call(self.comms[step.comm], self.get_own(step), number, begins=True)
        self.pending.append((number, step, request))
        return request

    def run_blocking(self, number: int, step: Step) -> None:
        comm, mine = self.comms[step.comm], self.get_own(step)
        self._take(number, step, lambda: call(comm, mine, number, begins=False))

    def wait(self, index: int) -> None:
        number, step, request = self.pending.pop(index)
        self._take(number, step, request.wait)

    def _take(self, number: int, step: Step, get: Callable[[], Any]) -> None:
        comm, mine = self.comms[step.comm], self.get_own(step)
        try:
            got = get()
        except mpicoll.MismatchError as error:
            self.texts.append(str(error))
            if step.odd is None:
                self.wrong.append(f"{number}: {error}")
            return
        except mpicoll.MpicollError as error:
            self.wrong.append(f"{number}: {type(error).__name__}: {error}")
            return
        want = find_result(mine, number, comm.rank, comm.size)
        if step.odd is not None:
            self.wrong.append(f"{number}: no MismatchError: {mine}")
        elif (want is None) != (got is None) or (want is not None and not np.array_equal(got, want)):
            self.wrong.append(f"{number}: {mine}: {got} instead of {want}")


def run(seed: int, steps: Sequence[Step], comms: Sequence[mpicoll.Communicator], *, sleep: float) -> str:
    """Run a program, and return what is wrong, or an empty string. Collective; a rank is late by up to `sleep` seconds
    now and then."""
    program = _Program(comms)
    rng = random.Random(f"{seed} {program.rank}")
    for number, step in enumerate(steps):
        if rng.random() < 0.1:
            time.sleep(rng.random() * sleep)
        # Where calls differ after a rank has gone on, the communicator can't be used any more.
        if rng.random() < 0.7 or (step.odd is not None and program.get_own(step).kind in AHEAD):
            request = program.begin(number, step)
            if rng.random() < 0.2:
                request.test()
        else:
            program.run_blocking(number, step)
        while program.pending and rng.random() < 0.4:
            program.wait(rng.randrange(len(program.pending)))
    while program.pending:
        program.wait(0)
    told = comms[0]._core.transport.allgather_text("\n".join(sorted(program.texts)))
    if len(set(told)) > 1:
        program.wrong.append(f"ranks have raised different errors: {told}")
    return "\n".join(program.wrong)
