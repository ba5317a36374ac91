"""The queue of a communicator: order, threads, failures, bounds."""

from __future__ import annotations

import gc
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.garbage import collect_during, make_garbage
from support.ranks import Ranks

import mpicoll
from mpicoll.engine.core import queue as queue_module
from mpicoll.engine.core.queue import OperationQueue
from mpicoll.engine.core.queued_operation import QueuedOperation
from mpicoll.engine.diagnostics.flight_recorder import Call, Group
from mpicoll.transport import local

WHAT = Call("a test of the queue")


@pytest.fixture
def queue() -> Iterator[OperationQueue]:
    one = OperationQueue(Group("0.0", "test", (0,), 0, 60.0), None, background=True, explain=lambda error: error)
    yield one
    worker = one._worker
    one.stop()
    if worker is not None:
        worker.join(20)
        assert not worker.is_alive()


def lazy() -> OperationQueue:
    """A queue without a worker."""
    return OperationQueue(Group("0.0", "test", (0,), 0, 60.0), None, background=False, explain=lambda error: error)


def fail() -> None:
    raise ZeroDivisionError("of the operation")


def lose() -> None:
    raise mpicoll.CommunicationError("lost")


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def truncate() -> None:
    raise mpicoll.TruncationError("rank 0: a message of 9 bytes does not fit")


def test_a_truncation_names_the_operation_and_a_remedy(queue: OperationQueue) -> None:
    call = Call("allreduce", 8, "float64", (1,), op="sum")
    with pytest.raises(mpicoll.TruncationError) as caught:
        queue.run(truncate, call)
    job = queue.submit(truncate, call)
    queue.wait_until_done(job, None)
    for number, error in ((1, caught.value), (2, job.error)):
        assert str(error).startswith(
            f"allreduce(float64[1], op=sum) number {number} on test, rank 0 of 1: rank 0: a message of 9 bytes does"
            " not fit. Pass the same shape and dtype on all ranks, or counts="
        )


# --- order


def test_first_in_first_out(queue: OperationQueue) -> None:
    gate = threading.Event()
    order: list[int] = []
    jobs = [queue.submit(lambda: gate.wait(20), WHAT)]
    jobs += [queue.submit(lambda number=number: order.append(number), WHAT) for number in range(100)]
    assert order == []
    gate.set()
    queue.run(lambda: order.append(-1), WHAT)
    assert order == [*range(100), -1]
    assert all(job.done for job in jobs)


def test_a_waiting_thread_runs_the_head_and_the_worker_stays_away() -> None:
    queue = lazy()
    threads: list[str] = []
    jobs = [queue.submit(lambda: threads.append(threading.current_thread().name), WHAT) for _ in range(3)]
    jobs[2].wait(None)
    assert threads == [threading.current_thread().name] * 3


