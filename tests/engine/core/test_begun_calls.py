"""Nonblocking collectives that are begun in the thread of their caller."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import begun_programs
from support.launch import mpirun
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.diagnostics.flight_recorder import COMPARED_BY_EXECUTOR, Call

pytestmark = pytest.mark.extension

MOST = 8
"""Number of calls that may be begun and not completed."""

DEFERRED = 40_000
"""Number of elements of a call of which nothing is done before it is completed."""

both = pytest.mark.parametrize("count", [3, DEFERRED])


@contextmanager
def communicator() -> Iterator[mpicoll.Communicator]:
    """A communicator on which the calls of :func:`begin` are begun. Collective."""
    comm = mpicoll.world().duplicate()
    for count, op in ((3, "sum"), (2000, "sum"), (DEFERRED, "sum"), (3, "max"), (DEFERRED, "max")):
        for _ in range(2):
            mpicoll.iallreduce(np.ones(count), op, comm=comm).wait()
    yield comm
    comm.free()


def begin(comm: mpicoll.Communicator, value: float = 1.0, count: int = 3, op: str = "sum", **kwargs: Any) -> Any:
    """Begin a call, in this thread. On a busy machine, the thread of the queue may carry out an earlier one: then it
    carries out this one, too."""
    request = mpicoll.iallreduce(np.full(count, float(value)), op, comm=comm, **kwargs)
    assert is_begun(request) or comm._core.queue._worker is not None
    return request


def is_begun(request: mpicoll.Request) -> bool:
    return type(request._handle).__name__ == "BegunCall"


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@both
def test_results(several: Ranks, count: int) -> None:
    def body() -> None:
        with communicator() as comm:
            for turn in range(40):
                out = np.zeros(count)
                request = begin(comm, turn, count, out=out)
                assert request.wait() is out
                assert (out == turn * comm.size).all()
                assert request.wait() is out
                assert request.test()

    several(body)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("mismatches", [0.0, 0.2])
def test_random_programs(several: Ranks, seed: int, mismatches: float) -> None:
    """On the world and a part of it, with ranks that are late, and call other collectives than the others."""

    def body() -> str:
        world = mpicoll.world()
        comms = [world.duplicate(), world.split(world.rank % 2)]
        steps = begun_programs.draw(seed, world.size, 200, mismatches=mismatches, comms=2)
        wrong = begun_programs.run(seed, steps, comms, sleep=0.003)
        for comm in comms:
            comm.free()
        return wrong

    assert [wrong for wrong in several(body) if wrong] == []


def test_calls_after_blocking_ones(several: Ranks) -> None:
    """A call like earlier blocking ones is begun, also where no other nonblocking one came before."""

    def body() -> None:
        comm = mpicoll.world().duplicate()
        for _ in range(3):
            mpicoll.allreduce(np.ones(3), comm=comm)
        assert mpicoll.iallreduce(np.ones(3), comm=comm).wait().tolist() == [comm.size] * 3
        assert begin(comm, 2).wait().tolist() == [2 * comm.size] * 3
        comm.free()

    several(body)


@pytest.mark.parametrize("counts", [(3, 3), (DEFERRED, DEFERRED), (3, DEFERRED), (DEFERRED, 3)])
def test_several_are_outstanding(several: Ranks, counts: tuple[int, int]) -> None:
    def body() -> None:
        with communicator() as comm:
            comm._core.queue.background = False  # nothing is completed before the first wait
            for order in (1, -1):
                requests = [begin(comm, turn, counts[turn % 2]) for turn in range(MOST)]
                for turn in range(MOST)[::order]:
                    assert (requests[turn].wait() == turn * comm.size).all()
                mpicoll.barrier(comm=comm)

    several(body)


def test_queue_takes_what_would_have_to_wait(several: Ranks) -> None:
    """Here the other ranks have not begun yet."""

    def body() -> None:
        with communicator() as comm:
            if comm.rank == 0:
                small = [begin(comm, turn) for turn in range(MOST)]
                small.append(mpicoll.iallreduce(np.full(3, float(MOST)), comm=comm))
                assert not is_begun(small[-1])
                mpicoll.send(np.zeros(1), 1)
            else:
                if comm.rank == 1:
                    mpicoll.recv(np.zeros(1), 0)
                small = [mpicoll.iallreduce(np.full(3, float(turn)), comm=comm) for turn in range(MOST + 1)]
            assert [one.wait()[0] for one in small] == [turn * comm.size for turn in range(MOST + 1)]

    several(body)


@both
def test_calls_on_the_same_array(several: Ranks, count: int) -> None:
    """Each reads what the one before has written, as in the queue."""

    def body() -> None:
        with communicator() as comm:
            x = np.ones(count)
            requests = [mpicoll.iallreduce(x, out=x, comm=comm) for _ in range(4)]
            assert (requests[-1].wait() == comm.size**4).all()
            out = np.zeros(count)
            requests = [mpicoll.iallreduce(np.full(count, turn + 1.0), out=out, comm=comm) for turn in range(4)]
            mpicoll.waitall(requests)
            assert (out == 4 * comm.size).all()

    several(body)


@both
def test_blocking_and_begun_calls_meet(several: Ranks, count: int) -> None:
    def body() -> None:
        with communicator() as comm:
            for turn in range(2 * comm.size):
                x = np.full(count, float(turn))
                if turn % comm.size == comm.rank:
                    assert (mpicoll.allreduce(x, comm=comm) == turn * comm.size).all()
                else:
                    assert (begin(comm, turn, count).wait() == turn * comm.size).all()

    several(body)


def test_call_behind_a_large_one_is_deferred(several: Ranks) -> None:
    """Its data would be where that of the large one lies. It has no number yet."""

    def body() -> None:
        with communicator() as comm:
            mpicoll.barrier(comm=comm)
            calls = comm._core.queue.calls
            assert calls is not None
            comm._core.queue.background = False  # nothing is completed before the first wait
            if comm.rank == 0:
                requests = [begin(comm, 1.0, 2000), begin(comm, 2.0), begin(comm, 3.0, DEFERRED)]
                assert (calls.begun, calls.deferred) == (3, 2)
                first = requests[0]._handle.number
                assert [one._handle.number for one in requests] == [first, first + 1, first + 2]
                mpicoll.send(np.zeros(1), 1)
            else:
                if comm.rank == 1:
                    mpicoll.recv(np.zeros(1), 0)
                requests = [begin(comm, value, count) for count, value in ((2000, 1.0), (3, 2.0), (DEFERRED, 3.0))]
            assert [one.wait()[0] for one in requests] == [comm.size, 2.0 * comm.size, 3.0 * comm.size]
            assert (calls.begun, calls.deferred) == (0, 0)
            last = [begin(comm, 1.0, DEFERRED), begin(comm)]
            numbers = [one._handle.number for one in last]
            mpicoll.waitall(last)
            assert [one._handle.number for one in last] == numbers

    several(body)


@both
@pytest.mark.parametrize("op", ["sum", "max"])
def test_other_ranks_need_no_wait_of_this_one(several: Ranks, op: str, count: int) -> None:
    """Where the calls differ (max), all ranks have to take part in the comparison. A deferred call is carried out by
    the thread of the queue."""

    def body() -> None:
        with communicator() as comm:
            first = comm.rank == 0
            request = begin(comm, comm.rank + 1.0, count, op="sum" if first else op)
            if first:
                for source in range(1, comm.size):
                    mpicoll.recv(np.zeros(1), source, comm=comm)
            _wait(request, comm, op)
            if not first:
                mpicoll.send(np.zeros(1), 0, comm=comm)
            assert begin(comm).wait()[0] == comm.size

    several(body)


def _wait(request: Any, comm: mpicoll.Communicator, op: str) -> None:
    if op == "sum":
        assert request.wait()[0] == sum(range(1, comm.size + 1))
    else:
        with pytest.raises(mpicoll.MismatchError, match="they differ in op"):
            request.wait()


@both
def test_test_completes(several: Ranks, count: int) -> None:
    def body() -> None:
        with communicator() as comm:
            requests = [begin(comm, turn, count) for turn in range(3)]
            until(requests[2].test)
            assert [one.wait()[0] for one in requests] == [turn * comm.size for turn in range(3)]
            requests = [begin(comm, 1.0, count, op="max" if comm.rank else "sum"), begin(comm, 2.0)]
            until(requests[1].test)
            with pytest.raises(mpicoll.MismatchError):
                requests[0].wait()
            assert requests[1].wait()[0] == 2.0 * comm.size

    several(body)


@both
@pytest.mark.parametrize("blocking", [False, True])
def test_calls_after_one_that_differs(several: Ranks, blocking: bool, count: int) -> None:
    def body() -> list[str]:
        texts = []
        with communicator() as comm:
            for turn in range(3):
                odd = comm.rank == turn % comm.size
                calls = ["sum", "max" if odd else "sum", "sum", "max", "sum"]
                requests = [begin(comm, float(number), count, op) for number, op in enumerate(calls[:2])]
                if blocking and odd:
                    requests[0].wait()
                    with pytest.raises(mpicoll.MismatchError):
                        requests[1].wait()
                requests += [begin(comm, float(number), count, op) for number, op in enumerate(calls) if number > 1]
                with pytest.raises(mpicoll.MismatchError, match="they differ in op") as found:
                    requests[1].wait()
                texts.append(str(found.value))
                del requests[1]
                assert [one.wait()[0] for one in requests] == [0.0, 2.0 * comm.size, 3.0, 4.0 * comm.size]
        return texts

    assert len({tuple(texts) for texts in several(body)}) == 1


def test_failure_of_a_blocking_call(several: Ranks) -> None:
    """All ranks leave that operation, and those that were begun after it are carried out."""

    def fail() -> None:
        raise ZeroDivisionError

    def body() -> None:
        with communicator() as comm:
            if comm.rank == 0:
                arena, call = comm._core.arena(), Call("a failure")
                assert arena is not None
                call.signature = COMPARED_BY_EXECUTOR
                with pytest.raises(ZeroDivisionError):
                    comm._core.queue.run(lambda: arena.run(lambda x, out: None, 1, load=fail), call)
            else:
                first = begin(comm)
                second = begin(comm, 5.0)
                with pytest.raises(mpicoll.CommunicationError, match="rank 0 failed in this operation"):
                    first.wait()
                assert second.wait()[0] == 5.0 * comm.size
                return
            assert begin(comm, 5.0).wait()[0] == 5.0 * comm.size

    several(body)


def test_rank_that_ends_before_it_begins() -> None:
    def body() -> None:
        with suppress(mpicoll.CommunicationError), communicator() as comm:
            if comm.rank == 1:
                raise SystemExit
            request = begin(comm)
            with pytest.raises(mpicoll.CommunicationError):
                request.wait()
            with pytest.raises(mpicoll.CommunicationError):
                request.wait()
            with pytest.raises(mpicoll.CommunicationError):
                mpicoll.iallreduce(np.ones(3), comm=comm).wait()


@both
def test_timeout_of_the_communicator(count: int) -> None:
    """The rank that stops waiting can't be synchronised any more, which late ranks see in each of its calls."""
    late = threading.Event()

    def body() -> None:
        with suppress(mpicoll.CommunicationError), communicator() as comm:
            if comm.rank == 0:
                comm.timeout = 0.3
                requests = [begin(comm, 1.0, count), begin(comm)]
                with pytest.raises(mpicoll.Timeout, match=r"allreduce.*rank 1"):
                    requests[0].wait()
                with pytest.raises(mpicoll.CommunicationError, match="was abandoned"):
                    requests[1].wait()
                late.set()
            else:
                assert late.wait(20)
                requests = [begin(comm, 1.0, count), begin(comm)]
                for request in requests:
                    with pytest.raises(mpicoll.CommunicationError):
                        request.wait()

    mpicoll.run_local(body, 2)


