"""Small calls of torch.distributed that come again: nothing is prepared anew, and each works on its own data."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.process_group import BACKEND, operations
from torch.distributed import ReduceOp

import mpicoll.torch
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.core.operation import Operation
from mpicoll.engine.diagnostics.flight_recorder import recorder
from mpicoll.torch import c10d_collectives

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("default_group"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

Make = Callable[[int], torch.Tensor]
"""A rank's data of a turn."""


def data(turn: int, count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Whole numbers that every dtype holds, as their sums; different ones in each turn."""
    return torch.from_numpy(np.random.default_rng([turn, rank]).integers(0, 9, count)).to(dtype)


def total(make: Make) -> torch.Tensor:
    return torch.stack([make(rank).double() for rank in range(dist.get_world_size())]).sum(0)


def joined(make: Make) -> torch.Tensor:
    return torch.cat([make(rank) for rank in range(dist.get_world_size())])


def part(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def parts(whole: torch.Tensor) -> list[torch.Tensor]:
    """Apart from each other in memory."""
    return [one.clone() for one in whole.chunk(dist.get_world_size())]


def all_reduce(make: Make, op: Any = ReduceOp.SUM, *, background: bool = False) -> Any:
    x = make(dist.get_rank())
    work = dist.all_reduce(x, op, async_op=background)
    if work is not None:
        work.wait()
    want = total(make) / (dist.get_world_size() if op == ReduceOp.AVG else 1)
    return x, want.to(x.dtype)


def parameter(make: Make) -> Any:
    x = torch.nn.Parameter(make(dist.get_rank()))
    version = x._version
    dist.all_reduce(x, ReduceOp.AVG)
    assert x._version == version
    return x.detach(), (total(make) / dist.get_world_size()).to(x.dtype)


def in_inference_mode(make: Make) -> Any:
    with torch.inference_mode():
        x = make(dist.get_rank()).clone()
    dist.all_reduce(x, ReduceOp.AVG)
    return x.clone(), (total(make) / dist.get_world_size()).to(x.dtype)


def strided(make: Make) -> Any:
    x = make(dist.get_rank()).repeat_interleave(2)[::2]
    dist.all_reduce(x)
    return x, total(make).to(x.dtype)


def coalesced(make: Make) -> Any:
    x, y = make(dist.get_rank()), make(dist.get_rank())
    dist.all_reduce_coalesced([x, y])
    return torch.cat([x, y]), torch.cat([total(make)] * 2).to(x.dtype)


def reduce(make: Make) -> Any:
    x = make(dist.get_rank())
    dist.reduce(x, 0)
    return x, total(make).to(x.dtype) if dist.get_rank() == 0 else make(dist.get_rank())


def all_gather(make: Make) -> Any:
    outputs = parts(torch.empty_like(joined(make)))
    dist.all_gather(outputs, make(dist.get_rank()))
    return torch.cat(outputs), joined(make)


def gather(make: Make) -> Any:
    root = dist.get_rank() == 0
    outputs = parts(torch.empty_like(joined(make))) if root else None
    dist.gather(make(dist.get_rank()), outputs, 0)
    return (torch.cat(outputs), joined(make)) if outputs is not None else (torch.empty(0), torch.empty(0))


def scatter(make: Make) -> Any:
    x = torch.empty_like(part(make(0)))
    dist.scatter(x, parts(make(0)) if dist.get_rank() == 0 else None, 0)
    return x, part(make(0))


def reduce_scatter(make: Make) -> Any:
    x = torch.empty_like(part(make(0)))
    dist.reduce_scatter(x, parts(make(dist.get_rank())))
    return x, part(total(make)).to(x.dtype)


def reduce_scatter_single(make: Make, op: Any = ReduceOp.SUM) -> Any:
    x = torch.empty_like(part(make(0)))
    dist.reduce_scatter_tensor(x, make(dist.get_rank()), op)
    return x, part(total(make) / (dist.get_world_size() if op == ReduceOp.AVG else 1)).to(x.dtype)


def all_to_all(make: Make) -> Any:
    x = make(dist.get_rank())
    outputs = parts(torch.empty_like(x))
    dist.all_to_all(outputs, parts(x))
    return torch.cat(outputs), torch.cat([part(make(rank)) for rank in range(dist.get_world_size())])


def all_to_all_splits(make: Make) -> Any:
    x = make(dist.get_rank())
    got, even = torch.empty_like(x), [x.numel() // dist.get_world_size()] * dist.get_world_size()
    dist.all_to_all_single(got, x, even, even)
    return got, torch.cat([part(make(rank)) for rank in range(dist.get_world_size())])


FORMS = [
    all_reduce,
    partial(all_reduce, op=ReduceOp.AVG),
    partial(all_reduce, background=True),
    parameter,
    in_inference_mode,
    strided,
    coalesced,
    reduce,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
    partial(reduce_scatter_single, op=ReduceOp.AVG),
    all_to_all,
    all_to_all_splits,
]


@pytest.mark.parametrize("rows", [1, 300])
def test_nothing_is_prepared_anew(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[str] = []
    prepare = Operation.__init__

    def count(operation: Operation, *args: Any, **options: Any) -> None:
        prepare(operation, *args, **options)
        prepared.append(operation.query.collective)

    monkeypatch.setattr(Operation, "__init__", count)
    count = rows * dist.get_world_size()
    for form in FORMS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for turn in range(5):
                if turn == 2:
                    prepared.clear()
                got, want = form(partial(data, turn, count, dtype))  # type: ignore[operator]
                assert torch.equal(got, want), f"{form} {dtype} turn {turn}: {got} {want}"
            assert not prepared, f"{form} {dtype}"


LISTS = [all_gather, gather, scatter, reduce_scatter, all_to_all]


@pytest.mark.extension
@pytest.mark.parametrize("form", LISTS)
def test_lists_of_tensors_bypass_the_general_path(
    form: Callable[[Make], tuple[torch.Tensor, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3 * dist.get_world_size()
    if count < 6:
        pytest.skip("needs two ranks")
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        with monkeypatch.context() as general:
            for turn in range(5):
                if turn == 3:
                    general.setattr(c10d_collectives, form.__name__, None)
                got, want = form(partial(data, turn, count, dtype))
                assert torch.equal(got, want), f"{dtype} turn {turn}: {got} {want}"


LAYOUTS: list[Callable[[int], list[torch.Tensor]]] = [
    lambda count: [torch.zeros(2, 3) for _ in range(count)],
    lambda count: [torch.zeros(3, 2).t() for _ in range(count)],
    lambda count: list(torch.zeros(count, 2, 3).unbind()),
    lambda count: [torch.zeros(2, 3, requires_grad=True) for _ in range(count)],
    lambda count: [torch._neg_view(torch.zeros(2, 3)) for _ in range(count)],
]


def test_lists_may_lie_otherwise_on_each_rank() -> None:
    """Whether a rank has prepared a call for its tensors or not, and copies them or not, its messages are the same."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def make(number: int, values: list[float]) -> list[torch.Tensor]:
        made = LAYOUTS[(rank + number) % len(LAYOUTS)](len(values))
        with torch.no_grad():
            for one, value in zip(made, values, strict=True):
                one.fill_(value)
        return made

    def check(tensors: list[torch.Tensor], want: list[float]) -> None:
        for one, value in zip(tensors, want, strict=True):
            assert torch.equal(one.detach(), torch.full((2, 3), value))

    ranks = [float(one) for one in range(size)]
    own = [rank * size + one for one in ranks]
    for turn in range(3 * len(LAYOUTS)):
        (x,), outputs = make(turn, [rank]), make(turn // 3, [-1.0] * size)
        dist.all_gather(outputs, x)
        check(outputs, ranks)
        root = turn % size
        outputs = make(turn // 3, [-1.0] * size) if rank == root else []
        dist.gather(x, outputs or None, root)
        check(outputs, ranks if rank == root else [])
        (x,) = make(turn, [-1.0])
        dist.scatter(x, make(turn // 3, own) if rank == root else None, root)
        check([x], [root * size + ranks[rank]])
        dist.reduce_scatter(x, make(turn // 3, own))
        check([x], [sum(other * size + ranks[rank] for other in range(size))])
        outputs = make(turn, [-1.0] * size)
        dist.all_to_all(outputs, make(turn // 3, own))
        check(outputs, [other * size + ranks[rank] for other in ranks])


def repeat_calls(module: Any, dtype: torch.dtype, algorithm: str, step: int) -> None:
    """Call each collective several times, on every `step`-th element of memory that must else stay as it is."""
    size, rank, queue = dist.get_world_size(), dist.get_rank(), core_of(operations().comm).queue
    memory = [torch.full((step * count,), 7, dtype=dtype) for count in (3, 3 * size, 3)]
    x, whole, out = (one[::step] for one in memory)
    # The old names are those of the drop-in.
    calls: list[tuple[Callable[[], Any], torch.Tensor, torch.Tensor]] = [
        (lambda: module.all_reduce(x.fill_(rank)), x, torch.full((3,), sum(range(size)))),
        # Open MPI's MAX of floating numbers is not used, because it ignores NaN.
        (lambda: module.all_reduce(x.fill_(rank + 1), ReduceOp.PRODUCT), x, torch.full((3,), math.factorial(size))),
        (lambda: module.broadcast(x.fill_(rank), 1), x, torch.ones(3)),
        (lambda: module.broadcast(x.fill_(rank), 1, dist.group.WORLD), x, torch.ones(3)),
        (lambda: module.reduce(x.fill_(rank), 1), x, torch.full((3,), sum(range(size)) if rank == 1 else rank)),
        (
            lambda: module.all_gather_into_tensor(whole, x.fill_(rank)),
            whole,
            torch.arange(size).repeat_interleave(3),
        ),
        (
            lambda: module.all_to_all_single(whole, torch.full_like(whole, rank)),
            whole,
            torch.arange(size).repeat(3).sort()[0],
        ),
        (
            lambda: module.reduce_scatter_tensor(out, torch.full_like(whole, rank)),
            out,
            torch.full((3,), sum(range(size))),
        ),
        (module.barrier, x, x),
    ]
    for call, got, want in calls:
        for _ in range(3):
            call()
        entry = recorder.list_records(True)[-1][0]
        assert (entry[0], entry[1]) == (queue.group, queue.number)
        assert entry[2].algorithm.startswith(algorithm)
        assert torch.equal(got, want.to(dtype))
    assert step == 1 or all((one[1::step] == 7).all() for one in memory)


@pytest.mark.extension
@pytest.mark.parametrize("module", [dist, mpicoll.torch], ids=["c10d", "dropin"])
@pytest.mark.parametrize("algorithm", ["shm", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_repeated_calls_take_the_short_way_of_the_extension(
    module: Any, dtype: torch.dtype, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, core = dist.get_world_size(), core_of(operations().comm)
    queue = core.queue
    if size < 2:
        pytest.skip("needs two ranks")
    if algorithm == "native":
        if dtype is torch.bfloat16:
            pytest.skip("MPI does not reduce it")
        monkeypatch.setattr(core, "shm_failed_reason", "this is a test")
    core.discard_calls()
    repeat_calls(module, dtype, algorithm, 1)
    # Between the elements of these there are others.
    repeat_calls(module, dtype, algorithm, 2)
    if BACKEND:
        return  # torch's dispatcher resolves the negation first
    # Where they aren't alike, the memory is not taken for that of a plain tensor.
    negated = torch._neg_view(torch.ones(3, dtype=dtype))
    dist.all_reduce(negated)
    assert recorder.list_records(True)[-1][0][1] != queue.number
    assert torch.equal(negated, torch.full((3,), -size).to(dtype))


@pytest.mark.extension
def test_reduce_and_broadcast_of_the_dropin_bypass_c10d(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups too, whose ranks are other ones than the global ones, by which their roots are named."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if size < 2:
        pytest.skip("needs two ranks")
    last = [size - 2, size - 1]
    group = dist.new_group(last)
    if rank in last:
        dist.barrier(group)  # shared memory is known to be there after its first use
    for name in ("reduce", "broadcast"):
        monkeypatch.setattr(dist, name, None)
    if rank in last:
        for _ in range(3):
            for given in ({"dst": size - 1}, {"group_dst": 1}):
                x = torch.full((3,), rank)
                mpicoll.torch.reduce(x, group=group, **given)  # type: ignore[arg-type]
                assert x.tolist() == [sum(last) if rank == size - 1 else rank] * 3
            for given in ({"src": size - 1}, {"group_src": 1}):
                x = torch.full((3,), rank)
                mpicoll.torch.broadcast(x, group=group, **given)  # type: ignore[arg-type]
                assert x.tolist() == [size - 1] * 3
    monkeypatch.undo()
    if rank in last:
        for invalid in ({"dst": size}, {}, {"dst": rank, "group_dst": 0}):
            with pytest.raises(ValueError, match="rank"):
                mpicoll.torch.reduce(torch.ones(1), group=group, **invalid)  # type: ignore[arg-type]
        dist.destroy_process_group(group)


@pytest.mark.extension
def test_calls_that_lose_shared_memory_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may carry out the call in another way, and all ranks compare the numbers of their calls."""
    group = dist.new_group()
    core = core_of(operations(group).comm)
    if core.size < 2:
        pytest.skip("needs two ranks")

    def share(nbytes: int) -> NoReturn:
        raise mpicoll.CommunicationError("there is no memory")

    monkeypatch.setattr(core.transport, "share", share)
    begun, x = core.queue.number, torch.ones(3)
    assert not core.has_arena
    for _ in range(3):
        dist.all_reduce(x.fill_(1), group=group)
        assert x[0] == core.size
    assert (core.shm_failed_reason, core.queue.number) == ("there is no memory", begun + 3)


@pytest.mark.extension
def test_complex_numbers_may_lie_otherwise_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """c10d makes real numbers of those that the fast path does not take, and ranks without shared memory compare their
    calls."""
    group, rank, size = dist.new_group(), dist.get_rank(), dist.get_world_size()

    def share(nbytes: int) -> NoReturn:
        raise mpicoll.CommunicationError("there is no memory")

    monkeypatch.setattr(core_of(operations(group).comm).transport, "share", share)
    x = torch.full((size, 2), complex(rank, 1))
    mine = x if rank == 0 else x.t().contiguous().t()
    cast, gathered, exchanged = mine.clone(), torch.zeros(size * size, 2, dtype=x.dtype), torch.zeros_like(x)
    mpicoll.torch.broadcast(cast, 0, group)
    mpicoll.torch.all_gather_into_tensor(gathered, mine, group)
    mpicoll.torch.all_to_all_single(exchanged, mine, group=group)
    everyone = torch.stack([torch.full((size, 2), complex(other, 1)) for other in range(size)])
    assert torch.equal(cast, everyone[0])
    assert torch.equal(gathered, everyone.flatten(0, 1))
    assert torch.equal(exchanged, everyone[:, 0])


@pytest.mark.parametrize("offset", [0, 5, 100_000])
def test_a_tensor_whose_storage_was_freed_is_refused(offset: int) -> None:
    """Also where a call like it has been prepared: its address is its offset, and numpy would allocate memory."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def freed(count: int) -> torch.Tensor:
        made = torch.ones(offset + count)[offset:]
        made.untyped_storage().resize_(0)
        return made

    calls: list[Callable[[Make], object]] = [
        lambda make: mpicoll.torch.all_reduce(make(2)),
        lambda make: mpicoll.torch.broadcast(make(2), 0),
        lambda make: mpicoll.torch.reduce(make(2), 0),
        lambda make: mpicoll.torch.all_gather_into_tensor(torch.zeros(2 * size), make(2)),
        lambda make: mpicoll.torch.all_gather_into_tensor(make(2 * size), torch.ones(2)),
        lambda make: mpicoll.torch.reduce_scatter_tensor(make(2), torch.ones(2 * size)),
        lambda make: mpicoll.torch.all_to_all_single(torch.zeros(size), make(size)),
        lambda make: dist.all_gather([torch.zeros(2)] * size, make(2)),
        lambda make: dist.isend(make(2), rank),
    ]
    for call in calls[:-1]:
        for _ in range(3):
            call(torch.ones)
    for call in calls:
        with pytest.raises(mpicoll.DTypeError, match=r"\d elements, but no memory"):
            call(freed)


def test_groups_of_one_rank() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    fast_path = operations(alone).get_fast_path()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
            if op == ReduceOp.AVG and not dtype.is_floating_point:
                continue
            given = data(0, 6, dtype, 1)
            x, out = given.clone(), torch.zeros_like(given)
            dist.all_reduce(x, op, group=alone)
            dist.reduce_scatter_single(out, given, op, group=alone)
            assert torch.equal(x, given)
            assert torch.equal(out, given)
            assert fast_path.all_reduce(x, op)
            assert fast_path.reduce_scatter_single(out, given, op)
    x, out = torch.ones(4), torch.zeros(4)
    assert fast_path.all_gather_single(out, x)
    assert fast_path.all_to_all_single(x, 2 * out)
    assert fast_path.broadcast(x, 0)
    assert fast_path.reduce(x, ReduceOp.SUM, 0)
    assert fast_path.barrier()
    assert (x.tolist(), out.tolist()) == ([2.0] * 4, [1.0] * 4)
    dist.destroy_process_group(alone)
