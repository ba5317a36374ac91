"""The MPI transport by itself."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.transport import quirks
from mpicoll.transport.base import Envelope

pytestmark = pytest.mark.mpi


@pytest.fixture
def end() -> Iterator[Any]:
    """This rank's end of a fresh transport."""
    from mpi4py import MPI

    from mpicoll.transport.mpi import duplicate

    made = duplicate(MPI.COMM_WORLD)
    yield made
    made.free()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages over 64 bytes are large, and made of blocks of 16."""
    from mpicoll.transport.mpi import messages

    monkeypatch.setattr(messages, "INT_MAX", 64)
    monkeypatch.setattr(messages, "_BLOCK", 16)


def needs_peers() -> None:
    """Open MPI cuts a message to oneself that is larger than a receive posted before it, and reports no error."""
    if mpicoll.world().size < 2:
        pytest.skip("needs two ranks")


def neighbours(end: Any) -> tuple[int, int]:
    return (end.rank - 1) % end.size, (end.rank + 1) % end.size


def test_groups_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks wait for each other before MPI creates a communicator."""
    world = mpicoll.world()
    transport = world._core.transport
    monkeypatch.setattr(transport, "nodes", tuple(range(world.size)))
    waited: list[int] = []
    exchange = transport.exchange
    monkeypatch.setattr(transport, "exchange", lambda *args: waited.append(args[2]) or exchange(*args))
    own = world.duplicate(tag=3)
    assert mpicoll.allgather(np.array(own.rank), comm=own).tolist() == list(range(own.size))
    own.free()
    members = list(range(world.size))[::-1][: max(1, world.size - 1)]
    if world.rank in members:
        part = world.group(members)
        assert (part.size, part.rank) == (len(members), members.index(world.rank))
        assert mpicoll.allgather(np.array(world.rank), comm=part).tolist() == members
        part.free()
    rounds = (world.size - 1).bit_length(), (len(members) - 1).bit_length()
    assert len(waited) == rounds[0] + (rounds[1] if world.rank in members else 0)
    assert len(set(waited)) == (rounds[0] > 0) + (rounds[1] > 0 and world.rank in members)


def octets(size: int, seed: int) -> np.ndarray:
    return ((np.arange(size) * 7 + seed * 31) % 251).astype(np.uint8)


def test_world_is_a_duplicate(end: Any) -> None:
    from mpi4py import MPI

    for comm in (end.mpi, end._collective):
        assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT
    assert MPI.Comm.Compare(end.mpi, end._collective) == MPI.CONGRUENT


def test_tags_up_to_the_largest(end: Any) -> None:
    left, right = neighbours(end)
    assert end.max_tag >= 32767
    for tag in (0, 32767, end.max_tag):
        into = np.zeros(1, np.uint8)
        pending = end.irecv(into, left, tag)
        end.send(np.full(1, 5, np.uint8), right, tag)
        assert pending.wait(20) == Envelope(left, tag, 1)


def test_parts_have_the_same_largest_tag() -> None:
    world = mpicoll.world()
    with world.split(0) as part, world.group(range(world.size)) as group:
        assert world._core.transport.max_tag == part._core.transport.max_tag == group._core.transport.max_tag
        largest = world._core.transport.max_tag
        for comm in (part, group, world):
            pending = mpicoll.irecv(np.zeros(1), world.rank, largest, comm=comm)
            mpicoll.send(np.ones(1), world.rank, largest, comm=comm)
            assert pending.wait(20)[0] == 1.0
            with pytest.raises(mpicoll.RankError, match="tag"):
                mpicoll.isend(np.ones(1), 0, largest + 1, comm=comm)


def test_equal_tags_are_matched_in_order(end: Any) -> None:
    left, right = neighbours(end)
    rooms = [np.zeros(1, np.uint8) for _ in range(10)]
    pending = [end.irecv(room, left, 3) for room in rooms]
    sent = [end.isend(np.full(1, number, np.uint8), right, 3) for number in range(10)]
    assert [one.wait(20) for one in pending] == [Envelope(left, 3, 1)] * 10
    assert [room[0] for room in rooms] == list(range(10))
    for one in sent:
        one.wait(20)


