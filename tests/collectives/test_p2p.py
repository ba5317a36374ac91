"""Messages from one rank to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.data import DTYPES, LAYOUTS, LIBRARIES, has, has_layout, laid, numbers, random, unwrap, wrap
from support.ranks import Ranks

import mpicoll


def _ring() -> tuple[int, int, int, int]:
    world = mpicoll.world()
    return world.rank, world.size, (world.rank + 1) % world.size, (world.rank - 1) % world.size


def test_every_dtype_library_and_layout_around_the_ring(ranks: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        for number, name in enumerate(DTYPES):
            for library in LIBRARIES:
                if not has(library, name):
                    continue
                for layout in LAYOUTS:
                    shape = () if library in ("python", "scalar") else (4, 3)
                    if not has_layout(library, layout, shape):
                        continue
                    mine, theirs = (numbers(random(name, layout, one), name, shape) for one in (rank, left))
                    view = laid(mine, layout)
                    x = wrap(library, view)
                    got = mpicoll.sendrecv(x, right, left, number, number)
                    np.testing.assert_array_equal(unwrap(library, got, name, shape), theirs)
                    np.testing.assert_array_equal(view, mine)

    ranks(body)


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
def test_send_and_recv(several: Ranks, count: int) -> None:
    """From even ranks to the next, then the other way; large messages wait for the receiver."""

    def body() -> None:
        rank, size, right, left = _ring()
        if rank % 2 == 0 and right != 0:
            assert mpicoll.send(np.full(count, rank), right) is None
            got = mpicoll.recv(np.empty(count, int), right)
            np.testing.assert_array_equal(got, np.full(count, right))
        elif rank % 2 == 1:
            got = mpicoll.recv(np.empty(count, int), left)
            np.testing.assert_array_equal(got, np.full(count, left))
            mpicoll.send(np.full(count, rank), left)
        mpicoll.barrier()
        assert mpicoll.allreduce(1) == size

    several(body)


def test_recv_into_out(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        request = mpicoll.isend(np.full((2, 3), rank, np.float32), right)
        base = np.full((2, 6), -1, np.float32)
        out = base[:, ::2]
        assert mpicoll.recv(source=left, out=out) is out
        np.testing.assert_array_equal(base, [[left, -1] * 3] * 2)
        request.wait()
        tensor = torch.zeros(2)
        request = mpicoll.isend(torch.full((2,), float(rank)), right)
        assert mpicoll.recv(source=left, out=tensor) is tensor
        assert tensor.tolist() == [left, left]
        request.wait()

    several(body)


def test_messages_of_one_tag_arrive_in_order(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        requests = [mpicoll.isend(np.array([rank, number]), right, 5) for number in range(20)]
        got = [mpicoll.recv(np.empty(2, int), left, 5).tolist() for _ in range(20)]
        assert got == [[left, number] for number in range(20)]
        assert mpicoll.waitall(requests) == [None] * 20

    several(body)


def test_tags_select_messages(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        largest = mpicoll.world()._core.transport.max_tag
        tags = [3, 0, largest, 7]
        requests = [mpicoll.isend(100 * rank + number, right, tag) for number, tag in enumerate(tags)]
        for number, tag in reversed(list(enumerate(tags))):
            assert mpicoll.recv(0, left, tag) == 100 * left + number
        mpicoll.waitall(requests)

    several(body)


def test_any_source_and_any_tag(several: Ranks) -> None:
    def body() -> None:
        rank, size, _, _ = _ring()
        if rank:
            mpicoll.send(np.array([rank, rank * 2]), 0, rank + 10)
            return
        seen = []
        for _ in range(size - 1):
            status = mpicoll.Status()
            got = mpicoll.recv(np.empty(2, int), status=status)
            assert got.tolist() == [status.source, 2 * status.source]
            assert (status.tag, status.nbytes) == (status.source + 10, 16)
            seen.append(status.source)
        assert sorted(seen) == list(range(1, size))

    several(body)


def test_probe_tells_the_size_and_leaves_the_message(several: Ranks) -> None:
    def body() -> None:
        rank, size, _, _ = _ring()
        if rank == size - 1:
            mpicoll.send(np.arange(7, dtype=np.int16), 0, 4)
        elif rank == 0:
            status = mpicoll.probe()
            assert (status.source, status.tag, status.nbytes) == (size - 1, 4, 14)
            assert mpicoll.probe(size - 1, 4, timeout=30) == status
            assert mpicoll.iprobe(size - 1, 4) == status
            assert mpicoll.iprobe(tag=5) is None
            np.testing.assert_array_equal(mpicoll.recv(np.empty(status.nbytes // 2, np.int16), status.source), range(7))
            assert mpicoll.iprobe() is None
        mpicoll.barrier()

    several(body)


def test_probe_that_times_out(ranks: Ranks) -> None:
    def body() -> None:
        with pytest.raises(mpicoll.Timeout):
            mpicoll.probe(tag=9, timeout=0.01)
        assert mpicoll.allreduce(1) == mpicoll.world().size

    ranks(body)


def test_request_that_times_out_completes_later(several: Ranks) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        request = mpicoll.irecv(np.empty(3), left, 1)
        assert not request.test()
        with pytest.raises(mpicoll.Timeout):
            request.wait(timeout=0.01)
        assert not request.waited
        mpicoll.barrier()
        sent = mpicoll.isend(np.full(3, float(rank)), right, 1)
        np.testing.assert_array_equal(request.wait(timeout=20), [left] * 3)
        assert request.waited
        assert request.test()
        assert sent.wait() is None

    several(body)


def test_waitall_gives_results_in_order_of_requests(several: Ranks) -> None:
    def body() -> None:
        rank, size, _, _ = _ring()
        receiving = [mpicoll.irecv(0, source, 2) for source in range(size)]
        sending = [mpicoll.isend(10 * rank + dest, dest, 2) for dest in reversed(range(size))]
        assert mpicoll.waitall(receiving, timeout=20) == [10 * source + rank for source in range(size)]
        assert mpicoll.waitall(sending) == [None] * size
        assert mpicoll.waitall([]) == []

    several(body)


def test_waitall_that_times_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        requests = [mpicoll.irecv(0, world.rank, tag) for tag in (1, 2)]
        mpicoll.isend(11, world.rank, 1).wait()
        with pytest.raises(mpicoll.Timeout):
            mpicoll.waitall(requests, timeout=0.01)
        mpicoll.isend(22, world.rank, 2).wait()
        assert mpicoll.waitall(requests) == [11, 22]

    ranks(body)


def test_waitany_hands_out_each_once(several: Ranks) -> None:
    def body() -> None:
        rank, size, _, _ = _ring()
        receiving = [mpicoll.irecv(0, source, 6) for source in range(size)]
        sending = [mpicoll.isend(10 * rank + dest, dest, 6) for dest in range(size)]
        got = {}
        for _ in range(size):
            index, value = mpicoll.waitany(receiving)
            got[index] = value
        assert got == {source: 10 * source + rank for source in range(size)}
        with pytest.raises(mpicoll.ArgumentError, match="none of the"):
            mpicoll.waitany(receiving)
        mpicoll.waitall(sending)

    several(body)


def test_waitany_that_times_out(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        requests = [mpicoll.irecv(0, world.rank, tag) for tag in (1, 2)]
        with pytest.raises(mpicoll.Timeout):
            mpicoll.waitany(requests, timeout=0.01)
        mpicoll.isend(5, world.rank, 2).wait()
        assert mpicoll.waitany(requests, timeout=20) == (1, 5)
        mpicoll.isend(4, world.rank, 1).wait()
        assert mpicoll.waitany(requests, timeout=20) == (0, 4)

    ranks(body)


def test_request_can_be_waited_for_twice(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        request = mpicoll.irecv(np.empty(2), world.rank)
        mpicoll.isend(np.ones(2), world.rank).wait()
        assert request.wait() is request.wait()

    ranks(body)


def test_dropped_requests(several: Ranks) -> None:
    """MPI still reads what was sent, after nobody refers to request or array any more."""

    def body() -> None:
        rank, _, right, left = _ring()
        for number in range(30):
            mpicoll.isend(np.full(20_000, 100.0 * rank + number), right, 1)
        for number in range(30):
            got = mpicoll.recv(np.empty(20_000), left, 1)
            np.testing.assert_array_equal(got, np.full(20_000, 100.0 * left + number))
        mpicoll.barrier()

    several(body)


def test_send_to_oneself(ranks: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        with pytest.raises(mpicoll.RankError, match=f"send: rank {world.rank} sends to itself.*irecv"):
            mpicoll.send(1, world.rank, 3)
        other = mpicoll.irecv(0, world.rank, 4)
        with pytest.raises(mpicoll.RankError, match="sends to itself"):
            mpicoll.send(1, world.rank, 3)
        mpicoll.send(2, world.rank, 4)
        assert other.wait() == 2
        wildcard = mpicoll.irecv(np.empty(3))
        mpicoll.send(np.arange(3.0), world.rank, 8)
        assert wildcard.wait().tolist() == [0, 1, 2]
        assert mpicoll.sendrecv(7, world.rank, world.rank) == 7
        assert mpicoll.allreduce(1) == world.size

    ranks(body)


@pytest.mark.parametrize("receive", [2, 9], ids=["larger message", "smaller message"])
def test_size_mismatch(ranks: Ranks, receive: int) -> None:
    """A recv of another size says so, and later messages are not affected."""

    def body() -> None:
        rank, _, right, left = _ring()
        sending = mpicoll.isend(np.zeros(5), right, 1)
        with pytest.raises(mpicoll.TruncationError) as caught:
            mpicoll.recv(np.empty(receive), left, 1)
        assert f"rank {rank}" in str(caught.value)
        sending.wait()
        assert mpicoll.sendrecv(rank, right, left) == left

    ranks(body)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "negative"])
def test_sendrecv_in_place(ranks: Ranks, layout: str) -> None:
    def body() -> None:
        rank, _, right, left = _ring()
        for count in (3, 50_000):
            x = laid(np.full(count, float(rank)), layout)
            assert mpicoll.sendrecv(x, right, left, out=x) is x
            np.testing.assert_array_equal(x, np.full(count, float(left)))

    ranks(body)


def test_sendrecv_of_different_things(ranks: Ranks) -> None:
    def body() -> None:
        rank, size, right, left = _ring()
        status = mpicoll.Status()
        x = np.full(rank + 1, rank, np.int8)
        got = mpicoll.sendrecv(x, right, left, 1, 1, like=np.empty(left + 1, np.int8), status=status)
        assert got.tolist() == [left] * (left + 1)
        assert (status.source, status.tag, status.nbytes) == (left, 1, left + 1)
        assert size == mpicoll.allreduce(1)

    ranks(body)


def test_messages_on_a_part_of_the_ranks(several: Ranks) -> None:
    """The same tags on two communicators at once don't meet."""

    def body() -> None:
        world = mpicoll.world()
        part = world.split(0, -world.rank)
        assert part is not None
        right = (part.rank + 1) % part.size
        left = (part.rank - 1) % part.size
        receiving: list[Any] = [mpicoll.irecv(0, comm=world), mpicoll.irecv(0, comm=part)]
        mpicoll.isend(1000 + world.rank, (world.rank + 1) % world.size, comm=world)
        mpicoll.isend(2000 + part.rank, right, comm=part)
        assert mpicoll.waitall(receiving) == [1000 + (world.rank - 1) % world.size, 2000 + left]
        part.free()

    several(body)


