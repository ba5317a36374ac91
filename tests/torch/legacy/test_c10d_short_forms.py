"""The collectives of a process group called by themselves, in every way that torch's own signatures allow.

The calls are made of the signatures that torch writes into its docstrings: each overload by position, by name, and
without what has a default. gloo, in the same threads, says what must come out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.process_group import gloo_has_alltoall
from torch.distributed import distributed_c10d as c10d

import mpicoll
from mpicoll.torch.legacy.c10d_short_forms import _FORMS
from mpicoll.torch.legacy.mixed_process_group import MixedProcessGroup
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll

SIZE = 2
BOUND = timedelta(seconds=30)
OP = dist.ReduceOp.MAX

METHODS = (*_FORMS, "_allgather_base", "_reduce_scatter_base", "alltoall_base")
METHODS += ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "send", "recv")
# Older versions of torch lack the newest names.
METHODS = tuple(method for method in METHODS if hasattr(dist.ProcessGroup, method))


class Parameter(NamedTuple):
    name: str
    type: str
    optional: bool


def overloads(method: str) -> list[list[Parameter]]:
    """The parameters of each form in which torch's own group takes `method`."""
    text = getattr(dist.ProcessGroup, method).__doc__
    found = []
    for line in re.findall(rf"^(?:\d+\. )?{method}\(self: [\w.]+,? ?(.*)\) -> ", text, re.MULTILINE):
        parts = re.split(r", (?=\w+: )", line) if line else []
        names = [re.fullmatch(r"(\w+): (.*?)(?: = (.*))?", part, re.DOTALL) for part in parts]
        found.append([Parameter(one[1], one[2], one[3] is not None) for one in names if one is not None])
        assert len(found[-1]) == len(parts), line
    assert found, text
    return found


class Values:
    """The arguments of one call, the same with every group."""

    def __init__(self, method: str, rank: int) -> None:
        self.method = method
        self.rank = rank
        self.tensors: list[torch.Tensor] = []
        self.root = 0 if method in ("gather", "scatter") else 1

    def one(self, count: int) -> torch.Tensor:
        """The next tensor; no two are alike."""
        start = 100.0 * self.rank + 10 * len(self.tensors) + 1
        self.tensors.append(torch.arange(start, start + count) * (-1) ** self.rank)
        return self.tensors[-1]

    def several(self, count: int) -> list[torch.Tensor]:
        return [self.one(count) for _ in range(SIZE)]

    def data(self, depth: int, output: bool) -> Any:
        """Tensors in lists of that depth, as an output or as an input."""
        method = self.method
        if method in ("gather", "scatter") and output == (method == "gather"):
            # Of use at the root only.
            found: Any = self.several(4) if self.rank == self.root else []
            return [found] if depth == 2 and found else found
        if "coalesced" in method and method != "allreduce_coalesced":
            counts = {"allgather_coalesced": (4, 4), "reduce": (2, 4), "all": (4, 8)}
            small, large = counts[method if method in counts else method[: 6 if method[0] == "r" else 3]]
            count = large if output == (method[0] != "r") else small
            return [self.several(count) for _ in range(SIZE)] if depth == 2 else [self.one(count), self.one(count)]
        if method in ("reduce_scatter", "alltoall"):
            found = self.several(2) if method == "alltoall" or not output else self.one(2)
        elif method == "allgather":
            found = self.several(4) if output else self.one(4)
        elif method in ("all_gather_single", "_allgather_base"):
            found = self.one(8 if output else 4)
        elif method in ("reduce_scatter_single", "_reduce_scatter_base"):
            found = self.one(2 if output else 4)
        else:
            found = self.one(4)
        have = 1 if isinstance(found, list) else 0
        for _ in range(depth - have):
            found = [found]
        return found

    def value(self, parameter: Parameter) -> Any:
        name, kind = parameter.name, parameter.type
        if "Options" in kind:
            options = getattr(c10d, kind.rpartition(".")[2])()
            for field, value in (("rootRank", self.root), ("reduceOp", OP)):
                if hasattr(options, field):
                    setattr(options, field, value)
            return options
        if "Tensor" in kind:
            return self.data(kind.count("Sequence"), "output" in name)
        if "ReduceOp" in kind:
            return OP
        if "timedelta" in kind:
            return BOUND
        if "split" in name:
            return [1, 3] if self.rank == 0 else [3, 1]
        return {"root": self.root, "dstRank": 1 - self.rank, "srcRank": 1 - self.rank, "tag": 5}[name]


