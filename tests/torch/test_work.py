"""What asynchronous operations return: Work and its future, as torch means them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import mpicoll
import mpicoll.torch as dropin
from mpicoll.torch.begun_collectives import CollectiveWork
from mpicoll.torch.group_operations import GroupOperations

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]

SHORT = timedelta(seconds=0.05)
LONG = timedelta(seconds=30)


@pytest.fixture
def rank() -> int:
    return dist.get_rank()


@pytest.fixture
def size() -> int:
    return dist.get_world_size()


def total(size: int, number: int = 0) -> float:
    """What all_reduce gives where rank r passes r + 1 + number."""
    return size * (size + 1) / 2 + size * number


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "nothing has come within 30 s"
        time.sleep(0.001)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each asynchronous collective has begun at once, or None. With a backend, c10d wraps what it returns."""
    found: list[Any] = []
    begin = GroupOperations._begin

    def note(operations: GroupOperations, *args: Any) -> Any:
        found.append(begin(operations, *args))
        return found[-1]

    monkeypatch.setattr(GroupOperations, "_begin", note)
    return found


# --- waiting


@pytest.mark.extension
def test_calls_like_earlier_ones_are_begun_at_once(rank: int, size: int, begun: list[Any]) -> None:
    if size < 2:
        pytest.skip("needs two ranks")
    tensor = torch.empty(3)
    for turn in range(5):
        tensor.fill_(rank + 1.0 + turn)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        assert tensor.tolist() == [total(size, turn)] * 3
    tensor.fill_(1.0)
    dist.barrier()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    assert type(getattr(begun[-3].handle, "_handle", None)).__name__ == "BegunCall"
    assert works[-1].get_future().wait()[0].tolist() == [size**3] * 3
    assert all(work.is_success() for work in works)


@pytest.mark.extension
@pytest.mark.parametrize("count", [6, 120_000])  # elements for each rank: begun with a step, and deferred
def test_each_collective_of_a_repeated_kind(rank: int, size: int, count: int, begun: list[Any]) -> None:
    if size < 2:
        pytest.skip("needs two ranks")
    one, whole = torch.empty(count), torch.empty(count * size)
    part, all_parts = torch.empty(count), torch.empty(count * size)
    average = dist.ReduceOp.AVG
    # The names before torch 2.13 come second.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, tuple[Callable[[], Any], torch.Tensor, Callable[[int], list[float]]]] = {
        "all_reduce": (lambda: dist.all_reduce(one, async_op=True), one, lambda turn: [total(size, turn)] * size),
        "average": (
            lambda: dist.all_reduce(one, average, async_op=True),
            one,
            lambda turn: [total(size, turn) / size] * size,
        ),
        "reduce": (
            lambda: dist.reduce(one, 1, async_op=True),
            one,
            lambda turn: [total(size, turn) if rank == 1 else rank + 1.0 + turn] * size,
        ),
        "broadcast": (lambda: dist.broadcast(one, 1, async_op=True), one, lambda turn: [2.0 + turn] * size),
        "all_gather": (
            lambda: gather(all_parts, one, async_op=True),
            all_parts,
            lambda turn: [peer + 1.0 + turn for peer in range(size)],
        ),
        "reduce_scatter": (
            lambda: scatter(part, whole, async_op=True),
            part,
            lambda turn: [total(size, turn)] * size,
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(all_parts, whole, async_op=True),
            all_parts,
            lambda turn: [peer + 1.0 + turn for peer in range(size)],
        ),
    }
    for name, (call, result, expected) in calls.items():
        begun.clear()
        for turn in range(6):
            one.fill_(rank + 1.0 + turn)
            whole.fill_(rank + 1.0 + turn)
            work = call()
            assert work.wait()
            assert work.result()[0] is result
            found = result.view(size, -1) if result.numel() > count else result.expand(size, -1)
            assert (found == torch.tensor(expected(turn)).view(-1, 1)).all(), name
        assert CollectiveWork in map(type, begun), name


@pytest.mark.extension
def test_a_barrier_is_begun_at_once(size: int, begun: list[Any]) -> None:
    if size < 2:
        pytest.skip("needs two ranks")
    for _ in range(5):
        work: Any = dist.barrier(async_op=True)
        assert work.wait()
        assert work.result() == []
    assert type(begun[-1]) is CollectiveWork


