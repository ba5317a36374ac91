"""The local transport by itself: matching, faults, groups. A send never waits, so one thread can play all ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import mpicoll
from mpicoll.transport.base import Envelope
from mpicoll.transport.local import Delay, Drop, Fault, Kill, Killed, LocalJob, LocalTransport, transports


def ends(size: int, *faults: Fault, timeout: float = 5.0) -> list[LocalTransport]:
    return transports(LocalJob(size, faults, timeout))


def data(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def room(size: int = 1) -> np.ndarray:
    return np.zeros(size, np.uint8)


def receive(end: LocalTransport, source: int | None = None, tag: int | None = None, size: int = 1) -> list[int]:
    into = room(size)
    end.recv(into, source, tag)
    return into.tolist()


# --- matching


def test_a_message() -> None:
    a, b = ends(2)
    a.send(data(1, 2, 3), 1, 7)
    into = room(5)
    assert b.recv(into, 0, 7) == Envelope(0, 7, 3)
    assert into.tolist() == [1, 2, 3, 0, 0]


def test_what_was_sent_may_be_changed_at_once() -> None:
    a, b = ends(2)
    memory = data(1)
    pending = a.isend(memory, 1, 0)
    assert pending.test() == pending.wait(None) == Envelope(0, 0, 1)
    memory[0] = 9
    assert receive(b) == [1]


def test_unexpected_messages_wait_in_order() -> None:
    a, b = ends(2)
    for value in range(5):
        a.send(data(value), 1, value % 2)
    assert receive(b, 0, 1) == [1]
    assert receive(b, 0, None) == [0]
    assert receive(b, None, 1) == [3]
    assert [receive(b) for _ in range(2)] == [[2], [4]]


def test_receives_are_served_in_the_order_of_posting() -> None:
    a, b = ends(2)
    rooms = [room() for _ in range(4)]
    posted = [
        b.irecv(into, source, tag)
        for into, (source, tag) in zip(rooms, [(None, 5), (0, None), (None, None), (0, 5)], strict=True)
    ]
    assert [one.test() for one in posted] == [None] * 4
    for value, tag in ((10, 4), (11, 5), (12, 5), (13, 5)):
        a.send(data(value), 1, tag)
    assert [one.wait(None) for one in posted] == [Envelope(0, tag, 1) for tag in (5, 4, 5, 5)]
    assert [into[0] for into in rooms] == [11, 10, 12, 13]


def test_two_receives_from_any_rank() -> None:
    a, b, c = ends(3)
    first, second = room(), room()
    one, two = c.irecv(first, None, None), c.irecv(second, None, None)
    b.send(data(2), 2, 8)
    a.send(data(1), 2, 9)
    assert (two.wait(None), one.wait(None)) == (Envelope(0, 9, 1), Envelope(1, 8, 1))
    assert (first[0], second[0]) == (2, 1)


def test_messages_to_oneself() -> None:
    (a,) = ends(1)
    a.send(data(3), 0, 1)
    assert receive(a, 0, 1) == [3]
    assert a.sendrecv(data(4), 0, 2, into := room(), 0, 2) == Envelope(0, 2, 1)
    assert into[0] == 4


def test_empty_messages() -> None:
    a, b = ends(2)
    a.send(room(0), 1, 3)
    assert b.recv(room(0), 0, 3) == Envelope(0, 3, 0)


def test_collectives_and_messages_are_apart() -> None:
    a, b = ends(2)
    a.exchange([(1, data(1))], [], 0)
    assert b.iprobe(None, None) is None
    a.send(data(2), 1, 0)
    into = room()
    b.exchange([], [(0, into)], 0)
    assert into[0] == 1
    assert receive(b) == [2]


def test_probe() -> None:
    a, b = ends(2)
    assert b.iprobe(0, 0) is None
    a.send(data(1), 1, 4)
    a.send(data(1, 2), 1, 5)
    assert b.iprobe(0, 5) == b.probe(None, 5, None) == Envelope(0, 5, 2)
    assert b.iprobe(None, None) == b.iprobe(None, None) == Envelope(0, 4, 1)
    assert b.iprobe(1, None) is None
    receive(b, 0, 4)
    assert b.iprobe(0, 4) is None


def test_probe_waits() -> None:
    a, b = ends(2)
    found: list[Envelope] = []
    thread = threading.Thread(target=lambda: found.append(b.probe(0, 1, 20)))
    thread.start()
    a.send(data(1), 1, 0)
    a.send(data(1), 1, 1)
    thread.join()
    assert found == [Envelope(0, 1, 1)]


def test_a_larger_message_than_its_room() -> None:
    a, b = ends(2)
    a.send(data(1, 2, 3), 1, 6)
    pending = b.irecv(room(2), None, None)
    message = r"rank 1: a message of 3 bytes from rank 0 \(tag 6\) does not fit the 2 bytes that receive it"
    for call in (pending.test, lambda: pending.wait(None), lambda: pending.wait(1)):
        with pytest.raises(mpicoll.TruncationError, match=message):
            call()


def test_a_smaller_message_in_an_exchange() -> None:
    a, b = ends(2)
    a.exchange([(1, data(1, 2))], [], 0)
    with pytest.raises(mpicoll.TruncationError, match="rank 1 expected 3 bytes from rank 0, got 2"):
        b.exchange([], [(0, room(3))], 0)


# --- bounds


@pytest.mark.parametrize("bound", [0.1, None])
def test_timeout_names_the_waiting_and_the_awaited_ranks(bound: float | None) -> None:
    _, b, _ = ends(3, timeout=0.1)
    pending = b.irecv(room(), 2, 4)
    begin = time.monotonic()
    with pytest.raises(
        mpicoll.Timeout, match=r"^rank 1 waits for a message from rank 2, tag 4: nothing within 0\.1 s$"
    ):
        pending.wait(bound)
    assert time.monotonic() - begin >= 0.1
    with pytest.raises(mpicoll.Timeout, match="rank 1 probes for a message from any rank, tag None"):
        b.probe(None, None, bound)


def test_a_receive_is_still_posted_after_its_timeout() -> None:
    a, b = ends(2)
    into = room()
    pending = b.irecv(into, 0, 0)
    with pytest.raises(mpicoll.Timeout):
        pending.wait(0)
    a.send(data(5), 1, 0)
    assert pending.wait(0) == Envelope(0, 0, 1)
    assert into[0] == 5


# --- delay


def test_a_delayed_message_is_not_there_yet() -> None:
    a, b = ends(2, Delay(0.2, source=0))
    pending = b.irecv(into := room(), 0, 0)
    begin = time.monotonic()
    a.send(data(1), 1, 0)
    a.send(data(2), 1, 1)
    assert pending.test() is None
    assert b.iprobe(0, 1) is None
    assert into[0] == 0
    assert pending.wait(None) == Envelope(0, 0, 1)
    assert time.monotonic() - begin >= 0.2
    assert b.probe(0, 1, 5) == Envelope(0, 1, 1)


def test_a_delayed_message_outlives_its_sender() -> None:
    job = LocalJob(2, [Delay(0.1)], 5.0)
    a, b = transports(job)
    a.send(data(1), 1, 0)
    a.send(data(2), 1, 1)
    job.mark_dead(0)
    assert receive(b, 0, 0) == [1]
    assert b.probe(0, 1, None) == Envelope(0, 1, 1)
    assert receive(b, None, None) == [2]
    with pytest.raises(mpicoll.RankFailed):
        receive(b, 0)


def test_a_dropped_message() -> None:
    a, b = ends(2, Drop(nth=1))
    for value in range(3):
        a.send(data(value), 1, 0)
    assert [receive(b) for _ in range(2)] == [[0], [2]]
    assert b.iprobe(None, None) is None


# --- death


def test_kill() -> None:
    job = LocalJob(2, [Kill(0, nth=2)], 5.0)
    a, b = transports(job)
    a.send(data(1), 1, 0)
    a.send(data(2), 0, 0)
    with pytest.raises(Killed, match="rank 0 was killed before its message 2"):
        a.send(data(3), 1, 0)
    assert job.dead == {0}
    assert receive(b) == [1]
    with pytest.raises(
        mpicoll.RankFailed, match="rank 1 waits for a message from rank 0, tag None: rank 0 has exited"
    ) as error:
        receive(b, 0)
    assert error.value.ranks == (0,)
    with pytest.raises(Killed):
        a.send(data(4), 1, 0)


def test_a_wait_ends_when_the_peer_dies() -> None:
    job = LocalJob(3, timeout=20)
    _, b, c = transports(job)
    seen: list[str] = []

    def wait(end: LocalTransport, source: int | None) -> None:
        with pytest.raises(mpicoll.RankFailed) as error:
            end.recv(room(), source, 0)
        seen.append(str(error.value))

    one = threading.Thread(target=wait, args=(b, 0))
    anybody = threading.Thread(target=wait, args=(c, None))
    one.start()
    anybody.start()
    job.mark_dead(0)
    one.join()
    assert len(seen) == 1
    assert anybody.is_alive(), "rank 1 may still send"
    job.mark_dead(1)
    anybody.join()
    assert seen == [
        "rank 1 waits for a message from rank 0, tag 0: rank 0 has exited",
        "rank 2 waits for a message from any rank, tag 0: rank 0 has exited",
    ]


# --- groups


def together(*calls: object) -> list[object]:
    """Call each on a thread of its own."""
    results: list[object] = [None] * len(calls)

    def one(number: int, call: object) -> None:
        try:
            results[number] = call()  # type: ignore[operator]
        except mpicoll.MpicollError as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_groups_have_their_own_ranks_and_mailboxes() -> None:
    a, b, c = ends(3)
    first = together(lambda: a.group([2, 0]), lambda: c.group([2, 0]))
    again = together(lambda: a.group([2, 0]), lambda: c.group([2, 0]))
    assert [(end.rank, end.size) for end in first] == [(1, 2), (0, 2)]  # type: ignore[attr-defined]
    for number, group in enumerate((first, again)):
        group[0].send(data(number), 0, 0)  # type: ignore[attr-defined]
    a.send(data(9), 2, 0)
    assert [receive(end) for end in (again[1], first[1], c)] == [[1], [0], [9]]  # type: ignore[arg-type]
    assert b.iprobe(None, None) is None


def test_splits_of_splits_do_not_meet() -> None:
    four = ends(4)
    halves = together(*(lambda end=end: end.split(end.rank % 2, -end.rank) for end in four))
    assert [(half.rank, half.size) for half in halves] == [(1, 2), (1, 2), (0, 2), (0, 2)]  # type: ignore[attr-defined]
    quarters = together(*(lambda half=half: half.split(half.rank, 0) for half in halves))
    assert [(one.rank, one.size) for one in quarters] == [(0, 1)] * 4  # type: ignore[attr-defined]
    pairs = together(*(lambda half=half: half.split(None if half.rank else 0, 0) for half in halves))
    assert [pair is None for pair in pairs] == [True, True, False, False]


@pytest.mark.parametrize("make", [lambda end: end.split(0, 0), lambda end: end.group([0, 1])], ids=["split", "group"])
def test_a_meeting_that_a_dead_member_will_not_come_to(make: object) -> None:
    job = LocalJob(2, timeout=20)
    a, _ = transports(job)
    job.mark_dead(1)
    with pytest.raises(mpicoll.RankFailed, match="creation of a group: rank 1 has exited") as error:
        make(a)  # type: ignore[operator]
    assert error.value.ranks == (1,)


def test_a_meeting_with_a_late_rank() -> None:
    a, _ = ends(2, timeout=0.1)
    with pytest.raises(mpicoll.Timeout, match=r"creation of a group: nothing within 0\.1 s"):
        a.split(0, 0)


def test_nodes() -> None:
    assert [end.nodes for end in transports(LocalJob(3))] == [(0, 0, 0)] * 3
    assert transports(LocalJob(5), 2)[0].nodes == (0, 0, 1, 1, 2)


def test_what_it_is() -> None:
    (a,) = ends(1)
    assert (a.native, a.mpi, a.background, a.max_tag) == (None, None, True, 2**31 - 1)