def calls(method: str) -> Iterator[tuple[list[Parameter], list[Parameter]]]:
    """Parameters to be passed by position and by name."""
    for form in overloads(method):
        needed = [one for one in form if not one.optional]
        for some in (form, needed) if len(needed) < len(form) else (form,):
            yield some, []
            yield [], some
            if len(some) > 2:
                yield some[:1], some[1:]


def groups(method: str) -> list[Callable[[mpicoll.Communicator, dist.Store], Any]]:
    """mpicoll's group, the same beside another backend, and torch's own with gloo."""

    def ours(comm: mpicoll.Communicator, store: dist.Store) -> Any:
        group = ProcessGroupMpicoll(comm.duplicate(), dist.HashStore(), BOUND)
        group.setGroupName("short")
        return group

    def mixed(comm: mpicoll.Communicator, store: dist.Store) -> Any:
        group = MixedProcessGroup(comm.duplicate(), dist.HashStore(), BOUND, {"meta": None})
        group.setGroupName("mixed")
        return group

    def gloo(comm: mpicoll.Communicator, store: dist.Store) -> Any:
        group = dist.ProcessGroup(store, comm.rank, comm.size)
        backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), comm.rank, comm.size, BOUND)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    return [ours, mixed, gloo]


def outcome(group: Any, method: str, by_position: list[Parameter], by_name: list[Parameter], rank: int) -> Any:
    """The tensors after a call; what was raised, if anything."""
    values = Values(method, rank)
    args = [values.value(one) for one in by_position]
    named = {one.name: values.value(one) for one in by_name}
    if method == "recv":
        other = group.send([torch.full((4,), float(rank))], 1 - rank, 5)
    elif method == "send":
        other = group.recv([values.one(4)], 1 - rank, 5)
    else:
        other = None
    work = getattr(group, method)(*args, **named)
    assert work is not None
    work.wait()
    if other is not None:
        other.wait()
    asked = {"root", "opts"} & {one.name for one in (*by_position, *by_name)}
    if method == "reduce" and rank != (values.root if asked else 0):
        return []  # gloo leaves there what it has reduced so far
    return [one.tolist() for one in values.tensors]


@pytest.mark.parametrize("method", METHODS)
def test_every_signature_of_torch(method: str) -> None:
    if method == "alltoall" and not gloo_has_alltoall():
        pytest.skip("this version of gloo has no alltoall to compare with")
    store = dist.HashStore()

    def body() -> list[list[Any]]:
        world = mpicoll.world()
        some = [make(world, store) for make in groups(method)]
        ends = [
            [outcome(group, method, by_position, by_name, world.rank) for group in some]
            for by_position, by_name in calls(method)
        ]
        for group in some[:2]:
            ProcessGroupMpicoll.shutdown(group)
        return ends

    for ends in mpicoll.run_local(body, SIZE, timeout=60):
        assert len(ends) >= 2
        for (ours, mixed, gloo), call in zip(ends, calls(method), strict=True):
            assert ours == mixed == gloo, call


def alone(body: Callable[[Any, int], None]) -> None:
    """Call ``body(group, rank)`` on two ranks with a group of mpicoll."""

    def run() -> None:
        rank = mpicoll.world().rank
        group = groups("")[0](mpicoll.world(), dist.HashStore())
        body(group, rank)
        group.allreduce(torch.ones(1)).wait()
        group.shutdown()

    mpicoll.run_local(run, SIZE, timeout=60)


T = torch.ones(2)

EMPTY: dict[str, tuple[Any, ...]] = {
    "allreduce": ([],),
    "allreduce_coalesced": ([],),
    "broadcast": ([],),
    "reduce": ([],),
    "allgather": ([], []),
    "allgather, no outputs": ([[]], [T]),
    "allgather, no list of outputs": ([], [T]),
    "allgather_coalesced": ([], []),
    "gather": ([], []),
    "scatter": ([], []),
    "reduce_scatter": ([], []),
    "reduce_scatter, no list of inputs": ([T], []),
    "alltoall": ([], []),
    "send": ([], 0, 1),
    "recv": ([], 0, 1),
}