def test_messages_beside_collectives(several: Ranks) -> None:
    """A pending receive of anything takes no message of a collective."""

    def body() -> None:
        rank, size, right, left = _ring()
        pending = mpicoll.irecv(np.empty(4))
        for algorithm in mpicoll.schedules.algorithms_of("allreduce"):
            assert mpicoll.allreduce(rank, algorithm=algorithm) == sum(range(size))
        sending = mpicoll.isend(np.full(4, rank), right)
        sending = mpicoll.isend(np.full(4, float(rank)), right)
        assert pending.wait().nbytes == 32
        np.testing.assert_array_equal(mpicoll.recv(np.empty(4), left), [left] * 4)
        sending.wait()

    several(body)


def test_no_rank_is_sent_to_and_received_from(ranks: Ranks) -> None:
    """mpicoll's PROC_NULL, and mpi4py's where there is MPI."""

    def body() -> None:
        rank, size, right, left = _ring()
        world = mpicoll.world()
        nobody = [mpicoll.PROC_NULL]
        if world.mpi is not None:
            from mpi4py import MPI

            nobody.append(MPI.PROC_NULL)
        for null in nobody:
            x, out, bound = np.full(3, rank), np.full(3, -7), {"timeout": 5.0}
            assert mpicoll.send(x, null) is None
            assert mpicoll.send(x, null, **bound) is None
            for options in ({}, bound):
                status = mpicoll.Status(0, 0, 99)
                assert mpicoll.recv(x, null, status=status, **options) is None
                assert (status.source, status.tag, status.nbytes) == (mpicoll.PROC_NULL, -1, 0)
                assert mpicoll.recv(source=null, tag=4, out=out, **options) is out
                assert mpicoll.sendrecv(x, null, null, out=out, **options) is out
                # One of the two is somebody: each end of a line has one neighbour.
                after, before = (null if rank == size - 1 else right), (null if rank == 0 else left)
                status = mpicoll.Status()
                got = mpicoll.sendrecv(x, after, before, status=status, **options)
                assert (got is None) == (before is null)
                assert got is None or got.tolist() == [left] * 3
                assert status.source == (mpicoll.PROC_NULL if before is null else left)
            assert mpicoll.probe(null) == mpicoll.iprobe(null) == mpicoll.Status(mpicoll.PROC_NULL, -1, 0)
            status = mpicoll.Status()
            requests = [
                mpicoll.isend(x, null),
                mpicoll.irecv(source=null, out=out, status=status),
                mpicoll.irecv(x, null),
            ]
            assert all(one.test() for one in requests)
            index, value = mpicoll.waitany(requests)
            assert (index, value) == (0, None)
            values = mpicoll.waitall(requests)
            assert values[0] is None
            assert values[1] is out
            assert values[2] is None
            assert status.source is mpicoll.PROC_NULL
            assert x.tolist() == [rank] * 3
            assert out.tolist() == [-7] * 3
        assert repr(mpicoll.PROC_NULL) == "mpicoll.PROC_NULL"
        for wrong in ({"dest": mpicoll.PROC_NULL, "tag": -1}, {"dest": mpicoll.PROC_NULL, "x": "no array"}):
            with pytest.raises(mpicoll.ArgumentError):
                mpicoll.send(**{"x": np.zeros(1), **wrong})
        mpicoll.barrier()
        assert mpicoll.iprobe() is None

    ranks(body)
