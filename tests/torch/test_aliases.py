"""Tensors that share memory, in every call that takes several: each call takes what was there before it, as gloo does.

The ranks are threads with a process group of mpicoll and one of gloo beside it. Rank 0 passes tensors that overlap, and
rank 1 the same number of separate ones, or the other way round: what overlaps on one rank is nothing to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.process_group import gloo_has_alltoall

import mpicoll
from mpicoll.torch.legacy.process_group import ProcessGroupMpicoll
from mpicoll.torch.tensors import protect_inputs

SIZE = 2
BOUND = timedelta(seconds=30)

Views = Callable[[torch.Tensor], list[torch.Tensor]]

VIEWS: dict[str, Views] = {
    "twice": lambda x: [x[:4], x[:4]],
    "thrice among others": lambda x: [x[8:12], x[:4], x[4:8], x[:4], x[:4]],
    "shifted": lambda x: [x[:4], x[1:5], x[2:6]],
    "backwards": lambda x: [x[2:6], x[1:5], x[:4]],
    "one within another": lambda x: [x[:8], x[2:4]],
    "two strides": lambda x: [x[:8:2], x[1:9:2]],
    "transposed": lambda x: [x[:4].view(2, 2), x[:4].view(2, 2).t()],
    "with empty ones": lambda x: [x[2:2], x[:4], x[1:1], x[:4]],
    "apart": lambda x: [x[:4], x[4:8], x[8:12]],
}


def memory(rank: int) -> torch.Tensor:
    return torch.arange(1.0, 17.0) * 10**rank


@pytest.fixture(params=["both", "first", "last"])
def aliased(request: pytest.FixtureRequest) -> Callable[[int], bool]:
    """Whether the tensors of a rank overlap."""
    return lambda rank: {"both": True, "first": rank == 0, "last": rank == SIZE - 1}[request.param]


def groups(comm: mpicoll.Communicator, store: dist.Store) -> Iterator[Any]:
    """mpicoll's process group, then gloo's."""
    ours = ProcessGroupMpicoll(comm.duplicate(), dist.HashStore(), BOUND)
    ours.setGroupName("aliases")
    yield ours
    ours.shutdown()
    group = dist.ProcessGroupGloo(store, comm.rank, comm.size, BOUND)
    # A rank that calls nothing would close its connections while the other one still connects.
    mpicoll.barrier()
    yield group


def on_two_ranks(body: Callable[[Any, int], Any]) -> list[list[Any]]:
    """What ``body(group, rank)`` returns with mpicoll and with gloo, by rank."""
    store = dist.HashStore()

    def run() -> list[Any]:
        world = mpicoll.world()
        return [body(group, world.rank) for group in groups(world, store)]

    return mpicoll.run_local(run, SIZE, timeout=60)


def inputs_of(views: str, rank: int, aliased: Callable[[int], bool]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = memory(rank)
    some = VIEWS[views](x)
    return x, some if aliased(rank) else [one.clone() for one in some]


@pytest.mark.parametrize("views", VIEWS)
def test_all_reduce_coalesced(views: str, aliased: Callable[[int], bool]) -> None:
    def body(group: Any, rank: int) -> Any:
        x, tensors = inputs_of(views, rank, aliased)
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        return x, [one.clone() for one in tensors]

    for (whole, tensors), (want, wanted) in on_two_ranks(body):
        assert torch.equal(whole, want)
        assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))


@pytest.mark.parametrize("views", VIEWS)
def test_all_gather_coalesced(views: str, aliased: Callable[[int], bool]) -> None:
    """The inputs, and the outputs of this rank's own, are views of one memory."""

    def body(group: Any, rank: int) -> Any:
        x, tensors = inputs_of(views, rank, aliased)
        outputs = [[torch.zeros_like(one) for one in tensors] for _ in range(SIZE)]
        outputs[1 - rank] = tensors  # what the other rank sends replaces this rank's own inputs
        group.allgather_coalesced(outputs, tensors).wait()
        return [x, *(one.clone() for of in outputs for one in of)]

    for got, want in on_two_ranks(body):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_pairs_whose_inputs_lie_in_outputs_of_earlier_pairs(aliased: Callable[[int], bool]) -> None:
    """gloo has no such calls, so the same is asked for one pair at a time, of copies."""

    def body(group: Any, rank: int) -> bool:
        if not isinstance(group, ProcessGroupMpicoll):
            return True
        fine = True
        for gathers in (True, False):
            x = memory(rank)
            inputs = [x[:2], x[2:4], x[1:3]] if gathers else [x[:4], x[4:8], x[2:6]]
            outputs = [x[2:6], x[8:12], x[12:16]] if gathers else [x[4:6], x[0:2], x[8:10]]
            if not aliased(rank):
                inputs, outputs = [one.clone() for one in inputs], [one.clone() for one in outputs]
            wanted = [torch.empty_like(one) for one in outputs]
            for given, want in zip([one.clone() for one in inputs], wanted, strict=True):
                call = group._allgather_base if gathers else group._reduce_scatter_base
                call(want, given).wait()
            names = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"
            getattr(group, names[not gathers])(outputs, inputs).wait()
            fine = fine and all(torch.equal(one, want) for one, want in zip(outputs, wanted, strict=True))
        return fine

    assert on_two_ranks(body) == [[True, True]] * SIZE


