"""Random programs: sequences of operations on random communicators, compared with the oracle.

Every rank knows the program, so each can work out what all others pass. What differs from the oracle is collected and
raised at the end, so that a wrong value on one rank does not leave the others waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data import DTYPES, OPS, Expected, has, laid, make_op, means, wrap
from support.exercise import COLLECTIVES, COUNTED, REDUCTIONS, ROOTED, Call, serves
from support.ranks import Ranks

import mpicoll

PLAIN = [op for op in OPS if op not in ("user_affine", "user_matmul")]


@dataclass(frozen=True)
class Step:
    """One operation of a program. Numbers that pick something are taken modulo how much there is."""

    collective: str
    row: dict[str, Any]
    comm: int
    background: bool


@dataclass(frozen=True)
class Split:
    comm: int
    colors: tuple[int | None, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    comm: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Shift:
    """Everybody sends to the rank that is `by` further, and receives from the one that is as far behind."""

    comm: int
    by: int
    tag: int
    dtype: str
    count: int


@dataclass(frozen=True)
class Wait:
    """Wait for everything in the background, the last one first or the first one first."""

    backwards: bool


@st.composite
def steps(draw: st.DrawFn) -> Step:
    collective = draw(st.sampled_from((*COLLECTIVES, "barrier")))
    row: dict[str, Any] = {"dtype": draw(st.sampled_from(DTYPES)), "op": "sum"}
    if collective in REDUCTIONS:
        row["op"] = draw(
            st.sampled_from([op for op in PLAIN if means(op, row["dtype"]) and not _is_prefix_average(collective, op)])
        )
    shapes = [(1,), (3, 2), (17,), (0, 4), (2, 3, 2), (400,), *([(1500, 2)] if collective == "bcast" else [])]
    row["shape"] = draw(st.sampled_from(shapes))
    row["layout"] = draw(st.sampled_from(("contiguous", "strided", "fortran")))
    row["library"] = draw(st.sampled_from(("numpy", "numpy", "torch")))
    row["root"] = draw(st.sampled_from(("first", "last", "middle")))
    row["counts"] = draw(st.sampled_from(("none", "equal", "uneven", "zeros")))
    names = [name for name in mpicoll.schedules.algorithms_of(collective) if serves(collective, name, row["op"])]
    if collective == "alltoall" and row["counts"] != "none":
        names.remove("bruck")
    row["algorithm"] = draw(st.sampled_from([None, *names]))
    unknown = row["op"].startswith("user_") and row["dtype"] in ("uint16", "uint32", "uint64")
    if not has(row["library"], row["dtype"]) or unknown:
        row["library"] = "numpy"
    return Step(collective, row, draw(st.integers(0, 5)), draw(st.booleans()))


def _is_prefix_average(collective: str, op: str) -> bool:
    return op == "avg" and collective in ("scan", "exscan")


four = st.tuples(*[st.integers(0, 3)] * 4)
colors = st.tuples(*[st.sampled_from((0, 1, 2, None))] * 4)
members = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True).map(tuple)
program = st.lists(
    st.one_of(
        steps(),
        steps(),
        steps(),
        steps(),
        st.builds(Split, st.integers(0, 5), colors, four),
        st.builds(Group, st.integers(0, 5), members),
        st.builds(
            Shift, st.integers(0, 5), st.integers(0, 4), st.integers(0, 9), st.sampled_from(DTYPES), st.integers(0, 600)
        ),
        st.builds(Wait, st.booleans()),
    ),
    min_size=1,
    max_size=12,
)


@dataclass
class Machine:
    """One rank that carries out a program."""

    comms: list[mpicoll.Communicator | None] = field(default_factory=lambda: [mpicoll.world()])
    pending: list[tuple[mpicoll.Request, Expected | None, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def run(self, lines: list[Any]) -> None:
        for number, line in enumerate(lines):
            comm = self.comms[line.comm % len(self.comms)] if hasattr(line, "comm") else mpicoll.world()
            if isinstance(line, Split):
                self.comms.append(comm and comm.split(line.colors[comm.rank], line.keys[comm.rank]))
            elif isinstance(line, Group):
                self.comms.append(comm and _group(comm, line.ranks))
            elif isinstance(line, Wait):
                self.wait(backwards=line.backwards)
            elif comm is not None:
                self.operate(number, line, comm)
        self.wait(backwards=False)
        for comm in reversed(self.comms[1:]):
            if comm is not None:
                comm.free()
        assert not self.wrong, "\n".join(self.wrong)

    def operate(self, number: int, line: Any, comm: mpicoll.Communicator) -> None:
        where = f"line {number}, rank {comm.rank} of {comm.size} of {comm.name}: {line}"
        if isinstance(line, Shift):
            self.shift(number, line, comm, where)
        elif line.collective == "barrier":
            if line.background:
                self.pending.append((mpicoll.ibarrier(comm=comm), None, where))
            else:
                mpicoll.barrier(comm=comm, algorithm=line.row["algorithm"])
        else:
            self.collective(number, line, comm, where)

    def collective(self, number: int, line: Step, comm: mpicoll.Communicator, where: str) -> None:
        call = Call(line.collective, line.row, comm.rank, comm.size)
        inputs = call.inputs((number, comm.name))
        x = wrap(line.row["library"], laid(inputs[comm.rank], line.row["layout"]))
        options: dict[str, Any] = {"comm": comm, "algorithm": line.row["algorithm"]}
        if line.collective in ROOTED:
            options["root"] = call.root
        if line.collective in COUNTED:
            options["counts"] = call.counts()
        if line.collective in REDUCTIONS:
            options["op"] = make_op(call.op, comm.rank, call.name)
        want = call.expect(inputs)
        if line.background:
            request = getattr(mpicoll, f"i{line.collective}")(x, **options)
            self.pending.append((request, want, where))
        else:
            self.compare(getattr(mpicoll, line.collective)(x, **options), want, where)

    def shift(self, number: int, line: Shift, comm: mpicoll.Communicator, where: str) -> None:
        row = {"dtype": line.dtype, "shape": (line.count,)}
        inputs = Call("bcast", row, comm.rank, comm.size).inputs(number)
        dest, source = (comm.rank + line.by) % comm.size, (comm.rank - line.by) % comm.size
        got = mpicoll.sendrecv(inputs[comm.rank], dest, source, line.tag, line.tag, comm=comm)
        self.compare(got, Expected(inputs[source]), where)

    def wait(self, *, backwards: bool) -> None:
        for request, want, where in self.pending[:: -1 if backwards else 1]:
            self.compare(request.wait(), want, where)
        self.pending.clear()

    def compare(self, got: Any, want: Expected | None, where: str) -> None:
        try:
            if want is None:
                assert got is None
            else:
                want.check(_numpy(got), where)
        except AssertionError as error:
            self.wrong.append(f"{where}: {error}")


def _numpy(got: Any) -> np.ndarray:
    if not isinstance(got, torch.Tensor):
        return got
    return got.to(torch.float32).numpy() if got.dtype is torch.bfloat16 else got.numpy()


def _group(comm: mpicoll.Communicator, ranks: tuple[int, ...]) -> mpicoll.Communicator | None:
    members = [rank for rank in ranks if rank < comm.size] or [0]
    return comm.group(members)


def _run(lines: list[Any]) -> None:
    Machine().run(lines)


@pytest.mark.slow
@given(lines=program)
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_random_programs(ranks: Ranks, together: Callable[[], AbstractContextManager[None]], lines: list[Any]) -> None:
    with together():
        ranks(_run, lines)
