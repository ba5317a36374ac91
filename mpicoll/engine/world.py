"""The communicator of all ranks, and the communicator that an argument ``comm`` stands for."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeAlias

from mpicoll.config import config, find_unknown_settings
from mpicoll.engine import learning, startup
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.message_check import warn_of_unmatched_messages
from mpicoll.engine.core.observer import Observer
from mpicoll.engine.core.registry import Options, Registry
from mpicoll.engine.diagnostics.flight_recorder import Call
from mpicoll.errors import CommunicatorError, MpicollError
from mpicoll.extension import set_world
from mpicoll.logs import get_logger
from mpicoll.transport import launch_env
from mpicoll.transport.base import Transport

CommLike: TypeAlias = "Communicator | Any | None"
"""Types accepted as ``comm``: a Communicator, an mpi4py communicator, or None for the world."""

_SETTLE = 1.0
"""Seconds that an exiting process waits for the last messages of the other ranks."""

local_world: ContextVar[Communicator | None] = ContextVar("mpicoll_local_world", default=None)
"""The world of a rank that is a thread (see :func:`mpicoll.run_local`)."""

_world: Communicator | None = None
_library = ""
_has_local_worlds = False
_world_lock = threading.Lock()


def _make_check(*arguments: Any) -> Observer:
    """Return the observer of the communicator's calls."""
    from mpicoll.engine.checks.call_check import CallCheck  # late: only checked programs need it

    return CallCheck(*arguments)


_registry = Registry(_make_check)
"""Communicators of a process that is one rank."""


def world() -> Communicator:
    """Return the communicator of all ranks, created at first use: collective then, and without cost afterwards.

    Under an MPI launcher it is a duplicate of MPI.COMM_WORLD. Under torchrun, and wherever MASTER_ADDR, MASTER_PORT,
    RANK and WORLD_SIZE are set, it has the ranks that these describe, and needs no MPI; after ``init_process_group``
    with a store, a rank and a size it has those ranks until that group is destroyed. Without a launcher it is a world
    of one rank that needs no MPI library. Inside :func:`mpicoll.run_local` it is the world of that run.

    Returns:
        The same communicator at each call, unless ``shrink`` has replaced it.

    Raises:
        SetupError: There is no MPI library, or it belongs to another launcher than the one that started this process.
        Timeout: A rank that the environment describes has not come.

    Example:
        >>> mpicoll.world().rank, mpicoll.world().size
        (0, 1)
    """
    return local_world.get() or _world or _make_world()


def has_world() -> bool:
    """Return True if the world exists, so that :func:`world` is not collective."""
    return (local_world.get() or _world) is not None


def _make_world() -> Communicator:
    """Create the communicator of all ranks. Collective."""
    with _world_lock:
        if _world is None:
            kind, without_mpi = config().transport, False
            if kind != "local":
                without_mpi = kind == "auto" and launch_env.is_job_without_mpi(os.environ)
                startup.reject_child_processes(without_mpi=without_mpi)
            if without_mpi:
                # Not at module level, too: it is not needed elsewhere.
                from mpicoll.engine import startup_tcp
                from mpicoll.transport.tcp.environment import connect_by_environment

                _begin(*startup_tcp.start(connect_by_environment, _registry))
            elif kind == "mpi" or (kind == "auto" and launch_env.is_launched(os.environ)):
                _begin(*startup.start_mpi(_registry))
            else:
                # Not at module level: an MPI job does not need it, and starts faster without it.
                from mpicoll.transport import local

                alone = local.transports(local.LocalJob(1, timeout=config().timeout))[0]
                core = CommunicatorCore(
                    alone, None, name="world", checks=Options.parse(config().check), registry=_registry
                )
                _begin(core, config().trace, "")
    assert _world is not None
    return _world


def _begin(core: CommunicatorCore, trace_folder: str, library: str) -> None:
    """Use `core` as the world; trace the job if `trace_folder` is not empty. `library` is the name of its MPI library.
    Collective."""
    global _library  # noqa: PLW0603  it is that of the world
    _library = library
    _use_world(Communicator(core, _replace_world))
    if core.rank == 0:
        _warn_of_misspelt_settings()
    # A process may have several worlds one after the other.
    if core.rank == 0 and core.tune != "off" and _write_learned_results not in startup.exit_callbacks:
        startup.exit_callbacks.append(_write_learned_results)
    if _warn_of_messages not in startup.exit_callbacks:
        startup.exit_callbacks.append(_warn_of_messages)
    if trace_folder:
        _start_trace(core, trace_folder)


def _warn_of_misspelt_settings() -> None:
    """Other variables with the prefix of mpicoll may belong to an installation of it, such as MPICOLL_ROOT."""
    for name, similar in find_unknown_settings(os.environ).items():
        if similar:
            get_logger().warning("there is no setting %s, which has no effect: is %s meant?", name, similar)


