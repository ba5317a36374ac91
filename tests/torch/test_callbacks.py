"""Callbacks of futures that start collectives: in the same order on all ranks, and none waits for ever."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicoll.torch import callback_comms

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("default_group")]


def future(value: float, group: Any = None) -> Any:
    return dist.all_reduce(torch.tensor([value]), group=group, async_op=True).get_future()


def test_what_callbacks_start_does_not_meet_what_the_program_starts() -> None:
    """On each rank the callbacks come at another time among the program's own calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(10):
        wanted = []
        for width in range(1, 6):

            def started(_: Any, width: int = width, turn: int = turn) -> torch.Tensor:
                time.sleep(0.002 * ((rank + turn) % size))
                y = torch.full((width * 10,), float(width))
                return dist.all_reduce(y, async_op=True).get_future().wait()[0]

            wanted.append(future(1.0).then(started))
        for width, one in enumerate(wanted, 1):
            mine = torch.full((width,), 2.0)
            dist.all_reduce(mine)
            assert mine.tolist() == [2.0 * size] * width
            assert one.wait().tolist() == [float(width * size)] * (10 * width)


def test_callbacks_of_two_groups_on_a_third() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second, third = dist.new_group(), dist.new_group(), dist.new_group()

    def started(value: float, slow: int) -> Any:
        def callback(_: Any) -> float:
            if rank == slow % size:
                time.sleep(0.2)
            t = torch.tensor([value])
            dist.all_reduce(t, group=third)
            return t.item()

        return callback

    one = future(1.0, first).then(started(1.0, 0))
    other = future(1.0, second).then(started(100.0, 1))
    assert (one.wait(), other.wait()) == (size, 100.0 * size)
    for group in (first, second, third):
        dist.destroy_process_group(group)


def test_callbacks_of_callbacks_start_collectives() -> None:
    size = dist.get_world_size()

    def inner(_: Any) -> float:
        t = torch.ones(3)
        dist.all_reduce(t)
        return t.sum().item()

    def outer(_: Any) -> float:
        return future(2.0).then(inner).wait()

    assert [future(1.0).then(outer) for _ in range(3)][-1].wait() == 3.0 * size


def test_a_callback_that_waits_for_another_one_of_its_group() -> None:
    first, second = future(1.0), future(2.0)
    size = dist.get_world_size()
    assert first.then(lambda _: second.then(lambda done: done.value()[0].item()).wait()).wait() == 2.0 * size


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises(error: type[BaseException]) -> None:
    def bad(_: Any) -> None:
        raise error("on purpose")

    failed = future(1.0).then(bad)
    with pytest.raises(RuntimeError if error is not ValueError else ValueError, match="on purpose"):
        failed.wait()
    assert future(1.0).then(lambda _: "the next one").wait() == "the next one"


def test_a_done_callback_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def bad(_: Any) -> None:
        raise ValueError("on purpose")

    with caplog.at_level(logging.ERROR, "mpicoll"):
        one = future(1.0)
        one.add_done_callback(bad)
        assert one.then(lambda _: "the next one").wait() == "the next one"
    assert "a callback of an operation failed" in caplog.text


def test_the_future_does_not_keep_its_tensors() -> None:
    gc.disable()
    try:
        t = torch.ones(10)
        work = dist.all_reduce(t, async_op=True)
        work.get_future().wait()
        gone = weakref.ref(work)
        del work
        deadline = time.monotonic() + 20
        while gone() is not None:  # the thread that has completed it may hold it for a moment
            assert time.monotonic() < deadline
            time.sleep(1e-3)
    finally:
        gc.enable()


def test_coalesced_operations_have_callbacks_of_their_group() -> None:
    group = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    t = torch.ones(3)
    dist.all_reduce(t, async_op=True)
    work = group._end_coalescing(torch.device("cpu"))
    assert work.get_future().then(lambda _: callback_comms.callback_context.path).wait() == (group.group_name,)
    assert work.result()[0] is t


def test_a_group_that_is_destroyed_waits_for_its_callbacks() -> None:
    size = dist.get_world_size()
    group = dist.new_group()

    def started(_: Any) -> float:
        time.sleep(0.1 * dist.get_rank())
        t = torch.ones(1)
        dist.all_reduce(t, group=group)
        return t.item()

    wanted = future(1.0, group).then(started)
    dist.destroy_process_group(group)
    assert wanted.wait() == size


def test_a_strided_receive_is_complete_when_it_has_arrived() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    into = torch.zeros(3, 2)[:, 0]
    receiving = dist.irecv(into, (rank - 1) % size)
    sending = dist.isend(torch.arange(3.0) + rank, (rank + 1) % size)
    deadline = time.monotonic() + 20
    while not receiving.is_completed():
        assert time.monotonic() < deadline
    assert into.tolist() == [float((rank - 1) % size + i) for i in range(3)]
    into.fill_(-1.0)
    receiving.wait()
    assert into.tolist() == [-1.0] * 3  # it comes once
    sending.wait()
