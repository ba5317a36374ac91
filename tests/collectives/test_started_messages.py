"""Messages in the background like earlier ones, which the extension starts where the ranks are those of an MPI job."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from support.garbage import collect_during, make_garbage
from support.ranks import Ranks

import mpicoll
from mpicoll.collectives.repeated_messages import StartedMessage, makes_progress
from mpicoll.engine.core.communicator import core_of

TURNS = 5


def _neighbours(comm: Any = None) -> tuple[int, int, int]:
    comm = mpicoll.world() if comm is None else comm
    return comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def _exchange(x: Any, tag: int = 3, comm: Any = None, out: Any = None) -> Any:
    """Pass `x` to the next rank, and return what the previous one has passed."""
    _, right, left = _neighbours(comm)
    receiving = mpicoll.irecv(x if out is None else None, left, tag, out=out, comm=comm)
    sending = mpicoll.isend(x, right, tag, comm=comm)
    assert sending.wait() is None
    return receiving.wait()


@pytest.mark.extension
def test_the_extension_starts_them(several: Ranks) -> None:
    def body() -> None:
        _, right, left = _neighbours()
        for x in (np.ones(3), torch.ones(3)):
            for _ in range(2):
                _exchange(x, 8)
            requests = [mpicoll.irecv(x, left, 8), mpicoll.isend(x, right, 8)]
            assert all((type(one._handle) is StartedMessage) is not several.local for one in requests)
            mpicoll.waitall(requests)
            for request, name, peer in zip(requests, ("irecv", "isend"), (left, right), strict=True):
                queue, call = request.awaited
                assert queue is core_of(mpicoll.world()).queue
                assert (call.name, call.peer, call.tag, call.nbytes) == (name, peer, 8, x.nbytes)
                assert request.limit == mpicoll.world().timeout

    several(body)


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 18])
def test_values(several: Ranks, count: int) -> None:
    def body() -> None:
        me, _, left = _neighbours()
        for dtype in ("int8", "float64", "complex128", "bool", ">i4"):
            for turn in range(TURNS):
                x, expected = (np.full(count, rank + turn).astype(dtype) for rank in (me, left))
                out = np.zeros(count, dtype)
                assert _exchange(x, out=out) is out
                for got in (out, _exchange(x)):
                    np.testing.assert_array_equal(got, expected)
                    assert got.dtype == x.dtype
                np.testing.assert_array_equal(x, np.full(count, me + turn).astype(dtype))
        for turn in range(TURNS):
            whole = torch.zeros(count, 2, dtype=torch.bfloat16)
            assert torch.equal(
                _exchange(torch.full((count,), me + turn, dtype=torch.bfloat16), out=whole[:, 0]), whole[:, 0]
            )
            assert (whole[:, 0] == left + turn).all()
            assert not whole[:, 1].any()

    several(body)


def test_requests_in_any_order(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for turn in range(TURNS):
            receives = [mpicoll.irecv(np.empty(4), left, tag) for tag in range(3)]
            with pytest.raises(
                mpicoll.Timeout, match=r"irecv\(float64\[4\].*within the timeout of 0\.01 s; it is still"
            ):
                receives[0].wait(0.01)
            assert not any(one.test() for one in receives)
            mpicoll.barrier()
            sends = [mpicoll.isend(np.full(4, 10.0 * me + tag + turn), right, tag) for tag in (2, 0, 1)]
            index, value = mpicoll.waitany([receives[2]])
            assert (index, value[0]) == (0, 10 * left + 2 + turn)
            assert mpicoll.waitall(sends, 20) == [None] * 3
            deadline = time.monotonic() + 20
            while not receives[1].test():
                assert time.monotonic() < deadline
            values = [one.wait(20)[0] for one in receives]
            assert values == [10 * left + tag + turn for tag in range(3)]
            assert receives[0].wait() is receives[0].wait()

    several(body)


def test_any_source_status_and_probe(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for turn in range(TURNS):
            sending = mpicoll.isend(np.full(2, me), right, turn % 2)
            status = mpicoll.Status()
            got = mpicoll.irecv(np.empty(2, int), status=status if turn == 3 else None).wait()
            assert got[0] == left
            if turn == 3:
                assert (status.source, status.tag, status.nbytes) == (left, 1, 16)
            sending.wait()
            mpicoll.barrier()
            sending = mpicoll.isend(np.full(2, me), right, 9)
            assert mpicoll.probe(left, 9, timeout=20).nbytes == 16
            assert mpicoll.irecv(np.empty(2, int), left, 9).wait()[1] == left
            sending.wait()

    several(body)


@pytest.mark.parametrize("sent", [1, 9])
def test_another_size_than_expected(several: Ranks, sent: int) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for _ in range(TURNS):
            _exchange(np.ones(4))
            _exchange(np.ones(sent))
        size = mpicoll.world().size
        for _ in range(2):
            receiving = mpicoll.irecv(np.empty(4), left, 3)
            sending = mpicoll.isend(np.full(sent, float(me)), right, 3)
            for _ in range(2):
                with pytest.raises(mpicoll.TruncationError, match=rf"rank {me}\b.*of {size}"):
                    receiving.wait(20)
            assert receiving.test()
            sending.wait()
        np.testing.assert_array_equal(_exchange(np.full(4, float(me))), float(left))

    several(body)


def test_memory_lives_until_they_complete(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        count = 50_000
        for _ in range(TURNS):
            _exchange(np.ones(count), 5, out=np.empty(count))
        targets = [np.zeros(count) for _ in range(3)]
        alive = [ref(one) for one in targets]
        while targets:
            mpicoll.irecv(out=targets.pop(), source=left, tag=5)
        gc.collect()
        assert not any(one() is None for one in alive)
        mpicoll.barrier()
        for number in range(3):
            mpicoll.isend(np.full(count, number + 1.0), right, 5)
        # Without the extension, requests that have completed are let go as others begin: here as messages to oneself.
        deadline = time.monotonic() + 20
        while any(one() is not None for one in alive):
            mpicoll.waitall([mpicoll.irecv(np.empty(1), me, 6), mpicoll.isend(np.ones(1), me, 6)])
            assert time.monotonic() < deadline
        mpicoll.barrier()

    if not several.local:
        several(body)


@pytest.mark.extension
def test_calls_do_not_replace_each_other_again_and_again(several: Ranks) -> None:
    """With more kinds of messages than the extension has room for, those that are repeated alternately take the
    short way."""

    def body() -> None:
        me, x = _neighbours()[0], np.ones(1)
        with mpicoll.world().duplicate() as comm:

            def exchange(tag: int) -> bool:
                received = mpicoll.irecv(x, me, tag, comm=comm)
                mpicoll.waitall([received, mpicoll.isend(x, me, tag, comm=comm)])
                return makes_progress(received)

            for tag in range(1000, 2000):  # receives and sends: all places are taken
                for _ in range(2):
                    exchange(tag)
            for _ in range(12):
                short = [exchange(tag) for tag in range(40)]
            assert all(short)

    if not several.local:
        several(body)


@pytest.mark.extension
def test_messages_may_complete_while_they_are_listed(several: Ranks) -> None:
    """A garbage collection, whose finalizers complete some, may begin within the function of C that lists them."""

    def body() -> None:
        from mpicoll._shm import list_pending_messages

        me, _, _ = _neighbours()
        x = np.ones(1)
        for _ in range(TURNS):
            mpicoll.waitall([mpicoll.irecv(x, me, 21), mpicoll.isend(x, me, 21)])
            mpicoll.waitall([mpicoll.irecv(x, me, 22), mpicoll.isend(x, me, 22)])
        started: list[mpicoll.Request[Any]] = []

        def prepare() -> None:
            started[:] = [mpicoll.irecv(x, me, 21), mpicoll.irecv(x, me, 22)]
            make_garbage(lambda: mpicoll.waitall([started[1], mpicoll.isend(x, me, 22)]))

        def check() -> None:
            assert 21 in [tag for _, _, _, tag in list_pending_messages()]
            mpicoll.waitall([started[0], mpicoll.isend(x, me, 21)])

        collect_during(check, prepare, 20)
        mpicoll.barrier()

    if not several.local:
        several(body)


@pytest.mark.extension
def test_a_message_may_be_tested_while_it_is_counted(several: Ranks) -> None:
    """To count it may take Python code, in which other threads run. MPI reports its outcome once."""

    def body() -> None:
        me, _, _ = _neighbours()
        x, counters = np.ones(4), core_of(mpicoll.world()).transport.traffic.receives
        for _ in range(TURNS):
            mpicoll.waitall([mpicoll.irecv(x, me, 23), mpicoll.isend(x, me, 23)])
        receiving = mpicoll.irecv(x, me, 23)
        asked: list[Any] = []
        found: list[bool] = []

        class Counters(type(counters)):  # type: ignore[misc]
            def __missing__(self, key: Any) -> Any:
                if not asked:
                    asked.append(key)
                    found.append(receiving.test())
                return super().__missing__(key)

        keys, before, original = set(counters), counters.pop((me, 23)), type(counters)
        counters.__class__ = Counters
        mpicoll.isend(x + 1, me, 23).wait()
        np.testing.assert_array_equal(receiving.wait(), 2.0)
        counters.__class__ = original
        counters[me, 23] = before
        assert found == [True]
        assert set(counters) == keys
        mpicoll.barrier()

    if not several.local:
        several(body)


def test_freed_and_dropped_communicators(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world().duplicate()
        for _ in range(TURNS):
            _exchange(np.ones(2), comm=comm)
        comm.free()
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            mpicoll.isend(np.ones(2), 0, 3, comm=comm)
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            mpicoll.irecv(np.ones(2), 0, 3, comm=comm)
        comm = mpicoll.world().duplicate()
        for _ in range(TURNS):
            _exchange(np.ones(2), comm=comm)
        gone = ref(core_of(comm))
        mpicoll.barrier()
        del comm
        gc.collect()
        assert gone() is None

    several(body)


def test_arguments_of_other_kinds(several: Ranks) -> None:
    def body() -> None:
        _, right, left = _neighbours()
        for _ in range(TURNS):
            _exchange(np.ones(2), 1)
        with pytest.raises(mpicoll.RankError):
            mpicoll.isend(np.ones(2), right, 1.0)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.RankError):
            mpicoll.irecv(np.ones(2), float(left), 1)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.DTypeError):
            mpicoll.isend([1.0, 1.0], right, 1)
        readonly = np.ones(2)
        readonly.flags.writeable = False
        with pytest.raises(mpicoll.ArgumentError):
            mpicoll.irecv(None, left, 1, out=readonly)
        with pytest.raises(mpicoll.ShapeError):
            mpicoll.irecv(np.ones(2), left, 1, out=np.empty(3))
        with pytest.raises(TypeError):
            mpicoll.isend(np.ones(2), right, 1, timeout=3)  # type: ignore[call-arg]
        mpicoll.isend(np.ones(2), mpicoll.PROC_NULL, 1).wait()

    several(body)


def test_several_threads(several: Ranks) -> None:
    def body() -> None:
        world = mpicoll.world()
        me, right, left = _neighbours(world)
        if not core_of(world).transport.background:
            return
        failures: list[BaseException] = []

        def exchange(tag: int) -> None:
            try:
                for turn in range(200):
                    count = 1 if turn % 10 else 20_000
                    receiving = mpicoll.irecv(np.empty(count, int), left, tag, comm=world)
                    sending = mpicoll.isend(np.full(count, me + turn), right, tag, comm=world)
                    np.testing.assert_array_equal(receiving.wait(), left + turn)
                    sending.wait()
            except BaseException as error:  # noqa: BLE001  raised below
                failures.append(error)

        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures

    several(body)


@pytest.mark.extension
def test_a_wait_that_lasts_is_shown(several: Ranks) -> None:
    def body() -> None:
        watch = core_of(mpicoll.world()).watch
        if watch is None:  # of ranks that are threads
            return
        x = np.ones(3)
        seen: list[Any] = []
        ident = threading.get_ident()

        def look() -> None:
            while (wait := watch.active.get(ident)) is None:
                pass
            seen.append(wait)
            mpicoll.isend(x, own.rank, 3, comm=own).wait()

        for _ in range(TURNS):
            mpicoll.waitall([mpicoll.irecv(x, own.rank, 3, comm=own), mpicoll.isend(x, own.rank, 3, comm=own)])
        receiving = mpicoll.irecv(x, own.rank, 3, comm=own)
        looking = threading.Thread(target=look)
        looking.start()
        receiving.wait()
        looking.join(20)
        (group, number, shown, _, _), bounded, polls = seen.pop()
        assert (group, number, shown.name, bounded, polls) == (core_of(own).queue.group, 0, "irecv", False, False)
        assert ident not in watch.active

    own: Any = None if several.local else mpicoll.world().duplicate()
    several(body)
    if own is not None:
        own.free()