@pytest.mark.extension
def test_integers_and_bools_of_a_repeated_kind(size: int) -> None:
    """Whose ops are others than those of floats, or are completed by a division."""
    numbers, flags = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool)
    for _ in range(4):
        for op, expected in ((dist.ReduceOp.AVG, 3), (dist.ReduceOp.SUM, 3 * size), (dist.ReduceOp.AVG, 3)):
            dist.all_reduce(numbers.fill_(3), op, async_op=True).wait()
            assert numbers.tolist() == [expected] * 3
        dist.all_reduce(flags.fill_(True), async_op=True).wait()
        assert flags.tolist() == [True] * 3


def test_wait_returns_true_and_again(rank: int, size: int) -> None:
    tensor = torch.tensor([rank + 1.0])
    work = dist.all_reduce(tensor, async_op=True)
    for timeout in (None, LONG, SHORT):
        assert (work.wait(timeout) if timeout else work.wait()) is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert tensor.item() == total(size)


def test_a_wait_given_up_can_be_taken_up_again(rank: int, size: int, request: pytest.FixtureRequest) -> None:
    """The last rank calls the collective only after the others' waits have been given up."""
    if size < 2:
        pytest.skip("needs two ranks")
    store = dist.PrefixStore(request.node.name, _get_default_store())
    tensor = torch.tensor([rank + 1.0])
    others = [f"{other}" for other in range(size - 1)]
    if rank == size - 1:
        store.wait(others)
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        begin = time.monotonic()
        with pytest.raises(mpicoll.Timeout, match=rf"all_reduce.*rank {rank}"):
            work.wait(SHORT)
        assert 0.04 < time.monotonic() - begin < 50
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        store.set(others[rank], "")
        assert work.wait()
        assert work.is_success()
    assert tensor.item() == total(size)


def test_a_receive_given_up_can_be_taken_up_again(rank: int) -> None:
    tensor = torch.zeros(2)
    work = dist.irecv(tensor, rank)
    with pytest.raises(mpicoll.Timeout, match=rf"rank {rank}"):
        work.wait(SHORT)
    assert not work.is_completed()
    assert work.exception() is None
    send = dist.isend(torch.ones(2), rank)
    assert work.wait(LONG)
    assert work.is_success()
    assert tensor.tolist() == [1.0, 1.0]
    send.wait()


def test_it_completes_while_no_rank_waits(rank: int, size: int) -> None:
    tensor, filled = torch.full((1000,), rank + 1.0), torch.zeros(200_000)
    receive = dist.irecv(filled, (rank - 1) % size)
    send = dist.isend(torch.ones(200_000), (rank + 1) % size)
    work = dist.all_reduce(tensor, async_op=True)
    for one in (work, receive, send):
        until(one.is_completed)
    assert torch.equal(tensor, torch.full((1000,), total(size)))
    assert filled.sum() == 200_000


def test_wait_in_another_thread(rank: int, size: int) -> None:
    tensors = [torch.tensor([rank + 1.0 + number]) for number in range(20)]
    works = [dist.all_reduce(one, async_op=True) for one in tensors]
    threads = [threading.Thread(target=one.wait) for one in reversed(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(one.is_completed() for one in works)
    assert [one.item() for one in tensors] == [total(size, number) for number in range(20)]


# --- what the result is


def test_result_and_future_hold_the_outputs(rank: int, size: int) -> None:
    reduced = torch.tensor([rank + 1.0])
    gathered = [torch.zeros(1) for _ in range(size)]
    whole = torch.zeros(size)
    mine = torch.tensor([rank + 1.0])
    for work, outputs in (
        (dist.all_reduce(reduced, async_op=True), [reduced]),
        (dist.all_gather(gathered, mine, async_op=True), gathered),
        (dist.all_gather_single(whole, mine, async_op=True), [whole]),
        (dist.broadcast(mine, 0, async_op=True), [mine]),
    ):
        future = work.get_future()
        for found in (future.wait(), future.value(), work.result()):
            assert [one.data_ptr() for one in found] == [one.data_ptr() for one in outputs]
        assert future.done()
    assert reduced.item() == total(size)
    assert torch.cat(gathered).tolist() == whole.tolist() == [other + 1.0 for other in range(size)]
    assert mine.item() == 1.0


def test_futures_collected(rank: int, size: int) -> None:
    tensors = [torch.tensor([rank + 1.0 + number]) for number in range(5)]
    futures = [dist.all_reduce(one, async_op=True).get_future() for one in tensors]
    found = torch.futures.wait_all(futures)
    assert [one[0].item() for one in found] == [total(size, number) for number in range(5)]
    collected = torch.futures.collect_all([dist.all_reduce(one, async_op=True).get_future() for one in tensors])
    assert [one.wait()[0].item() for one in collected.wait()] == [size * total(size, number) for number in range(5)]


def test_an_error_reaches_wait_exception_and_future(rank: int) -> None:
    send = dist.isend(torch.ones(5), rank)
    work = dist.irecv(torch.zeros(2), rank)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="rank"):
        future.wait()
    for _ in range(2):
        with pytest.raises(mpicoll.TruncationError):
            work.wait()
    with pytest.raises(mpicoll.TruncationError):
        work.result()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), mpicoll.TruncationError)
    send.wait()


