"""Nothing waits for ever: the bound on waiting, uncaught exceptions, and the end of the interpreter."""

from __future__ import annotations

import io
import queue
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from subprocess import CompletedProcess
from typing import Any, cast

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.core.queue import Job, Progress
from mpicoll.engine.diagnostics import watchdog
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Raw
from mpicoll.engine.diagnostics.position import Executing
from mpicoll.engine.diagnostics.process_exit import _fold, abort_on_failure, say
from mpicoll.engine.diagnostics.watchdog import Watch
from mpicoll.transport.control.network import Message

Starter = Callable[..., "CompletedProcess[str]"]


def entry(name: str, timeout: float, number: int = 1) -> Raw:
    """An operation that begins now."""
    return Group("0.0", "world", (0, 1), 1, timeout), number, Call(name, 8), time.monotonic(), None


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


class Queue:
    number, thread, background = 1, 0, True
    executing = Executing()

    def __init__(self, current: Raw | None = None) -> None:
        self.current = current
        self.group = Group("0.0", "world", (0, 1), 1, 60.0)
        self.queue: deque[Any] = deque()

    def drain(self, timeout: float) -> bool:
        return True

    def refuse(self) -> None:
        pass

    def unreported(self) -> list[Any]:
        return []

    def waiting_threads(self) -> set[int]:
        return set()


class Watched:
    """A watch that tells when it would have ended the job."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.codes: list[int] = []
        self.watch = Watch(0.05, self._abort)

    def _abort(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()
        threading.Event().wait()  # as MPI's abort never returns


# --- in one process


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch leaves no time to calls that raise by themselves: there are none."""
    monkeypatch.setattr(watchdog, "_PRIVATE", 0.0)


@pytest.mark.usefixtures("strict")
def test_an_operation_that_waits_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    queue = Queue(entry("allreduce", 0.2))
    watched.watch.add(queue)
    assert watched.ended.wait(20)
    assert watched.codes == [1]
    assert capfd.readouterr().err.startswith(
        "\nmpicoll: allreduce(8 bytes) number 1 on world, rank 1 of 2 has been waiting for more than 0.2 s"
        " (MPICOLL_TIMEOUT, or the timeout of its communicator); the job is ended.\n"
    )


@pytest.mark.usefixtures("strict")
def test_a_call_outside_of_the_queues(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    watched.watch.active[-1] = entry("recv", 0.2), False, False  # of a thread that is not there
    assert watched.ended.wait(20)
    assert "mpicoll: recv(8 bytes) number 1 on world, rank 1 of 2 has been waiting" in capfd.readouterr().err


@pytest.mark.usefixtures("strict")
def test_the_bound_is_that_of_the_communicator() -> None:
    watched = Watched()
    patient, hasty = Queue(entry("bcast", 60.0)), Queue()
    watched.watch.add(patient)
    watched.watch.add(hasty)
    assert not watched.ended.wait(0.3)
    hasty.current = entry("bcast", 0.1)
    assert watched.ended.wait(20)


def test_a_wait_with_a_bound_of_its_own_is_left_to_it() -> None:
    """It raises Timeout, and the operation stays pending, though it can never complete; without a bound that ends the
    job."""
    watched, release = Watched(), threading.Event()
    group = Group("0.0", "world", (0, 1), 0, 60.0)
    progress = Progress(group, watched.watch, background=True, explain=lambda error: error)

    def find_stuck() -> None:
        assert progress.current is not None
        _, number, _, begin, _ = progress.current
        watched.watch._doom([(0, "0.0", number, begin)], watchdog._Doom("it can never complete", mismatch=False))
        watched.watch.check(progress.current)

    def begin(name: str) -> Job:
        job = progress.submit(release.wait, Call(name, 0))
        until(lambda: progress.current is not None and progress.current[2] is job.call)
        return job

    job = begin("barrier")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.wait, 0.4)
        until(lambda: bool(watched.watch.bounded or waiting.done()))
        find_stuck()
        with pytest.raises(mpicoll.Timeout, match="barrier"):
            waiting.result(20)
    find_stuck()  # who has got Timeout decides what is to be done
    assert not watched.watch.bounded
    assert not watched.ended.wait(0.2)
    release.set()
    job.wait(20)
    release.clear()
    begin("allreduce")
    with pytest.raises(mpicoll.CommunicationError, match="it can never complete"):
        find_stuck()
    assert watched.ended.wait(20)
    release.set()