def _write_learned_results() -> None:
    """Keep what the calls of this job have learned for later jobs."""
    learning.write_results(_library)


def can_connect_world() -> bool:
    """Return True if this process is neither a rank yet nor started by MPI: :func:`connect_world` can make it one."""
    known = local_world.get() or _world
    if config().transport != "auto" or not launch_env.is_outside_mpi(os.environ):
        return False
    # A world of one without MPI is what a program has that has not been connected.
    return known is None or (core_of(known).size == 1 and core_of(known).transport.mpi is None)


def connect_world(connect: Callable[[], Transport], name: str = "world") -> Communicator:
    """Return the communicator of the ranks that `connect` connects without MPI. Collective over them.

    Under the name "world" it is what :func:`world` returns from now on, until it is passed to :func:`disconnect`.
    """
    from mpicoll.engine import startup_tcp  # late: an MPI job does not need it

    with _world_lock:
        core, trace_folder, library = startup_tcp.start(connect, _registry, name)
        if name == "world":
            _begin(core, trace_folder, library)
            assert _world is not None
            return _world
    return Communicator(core)


def disconnect(comm: Communicator, *, abort: bool = False) -> None:
    """Free a communicator of :func:`connect_world`, with its connections: those derived from it can't be used any more.
    Collective, unless `abort` is True: then operations that are running fail on all ranks."""
    global _world  # noqa: PLW0603
    with _world_lock:
        if comm is _world:
            _world = None
            set_world(None)
    core = core_of(comm)
    if abort:
        core.transport.free()
    else:
        core.free()


def _replace_world(comm: Communicator) -> None:
    """Replace the world by `comm`."""
    with _world_lock:
        _use_world(comm)


def _use_world(comm: Communicator) -> None:
    global _world  # noqa: PLW0603  the default communicator is the one global
    _world = comm
    if not _has_local_worlds:
        set_world(core_of(comm).queue)


def set_local_world(comm: Communicator) -> None:
    """Set the world of a rank that is a thread. From then on, Python has to find the world of each call: a context that
    has one can be copied to any thread."""
    global _has_local_worlds  # noqa: PLW0603
    _has_local_worlds = True
    set_world(None)
    local_world.set(comm)


def _start_trace(comm: CommunicatorCore, folder: str) -> None:
    """Trace the job. Collective."""
    from pathlib import Path

    from mpicoll.engine.tracing.session import TraceSession  # late: only traced jobs need it

    session = startup.run_within_deadline(
        comm.watch, "starting the trace", lambda: TraceSession(Path(folder), comm.transport, config().timeout)
    )
    if comm.watch is None:
        atexit.register(session.finish)
    else:
        startup.exit_callbacks.append(session.finish)


def _warn_of_messages() -> None:
    """Report messages that were not received, at exit."""
    if _world is None or core_of(_world).freed:
        return
    with suppress(MpicollError):  # where ranks have died
        if core_of(_world).transport.wait_for_all_ranks(_SETTLE):
            warn_of_unmatched_messages((comm.transport, comm.name) for comm in _registry.members())


def resolve(comm: CommLike) -> CommunicatorCore:
    """Return the resources of the communicator that `comm` stands for, see :func:`as_communicator`."""
    # The first two cases, without further calls, because small operations begin here.
    if comm is None:
        return (local_world.get() or _world or _make_world())._core  # noqa: SLF001
    if isinstance(comm, Communicator):
        core = comm._core  # noqa: SLF001
        if core.freed:
            core.check()
        return core
    return core_of(as_communicator(comm))


def as_communicator(comm: CommLike) -> Communicator:
    """Return the Communicator that `comm` stands for. Raises CommunicatorError if it was freed.

    The first use of an mpi4py communicator is collective over it. Its duplicate is cached with it, and freed when it is
    freed.
    """
    if comm is None:
        return world()
    if isinstance(comm, Communicator):
        core_of(comm).check()
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
    """Return a Communicator of the duplicate of an mpi4py communicator of `members`, ranks of the world. Collective."""
    watch = startup.start_watchdog()
    what = "first use of an mpi4py communicator"
    known = None if _world is None else core_of(_world)
    if known is not None and set(members) <= set(known.members):
        ranks = [known.members.index(one) for one in members]
        call = Call(f"{what} of ranks ({','.join(map(str, members))})", collective=False)
        transport: Transport = known.queue.run_unqueued(duplicate, call, ranks)
    else:  # the watchdogs are not connected yet, or not those of all these ranks
        transport = startup.run_within_deadline(watch, what, duplicate)
    if known is None and transport.size == mpi_size and not launch_env.is_job_without_mpi(os.environ):
        _make_world()  # which connects the watchdogs, and starts the trace
    table = None if known is None else known.context.table
    core, _ = startup.make_communicator(transport, watch, _registry, "mpi4py", library, table)
    return Communicator(core)
