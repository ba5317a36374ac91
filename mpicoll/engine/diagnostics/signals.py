"""SIGINT and SIGTERM, which reach the watchdog even while the main thread is blocked inside MPI."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mpicoll.engine.diagnostics.abort import TAKEOVER, JobAbort
from mpicoll.engine.diagnostics.deaths import DeathHandler
from mpicoll.engine.diagnostics.flight_recorder import Entry
from mpicoll.engine.diagnostics.local_waits import WaitKey, describe_wait, wait_key
from mpicoll.engine.diagnostics.peers import Peers
from mpicoll.engine.diagnostics.process_exit import end_by_signal, log_after_sigterm
from mpicoll.extension import cancel_sigterm_limit, limit_sigterm
from mpicoll.proc_files import read_file
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.wording import rank_list

_INTERRUPT_TIMEOUT = 2.0
"""Seconds that an interrupted call has to return to Python."""

_SIGTERM_SPREAD = 0.1
"""Seconds in which a launcher's SIGTERM reaches all ranks that it ends."""

_ENDED_BY_SIGTERM = "was ended by SIGTERM"

_SIGTERM_LIMIT = 4.0
"""Seconds after which SIGTERM ends this process while its interpreter lock is held. Before that, the next rank on the
host ends it, if there is one (:mod:`mpicoll.engine.diagnostics.neighbour`)."""

_texts: list[str] = []
"""The line that is written before the stacks of this process are, if SIGTERM ends it."""

_wakeup_fds: list[int] = []
"""The descriptor to which signal numbers for the watchdog are written, if it listens."""

_sigterm_pipe: list[int] = []
"""The descriptors of a pipe that is not empty after a SIGTERM: where to read and where to write, if it is handled."""

_set_wakeup_fd = signal.set_wakeup_fd

_forking = threading.local()


def listen_for_signals(rank_name: str = "this process") -> int | None:
    """Return a descriptor from which signal numbers can be read as the signals arrive.

    They arrive even while the main thread is blocked outside Python. Returns None if another library has set a
    wakeup descriptor, or if this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    previous = _set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous == -1:
        _wakeup_fds[:] = [writer]
        signal.set_wakeup_fd = _set_wakeup_fd_of_program
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _is_caught_in_c(signal.SIGTERM):
            died = f"{rank_name} died of SIGTERM, while a thread held its interpreter lock"
            _texts[:] = [f"\nmpicoll: {died}. Its stacks then and now:\n"]
            _handle_sigterm()
        return reader
    _set_wakeup_fd(previous)
    os.close(reader)
    os.close(writer)
    return None


def _set_wakeup_fd_of_program(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
    """Replace ``signal.set_wakeup_fd``: the program's descriptor comes before the watchdog's, which returns after it.

    An asyncio loop that has handled signals sets -1 when it is closed.
    """
    own = _wakeup_fds[0] if _wakeup_fds else -1
    if fd == -1:
        previous = _set_wakeup_fd(own, warn_on_full_buffer=False)
    else:
        previous = _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
    return -1 if previous == own else previous


def _is_caught_in_c(number: int) -> bool:
    """Return True if there is a handler of the signal `number`, though Python has none: as of ``faulthandler.register``
    in the program, whose file would be replaced by ours."""
    with suppress(OSError):
        for line in read_file("/proc/self/status").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> number - 1 & 1)
    return False


def _handle_sigterm() -> None:
    """Install the handler of SIGTERM, behind one that needs no interpreter lock: it writes the stack into a pipe."""
    signal.signal(signal.SIGTERM, handle_sigterm)
    if not _sigterm_pipe:
        _sigterm_pipe.extend(os.pipe())
    for descriptor in _sigterm_pipe:
        os.set_blocking(descriptor, False)
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed or None
        output = -1 if sys.__stderr__ is None else sys.__stderr__.fileno()
        limit_sigterm(_SIGTERM_LIMIT, _sigterm_pipe[0], output, _texts[0])
    faulthandler.register(signal.SIGTERM, file=_sigterm_pipe[1], all_threads=False, chain=True)


def renew_sigterm_handling() -> None:
    """Install the handler of SIGTERM again if the program has replaced and restored it, which drops faulthandler's."""
    with suppress(ValueError):  # this is not the main thread
        if _sigterm_pipe and signal.getsignal(signal.SIGTERM) is handle_sigterm:
            faulthandler.unregister(signal.SIGTERM)
            _handle_sigterm()


def describe_sigterm_pipe() -> list[int] | None:
    """Return the descriptor from which the stack at a SIGTERM can be read, and its inode; None if there is none."""
    return [_sigterm_pipe[0], os.fstat(_sigterm_pipe[0]).st_ino] if _sigterm_pipe else None


def has_received_sigterm() -> bool:
    """Return True if a SIGTERM has arrived that mpicoll handles."""
    return bool(_sigterm_pipe) and is_readable(_sigterm_pipe[0])


def is_readable(pipe: int) -> bool:
    """Return True if there are bytes to be read from a pipe."""
    return any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))


def handle_sigterm(number: int, frame: Any) -> None:
    """Pass the number of SIGTERM to the watchdog (the handler of SIGTERM).

    While the main thread is blocked in MPI, this handler never runs, and the number reaches the watchdog through
    the wakeup descriptor. If the handler does run, another library (such as asyncio) may have replaced that
    descriptor.
    """
    with suppress(OSError):
        for descriptor in _wakeup_fds:
            os.write(descriptor, bytes([number]))