@pytest.mark.usefixtures("strict")
def test_equal_operations_one_after_the_other_are_several() -> None:
    """The watch looks in between, and sees a call each time; but never the same for long."""
    watched = Watched()
    queue = Queue()
    watched.watch.add(queue)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        queue.current = entry("allreduce", 0.6)
        time.sleep(1e-3)
    queue.current = None
    assert not watched.ended.is_set()


@pytest.mark.usefixtures("strict")
def test_queues_may_come_while_the_watch_looks() -> None:
    """The set of queues is walked on the watch's thread, and grows and shrinks on others."""
    watched = Watched()
    others: list[Queue] = []

    class Growing(Queue):
        @property
        def current(self) -> None:  # type: ignore[override]
            if len(others) < 50:
                others.append(Queue())
                watched.watch.add(others[-1])

        @current.setter
        def current(self, value: object) -> None:
            pass

    growing = Growing()
    watched.watch.add(growing)
    while len(others) < 50:
        time.sleep(1e-3)
    stuck = Queue(entry("the last one", 0.1))
    watched.watch.add(stuck)
    assert watched.ended.wait(20)


@pytest.mark.usefixtures("strict")
def test_dropped_queues_are_not_watched() -> None:
    watched = Watched()
    watched.watch.add(Queue(entry("gone", 0.1)))
    assert watched.watch.queues() == []
    assert not watched.ended.wait(0.6)


class Teller:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def dying(self, of: str, alike: str = "") -> None:
        self._told.append(of)


def test_uncaught_exceptions_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: calls.append(error))
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(Teller(calls), calls.append)
    error = ValueError("uncaught\nand more")
    sys.excepthook(ValueError, error, None)
    assert calls == ["died of ValueError: uncaught; the job is ended", (ValueError, error, None), 1]
    with pytest.raises(SystemExit) as leaving:
        sys.exit(3)
    assert leaving.value.code == 3


class Wire:
    """A control network between two ranks of one process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size, self.gone = rank, 2, dict[int, Any]()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.other: Wire | None = None

    def send(self, body: dict[str, Any], to: int | None = None) -> None:
        if self.other is not None:
            self.other.inbox.put(Message(self.rank, body))

    def flush(self, timeout: float) -> bool:
        return True

    def poll(self, timeout: float) -> list[Message]:
        with suppress(queue.Empty):
            return [self.inbox.get(timeout=timeout)]
        return []


def die(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *texts: str, joined: bool) -> list[str]:
    """What two ranks say that die of these at the same time, each of which waits for the other to end the job."""
    monkeypatch.setattr(watchdog, "_BEHIND", 0.5)
    wires, watches = [Wire(0), Wire(1)], []
    if joined:
        wires[0].other, wires[1].other = wires[1], wires[0]
    for wire in wires:
        one = Watched().watch
        one.rank, one.size, one._line = wire.rank, 2, cast(Any, wire)
        one._joined.set()
        watches.append(one)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one, text: one.dying(f"died of {text}", text), watches, texts))
    for one in watches:
        one._leaving = True
    return [line for line in capsys.readouterr().err.splitlines() if line]


@pytest.mark.parametrize(
    ("texts", "joined", "said"),
    [
        # The second says it again, as nobody has ended it.
        (
            ("x (rank 0 of 2)", "x (rank 1 of 2)"),
            True,
            ["ranks 0 and 1 of 2 died of x (rank 0 of 2)", "rank 1 of 2 died of x (rank 1 of 2)"],
        ),
        (("x", "x"), False, ["rank 0 of 2 died of x", "rank 1 of 2 died of x"]),
        (("x", "y"), True, ["rank 0 of 2 died of x", "rank 1 of 2 died of y"]),
    ],
    ids=["alike", "out of touch", "not alike"],
)
def test_ranks_that_die_alike_say_it_once(
    texts: tuple[str, str],
    joined: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = die(monkeypatch, capsys, *texts, joined=joined)
    assert sorted(found) == sorted(f"mpicoll: {one}" for one in said)


def _raised(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  each is looked at
        function()
    return caught.value


def _frames(error: Exception) -> list[str]:
    return [one.name for one in traceback.extract_tb(_fold(error, error.__traceback__))]


def test_frames_of_the_package_are_folded() -> None:
    """But not those of the program between and below them, and none where an error is a mistake of the package."""

    def step(state: int, number: int, comm: Any) -> None:
        raise ValueError("in the program")

    refused = _raised(lambda: mpicoll.allreduce(np.ones(3, "M8[s]")))
    assert _frames(refused) == ["_raised", "<lambda>"]
    below = _raised(lambda: mpicoll.resilient(step, 0, 1))
    assert _frames(below) == ["_raised", "<lambda>", "step"]
    if sys.version_info >= (3, 11):
        for error in (refused, below):
            (note,) = error.__notes__
            assert re.fullmatch(r"\[\d+ frames of mpicoll are not shown; python -X dev shows them\]", note)
    mistake = _raised(lambda: mpicoll.resilient(None, 0, 1))  # type: ignore[arg-type]
    assert _frames(mistake)[-1] == "_go_on"


def test_an_exception_that_takes_no_note_ends_the_job_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(mpicoll.ArgumentError):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    calls: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(Teller(calls), calls.append)

    def step(state: int, number: int, comm: Any) -> None:
        raise Fixed("x")

    error = _raised(lambda: mpicoll.resilient(step, 0, 1))
    sys.excepthook(type(error), error, error.__traceback__)
    assert calls == ["died of Fixed: x; the job is ended", 1]


def test_what_a_hook_of_others_swallows_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed lets the hooks before its own write to a string."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", shown)
    monkeypatch.setattr(sys, "excepthook", lambda *error: sys.stderr.write("the traceback"))
    monkeypatch.setattr(sys, "exit", sys.exit)
    abort_on_failure(Teller([]), lambda code: None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.excepthook(ValueError, ValueError(), None)
    assert shown.getvalue() == "the traceback"


def test_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """mpirun ends texts with a zero byte and no newline, and may write one just before."""
    sys.stderr.write("a text of mpirun\n\0")
    say("rank 1 of 2 died", separate=True)
    assert capsys.readouterr().err.splitlines() == ["a text of mpirun", "\0", "mpicoll: rank 1 of 2 died"]


# --- under mpirun

WAITS = {
    "native allreduce": ("mpicoll.allreduce(np.ones(5))", "allreduce"),
    "schedule": ("mpicoll.allreduce(np.ones(5), algorithm='ring')", "allreduce"),
    "barrier": ("mpicoll.barrier()", "barrier"),
    "recv": ("mpicoll.recv(np.ones(5), 0)", "recv"),
    "irecv": ("mpicoll.irecv(np.ones(5), 0).wait()", "irecv"),
    "background": ("r = mpicoll.iallreduce(np.ones(5))\nwhile not r.test(): pass", "allreduce"),
}


@pytest.fixture(scope="module")
def waiting(
    job_in: Starter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """A job for each of WAITS. They do nothing but wait, so several of them run at the same time."""

    def run(call: str) -> CompletedProcess[str]:
        program = f"""