@both
def test_wait_with_a_timeout(several: Ranks, count: int) -> None:
    def body() -> None:
        with communicator() as comm:
            if comm.rank == 0:
                requests = [begin(comm, 1.0, count), begin(comm)]
                with pytest.raises(mpicoll.Timeout, match=r"allreduce.*pending"):
                    requests[1].wait(0.02)
                for dest in range(1, comm.size):
                    mpicoll.send(np.zeros(1), dest)
            else:
                mpicoll.recv(np.zeros(1), 0)
                requests = [begin(comm, 1.0, count), begin(comm)]
            assert [one.wait(20)[0] for one in requests] == [comm.size] * 2

    several(body)


def test_signal_handlers_in_a_wait(tmp_path: Path) -> None:
    """One that raises does so when the call has completed, as the other ranks have its data. One that calls a blocking
    collective, which would wait forever, gets an error."""
    script = tmp_path / "program.py"
    script.write_text("""
import signal, numpy as np, mpicoll
world = mpicoll.world()
comm = world.duplicate()
for _ in range(2):
    mpicoll.iallreduce(np.ones(3), comm=comm).wait()

class Interrupted(Exception):
    pass

def raise_error(*args):
    mpicoll.send(np.zeros(1), 1)
    raise Interrupted

def call(*args):
    try:
        mpicoll.allreduce(np.ones(3), comm=comm)
    except mpicoll.CommunicatorError as error:
        errors.append(error)
    mpicoll.send(np.zeros(1), 1)

errors = []
for handler in (raise_error, call):
    if world.rank:
        mpicoll.recv(np.zeros(1), 0)
    requests = [mpicoll.iallreduce(np.ones(3), comm=comm) for _ in range(2)]
    assert type(requests[0]._handle).__name__ == "BegunCall"
    if world.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            requests[0].wait()
        except Interrupted:
            assert handler is raise_error
        else:
            assert handler is call and len(errors) == 1, errors
    for request in requests:
        assert request.wait().tolist() == [2.0] * 3
print("done")
""")
    done = mpirun(2, script, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n" * 2)


@both
def test_dropped_requests_and_communicators(several: Ranks, count: int) -> None:
    def body() -> None:
        with communicator() as comm:
            out = np.zeros((3, count))
            for row in out:
                begin(comm, 1.0, count, out=row)
            mpicoll.barrier(comm=comm)
            assert (out == comm.size).all()
        comm = mpicoll.world().duplicate()
        for _ in range(2):
            mpicoll.iallreduce(np.ones(count), comm=comm).wait()
        request = begin(comm, 1.0, count)
        del comm
        gc.collect()
        assert request.wait()[0] == mpicoll.world().size

    several(body)


def test_free_completes(several: Ranks) -> None:
    def body() -> None:
        with communicator() as comm:
            requests = [begin(comm), begin(comm, op="max" if comm.rank else "sum")]
        assert requests[0].wait()[0] == comm.size
        with pytest.raises(mpicoll.MismatchError):
            requests[1].wait()

    several(body)


def test_end_of_a_program(tmp_path: Path) -> None:
    """No rank waits; an error that was not retrieved ends the job; a child that was forked completes nothing."""
    script = tmp_path / "program.py"
    script.write_text("""
import os, sys, numpy as np, mpicoll
world = mpicoll.world()
for _ in range(2):
    mpicoll.iallreduce(np.ones(3)).wait()
    mpicoll.iallreduce(np.ones(3), "max").wait()
for first in range(2):
    if world.rank != first:
        mpicoll.recv(np.zeros(1), first)  # until then the call can't complete
    request = mpicoll.iallreduce(np.ones(3))
    if world.rank == first:
        if os.fork() == 0:
            assert not request.test()
            for call in request.wait, mpicoll.iprobe:
                try:
                    call()
                except mpicoll.CommunicatorError:
                    continue
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        mpicoll.send(np.zeros(1), 1 - first)
    request.wait()
mpicoll.iallreduce(np.ones(3), "max" if world.rank == int(sys.argv[1]) else "sum")
""")
    assert mpirun(2, script, "2", cwd=tmp_path).returncode == 0
    done = mpirun(2, script, "1", cwd=tmp_path)
    assert done.returncode != 0
    assert "its error was not retrieved" in done.stdout


def test_rank_that_dies(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("""
import os, signal, numpy as np, mpicoll
world = mpicoll.world()
for _ in range(2):
    mpicoll.iallreduce(np.ones(3)).wait()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
mpicoll.iallreduce(np.ones(3)).wait()
""")
    begin = time.monotonic()
    done = mpirun(2, script, cwd=tmp_path)
    assert done.returncode != 0
    assert time.monotonic() - begin < 20


@both
def test_abandoned_queue(count: int) -> None:
    def body() -> None:
        with suppress(mpicoll.CommunicationError, mpicoll.CommunicatorError), communicator() as comm:
            requests = [begin(comm, 1.0, count)] if comm.rank == 0 else []
            comm._core.queue.abandon()
            for request in requests:
                with pytest.raises(mpicoll.CommunicatorError, match="abandoned"):
                    request.wait()

    mpicoll.run_local(body, 2)
