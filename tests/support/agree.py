"""The ranks of a pytest run agree: a test that fails on one rank fails on all of them, and none waits for ever.

pytest runs once per rank without communication. This plugin, which conftest.py registers for ``--with-mpi``,

* compares what the ranks collected, before the first test;
* makes each phase (setup, call, teardown) of a test end alike everywhere, with the messages of all ranks that failed in
  rank 0's report. A difference that is no failure, such as a skip on one rank only, is made one;
* ends the job when a rank has failed and the others do not arrive within `GRACE` seconds, since they wait for a message
  that will not come. What failed, and where each rank stands, goes to stderr;
* ends the job likewise when a test is over its time (pytest-timeout's option, ini value or marker; its own methods need
  a main thread that runs Python, which a rank that waits inside MPI does not);
* leaves terminal and junit report to rank 0.

Ranks communicate over a duplicate of COMM_WORLD, and for the end of the job through files in a temporary folder, since
MPI itself may be stuck then. All ranks must see that folder: they run on one machine, or share TMPDIR.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import zlib
from array import array
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis.errors import HypothesisException
from mpi4py import MPI
from pytest_mpi import MPIPlugin

GRACE = 3.0
"""Seconds that a rank which failed waits for the others before it ends the job."""

OUTSIDE = 120.0
"""Time limit in seconds outside of tests: collection, the time between tests, the end."""


class FailedTogether(AssertionError):
    """The error that `Agreement.together` raises on every rank."""


class Outcome(enum.IntEnum):
    """Outcome of a phase on one rank. Only PASSED is falsy."""

    PASSED = 0
    SKIPPED = 1
    XFAILED = 2
    FAILED = 3


class Agreement:
    """The pytest plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.folder = Path(self.comm.bcast(tempfile.mkdtemp(prefix="agree-") if self.rank == 0 else None))
        self.watch = Watch(self.rank, self.size, self.folder)
        self.watch.arm("collection", OUTSIDE)
        self.collect_errors: list[str] = []
        self.unclean = ""  # the first test that failed on some ranks only, and may have left messages behind
        if self.rank > 0:
            config.option.xmlpath = None

    # --- agreeing

    def exchange(self, where: str, outcome: Outcome, text: str = "") -> list[Outcome]:
        """Return every rank's outcome. End the job if this rank failed and the others are late, or are elsewhere."""
        where = f"{self.watch.what}: {where}"
        mine = array("q", [outcome, zlib.crc32(where.encode())])
        everyone = array("q", bytes(16 * self.size))
        request = self.comm.Iallgather(mine, everyone)
        patience = GRACE if outcome is Outcome.FAILED else float("inf")
        begin = time.monotonic()
        self.watch.failure = text if outcome is Outcome.FAILED else ""
        while not request.Test():
            waited = time.monotonic() - begin
            if waited > patience:
                self.watch.end_job(
                    f"rank {self.rank} failed in {where}, and not all ranks came there within {GRACE:g} s"
                )
            time.sleep(0 if waited < 0.001 else 0.0005)
        self.watch.failure = ""
        if len(set(everyone[1::2])) > 1:
            places = _by_rank(self.comm.allgather(where))
            self.watch.end_job(f"the ranks are at different places:\n{places}")
        return [Outcome(value) for value in everyone[0::2]]

    def texts(self, text: str) -> list[str]:
        """Return every rank's text."""
        return self.comm.allgather(text)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that fails on all ranks if it fails on one, by the same exception (see conftest.py)."""
        __tracebackhide__ = True
        failure = ""
        try:
            yield
        except HypothesisException:  # assume(): all ranks draw the same, so all are here
            raise
        except Exception:  # noqa: BLE001  any exception is reported to the other ranks
            failure = traceback.format_exc()
        outcome = Outcome.FAILED if failure else Outcome.PASSED
        if Outcome.FAILED in self.exchange("the end of together()", outcome, failure):
            # Outside of the except block, because hypothesis compares failures by their whole chain of exceptions.
            raise FailedTogether("\n" + _by_rank(self.texts(failure)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        outcome = _outcome(report)
        text = _text(report) if outcome else ""
        if call.excinfo is not None and call.excinfo.errisinstance(FailedTogether):
            text = ""  # it already holds the texts of all ranks
        outcomes = self.exchange(call.when, outcome, text)
        failed = Outcome.FAILED in outcomes
        if not failed and len(set(outcomes)) == 1:
            return report
        if not failed:
            text = f"{outcome.name.lower()} here, which is not what all ranks did\n{text}"
        texts = self.texts(text)
        if outcome is Outcome.FAILED:
            texts = ["" if other == text else other for other in texts]  # pytest prints this rank's own
        message = _by_rank(texts)
        if len(set(outcomes)) > 1 and self.unclean:
            message += f"\n(An earlier test also failed on some ranks only, and may have left messages: {self.unclean})"
        if outcome is not Outcome.FAILED:
            report.outcome = "failed"
            report.longrepr = message
            report.__dict__.pop("wasxfail", None)
        elif message:
            report.sections.append(("other ranks", message))
        if len(set(outcomes)) > 1:
            self.unclean = self.unclean or report.nodeid
        return report

    # --- collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [item.nodeid for item in session.items]
        collected = self.comm.allgather((mine, self.collect_errors))
        if all(other == collected[0] for other in collected):
            return
        lines = ["the ranks collected different tests"]
        for rank, (names, errors) in enumerate(collected):
            first = collected[0][0]
            lines.append(f"rank {rank}: {len(names)} tests, {len(errors)} errors")
            lines += [f"  not on rank 0: {name}" for name in names if name not in first]
            lines += [f"  only on rank 0: {name}" for name in first if name not in names]
            lines += [f"  {line}" for error in errors for line in error.splitlines()]
        # As pytest does for --maxfail: the session fails at once, and the terminal shows the reason.
        session.shouldfail = "\n".join(lines)
        raise session.Failed(session.shouldfail)

    # --- time

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.watch.disarm()
        self.watch.what = item.nodeid
        try:
            return (yield)
        finally:
            self.watch.arm(f"the time after {item.nodeid}", OUTSIDE)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        self.watch.arm(item.nodeid, settings.timeout)
        return True  # instead of pytest-timeout's own timer

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        return True  # pytest-timeout would cancel at the first failure, but teardown is to be watched as well

    # --- beginning and end

    def pytest_report_header(self) -> str:
        return f"mpi: {self.size} ranks, {MPI.Get_library_version().splitlines()[0]}"

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        for plugin in session.config.pluginmanager.get_plugins():
            if isinstance(plugin, MPIPlugin):
                plugin._is_testing_mpi = False  # its ten lines at the end of each run contain a zero byte
        if self.rank > 0:
            session.config.get_terminal_writer()._file = Path(os.devnull).open("w")  # noqa: SIM115

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.watch.failure = excinfo.exconly()
        self.watch.end_job(f"rank {self.rank} was interrupted")

    def pytest_internalerror(self, excrepr: object) -> None:
        self.watch.failure = str(excrepr)
        self.watch.end_job(f"pytest itself failed on rank {self.rank}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.watch.arm("the end of the session", OUTSIDE)
        self.exchange("goodbye", Outcome.PASSED)
        self.watch.close()
        self.comm.Free()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


class Watch:
    """A thread that ends the job after the time limit, and takes part when another rank ends it."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.what = ""
        self.failure = ""
        self._rank, self._size, self._folder = rank, size, folder
        # pytest captures file descriptor 2 during tests; this copy stays the real one.
        self._stderr = os.fdopen(os.dup(2), "w")
        self._deadline = float("inf")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agree.Watch", daemon=True)
        self._thread.start()

    def arm(self, what: str, seconds: float) -> None:
        """Set the current activity to `what`; the job ends if it takes longer than `seconds`."""
        self.what, self._deadline = what, time.monotonic() + seconds
        # No thread runs while a C function holds the GIL. This timer needs no GIL, and a rank's exit ends the job.
        faulthandler.dump_traceback_later(seconds + 5, exit=True, file=self._stderr)

    def disarm(self) -> None:
        self._deadline = float("inf")
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Stop watching, but bound the end of the process: a rank may hang in MPI_Finalize."""
        self._closed.set()
        self._thread.join()
        self.arm("the end of the process", OUTSIDE)

    def end_job(self, why: str) -> NoReturn:
        """Print the reason and every rank's state, and end all ranks with a nonzero exit status."""
        faulthandler.dump_traceback_later(30, exit=True, file=self._stderr)  # should anything below get stuck
        self._write_state()
        try:
            (self._folder / "ending").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(20)  # another rank was first and does it
        patience = time.monotonic() + 2.0
        while len(list(self._folder.glob("state.*"))) < self._size and time.monotonic() < patience:
            time.sleep(0.05)
        lines = [f"=== the job ends: {why}"]
        for rank in range(self._size):
            path = self._folder / f"state.{rank}"
            lines.append(f"--- rank {rank} of {self._size}")
            lines.append(path.read_text() if path.exists() else "does not answer: it runs no Python\n")
        self._stderr.write("\n" + "\n".join(lines) + "\n")
        self._stderr.flush()
        shutil.rmtree(self._folder, ignore_errors=True)
        time.sleep(0.5)  # for mpirun to pass the text on
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def _run(self) -> None:
        ending = self._folder / "ending"
        while not self._closed.wait(0.1):
            if ending.exists():
                self._write_state()
                return
            if time.monotonic() > self._deadline:
                self.end_job(f"{self.what} is over its time")

    def _write_state(self) -> None:
        """Write this rank's state to a file, once and atomically."""
        state = self._folder / f"state.{self._rank}"
        if state.exists():
            return
        text = f"in {self.what}\n{self.failure}\n"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident not in (self._thread.ident, threading.get_ident()):
                text += f"stack of {names.get(ident, ident)}:\n{_stack(frame)}"
        draft = self._folder / f"draft.{self._rank}"
        draft.write_text(text)
        draft.rename(state)


def _outcome(report: pytest.TestReport) -> Outcome:
    if hasattr(report, "wasxfail"):
        return Outcome.XFAILED  # an unexpected pass that is allowed counts as well
    return Outcome[report.outcome.upper()]


def _text(report: pytest.TestReport) -> str:
    """Return the text that pytest would print of a report."""
    return "\n".join([report.longreprtext, *(f"[{title}]\n{content}" for title, content in report.sections)])


def _by_rank(texts: list[str]) -> str:
    """Return the ranks' texts, each once under the ranks that reported it; empty texts are left out."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    return "\n".join(
        f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(who)} of {len(texts)}:\n{text}"
        for text, who in ranks.items()
    )


def _stack(frame: Any) -> str:
    """Format a stack without the frames of pytest."""
    frames = [
        line
        for line in traceback.extract_stack(frame)
        if not {"pytest", "_pytest", "pluggy", "<frozen runpy>"} & set(Path(line.filename).parts)
    ]
    return "".join(traceback.format_list(frames))