import threading
def waits_here():
    {call.replace(chr(10), chr(10) + "    ")}
if mpicoll.world().rank == 0:
    threading.Event().wait()
waits_here()
"""
        return job_in(tmp_path_factory.mktemp("waits"), 2, program, seconds=20, MPICOLL_TIMEOUT="1")

    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run, call) for name, (call, _) in WAITS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITS)
def test_a_rank_that_never_joins(waiting: dict[str, Future[CompletedProcess[str]]], name: str) -> None:
    """Rank 0 does something else for ever; what the others wait for is named, with their stacks."""
    what = WAITS[name][1]
    done = waiting[name].result()
    assert done.returncode not in (0, 124), done.stdout
    # In the background nobody has taken down where it was called.
    at = "" if name == "background" else r", called at .*program.py:\d+ in waits_here,"
    waits = rf"mpicoll: {what}\(.* on world, rank 1 of 2{at} has been waiting for more than 1 s \(MPICOLL_TIMEOUT"
    assert re.search(waits, done.stdout), done.stdout


@pytest.mark.slow
def test_many_short_operations_are_no_long_one(job: Starter) -> None:
    done = job(
        2,
        """
import time
from mpicoll.engine.diagnostics import watchdog
watchdog._PRIVATE = 0.5  # the loop takes longer than this and the bound
x, begin = np.ones(2), time.monotonic()
go_on = True
while go_on:
    for _ in range(200):
        mpicoll.allreduce(x)
        mpicoll.iallreduce(x).wait()
        mpicoll.sendrecv(x, 1 - mpicoll.world().rank)
    go_on = mpicoll.bcast(np.array(time.monotonic() - begin < 2.5))
print("done")
""",
        MPICOLL_TIMEOUT="1",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["done"] * 2)


@pytest.mark.slow
def test_an_uncaught_exception_ends_the_job(job: Starter) -> None:
    begin = time.monotonic()
    done = job(
        3,
        """
def breaks():
    raise ZeroDivisionError("on rank 1 alone")
if mpicoll.world().rank == 1:
    breaks()
