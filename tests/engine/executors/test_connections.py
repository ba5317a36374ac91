"""Programs of the extension whose messages go over connections, of ranks that are threads here."""

from __future__ import annotations

import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mpicoll import schedules
from mpicoll.engine.core.arrays import displacements
from mpicoll.engine.executors import bound_schedule, compiled_schedule
from mpicoll.engine.executors.compiled_schedule import make_numbers
from mpicoll.engine.executors.step_layout import lay_out

if TYPE_CHECKING:
    from mpicoll._shm import Connection, StreamedProgram

pytestmark = pytest.mark.extension

MESSAGE, CREDIT = 0x6D706331, 0x6D706332


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bound_schedule, "PIECE", 64)
    lay_out.cache_clear()
    compiled_schedule.make_numbers.cache_clear()
    yield
    lay_out.cache_clear()
    compiled_schedule.make_numbers.cache_clear()


def _connect(one: int, other: int) -> tuple[tuple[int, Connection], tuple[int, Connection]]:
    """Return for rank `one` its connection with `other`, and the other way round."""
    from mpicoll._shm import Connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for sock in (dialled, accepted):
        sock.setblocking(False)
    return (other, Connection(dialled.detach())), (one, Connection(accepted.detach()))


def _make_program(
    connections: Sequence[tuple[int, Connection]], numbers: array[int], memory: np.ndarray[Any, Any], op: str = "sum"
) -> StreamedProgram:
    from mpicoll._shm import StreamedProgram

    flat = tuple(one for pair in connections for one in pair)
    return StreamedProgram(0, flat, (memory.ctypes.data, memory.nbytes), numbers, op, str(memory.dtype), 8, 4, 512, 0.1)


class _Thread(threading.Thread):
    """Begins all programs of a rank, with consecutive tags, and carries them out."""

    def __init__(self, programs: Sequence[StreamedProgram], first: int) -> None:
        super().__init__(daemon=True)
        self._programs, self._first = programs, first
        self.ended = False

    def run(self) -> None:
        for number, program in enumerate(self._programs):
            program.start((self._first + number) % (1 << 15))
        for number, program in enumerate(self._programs):
            for _ in range(300):
                if program.run(0.1, tuple(self._programs[number + 1 :])):
                    break
        self.ended = all(program.failure is None and program.run(0.0, ()) for program in self._programs)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "halving_doubling", "double_tree"])
