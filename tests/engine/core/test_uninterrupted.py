"""Calls that no signal handler ends."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import mpicoll
from mpicoll.engine.core.uninterrupted import call_uninterrupted


class Interrupted(BaseException):
    """The exception of a signal handler."""


@pytest.fixture
def raising() -> Iterator[None]:
    """A handler of SIGALRM that raises."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, previous)


def signal_soon() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)


def test_without_a_signal() -> None:
    called: list[threading.Thread] = []
    assert call_uninterrupted(lambda: called.append(threading.current_thread())) is None
    assert len(called) == 1
    assert called != [threading.main_thread()]


@pytest.mark.usefixtures("raising")
def test_an_exception_of_a_handler_is_returned_afterwards() -> None:
    called: list[int] = []

    def function() -> None:
        time.sleep(0.1)
        called.append(1)

    signal_soon()
    assert isinstance(call_uninterrupted(function), Interrupted)
    assert called == [1]


def fail() -> None:
    raise ZeroDivisionError


def test_a_failure_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        call_uninterrupted(fail)


@pytest.mark.usefixtures("raising")
def test_an_exception_of_a_handler_comes_before_a_failure() -> None:
    def function() -> None:
        time.sleep(0.1)
        fail()

    signal_soon()
    with pytest.raises(Interrupted):
        call_uninterrupted(function)


def test_in_another_thread_there_are_no_handlers() -> None:
    called: list[threading.Thread] = []
    thread = threading.Thread(
        target=lambda: call_uninterrupted(lambda: called.append(threading.current_thread())), daemon=True
    )
    thread.start()
    thread.join(10)
    assert called == [thread]


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    called: list[int] = []
    assert call_uninterrupted(lambda: called.append(1)) is None
    assert called == [1]


@pytest.mark.parametrize("starts", [False, True])
def test_an_exception_during_the_start(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        if starts:
            start(thread)
        raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    called: list[int] = []
    assert isinstance(call_uninterrupted(lambda: called.append(1)), Interrupted)
    assert called == [1]


# --- a collective


@pytest.mark.mpi
@pytest.mark.usefixtures("raising")
@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("begins", [False, True])
def test_an_interrupted_collective_is_completed(begins: bool, calls: int) -> None:
    """The first one of a communicator too, in which the ranks make their shared memory."""
    with mpicoll.world().duplicate() as comm:
        for _ in range(calls):
            mpicoll.allreduce(1, comm=comm)
        mpicoll.barrier()
        if comm.rank == 0:
            signal_soon()
        else:
            time.sleep(0.2)
        out = np.zeros(100)
        request = mpicoll.iallreduce(np.ones(100), out=out, comm=comm) if begins else None
        with pytest.raises(Interrupted) if comm.rank == 0 else nullcontext():
            if request is None:
                mpicoll.allreduce(np.ones(100), out=out, comm=comm)
            else:
                request.wait()
        if request is not None:
            request.wait()
        assert out.tolist() == [comm.size] * 100
        assert mpicoll.allreduce(1, comm=comm) == comm.size