# --- callbacks


def test_then(rank: int, size: int) -> None:
    """Before it has completed, and after."""
    tensor = torch.tensor([rank + 1.0])
    work = dist.all_reduce(tensor, async_op=True)
    early = work.get_future().then(lambda future: future.value()[0] * 2)
    chained = early.then(lambda future: future.value() + 1)
    called = threading.Event()
    work.get_future().add_done_callback(lambda future: called.set())
    assert early.wait().item() == 2 * total(size)
    assert chained.wait().item() == 2 * total(size) + 1
    assert called.wait(30)
    late = work.get_future().then(lambda future: future.value()[0] * 3)
    assert late.wait().item() == 3 * total(size)


def test_then_of_a_receive(rank: int) -> None:
    tensor = torch.zeros(1)
    future = dist.irecv(tensor, rank).get_future().then(lambda future: future.value()[0] + 1)
    dist.isend(torch.tensor([6.0]), rank).wait()
    assert future.wait().item() == 7.0


def test_a_callback_that_raises(rank: int, size: int) -> None:
    def fail(future: Any) -> None:
        raise ValueError("what the callback has to say")

    tensor = torch.tensor([rank + 1.0])
    future = dist.all_reduce(tensor, async_op=True).get_future().then(fail)
    # torch makes a RuntimeError of it, or not, depending on which thread ran it
    with pytest.raises((RuntimeError, ValueError), match="what the callback has to say"):
        future.wait()
    dist.all_reduce(tensor)
    assert tensor.item() == size * total(size)


def test_a_callback_waits_for_another_operation(rank: int, size: int) -> None:
    """As PowerSGD's do."""

    def again(future: Any) -> torch.Tensor:
        second = future.value()[0].clone()
        dist.all_reduce(second, async_op=True).wait()
        dist.all_reduce(second)
        return second

    future = dist.all_reduce(torch.tensor([rank + 1.0]), async_op=True).get_future().then(again)
    assert future.wait().item() == size * size * total(size)


def test_callbacks_that_wait_all_at_once(rank: int, size: int) -> None:
    """Each on a group of its own, since nobody says in which order callbacks run."""
    inner = [dist.new_group() for _ in range(6)]
    met = threading.Barrier(len(inner))

    def again(future: Any, group: Any) -> torch.Tensor:
        met.wait(30)  # all of them are under way at the same time
        second = future.value()[0].clone()
        dist.all_reduce(second, group=group, async_op=True).get_future().wait()
        return second

    # None of these has completed when its callback comes; else the caller would have to run it.
    futures = [
        dist.irecv(torch.zeros(1), rank, tag=number).get_future().then(lambda future, group=group: again(future, group))
        for number, group in enumerate(inner)
    ]
    sends = [dist.isend(torch.tensor([rank + 1.0 + number]), rank, tag=number) for number in range(len(inner))]
    # while the callbacks wait, other groups go on
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == total(size)
    assert [one.wait().item() for one in futures] == [total(size, number) for number in range(len(inner))]
    for work in sends:
        work.wait()
    for group in inner:
        dist.destroy_process_group(group)