def test_several_messages_of_a_round_to_one_peer(end: Any) -> None:
    left, right = neighbours(end)
    rooms = [np.zeros(size, np.uint8) for size in (3, 1, 2)]
    end.exchange(
        [(right, np.full(room.size, 10 * room.size + end.rank, np.uint8)) for room in rooms],
        [(left, room) for room in rooms],
        5,
    )
    assert [room.tolist() for room in rooms] == [[30 + left] * 3, [10 + left], [20 + left] * 2]


def test_rounds_with_other_tags_may_be_received_first(end: Any) -> None:
    left, right = neighbours(end)
    late, early = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    end.exchange([(right, np.full(1, 1, np.uint8)), (right, np.full(1, 2, np.uint8))], [], 1)
    end.exchange([(right, np.full(1, 3, np.uint8))], [(left, early)], 2)
    end.exchange([], [(left, late)], 1)
    assert (early[0], late[0]) == (3, 1)
    end.exchange([], [(left, late)], 1)
    assert late[0] == 2


def test_memory_that_can_not_be_written_may_be_sent(end: Any) -> None:
    left, right = neighbours(end)
    x = np.arange(6.0)
    x.flags.writeable = False
    got = mpicoll.irecv(np.zeros(6), left)
    mpicoll.isend(x, right).wait(20)
    assert got.wait(20).tolist() == x.tolist()
    assert mpicoll.sendrecv(x, right, left).tolist() == x.tolist()
    frozen = np.frombuffer(b"abcd", np.uint8)
    room = np.zeros(4, np.uint8)
    end.exchange([(right, frozen)], [(left, room)], 0)
    assert room.tobytes() == b"abcd"


# --- large messages

SIZES = [64, 65, 79, 80, 81, 1000]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("size", SIZES)
def test_large_messages(end: Any, size: int) -> None:
    left, right = neighbours(end)
    mine, theirs = octets(size, end.rank), octets(size, left)

    def room() -> np.ndarray:
        return np.zeros(size + 8, np.uint8)

    rooms = [room() for _ in range(4)]
    end.exchange([(right, mine)], [(left, rooms[0][:size])], 0)
    pending = end.irecv(rooms[1][:size], left, 1)
    end.isend(mine, right, 1).wait(20)
    assert pending.wait(20) == Envelope(left, 1, size)
    assert end.sendrecv(mine, right, 2, rooms[2][:size], left, 2) == Envelope(left, 2, size)
    sending = end.isend(mine, right, 3)
    assert end.probe(left, 3, 20) == Envelope(left, 3, size)
    assert end.recv(rooms[3][:size], None, 3) == Envelope(left, 3, size)
    sending.wait(20)
    for one in rooms:
        assert one[:size].tolist() == theirs.tolist()
        assert one[size:].tolist() == [0] * 8


@pytest.mark.usefixtures("small_limits")
def test_large_and_small_ends_of_a_message(end: Any) -> None:
    """A small message into large room arrives, and says how small it is."""
    left, right = neighbours(end)
    room = np.zeros(200, np.uint8)
    pending = end.irecv(room, left, 0)
    end.isend(octets(30, end.rank), right, 0).wait(20)
    assert pending.wait(20) == Envelope(left, 0, 30)
    assert room[:30].tolist() == octets(30, left).tolist()


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "tree"])
def test_large_collectives(algorithm: str) -> None:
    x = np.arange(501.0) * (mpicoll.world().rank + 1)
    total = sum(range(1, mpicoll.world().size + 1))
    assert mpicoll.allreduce(x, algorithm=algorithm).tolist() == (np.arange(501.0) * total).tolist()


# --- messages that don't fit