LISTS: dict[str, Callable[[Any, int, torch.Tensor], Any]] = {
    "all_gather into one tensor twice": lambda g, r, x: g.allgather([[x[:2], x[:2]]], [x[4:6].clone()]),
    "all_gather into its input": lambda g, r, x: g.allgather([[x[:2], x[2:4]]], [x[1:3]]),
    "all_gather into what overlaps": lambda g, r, x: g.allgather([[x[:2], x[1:3]]], [x[:2]]),
    "gather into one tensor twice": lambda g, r, x: g.gather([[x[:2], x[:2]]] if r == 0 else [], [x[:2]]),
    "scatter one tensor twice": lambda g, r, x: g.scatter([x[:2]], [[x[:2], x[:2]]] if r == 0 else []),
    "scatter into an input": lambda g, r, x: g.scatter([x[1:3]], [[x[:2], x[2:4]]] if r == 0 else []),
    "all_to_all of one tensor": lambda g, r, x: g.alltoall([x[4:6], x[6:8]], [x[:2], x[:2]]),
    "all_to_all into one tensor twice": lambda g, r, x: g.alltoall([x[4:6], x[4:6]], [x[:2], x[2:4]]),
    "all_to_all into its inputs": lambda g, r, x: g.alltoall([x[2:4], x[:2]], [x[:2], x[2:4]]),
    "all_to_all_single, shifted": lambda g, r, x: g.alltoall_base(x[1:5], x[:4], [], []),
}
"""Calls of a process group with memory of 16 elements."""


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    if name.startswith("all_to_all ") and not gloo_has_alltoall():
        pytest.skip("this version of gloo has no alltoall to compare with")

    def body(group: Any, rank: int) -> torch.Tensor:
        x = memory(rank)
        # gloo gets copies of the inputs, as it does not look for overlap here.
        LISTS[name](group if isinstance(group, ProcessGroupMpicoll) else _Copies(group), rank, x).wait()
        return x

    for got, want in on_two_ranks(body):
        assert torch.equal(got, want)


class _Copies:
    """A gloo group whose inputs are copied."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        def call(outputs: Any, inputs: Any, *rest: Any) -> Any:
            return getattr(self._group, name)(outputs, _copied(inputs), *rest)

        return call


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else [_copied(one) for one in value]


def test_only_what_would_be_overwritten_is_copied() -> None:
    x = torch.zeros(4000)
    rows = list(x.view(1000, 4))
    assert all(one is other for one, other in zip(protect_inputs(rows, [[one] for one in rows]), rows, strict=True))
    later = protect_inputs([x[:2], x[1:3], x[2:4]], [[x[8:9]], [x[2:3]], [x[3:4]]])
    assert [one.data_ptr() - x.data_ptr() for one in later[:2]] == [0, 4]
    assert later[2].data_ptr() != x[2:].data_ptr()
