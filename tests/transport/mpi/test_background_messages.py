"""Messages that a thread of the extension moves."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.errors import TruncationError

pytestmark = [pytest.mark.mpi, pytest.mark.extension]

SECONDS = 30


@pytest.fixture
def end() -> Iterator[Any]:
    """This rank's end of a fresh transport."""
    from mpi4py import MPI

    from mpicoll.transport.mpi import duplicate

    made = duplicate(MPI.COMM_WORLD)
    yield made
    mpicoll.barrier()
    made.free()


@pytest.fixture
def queue(end: Any) -> Iterator[Any]:
    """Messages to and from each rank, this one included; a lane is a rank."""
    made = end.bind_background_messages(range(end.size))
    assert made is not None
    yield made
    made.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(1e-3)


def list_threads() -> list[Path]:
    """The folders in /proc of the threads that move messages."""
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return [name.parent for name in names if name.exists() and name.read_text() == "mpicoll-moving\n"]


def read_thread_seconds() -> float:
    """Seconds of a core that the thread has used."""
    (thread,) = list_threads()
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


def make_data(source: int, dest: int, number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng((source, dest, number)).integers(0, 256, nbytes, np.uint8)


def test_messages_between_all_ranks(end: Any, queue: Any) -> None:
    sizes = [0, 1, 700_000, 8, 300_000, 524_288, 524_288, 65_536]
    keys = [(peer, number) for peer in range(end.size) for number in range(len(sizes))]
    expected = {(peer, n): make_data(peer, end.rank, n, sizes[n]) for peer, n in keys}
    memory = {key: np.full(data.size, 77, np.uint8) for key, data in expected.items()}
    receives = {(peer, number): queue.recv(peer, memory[peer, number], number) for peer, number in memory}
    sends = []
    for number, size in enumerate(sizes):
        for peer in range(end.size):
            data = make_data(end.rank, peer, number, size)
            sends.append(queue.send(peer, data, number, in_turn=number % 4 != 3))
            del data  # the message keeps it
    for (peer, number), one in receives.items():
        assert one.wait(SECONDS) == (peer, number, sizes[number])
        assert one.test() == one.test()
        assert (memory[peer, number] == expected[peer, number]).all()
    for one in sends:
        one.wait(SECONDS)
    assert queue.left == 0
    assert queue.completed == 2 * len(receives)
    tally = dict.fromkeys(keys, 1)
    assert end.traffic.sent == end.traffic.received == tally


def test_posted_memory_costs_no_time(end: Any, queue: Any) -> None:
    """As little as a single byte: only one piece of a message is looked at."""

    def measure(nbytes: int) -> float:
        posted = [queue.recv(end.rank, np.empty(nbytes, np.uint8), number) for number in range(4)]
        wait_until(lambda: len(list_threads()) == 1)  # it names itself once it runs
        used = read_thread_seconds()
        time.sleep(0.25)
        used = read_thread_seconds() - used
        for one in posted:
            assert one.cancel() is None
        return used

    # A look takes several times as long where other processes have the cores: both are measured, and more than once.
    for _ in range(5):
        single, large = measure(1), measure((1 << 31) - 1)
        if large < 3 * single:
            return
    pytest.fail(f"the thread used {large} s for 8 GiB of posted memory, and {single} s for 4 bytes")


def test_sends_in_turn_arrive_in_order(end: Any, queue: Any) -> None:
    """Also where the first one is large, and the others would overtake it."""
    right, left = (end.rank + 1) % end.size, (end.rank - 1) % end.size
    sizes = [2_000_000, 300_000, 300_000, 300_000, 1, 1, 300_000, 300_000, 1]
    receives = [queue.recv(left, np.empty(size, np.uint8), number) for number, size in enumerate(sizes)]
    for number, size in enumerate(sizes):
        queue.send(right, np.empty(size, np.uint8), number, in_turn=True)
    begun = set()
    while len(begun) < len(sizes):
        seen = queue.completed
        done = {number for number, one in enumerate(receives) if one.test() is not None}
        # At most four are under way, and only of these one may overtake another.
        assert all(number < len(done) + 3 for number in done), done
        begun |= done
        queue.pause(seen, 1.0)
    wait_until(lambda: queue.left == 0)


def test_messages_move_while_the_program_holds_the_interpreter_lock(end: Any, queue: Any) -> None:
    right, left = (end.rank + 1) % end.size, (end.rank - 1) % end.size
    size = 400_000
    moved = False
    for _ in range(50):
        received = [queue.recv(left, np.empty(size, np.uint8), one) for one in range(6)]
        for one in range(6):
            queue.send(right, np.empty(size, np.uint8), one, in_turn=True)
        before = queue.left
        sum(range(2_000_000))  # in C, and with the lock
        moved = moved or queue.left < before
        for one in received:
            one.wait(SECONDS)
        wait_until(lambda: queue.left == 0)
        if mpicoll.allreduce(int(moved)) == end.size:
            break
    assert moved


def test_pauses_end_with_a_message_or_after_their_time(end: Any, queue: Any) -> None:
    seen = queue.completed
    begin = time.monotonic()
    queue.pause(seen, 0.05)
    assert 0.05 <= time.monotonic() - begin < SECONDS
    memory = np.zeros(1, np.uint8)
    queue.recv(end.rank, memory, 3)
    queue.send(end.rank, np.ones(1, np.uint8), 3)
    begin = time.monotonic()
    while not memory[0]:
        queue.pause(seen, SECONDS)
        seen = queue.completed
    assert time.monotonic() - begin < SECONDS


def test_a_cancelled_receive_takes_no_message(end: Any, queue: Any) -> None:
    right, left = (end.rank + 1) % end.size, (end.rank - 1) % end.size
    first, second = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    assert queue.recv(left, first, 5).cancel() is None
    assert end.list_posted_receives() == []
    assert end.traffic.received == {}
    mpicoll.barrier()
    later = queue.recv(left, second, 5)
    queue.send(right, np.full(4, 9, np.uint8), 5)
    assert later.wait(SECONDS) == (left, 5, 4)
    assert first.tolist() == [0] * 4
    assert second.tolist() == [9] * 4
    assert later.cancel() == (left, 5, 4), "it has arrived before"


def test_receives_that_several_threads_cancel(end: Any, queue: Any) -> None:
    """While the thread cancels some, others are cancelled."""
    each, several = 200, 8
    receives = [queue.recv(end.rank, np.zeros(200_000, np.uint8), tag) for tag in range(each * several)]
    begin, left = threading.Barrier(several), []

    def cancel(some: list[Any]) -> None:
        begin.wait(SECONDS)
        left.extend(one.cancel() for one in some)

    threads = [threading.Thread(target=cancel, args=(receives[at::several],)) for at in range(several)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert left == [None] * len(receives)


def test_memory_that_is_too_small(end: Any, queue: Any) -> None:
    if end.size < 2:
        pytest.skip("Open MPI does not report it of a message to this rank")
    right, left = (end.rank + 1) % end.size, (end.rank - 1) % end.size
    one = queue.recv(left, np.zeros(4, np.uint8), 6)
    queue.send(right, np.zeros(12, np.uint8), 6)
    for _ in range(2):
        with pytest.raises(TruncationError):
            one.wait(SECONDS)


def test_posted_receives_are_known(end: Any, queue: Any) -> None:
    left = (end.rank - 1) % end.size
    one = queue.recv(left, np.zeros(4, np.uint8), 7)
    assert end.list_posted_receives() == [(left, 7)]
    one.cancel()


def test_the_thread_ends_with_its_queue(end: Any) -> None:
    for stops in (True, False):
        queue = end.bind_background_messages([end.rank])
        assert len(list_threads()) == 0
        memory = np.zeros(1, np.uint8)
        received = queue.recv(0, memory, 8)
        queue.send(0, np.ones(1, np.uint8), 8, in_turn=True).wait(SECONDS)
        received.wait(SECONDS)
        assert len(list_threads()) == 1
        if stops:
            queue.stop()
            with pytest.raises(RuntimeError, match="no thread moves"):
                queue.send(0, memory, 8)
        del queue, received
        gc.collect()
        assert len(list_threads()) == 0


def test_a_forked_child_has_no_thread(end: Any, queue: Any) -> None:
    queue.recv(end.rank, np.zeros(1, np.uint8), 9)
    queue.send(end.rank, np.zeros(1, np.uint8), 9)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            queue.send(end.rank, np.zeros(1, np.uint8), 9)
        except RuntimeError:
            status = 0
        queue.pause(queue.completed, 60.0)
        queue.stop()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_invalid_arguments(end: Any, queue: Any) -> None:
    with pytest.raises(ValueError, match="no such lane"):
        queue.send(end.size, np.zeros(1, np.uint8), 0)
    with pytest.raises((BufferError, ValueError), match="read-only"):
        queue.recv(0, np.frombuffer(b"read only", np.uint8), 0)
    assert queue.left == 0