def of_bytes(size: int) -> str:
    """Return how a truncated message's size is told, which some MPI libraries don't report."""
    from mpi4py import MPI

    return "" if quirks.TRUNCATED_SIZES.applies_to(MPI.Get_library_version()) else f"of {size} bytes "


def test_a_message_that_is_too_large(end: Any) -> None:
    needs_peers()
    left, right = neighbours(end)
    pending = end.irecv(np.zeros(2, np.uint8), left, 1)
    sent = end.isend(np.ones(3, np.uint8), right, 1)
    for wait in (lambda: pending.wait(20), lambda: pending.wait(None), pending.test):
        text = rf"rank {end.rank}: a message {of_bytes(3)}from rank {left} \(tag 1\) does not fit the 2 bytes"
        with pytest.raises(mpicoll.TruncationError, match=text):
            wait()
    sent.wait(20)


def test_a_message_that_is_too_large_on_parts_of_the_world() -> None:
    """They inherit that errors are returned; by default MPI ends the job."""
    needs_peers()
    world = mpicoll.world()
    with world.split(0) as part, world.group(range(world.size)) as group:
        for comm in (part, group):
            left, right = neighbours(comm)
            pending = mpicoll.irecv(np.zeros(2), left, comm=comm)
            mpicoll.isend(np.ones(3), right, comm=comm)
            with pytest.raises(mpicoll.TruncationError):
                pending.wait(20)


def test_a_failed_receive_is_no_other_calls_failure() -> None:
    needs_peers()
    world = mpicoll.world()
    left, right = neighbours(world)
    with world.split(0) as part:
        failed = mpicoll.irecv(np.zeros(2), left, 1, comm=part)
        dropped = mpicoll.irecv(np.zeros(2), left, 1, comm=part)
        sent = [mpicoll.isend(np.ones(3), right, 1, comm=part) for _ in range(2)]
        mpicoll.waitall(sent, 20)
        mpicoll.barrier(comm=part)
        del dropped
        for number in range(20):
            pending = mpicoll.irecv(np.zeros(1), left, 2, comm=part)
            mpicoll.isend(np.full(1, float(number)), right, 2, comm=part).wait(20)
            assert pending.wait(20)[0] == number
        own = mpicoll.irecv(np.zeros(1), part.rank, 3, comm=part)
        mpicoll.send(np.ones(1), part.rank, 3, comm=part)
        assert own.wait(20)[0] == 1.0
        assert failed.test()
        for _ in range(2):
            with pytest.raises(mpicoll.TruncationError) as caught:
                failed.wait(20)
            # Where the size is unknown, MPI's own text follows in parentheses.
            assert re.sub(r"receive it \(Message truncated.*\);", "receive it;", str(caught.value)) == (
                f"irecv(float64[2], peer={left}, tag=1) on {part.name}, rank {part.rank} of {part.size}: rank"
                f" {part.rank}: a message {of_bytes(24)}from rank {left} (tag 1) does not fit the 16 bytes that receive"
                " it; sender and receiver must agree on the size; mpicoll.probe returns the size of a message before it"
                " is received"
            )


def test_a_sendrecv_that_is_too_large() -> None:
    needs_peers()
    left, right = neighbours(mpicoll.world())
    with pytest.raises(
        mpicoll.TruncationError, match=rf"a message {of_bytes(24)}from rank {left} \(tag 0\) does not fit the 16 bytes"
    ):
        mpicoll.sendrecv(np.ones(3), right, left, out=np.ones(2))


def test_a_message_that_is_too_small() -> None:
    world = mpicoll.world()
    left, right = neighbours(world)
    pending = mpicoll.irecv(np.zeros((2, 2)), left, 4)
    mpicoll.isend(np.ones(3), right, 4).wait(20)
    with pytest.raises(mpicoll.TruncationError) as caught:
        pending.wait(20)
    assert str(caught.value) == (
        f"irecv: a message of 24 bytes from rank {left} (tag 4) arrived where 32 bytes, shape (2, 2) of dtype float64,"
        f" were expected (rank {world.rank} of {world.size}); sender and receiver must agree on the size; mpicoll.probe"
        " returns the size of a message before it is received"
    )