def test_callbacks_of_many_collectives(rank: int, size: int) -> None:
    inner = [dist.new_group() for _ in range(4)]

    def again(future: Any, group: Any) -> torch.Tensor:
        second = future.value()[0].clone()
        dist.all_reduce(second, group=group)
        return second

    for turn in range(5):
        futures = [
            dist.all_reduce(torch.tensor([rank + 1.0 + number + turn]), async_op=True)
            .get_future()
            .then(lambda future, group=group: again(future, group))
            for number, group in enumerate(inner)
        ]
        wanted = [size * total(size, number + turn) for number in range(len(inner))]
        assert [one.wait().item() for one in futures] == wanted
    for group in inner:
        dist.destroy_process_group(group)


def test_threads_with_groups_of_their_own(rank: int, size: int) -> None:
    inner = [dist.new_group() for _ in range(3)]
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(50):
            tensor = torch.tensor([rank + 1.0 + number + turn])
            if turn % 2:
                dist.all_reduce(tensor, group=inner[number])
            else:
                dropin.all_reduce(tensor, group=inner[number])
            if tensor.item() != total(size, number + turn):
                wrong.append((number, turn, tensor))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inner))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    for group in inner:
        dist.destroy_process_group(group)


# --- sync and async


def test_one_rank_waits_at_once_another_later(rank: int, size: int) -> None:
    """The same collectives, on some ranks blocking, on some in the background, through both faces."""
    pending: list[tuple[Any, Callable[[], None]]] = []

    def check(found: torch.Tensor, wanted: list[float]) -> None:
        assert found.tolist() == wanted

    for number in range(60):
        face = dropin if (rank + number) % 3 == 0 else dist
        async_op = (rank + number // 4) % 2 == 1
        mine = torch.tensor([rank + 1.0 + number] * 3)
        if number % 4 == 0:
            work = face.all_reduce(mine, async_op=async_op)
            check_it = lambda mine=mine, number=number: check(mine, [total(size, number)] * 3)  # noqa: E731
        elif number % 4 == 1:
            whole = torch.zeros(3 * size)
            work = face.all_gather_single(whole, mine, async_op=async_op)
            wanted = [other + 1.0 + number for other in range(size) for _ in range(3)]
            check_it = lambda whole=whole, wanted=wanted: check(whole, wanted)  # noqa: E731
        elif number % 4 == 2:
            work = face.broadcast(mine, number % size, async_op=async_op)
            wanted = [number % size + 1.0 + number] * 3
            check_it = lambda mine=mine, wanted=wanted: check(mine, wanted)  # noqa: E731
        else:
            part = torch.zeros(1)
            work = face.reduce_scatter_single(part, mine[:1].repeat(size), async_op=async_op)
            check_it = lambda part=part, number=number: check(part, [total(size, number)])  # noqa: E731
        assert (work is not None) == async_op
        pending.append((work, check_it))
    for work, check_it in pending:
        if work is not None:
            work.wait()
        check_it()


def test_a_blocking_call_comes_after_what_is_pending(rank: int, size: int) -> None:
    tensor = torch.full((100_000,), rank + 1.0)
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True)
    dropin.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), size**3 * total(size)))


# --- what is dropped


def test_a_thousand_dropped(rank: int, size: int) -> None:
    """Of every second one the tensor is dropped as well, and its memory used anew."""
    kept = []
    for number in range(1000):
        tensor = torch.full((50,), rank + 1.0 + number)
        dist.all_reduce(tensor, async_op=True)
        if number % 2:
            kept.append((number, tensor))
    dist.barrier()
    for number, tensor in kept:
        assert torch.equal(tensor, torch.full((50,), total(size, number)))


def test_inputs_are_kept_until_they_are_used(rank: int, size: int) -> None:
    wholes = [torch.zeros(200 * size) for _ in range(50)]
    for number, whole in enumerate(wholes):
        dist.all_gather_single(whole, torch.full((200,), rank + 1.0 + number), async_op=True)
        torch.full((200,), -1.0)  # takes the memory of the input, had it been given back
    filled = [torch.zeros(200) for _ in range(50)]
    right, left = (rank + 1) % size, (rank - 1) % size
    for number in range(50):
        dist.isend(torch.full((200,), rank + 1.0 + number), right)
        torch.full((200,), -1.0)
    works = [dist.irecv(one, left) for one in filled]
    dist.barrier()
    for number in range(50):
        works[number].wait()
        wanted = torch.arange(1.0, size + 1).repeat_interleave(200) + number
        assert torch.equal(wholes[number], wanted)
        assert torch.equal(filled[number], torch.full((200,), left + 1.0 + number))
