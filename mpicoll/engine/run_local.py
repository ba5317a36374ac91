"""Jobs whose ranks are threads of this process."""

from __future__ import annotations

import importlib
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.config import config
from mpicoll.engine.checks.call_check import CallCheck
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.message_check import warn_of_unmatched_messages
from mpicoll.engine.core.registry import Options, Registry
from mpicoll.engine.core.request import seconds
from mpicoll.engine.world import local_world, set_local_world
from mpicoll.errors import ArgumentError, CommunicationError, RankError, RankFailed
from mpicoll.transport import local


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
    there are no native algorithms. If torch has been imported before, its setting ``set_multithreading_enabled`` is off
    in the ranks' threads, so that each runs its own backward passes. When a rank is done, fails or is killed, waits of
    other ranks for it raise RankFailed.

    Args:
        function: What each rank runs.
        size: Number of ranks.
        *args: Arguments of `function`, the same objects on all ranks.
        faults: Messages that are delayed or lost, and ranks that die (see :mod:`mpicoll.transport.local`).
        ranks_per_node: Number of consecutive ranks that count as one node. None: all ranks are on one node.
        timeout: Bound of a wait in seconds, after which the rank gets Timeout.

    Returns:
        The result of each rank; None for a killed one.

    Raises:
        ArgumentError: `function` is no function, or `timeout` no positive number.
        RankError: `size` is not a number of at least 1.
        Exception: The exception of the rank that failed first. One that only reports the failure of another rank is
            raised only if there are no others.

    Example:
        >>> mpicoll.run_local(lambda: mpicoll.allreduce(mpicoll.world().rank), 4)
        [6, 6, 6, 6]
    """
    size, timeout = _validate(function, size), seconds("run_local", timeout)
    checks = Options.parse(config().check)
    job = local.LocalJob(size, faults, timeout)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    worlds: list[CommunicatorCore] = []

    def rank_main(transport: local.LocalTransport) -> None:
        core: CommunicatorCore | None = None
        completed = False
        try:
            _keep_backward_passes()
            # Each rank is a thread here, with its own copy of the state that a process has elsewhere.
            core = CommunicatorCore(transport, None, name="world", checks=checks, registry=Registry(CallCheck))
            worlds.append(core)
            set_local_world(Communicator(core, _replace_world))
            results[transport.rank] = function(*args)
            core.registry.compare_unseen_calls()
            completed = True
        except local.Killed:
            pass  # the fault that was asked for
        except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
            failures.append((transport.rank, error))
        finally:
            last = local_world.get()
            core = core if last is None else core_of(last)
            if completed and core is not None:
                core.queue.close()
                for comm in core.registry.members():
                    comm.complete_on_device()
            # A worker that waits for other ranks fails when they detect that this rank has exited, and can be closed
            # only then.
            job.mark_dead(transport.rank)
            if core is not None:
                core.queue.close(abandon=True)

    threads = [
        threading.Thread(target=rank_main, args=(one,), name=f"mpicoll-rank-{one.rank}", daemon=True)
        for one in local.transports(job, ranks_per_node)
    ]
    _run_all(threads)
    if not failures and not faults:
        worlds.sort(key=lambda comm: comm.rank)
        warn_of_unmatched_messages((comm.transport, comm.name) for one in worlds for comm in one.registry.members())
    if failures:
        rank, error = min(failures, key=lambda failure: type(failure[1]) in (CommunicationError, RankFailed))
        if sys.version_info >= (3, 11):
            error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results


def _validate(function: Any, size: Any) -> int:
    """Validate the arguments, and return the number of ranks."""
    if not callable(function):
        raise ArgumentError(f"run_local: function must be a function that each rank calls, got {function!r}")
    try:
        size = operator.index(size)
    except TypeError:
        raise RankError(f"run_local: size must be a number of ranks, got {size!r}") from None
    if size < 1:
        raise RankError(f"run_local: size must be at least 1, got {size}")
    return int(size)


def _run_all(threads: Sequence[threading.Thread]) -> None:
    """Start `threads`, and return when they have ended."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _replace_world(comm: Communicator) -> None:
    set_local_world(comm)


def _keep_backward_passes() -> None:
    """Have torch run backward passes of this thread on this thread. Otherwise it runs those of all threads on one
    thread for each device, where a collective of the first rank would keep the others from joining it."""
    if sys.modules.get("torch") is not None:
        # Another rank may be importing it: this waits until it is complete.
        importlib.import_module("torch").autograd.set_multithreading_enabled(False)
