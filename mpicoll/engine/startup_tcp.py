"""Start and exit of a process of a job that no MPI launcher has started."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial

from mpicoll.config import config
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.registry import Registry
from mpicoll.engine.startup import DRAIN_TIMEOUT, exit_callbacks, make_communicator
from mpicoll.errors import MpicollError
from mpicoll.logs import get_logger
from mpicoll.transport import launch_env, tcp
from mpicoll.transport.base import Transport


def start(
    connect: Callable[[], Transport], registry: Registry, name: str = "world"
) -> tuple[CommunicatorCore, str, str]:
    """Return the communicator of the ranks that `connect` connects, the folder of the trace that a rank requests, or
    "", and what stands for the name of the MPI library. Collective over these ranks.

    There is no watchdog: where a rank dies, the others get an error, and the program or its launcher ends the job.
    """
    transport = connect()
    core, trace_folder = make_communicator(transport, None, registry, name, lambda: tcp.LIBRARY)
    core.is_world = True  # the program can't free it
    _register_exit(registry, os.getpid())
    return core, trace_folder, tcp.LIBRARY


@lru_cache(maxsize=1)
def _register_exit(registry: Registry, owner: int) -> None:
    """Let this process, the `owner`, leave its job without MPI at exit."""
    leave = partial(_leave_without_mpi, registry, owner)
    atexit.register(leave)
    if launch_env.is_child():
        # It ends without the functions of atexit if it was forked.
        from multiprocessing.util import Finalize

        Finalize(None, leave, exitpriority=1)
    os.register_at_fork(after_in_child=partial(_refuse_all, registry))


def _refuse_all(registry: Registry) -> None:
    """Disable communication in a forked child, which is no rank."""
    for comm in registry.members():
        comm.queue.refuse()


_has_left = False


def _leave_without_mpi(registry: Registry, owner: int) -> None:
    """Complete the pending operations at exit, and announce to the other ranks that this one makes no more calls."""
    global _has_left  # noqa: PLW0603  the process ends once
    if os.getpid() != owner or _has_left:
        return
    _has_left = True
    members = registry.members()
    for comm in members:
        with suppress(MpicollError):  # ranks have died, or do not join: the error has no caller any more
            # An operation that does not end holds the lock that the comparison takes.
            if comm.queue.drain(timeout=min(DRAIN_TIMEOUT, config().timeout)):
                comm.queue.compare_unseen_calls()
            else:
                get_logger().warning(
                    "rank %d of %d (%s) exits while operations are pending that other ranks have not joined",
                    comm.transport.rank,
                    comm.transport.size,
                    comm.name,
                )
    for callback in exit_callbacks:
        with suppress(MpicollError):
            callback()
    for comm in members:
        mesh = getattr(comm.transport, "mesh", None)
        if mesh is not None:
            mesh.leave()