def test_calls_from_many_threads(queue: OperationQueue) -> None:
    """Each thread's operations run in its order, and never two at once. For blocking ones the threads take turns."""
    busy, turn = threading.Lock(), threading.Lock()
    seen: list[tuple[int, int]] = []
    wrong: list[BaseException] = []

    def operation(thread: int, number: int) -> tuple[int, int]:
        assert busy.acquire(blocking=False), "two operations at once"
        seen.append((thread, number))
        busy.release()
        return thread, number

    def caller(thread: int) -> None:
        jobs: list[QueuedOperation] = []
        for number in range(200):
            if number % 7 == 0:
                with turn:
                    assert queue.run(operation, WHAT, thread, number) == (thread, number)
            else:
                jobs.append(queue.submit(lambda number=number: operation(thread, number), WHAT))
            if number % 10 == 9:
                jobs[-1].wait(None if thread % 2 else 20)
        for job in jobs:
            thread_of, _ = job.wait(None)
            assert thread_of == thread

    def checked(thread: int) -> None:
        try:
            caller(thread)
        except BaseException as error:  # noqa: BLE001  raised on the test's thread
            wrong.append(error)

    threads = [threading.Thread(target=checked, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    assert len(seen) == 8 * 200
    for thread in range(8):
        assert [number for which, number in seen if which == thread] == list(range(200))


# --- threads and handlers in each other's way

BESIDE = r"^{} on .*, rank 0: thread Main calls it while .*Other.* is in {} on the same communicator.*duplicate\(\)"


@pytest.mark.parametrize("kind", ["call", "kept", "plan", "split", "traced"])
def test_two_threads_in_blocking_collectives_are_an_error(kind: str, tmp_path: Path) -> None:
    """On the thread that comes second, before a message leaves; the first goes on, and so does the communicator."""
    begun = threading.Event()

    def body() -> None:
        world, x = mpicoll.world(), np.ones(3)
        plan = mpicoll.allreduce_init(x)
        calls: dict[str, Callable[[], Any]] = {"plan": plan, "split": lambda: world.split(0)}
        call = calls.get(kind, lambda: mpicoll.allreduce(x, comm=world))
        if kind == "kept":
            call()
        if world.rank == 1:
            assert begun.wait(20)
            call()
        else:
            threading.current_thread().name = "Main"
            number = world._core.queue.number
            other = threading.Thread(target=call, name="Other")
            other.start()
            until(lambda: world._core.queue.current is not None)
            what = r"split\(\)" if kind == "split" else r"allreduce\(.*"
            words = BESIDE.format("{}", rf"{what} number {number + 1}")
            for again, name in ((call, what), (partial(mpicoll.bcast, x, comm=world), r"bcast\(.*")):
                with pytest.raises(mpicoll.CommunicatorError, match=words.format(name)):
                    again()
            begun.set()
            other.join(20)
        assert mpicoll.allreduce(1, comm=world) == 2

    def traced() -> None:
        with mpicoll.trace(tmp_path) if kind == "traced" else nullcontext():
            body()

    mpicoll.run_local(traced, 2, timeout=20)


def test_of_two_threads_that_wait_for_a_background_operation_the_second_gets_an_error(queue: OperationQueue) -> None:
    """While it runs, a blocking call waits for its turn, and a second thread may wait for it."""
    gate = threading.Event()
    job = queue.submit(lambda: gate.wait(20), WHAT)
    values: list[object] = []
    first = threading.Thread(target=lambda: values.append(queue.run(lambda: "ran", WHAT)), name="Other")
    helper = threading.Thread(target=lambda: values.append(job.wait(None)))
    first.start()
    helper.start()
    until(lambda: bool(queue._behind))
    with pytest.raises(
        mpicoll.CommunicatorError, match=r"while thread Other is in a test of the queue\(\) on the same"
    ):
        queue.run(fail, WHAT)
    gate.set()
    first.join(20)
    helper.join(20)
    assert sorted(map(str, values)) == ["True", "ran"]
    assert queue.run(lambda: "goes on", WHAT) == "goes on"


@pytest.mark.parametrize("outer", ["run", "job", "callback"])
@pytest.mark.parametrize("inner", ["run", "wait", "after", "close"])
def test_an_operation_in_the_middle_of_another_is_an_error(outer: str, inner: str) -> None:
    """It could only wait for itself: in a signal's handler, a function of the program, a callback."""
    queue = lazy()
    inners: dict[str, Callable[[], object]] = {
        "run": lambda: queue.run(lambda: None, Call("inner")),
        "wait": lambda: queue.submit(lambda: None, Call("inner")).wait(None),
        "after": lambda: queue.run_after_pending(lambda: None, Call("inner")),
        "close": queue.close,
    }
    caught: list[str] = []

    def operation() -> None:
        previous = signal.signal(signal.SIGUSR1, lambda *_: inners[inner]())
        try:
            with pytest.raises(mpicoll.CommunicatorError, match="called in the middle of") as error:
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        caught.append(str(error.value))

    if outer == "run":
        queue.run(operation, WHAT)
    elif outer == "job":
        queue.submit(operation, WHAT).wait(None)
    else:
        job = queue.submit(lambda: None, WHAT)
        job.add_done_callback(lambda _: operation())
        job.wait(None)
    running = "an operation" if outer == "callback" else r"a test of the queue\(\) number 1"
    (words,) = caught
    what = {
        "run": r"inner\(\)",
        "wait": r"wait\(\) for inner\(\)",
        "after": r"inner\(\)",
        "close": r"free\(\)",
    }[inner]
    assert re.match(
        rf"{what} on test \(1 ranks\), rank 0: called in the middle of {running} on the same .*\(MainThread\)", words
    )
    assert queue.run(lambda: "goes on", WHAT) == "goes on"


def test_order_of_blocking_and_background_calls_is_that_of_the_calls(several: Ranks) -> None:
    """Which rank blocks for which operation differs; that they match shows in the values."""

    def main() -> None:
        rank, size = mpicoll.world().rank, mpicoll.world().size
        pending = []
        for number in range(60):
            x = np.full(3, number * (rank + 1))
            if (number + rank) % 3 == 0:
                assert mpicoll.allreduce(x)[0] == number * size * (size + 1) // 2
            else:
                pending.append((number, mpicoll.iallreduce(x)))
        for number, request in pending[::-1]:
            assert request.wait()[0] == number * size * (size + 1) // 2

    several(main)


def test_many_threads_of_one_rank() -> None:
    """Under run_local a rank's own threads use its communicator by name."""

    def main() -> None:
        world = mpicoll.world()
        values: list[float] = []

        def caller() -> None:
            requests = [mpicoll.iallreduce(np.full(5, 2.0), comm=world) for _ in range(25)]
            values.extend(value[0] for value in mpicoll.waitall(requests))

        threads = [threading.Thread(target=caller) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert values == [2.0 * world.size] * 100

    mpicoll.run_local(main, 3, timeout=20)


# --- failures


def test_a_failure_is_raised_at_each_wait(queue: OperationQueue) -> None:
    job = queue.submit(fail, WHAT)
    after = queue.submit(lambda: "still runs", WHAT)
    for timeout in (20, None, 0):
        with pytest.raises(ZeroDivisionError, match="of the operation"):
            job.wait(timeout)
    assert after.wait(20) == "still runs"
    assert job.test()


def test_a_failure_whose_text_can_not_be_made(queue: OperationQueue) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def mute() -> None:
        raise Mute

    with pytest.raises(Mute):
        queue.run(mute, WHAT)
    with pytest.raises(Mute):
        queue.submit(mute, WHAT).wait(20)
    unretrieved = queue.submit(mute, WHAT)
    with pytest.raises(mpicoll.CommunicationError, match=rf"^lost\. Before, {re.escape(str(unretrieved))}, .*: Mute$"):
        queue.run(lose, WHAT)


def test_failures_are_explained() -> None:
    group = Group("0.0", "test", (0,), 0, 60.0)
    queue = OperationQueue(
        group, None, background=False, explain=lambda error: mpicoll.CommunicationError(f"so: {error}")
    )
    with pytest.raises(mpicoll.CommunicationError, match="so: of the operation"):
        queue.submit(fail, WHAT).wait(None)
    with pytest.raises(mpicoll.CommunicationError, match="so: of the operation") as caught:
        queue.run(fail, WHAT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failure_without_a_waiting_caller_is_logged(queue: OperationQueue, caplog: pytest.LogCaptureFixture) -> None:
    queue.submit(fail, WHAT)
    assert queue.drain(20)
    with caplog.at_level(logging.ERROR, logger="mpicoll"):
        gc.collect()
        until(lambda: bool(gc.collect() or caplog.records))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mpicoll", "ERROR")
    assert record.getMessage() == "a test of the queue() on test (1 ranks) failed, and its error was not retrieved"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_failure_that_was_waited_for_is_not_logged(queue: OperationQueue, caplog: pytest.LogCaptureFixture) -> None:
    job = queue.submit(fail, WHAT)
    with pytest.raises(ZeroDivisionError):
        job.wait(20)
    del job
    gc.collect()
    assert caplog.records == []


def test_a_lost_message_shows_at_wait(caplog: pytest.LogCaptureFixture) -> None:
    def main() -> None:
        request = mpicoll.iallreduce(np.ones(3))
        for _ in range(2):
            with pytest.raises((mpicoll.Timeout, mpicoll.RankFailed), match=r"allreduce/.* round 1") as caught:
                request.wait()
            assert f"on rank {mpicoll.world().rank} of 2" in str(caught.value)
        del request, caught

    mpicoll.run_local(main, 2, faults=[local.Drop(count=100)], timeout=0.2)
    gc.collect()
    assert caplog.records == []


def test_an_interrupt_reaches_the_thread_that_it_is_meant_for() -> None:
    queue = lazy()

    def interrupted() -> None:
        raise KeyboardInterrupt

    job = queue.submit(interrupted, WHAT)
    with pytest.raises(KeyboardInterrupt):
        queue.run(lambda: None, WHAT)
    assert job.done
    assert queue.run(lambda: "goes on", WHAT) == "goes on"
    job.reported = True


def test_an_interrupt_that_was_kept_until_the_end_is_not_the_outcome() -> None:
    """As one in the comparison of calls, where all ranks have begun the operation."""

    class Interrupted(BaseException):
        pass

    queue, interrupts = lazy(), [Interrupted()]
    queue.match = lambda call: interrupts.pop() if interrupts else None
    job = queue.submit(lambda: "result", WHAT)
    with pytest.raises(Interrupted):
        job.wait(None)
    assert [job.wait(None) for _ in range(2)] == ["result"] * 2
    interrupts.append(Interrupted())
    job = queue.submit(fail, WHAT)
    with pytest.raises(ZeroDivisionError):
        job.wait(None)


# --- waiting


def test_test_becomes_true_by_itself(several: Ranks) -> None:
    def main() -> None:
        request = mpicoll.iallreduce(np.ones(1000))
        until(request.test)
        assert request.wait(0)[0] == mpicoll.world().size

    several(main)


def test_testing_runs_the_head_where_there_is_no_worker() -> None:
    queue = lazy()
    ran: list[int] = []
    first = queue.submit(lambda: ran.append(1), WHAT)
    second = queue.submit(lambda: ran.append(2), WHAT)
    assert ran == []
    assert first.test()
    assert ran == [1]
    assert second.test()
    assert ran == [1, 2]
    assert queue._worker is None


def test_timeout_is_prompt_and_leaves_it_pending(queue: OperationQueue) -> None:
    gate = threading.Event()
    job = queue.submit(lambda: gate.wait(60), WHAT)
    begin = time.monotonic()
    words = r"^a test of the queue\(\) number 1 on test \(1 ranks\).*not complete within the timeout of 0\.1 s; it is"
    with pytest.raises(mpicoll.Timeout, match=words):
        job.wait(0.1)
    assert 0.1 <= time.monotonic() - begin < 40
    assert not job.test()
    gate.set()
    assert job.wait(20) is True


def test_drain(queue: OperationQueue) -> None:
    assert queue.drain(0)
    gate = threading.Event()
    queue.submit(lambda: gate.wait(60), WHAT)
    begin = time.monotonic()
    assert not queue.drain(0.1)
    assert time.monotonic() - begin < 40
    gate.set()
    assert queue.drain(20)


# --- the end


def test_close_runs_what_is_queued() -> None:
    queue = lazy()
    ran: list[int] = []
    jobs = [queue.submit(lambda number=number: ran.append(number), WHAT) for number in range(3)]
    queue.close()
    assert ran == [0, 1, 2]
    assert all(job.done for job in jobs)


def test_close_may_abandon_what_is_queued() -> None:
    queue = lazy()
    job = queue.submit(lambda: pytest.fail("ran"), WHAT)
    queue.close(abandon=True)
    with pytest.raises(mpicoll.CommunicatorError, match="abandoned"):
        job.wait(None)


def test_close_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    queue = lazy()
    job, after = queue.submit(fail, WHAT), queue.submit(lambda: "ran", WHAT)
    queue.close()
    assert after.value == "ran"
    with pytest.raises(ZeroDivisionError):
        job.wait(None)


def test_the_worker_ends(queue: OperationQueue) -> None:
    queue.submit(lambda: None, WHAT).wait(20)
    worker = queue._worker
    assert worker is not None
    assert worker.daemon
    queue.close()
    worker.join(20)
    assert not worker.is_alive()


def test_stop_may_be_called_by_the_garbage_collector() -> None:
    """Which runs on any thread at any time, also on one that is just using the queue."""
    queue = lazy()

    def collected() -> None:
        with queue._filled:
            queue.stop()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_a_collection_may_end_the_wait_of_a_thread_while_they_are_listed(queue: OperationQueue) -> None:
    """It lets other threads run, maybe within the function of Python that copies the list of them."""
    some = [(ident, WHAT) for ident in range(3)]

    def end_two() -> None:
        for one in (some[2], some[0]):
            if one in queue._behind:
                queue._behind.remove(one)

    def prepare() -> None:
        queue._behind[:] = some
        make_garbage(end_two)

    found: list[set[int]] = []
    collect_during(lambda: found.append(queue.waiting_threads()), prepare)
    queue._behind.clear()
    # A copy that reads past the end of the list, which was moved, finds the last thread there.
    assert all(one in ({0, 1, 2}, {1}) for one in found)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpicoll-")]


@pytest.mark.slow
def test_no_worker_stays_behind() -> None:
    """Neither those of freed communicators nor those of dropped ones."""
    gc.collect()
    before = len(workers())

    def main() -> None:
        freed, dropped = mpicoll.world().split(0), mpicoll.world().split(0)
        assert freed is not None
        mpicoll.waitall(
            [mpicoll.iallreduce(np.ones(2), comm=comm) for comm in (freed, dropped, None) for _ in range(2)]
        )
        mpicoll.allreduce(np.ones(2), comm=dropped)  # leaves a prepared operation
        freed.free()

    for _ in range(3):
        mpicoll.run_local(main, 3)

    def gone() -> bool:
        gc.collect()
        return len(workers()) <= before

    until(gone)


def test_a_dropped_request_does_not_stop_its_operation(several: Ranks) -> None:
    def main() -> None:
        target = np.zeros(4)
        mpicoll.iallreduce(np.ones(4), out=target)
        gc.collect()
        mpicoll.barrier()
        assert target.tolist() == [mpicoll.world().size] * 4

    several(main)


# --- ends


def test_callbacks_are_called_once_whether_they_come_before_the_end_or_after(queue: OperationQueue) -> None:
    gate, seen = threading.Event(), list[QueuedOperation]()
    job = queue.submit(lambda: gate.wait(20), WHAT)
    job.add_done_callback(seen.append)
    assert seen == []
    gate.set()
    job.wait(20)
    until(lambda: seen == [job])
    job.add_done_callback(seen.append)
    assert seen == [job, job]


def test_callbacks_of_a_failed_job(queue: OperationQueue) -> None:
    job = queue.submit(fail, WHAT)
    errors: list[BaseException | None] = []
    job.add_done_callback(lambda job: errors.append(job.error))
    with pytest.raises(ZeroDivisionError):
        job.wait(20)
    until(lambda: bool(errors))
    assert isinstance(errors[0], ZeroDivisionError)


def test_an_idle_worker_ends_and_another_one_takes_over(queue: OperationQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "_IDLE", 0.05)
    queue.submit(lambda: None, WHAT).wait(20)
    first = queue._worker
    until(lambda: queue._worker is None)
    if first is not None:
        first.join(20)
    job = queue.submit(lambda: "again", WHAT)
    until(lambda: job.done)
    assert job.value == "again"


def test_what_is_abandoned_fails_and_what_runs_goes_on(queue: OperationQueue) -> None:
    gate, running = threading.Event(), threading.Event()

    def operation() -> str:
        running.set()
        gate.wait(20)
        return "done"

    first, second = queue.submit(operation, WHAT), queue.submit(lambda: "never", WHAT)
    assert running.wait(20)
    queue.abandon()
    with pytest.raises(mpicoll.CommunicatorError, match=r"a test of the queue\(\) on test \(1 ranks\): abandoned"):
        second.wait(20)
    gate.set()
    assert first.wait(20) == "done"


def test_a_queue_that_refuses() -> None:
    queue = lazy()
    queue.refuse()
    for call in (
        lambda: queue.run(fail, WHAT),
        lambda: queue.submit(fail, WHAT),
        lambda: queue.run_with_deadline(fail, WHAT),
    ):
        with pytest.raises(mpicoll.CommunicatorError, match="communicator test: this process was forked"):
            call()
