"""Messages like earlier ones, which the extension carries out where the ranks are those of an MPI job."""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core.communicator import core_of
from mpicoll.engine.diagnostics.flight_recorder import list_history

TURNS = 5


def _neighbours(comm: Any = None) -> tuple[int, int, int]:
    comm = mpicoll.world() if comm is None else comm
    return comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def _pass_on(x: Any, tag: int = 3, comm: Any = None, **options: Any) -> Any:
    """Pass `x` to the next rank and return what the previous one has passed: even ranks send first."""
    me, right, left = _neighbours(comm)
    if me % 2 == 0:
        mpicoll.send(x, right, tag, comm=comm)
    received = mpicoll.recv(None if "out" in options else x, left, tag, comm=comm, **options)
    if me % 2:
        mpicoll.send(x, right, tag, comm=comm)
    return received


def _count_direct(name: str) -> int:
    from mpicoll._shm import list_records

    return sum(entry[2].name == name for entry, _, _ in list_records(True))


@pytest.mark.extension
def test_the_extension_carries_them_out(several: Ranks) -> None:
    def body() -> None:
        _, right, left = _neighbours()
        x, out = np.arange(3.0), torch.empty(3)
        names = "send", "recv", "sendrecv"
        before = [_count_direct(name) for name in names]
        for _ in range(TURNS):
            _pass_on(x)
            _pass_on(torch.ones(3), out=out)
            mpicoll.sendrecv(x, right, left)
        new = [_count_direct(name) - old for name, old in zip(names, before, strict=True)]
        assert new == ([0, 0, 0] if several.local else [2 * (TURNS - 2), 2 * (TURNS - 2), TURNS - 2])
        if not several.local:
            (_, number, call, begin, _), end, error = [one for one in list_history() if one[0][2].name == "recv"][-1]
            assert (number, call.peer, call.tag, error) == (0, left, 3, "")
            assert end is not None
            assert begin <= end

    several(body)


@pytest.mark.parametrize("count", [0, 1, 1000, 1 << 14, 1 << 18])
def test_values(several: Ranks, count: int) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for turn in range(TURNS):
            x, expected = np.full(count, me + turn, np.int32), np.full(count, left + turn, np.int32)
            out = np.zeros(count, np.int32)
            assert _pass_on(x, out=out) is out
            np.testing.assert_array_equal(out, expected)
            for got in (_pass_on(x), mpicoll.sendrecv(x, right, left), mpicoll.sendrecv(x, right)):
                np.testing.assert_array_equal(got, expected)
                assert got.dtype == x.dtype
            mpicoll.barrier()
            assert mpicoll.sendrecv(x, right, left, 4, 4, out=out) is out
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(x, me + turn)

    several(body)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "bool", "int64"])
def test_tensors(several: Ranks, dtype: str) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for turn in range(TURNS):
            for shape in ((), (0,), (2, 3)):
                x = torch.full(shape, me + turn).to(getattr(torch, dtype))
                expected = torch.full(shape, left + turn).to(x.dtype)
                out = torch.zeros_like(x)
                assert _pass_on(x, out=out) is out
                for got in (out, _pass_on(x), mpicoll.sendrecv(x, right, left)):
                    assert got.dtype == x.dtype
                    assert torch.equal(got, expected)
            whole = torch.zeros(4, 6)
            assert torch.equal(_pass_on(torch.full((6, 4), float(me)).T, out=whole.T), torch.full((6, 4), float(left)))
            assert torch.equal(_pass_on(torch.full((3,), 1j * me).conj()), torch.full((3,), -1j * left))

    several(body)