@pytest.mark.parametrize("size", [1, 3, 5])
def test_rounds_that_do_not_fit(end: Any, size: int) -> None:
    if size > 4:
        needs_peers()
    left, right = neighbours(end)
    got = "more" if size > 4 and not of_bytes(size) else size
    with pytest.raises(mpicoll.TruncationError, match=rf"expected 4 bytes from rank {left}, got {got}: the ranks"):
        end.exchange([(right, np.zeros(size, np.uint8))], [(left, np.zeros(4, np.uint8))], 0)
    room = np.zeros(4, np.uint8)
    end.exchange([(right, octets(4, end.rank))], [(left, room)], 1)
    assert room.tolist() == octets(4, left).tolist()


# --- memory


def test_the_memory_of_dropped_requests_lives_until_they_complete() -> None:
    """MPI writes and reads it meanwhile."""
    world = mpicoll.world()
    left, right = neighbours(world)
    size = 50_000
    targets = [np.zeros(size) for _ in range(5)]
    alive = [weakref.ref(target) for target in targets]
    while targets:
        mpicoll.irecv(out=targets.pop(0), source=left, tag=1)
    gc.collect()
    assert not any(ref() is None for ref in alive)
    mpicoll.barrier()
    for number in range(5):
        mpicoll.isend(np.full(size, number + 1.0), right, tag=1)
        gc.collect()

    def arrived(number: int) -> bool:
        target = alive[number]()
        return target is None or bool(target[-1] == number + 1.0)

    deadline = time.monotonic() + 20
    while not all(arrived(number) for number in range(5)):
        assert time.monotonic() < deadline
        mpicoll.iprobe()  # lets MPI make progress
    mpicoll.barrier()
    # Requests that have completed are let go, a few for each new one, or by the thread that makes progress.
    for _ in range(20):
        pending = mpicoll.irecv(np.zeros(1), left, tag=2)
        mpicoll.isend(np.ones(1), right, tag=2).wait(20)
        pending.wait(20)
    while any(ref() is not None for ref in alive):
        assert time.monotonic() < deadline
        gc.collect()
    assert len(_under_way()) < 20


def test_many_messages_leave_nothing_behind() -> None:
    world = mpicoll.world()
    left, right = neighbours(world)
    for number in range(300):
        pending = mpicoll.irecv(np.zeros(1), left)
        mpicoll.isend(np.full(1, float(number)), right)
        assert pending.wait(20)[0] == number
    assert len(_under_way()) < 20


# --- what the engine asks for


def test_errors_are_explained(end: Any) -> None:
    from mpi4py import MPI

    assert type(end.translate_error(MPI.Exception(MPI.ERR_TRUNCATE))) is mpicoll.TruncationError
    assert type(end.translate_error(MPI.Exception(MPI.ERR_OTHER))) is mpicoll.CommunicationError
    assert str(end.translate_error(MPI.Exception(MPI.ERR_OTHER))).startswith(f"rank {end.rank}: ")
    other = ValueError("another")
    assert end.translate_error(other) is other


def test_background_needs_threads_in_mpi(end: Any) -> None:
    from mpi4py import MPI

    assert end.background == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def test_library_is_named() -> None:
    from mpicoll.transport import mpi

    name = mpi.library()
    assert name
    assert "\n" not in name
    assert "," not in name


def test_errors_are_returned_whatever_the_original_says() -> None:
    from mpi4py import MPI

    from mpicoll.transport.mpi import duplicate

    theirs = MPI.COMM_WORLD.Dup()
    theirs.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    end = duplicate(theirs)
    part, group = end.split(0, 0), end.group(range(end.size))
    for one in (end, part, group):
        for comm in (one.mpi, one._collective):
            assert comm.Get_errhandler() == MPI.ERRORS_RETURN
    assert theirs.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    for one in (part, group, end):
        one.free()
    theirs.Free()