def test_empty_lists_are_refused() -> None:
    """On each rank by itself, as gloo does; and two tensors where one is wanted."""

    def body(group: Any, rank: int) -> None:
        for name, args in EMPTY.items():
            with pytest.raises(mpicoll.ArgumentError, match=r"got (0|an empty list)"):
                getattr(group, name.partition(",")[0])(*args)
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        for args in (([T, T],), ([T, T], options)):
            with pytest.raises(mpicoll.ArgumentError, match="pass one tensor on each rank, got 2"):
                group.allreduce(*args)

    alone(body)


def test_arguments_that_no_signature_has() -> None:
    def body(group: Any, rank: int) -> None:
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("allreduce", (T,), {"root": 1}),
            ("allreduce", (), {"op": OP}),
            ("allreduce", (T, OP, BOUND, 1), {}),
            ("broadcast", (T,), {"opts": c10d.ReduceOptions()}),
            ("gather", ([T], T), {"op": OP}),
            ("alltoall_base", (T,), {}),
        ]
        for method, args, named in wrong:
            with pytest.raises(
                TypeError,
                match=r"(is missing|is not an argument of this method); the arguments are|incompatible",
            ):
                getattr(group, method)(*args, **named)

    alone(body)


def test_a_short_timeout_is_that_of_the_work() -> None:
    def body(group: Any, rank: int) -> None:
        x = torch.ones(2)
        if rank == 0:
            work = group.allreduce(x, timeout=timedelta(seconds=0.05))
            with pytest.raises(mpicoll.Timeout, match=r"0\.05 s"):
                work.wait()
            mpicoll.send(1, 1)
            assert work.wait(BOUND)
        else:
            mpicoll.recv(0, 0)
            group.allreduce(x).wait()
        assert x.tolist() == [2.0, 2.0]

    alone(body)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_the_mean_of_integers_is_rounded_towards_zero(dtype: torch.dtype) -> None:
    """As NCCL's; the native operations refuse it."""

    def body(group: Any, rank: int) -> None:
        avg = dist.ReduceOp.AVG
        both = torch.tensor([[7, 3, 0, 120], [-8, 0, 1, 1] if dtype is not torch.uint8 else [8, 0, 1, 1]])
        mean = (both.sum(0).to(dtype).long() / 2).trunc().to(dtype)
        mine = both[rank].to(dtype)
        # All forms that reduce, in place and out of place, on memory that is laid out in another way, and in a list.
        x, strided = mine.clone(), torch.zeros(8, dtype=dtype)[::2].copy_(mine)
        group.allreduce(x, avg).wait()
        group.allreduce(strided, avg).wait()
        coalesced, options = [mine.clone(), mine.clone()], c10d.AllreduceCoalescedOptions()
        options.reduceOp = avg
        group.allreduce_coalesced([*coalesced, coalesced[0]], options).wait()
        for got in (x, strided, *coalesced):
            assert torch.equal(got, mean), (got, mean)
        x = mine.clone()
        group.reduce(x, 1, avg).wait()
        assert torch.equal(x, mean if rank == 1 else mine)
        scattered, single = torch.zeros(4, dtype=dtype)[::2], torch.zeros(2, dtype=dtype)
        group.reduce_scatter(scattered, list(mine.clone().chunk(2)), avg).wait()
        options = c10d.ReduceScatterOptions()
        options.reduceOp = avg
        group.reduce_scatter_single(single, mine, options).wait()
        for got in (scattered, single):
            assert torch.equal(got, mean[2 * rank : 2 * rank + 2])
        with pytest.raises(mpicoll.DTypeError, match=r"avg.*int"):
            mpicoll.allreduce(mine, "avg")
        with pytest.raises(mpicoll.DTypeError, match=r"avg.*(bool|uint16)"):
            group.allreduce(torch.ones(2, dtype=torch.uint16 if rank else torch.bool), avg)

    alone(body)