def test_any_source_and_any_tag(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        x = np.full(2, float(me))
        for turn in range(TURNS):
            sending = mpicoll.isend(x, right, turn)
            assert mpicoll.recv(x)[0] == left
            sending.wait()
            mpicoll.barrier()

    several(body)


def test_messages_to_oneself(several: Ranks) -> None:
    def body() -> None:
        me = mpicoll.world().rank
        for turn in range(TURNS):
            for count in (1, 1 << 16):
                x = np.full(count, turn)
                assert (mpicoll.sendrecv(x, me, me) == turn).all()
                sending = mpicoll.isend(x, me, 2)
                assert (mpicoll.recv(x, me, 2) == turn).all()
                sending.wait()
                receiving = mpicoll.irecv(x, me, 2)
                mpicoll.send(x, me, 2)
                receiving.wait()
            with pytest.raises(mpicoll.RankError, match="would never complete"):
                mpicoll.send(x, me, 2)

    several(body)


@pytest.mark.parametrize("sent", [1, 9, 1 << 17])
def test_another_size_than_expected(several: Ranks, sent: int) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for _ in range(TURNS):
            _pass_on(np.ones(4))
            mpicoll.sendrecv(np.ones(4), right, left, 5, 5)
            mpicoll.sendrecv(np.ones(sent), right, left, 5, 5)
        guarded = np.zeros(6)
        for out in (None, guarded[:4]):
            sending = mpicoll.isend(np.full(sent, float(me)), right, 3)
            with pytest.raises(mpicoll.TruncationError, match=rf"{8 * sent} bytes from rank {left} \(tag 3\)"):
                mpicoll.recv(np.ones(4) if out is None else None, left, 3, out=out)
            sending.wait()
            np.testing.assert_array_equal(guarded[4:], 0)
        mpicoll.barrier()
        # Rank 0 sends more or less than its neighbour expects, and expects what that neighbour does not send.
        with pytest.raises(mpicoll.TruncationError, match=f"{32 if me == 0 else 8 * sent} bytes"):
            mpicoll.sendrecv(np.ones(4 if me else sent), right, left, 5, 5)
        mpicoll.barrier()
        np.testing.assert_array_equal(_pass_on(np.full(4, float(me))), float(left))

    if (several.local or mpicoll.world().size) == 2:
        several(body)


def test_memory_that_is_sent_and_received(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        x = np.empty(4)
        for _ in range(TURNS):
            x[:] = me
            mpicoll.sendrecv(x, right, left, out=x)
            np.testing.assert_array_equal(x, left)
            whole = np.full(6, float(me))
            mpicoll.sendrecv(whole[:4], right, left, out=whole[2:])
            np.testing.assert_array_equal(whole, [me, me, left, left, left, left])

    several(body)


@pytest.mark.extension
def test_a_wait_that_lasts_is_shown(several: Ranks) -> None:
    def body() -> None:
        watch = core_of(mpicoll.world()).watch
        if watch is None:  # of ranks that are threads
            return
        me, peer = mpicoll.world().rank, mpicoll.world().rank ^ 1
        if peer == mpicoll.world().size:
            return
        x, large = np.ones(3), np.ones(1 << 20)
        comm = pairs[me]
        for _ in range(TURNS):
            mpicoll.sendrecv(x, 1 - comm.rank, comm=comm)
            _pass_on(x, comm=comm)
            _pass_on(large, comm=comm)
        seen: list[Any] = []
        ident = threading.get_ident()

        def look() -> None:
            while (wait := watch.active.get(ident)) is None:
                pass
            seen.append(wait)
            mpicoll.send(x, 1 - comm.rank, 9, comm=comm)

        for operation, call in (
            ("recv", lambda: mpicoll.recv(x, 1 - comm.rank, 3, comm=comm)),
            ("send", lambda: mpicoll.send(large, 1 - comm.rank, 3, comm=comm)),
            ("sendrecv", lambda: mpicoll.sendrecv(x, 1 - comm.rank, comm=comm)),
        ):
            if comm.rank == 0:
                looking = threading.Thread(target=look)
                looking.start()
                call()
                looking.join(20)
                (group, number, shown, _, _), bounded, polls = seen.pop()
                assert (group, number, shown.name) == (core_of(comm).queue.group, 0, operation)
                assert not bounded
                assert not polls
                assert ident not in watch.active
            else:
                mpicoll.recv(x, 0, 9, comm=comm)
                if operation == "recv":
                    mpicoll.send(x, 0, 3, comm=comm)
                elif operation == "send":
                    mpicoll.recv(large, 0, 3, comm=comm)
                else:
                    mpicoll.sendrecv(x, 0, comm=comm)

    world = None if several.local else mpicoll.world()
    pairs = {} if world is None else {world.rank: world.split(world.rank // 2, world.rank)}
    several(body)
    for comm in pairs.values():
        comm.free()


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
                    got = mpicoll.sendrecv(np.full(count, me + turn), right, left, tag, tag, comm=world)
                    np.testing.assert_array_equal(got, left + turn)
            except BaseException as error:  # noqa: BLE001  raised below
                failures.append(error)

        threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures

    several(body)


def test_messages_are_counted(several: Ranks) -> None:
    def body() -> None:
        traffic = core_of(mpicoll.world()).transport.traffic
        if traffic is None:
            return
        _, right, left = _neighbours()
        key = 21
        for turn in range(TURNS):
            _pass_on(np.ones(1), key)
            sending = mpicoll.isend(np.ones(1), right, key)
            mpicoll.recv(np.ones(1), None, key)
            sending.wait()
            assert traffic.sent.get((right, key), 2 * turn + 2) == 2 * turn + 2
            assert traffic.received.get((left, key), 2 * turn + 2) == 2 * turn + 2

    several(body)


def test_a_communicator_that_was_freed(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world().duplicate()
        for _ in range(TURNS):
            _pass_on(np.ones(2), comm=comm)
        comm.free()
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            mpicoll.send(np.ones(2), 1, 3, comm=comm)
        with pytest.raises(mpicoll.CommunicatorError, match="freed"):
            mpicoll.recv(np.ones(2), 1, 3, comm=comm)

    several(body)


def test_a_communicator_that_is_dropped_is_collected(several: Ranks) -> None:
    def body() -> None:
        comm = mpicoll.world().duplicate()
        for _ in range(TURNS):
            _pass_on(np.ones(2), comm=comm)
        gone = ref(core_of(comm))
        mpicoll.barrier()
        del comm
        gc.collect()
        assert gone() is None

    several(body)


def test_arguments_of_other_kinds(several: Ranks) -> None:
    def body() -> None:
        me, right, left = _neighbours()
        for _ in range(TURNS):
            _pass_on(np.ones(2), 1)
            mpicoll.sendrecv(np.ones(2), right, left, 1, 1)
        with pytest.raises(mpicoll.RankError):
            mpicoll.send(np.ones(2), right, 1.0)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.RankError):
            mpicoll.sendrecv(np.ones(2), float(right), left, 1, 1)  # type: ignore[arg-type]
        with pytest.raises(mpicoll.ShapeError):
            mpicoll.recv(np.ones(2), left, 1, out=np.empty(3))
        with pytest.raises(mpicoll.DTypeError):
            mpicoll.send([1.0, 1.0], right, 1)
        readonly = np.ones(2)
        readonly.flags.writeable = False
        with pytest.raises(mpicoll.ArgumentError):
            mpicoll.recv(None, left, 1, out=readonly)
        assert mpicoll.recv(source=mpicoll.PROC_NULL, out=np.ones(2)).sum() == 2
        mpicoll.send(np.ones(2), mpicoll.PROC_NULL, 1)
        status = mpicoll.Status()
        got = _pass_on(np.full(2, me), 1, status=status)
        assert (got[0], status.source, status.tag, status.nbytes) == (left, left, 1, 16)
        sending = mpicoll.isend(np.ones(2), right, 1)
        mpicoll.recv(np.ones(2), left, 1, timeout=20)
        sending.wait()

    several(body)