def _under_way() -> list[Any]:
    from mpicoll.transport import mpi

    return mpi.active_transfers.list_posted_receives()


def test_memory_outlives_the_communicator_that_was_dropped() -> None:
    world = mpicoll.world()
    if world.size < 2:
        pytest.skip("needs two ranks")
    part = world.split(0)
    assert part is not None
    if world.rank == 1:
        out = np.zeros(64 * 1024)
        alive = weakref.ref(out)
        mpicoll.irecv(out=out, source=0, comm=part)
        del out, part
        gc.collect()
        assert alive() is not None
        mpicoll.barrier()
        end = time.monotonic() + 20
        while alive() is not None and time.monotonic() < end:
            _under_way()  # looks at what has completed
            gc.collect()
        assert alive() is None
    else:
        mpicoll.barrier()
        if world.rank == 0:
            mpicoll.isend(np.ones(64 * 1024), 1, comm=part).wait(20)
    mpicoll.barrier()


def test_threads_complete_their_own_requests() -> None:
    world = mpicoll.world()
    left, right = neighbours(world)
    failures: list[BaseException] = []

    def pass_round(tag: int) -> None:
        try:
            for number in range(500):
                sent = mpicoll.isend(np.full(8, float(number)), right, tag)
                assert mpicoll.irecv(np.zeros(8), left, tag).wait()[0] == number
                sent.wait()
        except BaseException as error:  # noqa: BLE001  the test's own thread raises it
            failures.append(error)

    threads = [threading.Thread(target=pass_round, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_blocks_of_two_ranks(end: Any) -> None:
    """mpi4py takes a pair that is no list for counts and displacements."""
    needs_peers()
    part = end.split(0 if end.rank < 2 else None, end.rank)
    if part is None:
        return
    counts, whole = (2, 1), np.array([5.0, 6.0, 7.0])
    mine = whole[:2] if part.rank == 0 else whole[2:]
    everything, own = np.zeros(3), np.zeros(counts[part.rank])
    part.native.allgather(mine, everything, counts)
    np.testing.assert_array_equal(everything, whole)
    everything[...] = 0
    part.native.gather(mine, everything if part.rank == 1 else None, counts, 1)
    np.testing.assert_array_equal(everything, whole if part.rank == 1 else 0)
    part.native.scatter(whole if part.rank == 0 else None, own, counts, 0)
    np.testing.assert_array_equal(own, mine)
    part.free()


def test_messages_move_while_their_rank_waits_in_shared_memory(end: Any) -> None:
    """The other one comes to the collective when it has the message, whose sender waits there already."""
    world = mpicoll.world()
    if world.size < 2 or world._core.no_shm_reason is not None:
        pytest.skip("needs two ranks that share memory")
    large, x = np.ones(1 << 20), np.ones(4096)
    if world.rank == 0:
        mpicoll.isend(large, 1).wait()
    if world.rank == 1:
        request = mpicoll.irecv(large, 0)
    assert mpicoll.allreduce(x, algorithm="shm_pipelined")[0] == world.size
    if world.rank == 1:
        assert request.wait().sum() == large.size


@pytest.mark.parametrize("anywhere", [False, True])
def test_transfers_in_the_background_are_counted(end: Any, anywhere: bool) -> None:
    """A send in the background counts as sent alone, a receive from any rank by its source."""
    needs_peers()
    left, right = neighbours(end)
    receive = end.irecv(np.empty(8, np.uint8), None if anywhere else left, 3)
    send = end.isend(octets(8, end.rank), right, 3)
    receive.wait(None)
    send.wait(None)
    assert end.traffic.sent == {(right, 3): 1}
    assert end.traffic.received == {(left, 3): 1}