def test_sums_of_several_programs_at_a_time(name: str, size: int) -> None:
    """Also where their tags begin again at 0."""
    algorithm = schedules.get("allreduce", name)
    plans = [algorithm.schedule(rank, size) for rank in range(size)]
    connections: list[list[tuple[int, Connection]]] = [[] for _ in range(size)]
    for one in range(size):
        for other in range(one):
            ends = _connect(one, other)
            connections[one].append(ends[0])
            connections[other].append(ends[1])
    rng = np.random.default_rng(size)
    data = [[rng.standard_normal(n) for n in (1000, 3, 4567, 64)] for _ in range(size)]
    want = [reduce(np.add, [one[k] for one in data]) for k in range(4)]
    threads = []
    for rank, schedule in enumerate(plans):
        programs = []
        for one in data[rank]:
            counts = np.full(schedule.chunks, one.size // schedule.chunks)
            counts[: one.size % schedule.chunks] += 1
            offsets = (tuple(displacements(counts.tolist())),)
            _, numbers = make_numbers(schedule, offsets, 8, True, ())
            programs.append(_make_program(connections[rank], numbers, one))
        threads.append(_Thread(programs, (1 << 15) - 2))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert thread.ended
    for k, total in enumerate(want):
        for one in data:
            np.testing.assert_allclose(one[k], total, rtol=1e-12)
            np.testing.assert_array_equal(one[k], data[0][k])


# --- what the other end does


RECEIVE = array("q", (1, 0, 0, 0, 1, 0, 1, 0, -1, 1, 1, 0, 0, 64, 0))
"""A plan: 64 bytes from rank 1, over the connection."""

SEND = array("q", (1, 0, 0, 0, 1, 0, 1, 1, -1, 1, 1, 0, 0, 64, 0))


class _End:
    """A program of rank 0 on the memory `memory`, and rank 1's end of its connection, a socket."""

    def __init__(self, numbers: array[int]) -> None:
        from mpicoll._shm import Connection

        own, self.other = socket.socketpair()
        own.setblocking(False)
        self.other.settimeout(10)
        self.memory = np.zeros(8)
        self._numbers, self.connection = numbers, Connection(own.detach())
        self.program = self.make_program()

    def make_program(self) -> StreamedProgram:
        return _make_program([(1, self.connection)], self._numbers, self.memory, "")


@pytest.fixture
def make_end() -> Iterator[Callable[[array[int]], _End]]:
    with ExitStack() as opened:

        def make(numbers: array[int]) -> _End:
            end = _End(numbers)
            opened.enter_context(end.other)
            return end

        yield make


def _frame(kind: int, tag: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("=IiQ", kind, tag, count) + body


def test_frames_that_arrive_in_parts(make_end: Callable[[array[int]], _End]) -> None:
    end = make_end(RECEIVE)
    other, program, memory = end.other, end.program, end.memory
    program.start(5)
    assert other.recv(100) == _frame(CREDIT, 5, 1)
    text = _frame(MESSAGE, 5, 64, np.arange(8.0).tobytes())
    for at in range(len(text)):
        assert not program.advance()
        other.sendall(text[at : at + 1])
    assert program.run(10.0, ())
    np.testing.assert_array_equal(memory, np.arange(8.0))


def test_a_message_waits_for_its_credit(make_end: Callable[[array[int]], _End]) -> None:
    end = make_end(SEND)
    other, program, memory = end.other, end.program, end.memory
    memory[:] = 3.0
    other.sendall(_frame(CREDIT, 6, 1) + _frame(CREDIT, 4, 1))
    program.start(5)
    assert not program.run(0.05, ())  # those are for an earlier and a later program
    other.sendall(_frame(CREDIT, 5, 1))
    assert program.run(10.0, ())
    assert other.recv(100) == _frame(MESSAGE, 5, 64, memory.tobytes())
    program.start(6)
    assert program.run(10.0, ())
    assert other.recv(100) == _frame(MESSAGE, 6, 64, memory.tobytes())
    program.start(4)
    assert not program.run(0.05, ())


def test_messages_for_an_abandoned_program_are_dropped(make_end: Callable[[array[int]], _End]) -> None:
    end = make_end(RECEIVE)
    other, program, memory = end.other, end.program, end.memory
    program.start(5)
    other.sendall(_frame(MESSAGE, 5, 64, bytes(10)))
    assert not program.run(0.05, ())
    program.abandon()
    assert program.failure is not None
    other.sendall(bytes(54))
    again = end.make_program()
    again.start(6)
    other.sendall(_frame(MESSAGE, 6, 64, np.ones(8).tobytes()))
    assert again.run(10.0, ())
    np.testing.assert_array_equal(memory, np.ones(8))


def test_messages_of_another_size(make_end: Callable[[array[int]], _End]) -> None:
    end = make_end(RECEIVE)
    other, program = end.other, end.program
    program.start(5)
    other.sendall(_frame(MESSAGE, 5, 70, bytes(70)))
    assert program.run(10.0, ())
    assert program.failure == (0, 1, 64, 70)


def test_connections_that_are_lost_or_carry_something_else(make_end: Callable[[array[int]], _End]) -> None:
    ends = [make_end(RECEIVE) for _ in range(4)]
    programs = [end.program for end in ends]
    for number, program in enumerate(programs):
        program.start(number)
    # A rank that has sent all it had to may close its connection, while another one is late.
    early, late = make_end(RECEIVE), make_end(RECEIVE)
    both = array("q", (2, 0, 0, 0, 1, 0, 2, 0, -1, 1, 1, 0, 0, 32, 0, 0, 1, 0, 1, 0, -1, 1, 1, 0, 32, 64, 0))
    survivor = _make_program([(1, early.connection), (2, late.connection)], both, early.memory, "")
    survivor.start(9)
    early.other.sendall(_frame(MESSAGE, 9, 32, np.full(4, 1.0).tobytes()))
    early.other.close()
    ends[0].other.close()
    ends[1].other.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    ends[2].other.sendall(_frame(CREDIT, 2, 1 << 40))
    ends[3].other.sendall(_frame(MESSAGE, 1 << 15, 64))
    assert not programs[0].run(0.5, (*programs[1:], survivor))  # the death of the rank would be reported meanwhile
    failures = []
    limit = time.monotonic() + 20
    for program in programs:
        while not program.run(0.1, (survivor,)):
            assert time.monotonic() < limit
        assert program.failure is not None
        failures.append(program.failure[:2])
    assert failures[0][0] < 0
    assert {peer for _, peer in failures} == {1}
    assert failures[1] == failures[2] == failures[3]
    assert not survivor.run(0.05, ())
    late.other.sendall(_frame(MESSAGE, 9, 32, np.full(4, 2.0).tobytes()))
    assert survivor.run(10.0, ())
    assert survivor.failure is None
    np.testing.assert_array_equal(early.memory, np.repeat([2.0, 1.0], 4))