def block_sigterm() -> None:
    """Block SIGTERM before a fork.

    Until the child has reset its signal handling, a signal to the child alone would be reported to the watchdog of
    the parent.
    """
    # A handler of the program might raise during the fork, where the exception would be lost.
    ours = signal.getsignal(signal.SIGTERM) is handle_sigterm
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if ours else None


def restore_signal_mask() -> None:
    """Restore the signal mask after a fork, in the parent and in the child."""
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def reset_signal_handling() -> None:
    """Reset the signal handling at the end of the program and in a forked child."""
    with suppress(ValueError):  # if this is not the main thread, or none is left
        if signal.set_wakeup_fd is _set_wakeup_fd_of_program:
            signal.set_wakeup_fd = _set_wakeup_fd
        _set_wakeup_fd(-1)
        handler = signal.getsignal(signal.SIGTERM)
        if _sigterm_pipe and handler is not None:
            faulthandler.unregister(signal.SIGTERM)  # and restore what the program has installed since
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is handle_sigterm else handler)


class SignalMonitor:
    """Handling of signals on the watchdog's thread.

    `descriptor` is that of :func:`listen_for_signals`. `handle` handles events of other ranks that arrive meanwhile.
    """

    def __init__(
        self,
        descriptor: int | None,
        peers: Peers,
        deaths: DeathHandler,
        abort: JobAbort,
        handle: Callable[[Message | PeerExit], None],
    ) -> None:
        self._descriptor = descriptor
        self._peers = peers
        self._deaths = deaths
        self._abort = abort
        self._handle = handle
        self._interrupted: tuple[float, set[WaitKey]] | None = None
        self._ended: set[int] = set()  # the other ranks that have received SIGTERM

    def check(self, waiting: list[Entry], now: float) -> None:
        """Handle the signals that have arrived. `waiting` are the operations in which this rank waits."""
        if self._descriptor is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self._descriptor, 4096)
            self.wake_network()
            ours = signal.getsignal(signal.SIGTERM) is handle_sigterm or has_received_sigterm()
            if signal.SIGTERM in numbers and ours:
                self._terminate()
            if signal.SIGINT in numbers:
                self._interrupted = now, self._waits_of_main_thread()
        self._abort_if_uninterruptible(waiting, now)

    def wake_network(self) -> None:
        """Have the control network return from its wait as soon as the next signal arrives."""
        if self._descriptor is not None and self._peers.network is not None:
            self._peers.network.wake_once(self._descriptor)

    def record_sigterm(self, rank: int) -> None:
        """Record that another rank has received SIGTERM, before or after this one."""
        self._ended.add(rank)

    def _waits_of_main_thread(self) -> set[WaitKey]:
        """Return the operations in which the main thread waits: an interrupt concerns these."""
        pending = self._peers.own_state().get("pending", [])
        return {(one["key"], one["number"], one["begin"]) for one in pending if one["program"]}

    def _terminate(self) -> None:
        """Handle SIGTERM, which was sent to this rank alone, or by the launcher to all ranks that it ends."""
        cancel_sigterm_limit()
        peers, announced, network = self._peers, self._peers.announced, self._peers.network
        if peers.fault_tolerant:
            end_by_signal(
                signal.SIGTERM, f"rank {peers.rank} of {peers.size} died of SIGTERM; the other ranks continue"
            )
        if network is not None and not self._deaths.suspicion:
            peers.send("sigterm")
            self._handle_events(_SIGTERM_SPREAD, lambda: len(self._ended) >= peers.size - 1)
            for source in self._ended:
                announced.setdefault(source, _ENDED_BY_SIGTERM)
        if self._deaths.suspicion:
            if peers.coordinator() == peers.rank:
                log_after_sigterm(self._deaths.suspicion)
        elif self._deaths.report_unreported(self._ended):
            pass  # the launcher ends all ranks because of it
        elif not announced:
            from mpicoll.engine.diagnostics import stacks  # late, see `late_imports`

            self._abort.announce(f"died of SIGTERM; the job is ended. Its stack:\n{stacks.traceback_of_main_thread()}")
        elif set(announced.values()) == {_ENDED_BY_SIGTERM}:
            if peers.rank < min(announced):
                why = f"{rank_list([peers.rank, *announced])} of {peers.size} were ended by SIGTERM"
                log_after_sigterm(why)
                self._abort.report_long_waits(why, log_after_sigterm)
            else:
                self._handle_events(TAKEOVER, lambda: False)  # the queries of the lowest rank, which then ends the job
        self._abort.abort_all(128 + signal.SIGTERM)

    def _handle_events(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """Handle events of the other ranks for `seconds` seconds, or until `is_done` returns True."""
        network, deadline = self._peers.network, time.monotonic() + seconds
        while network is not None and not is_done() and (left := deadline - time.monotonic()) > 0:
            for event in network.poll(left):
                self._handle(event)

    def _abort_if_uninterruptible(self, waiting: list[Entry], now: float) -> None:
        """End this rank if an operation outlasts an interrupt: Python can't interrupt a call that blocks inside MPI."""
        if self._interrupted is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        when, interrupted = self._interrupted
        stuck = [entry for entry in waiting if wait_key(entry) in interrupted]
        if not stuck:
            self._interrupted = None
        elif now - when >= _INTERRUPT_TIMEOUT:
            peers = self._peers
            if peers.fault_tolerant:
                end_by_signal(
                    signal.SIGINT, f"rank {peers.rank} of {peers.size} died of SIGINT; the other ranks continue"
                )
            self._abort.abort(f"interrupted, but {describe_wait(stuck[0], peers.own_state())} still waits")