mpicoll.allreduce(np.ones(2))
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert time.monotonic() - begin < 10
    assert "mpicoll: rank 1 of 3 died of ZeroDivisionError: on rank 1 alone" in done.stdout
    assert "in breaks" in done.stdout
    assert "ZeroDivisionError: on rank 1 alone" in done.stdout


@pytest.mark.slow
def test_an_exception_on_all_ranks_is_shown_once(job: Starter) -> None:
    done = job(3, "def breaks():\n    mpicoll.allreduce(np.ones(3, 'M8[s]'))\nbreaks()\n")
    assert done.returncode not in (0, 124), done.stdout
    assert re.findall("^mpicoll: .* died of", done.stdout, re.MULTILINE) == ["mpicoll: ranks 0-2 of 3 died of"]
    assert done.stdout.count("Traceback") == done.stdout.count("in breaks") == 1, done.stdout
    assert "mpicoll/collectives" not in done.stdout


@pytest.mark.slow
def test_an_interrupt_ends_the_job(job: Starter) -> None:
    done = job(
        3,
        """
import os, signal
if mpicoll.world().rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
mpicoll.barrier()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert "mpicoll: rank 1 of 3 died of KeyboardInterrupt" in done.stdout


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(job: Starter) -> None:
    done = job(
        3,
        """
import os, signal
mpicoll.barrier()
if mpicoll.world().rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
mpicoll.barrier()
""",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert re.search(r"mpicoll: rank 1 of 3 .* was killed by SIGKILL", done.stdout)


@pytest.mark.slow
def test_a_stopped_rank_0_is_the_suspect_also_without_a_report(job: Starter) -> None:
    """It passes on what the others say, so nothing is heard of them; and the folder for reports can't be made."""
    done = job(
        3,
        """
import os, signal, threading
pids = mpicoll.allgather(np.array([os.getpid()]))
mpicoll.barrier()
if mpicoll.world().rank == 1:
    os.kill(int(pids[0]), signal.SIGSTOP)
elif mpicoll.world().rank == 0:
    threading.Event().wait()
mpicoll.barrier()
""",
        seconds=50,
        MPICOLL_TIMEOUT="1",
        MPICOLL_REPORT="/proc/none",
        MPICOLL_SHARED_MEMORY="off",  # who waits there raises by itself
    )
    assert done.returncode not in (0, 124), done.stdout
    said = done.stdout[done.stdout.index("mpicoll: ") :].split("mpicoll: ")
    assert "has been waiting for more than 1 s" in said[1]
    assert "rank 0 does not answer (stopped or frozen?); it passes on" in said[1]
    assert "so nothing is known of rank 2" in said[1]
    assert re.search(r"barrier\(\) number \d+ on world waits for rank 0, which", said[1]), said[1]
    assert said[2].startswith("The report can't be written to /proc/none (FileNotFoundError")


# --- the end of the interpreter


@pytest.mark.slow
def test_pending_operations_complete_at_the_end(job: Starter) -> None:
    """The last rank joins late; the others are at their end by then, with nothing but the operations' own memory."""
    done = job(
        3,
        """
world = mpicoll.world()
part = world.split(0)
for comm in (world, part):
    for number in range(20):
        mpicoll.iallreduce(np.full(50_000, number), comm=comm)
if world.rank == 2:
    total = mpicoll.iallreduce(np.ones(1)).wait()
    print(total[0])
else:
    mpicoll.iallreduce(np.ones(1))
""",
    )
    assert (done.returncode, done.stdout.split()) == (0, ["3.0"])


@pytest.mark.slow
def test_pending_operations_that_can_not_complete(job: Starter) -> None:
    begin = time.monotonic()
    done = job(
        2,
        """
if mpicoll.world().rank == 0:
    mpicoll.iallreduce(np.ones(2))
""",
        MPICOLL_TIMEOUT="1",
    )
    assert done.returncode not in (0, 124), done.stdout
    assert time.monotonic() - begin < 10
    assert re.search(
        r"mpicoll: (rank 0 of 2 exits while .*world.* holds operations|.* allreduce.* has been waiting"
        r"|rank 0 waits in allreduce.* for rank 1, which has left the program)",
        done.stdout,
    )


@pytest.mark.slow
def test_pending_operations_without_mpi(python: Callable[..., CompletedProcess[str]]) -> None:
    done = python("import numpy, mpicoll\nfor _ in range(50): mpicoll.iallreduce(numpy.ones(10_000))")
    assert (done.returncode, done.stdout) == (0, "")
