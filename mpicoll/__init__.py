"""MPI collectives for numpy and torch, with the algorithms as data.

``import mpicoll`` does not initialise MPI. The first operation that needs MPI initialises it; without an MPI launcher
MPI is never initialised. See README.md and docs/ for a tour, :mod:`mpicoll.errors` for the exceptions,
:mod:`mpicoll.config` for the environment variables, and :mod:`mpicoll.schedules` for the algorithms.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll import schedules
    from mpicoll.buffers.ops import Op, premul_sum
    from mpicoll.collectives.allgather import allgather, allgather_init, iallgather
    from mpicoll.collectives.allreduce import allreduce, allreduce_init, iallreduce
    from mpicoll.collectives.alltoall import alltoall, alltoall_init, ialltoall
    from mpicoll.collectives.barrier import barrier, barrier_init, ibarrier
    from mpicoll.collectives.bcast import bcast, bcast_init, ibcast
    from mpicoll.collectives.empty import empty
    from mpicoll.collectives.explain import explain
    from mpicoll.collectives.exscan import exscan, exscan_init, iexscan
    from mpicoll.collectives.file import File
    from mpicoll.collectives.gather import gather, gather_init, igather
    from mpicoll.collectives.halo import exchange_halo, iexchange_halo
    from mpicoll.collectives.message_buffers import Status
    from mpicoll.collectives.neighbours import (
        ineighbor_allgather,
        ineighbor_alltoall,
        neighbor_allgather,
        neighbor_alltoall,
    )
    from mpicoll.collectives.npy import load, save
    from mpicoll.collectives.objects import (
        allgather_object,
        alltoall_object,
        bcast_object,
        gather_object,
        scatter_object,
    )
    from mpicoll.collectives.p2p import iprobe, irecv, isend, probe, recv, send, sendrecv
    from mpicoll.collectives.reduce import ireduce, reduce, reduce_init
    from mpicoll.collectives.reduce_scatter import ireduce_scatter, reduce_scatter, reduce_scatter_init
    from mpicoll.collectives.resilient import resilient
    from mpicoll.collectives.scan import iscan, scan, scan_init
    from mpicoll.collectives.scatter import iscatter, scatter, scatter_init
    from mpicoll.collectives.window import Window
    from mpicoll.engine.core.communicator import CartesianCommunicator, Communicator, GraphCommunicator
    from mpicoll.engine.core.proc_null import PROC_NULL
    from mpicoll.engine.core.request import Request, waitall, waitany
    from mpicoll.engine.core.topology import dims_create
    from mpicoll.engine.debug import debug
    from mpicoll.engine.plan import Plan
    from mpicoll.engine.run_local import run_local
    from mpicoll.engine.selection.selector import Choice, algorithms
    from mpicoll.engine.trace import trace
    from mpicoll.engine.world import world
    from mpicoll.errors import (
        AlgorithmError,
        ArgumentError,
        CommunicationError,
        CommunicatorError,
        DeviceError,
        DTypeError,
        FileError,
        MismatchError,
        MpicollError,
        NumericsError,
        RankError,
        RankFailed,
        ScheduleError,
        SetupError,
        ShapeError,
        SpawnError,
        Timeout,
        TruncationError,
    )
    from mpicoll.launch import spawn

    __version__: str

__all__ = [
    "PROC_NULL",
    "AlgorithmError",
    "ArgumentError",
    "CartesianCommunicator",
    "Choice",
    "CommunicationError",
    "Communicator",
    "CommunicatorError",
    "DTypeError",
    "DeviceError",
    "File",
    "FileError",
    "GraphCommunicator",
    "MismatchError",
    "MpicollError",
    "NumericsError",
    "Op",
    "Plan",
    "RankError",
    "RankFailed",
    "Request",
    "ScheduleError",
    "SetupError",
    "ShapeError",
    "SpawnError",
    "Status",
    "Timeout",
    "TruncationError",
    "Window",
    "algorithms",
    "allgather",
    "allgather_init",
    "allgather_object",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoall_init",
    "alltoall_object",
    "barrier",
    "barrier_init",
    "bcast",
    "bcast_init",
    "bcast_object",
    "debug",
    "dims_create",
    "empty",
    "exchange_halo",
    "explain",
    "exscan",
    "exscan_init",
    "gather",
    "gather_init",
    "gather_object",
    "iallgather",
    "iallreduce",
    "ialltoall",
    "ibarrier",
    "ibcast",
    "iexchange_halo",
    "iexscan",
    "igather",
    "ineighbor_allgather",
    "ineighbor_alltoall",
    "iprobe",
    "irecv",
    "ireduce",
    "ireduce_scatter",
    "iscan",
    "iscatter",
    "isend",
    "load",
    "neighbor_allgather",
    "neighbor_alltoall",
    "premul_sum",
    "probe",
    "recv",
    "reduce",
    "reduce_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "resilient",
    "run_local",
    "save",
    "scan",
    "scan_init",
    "scatter",
    "scatter_init",
    "scatter_object",
    "schedules",
    "send",
    "sendrecv",
    "spawn",
    "trace",
    "waitall",
    "waitany",
    "world",
]

# Resolved at first use: importing torch imports this package, which must not slow that down.
_HOMES = {
    "buffers.ops": "Op premul_sum",
    "collectives.allgather": "allgather allgather_init iallgather",
    "collectives.allreduce": "allreduce allreduce_init iallreduce",
    "collectives.alltoall": "alltoall alltoall_init ialltoall",
    "collectives.barrier": "barrier barrier_init ibarrier",
    "collectives.bcast": "bcast bcast_init ibcast",
    "collectives.empty": "empty",
    "collectives.explain": "explain",
    "collectives.exscan": "exscan exscan_init iexscan",
    "collectives.file": "File",
    "collectives.gather": "gather gather_init igather",
    "collectives.halo": "exchange_halo iexchange_halo",
    "collectives.message_buffers": "Status",
    "collectives.neighbours": "ineighbor_allgather ineighbor_alltoall neighbor_allgather neighbor_alltoall",
    "collectives.npy": "load save",
    "collectives.objects": "allgather_object alltoall_object bcast_object gather_object scatter_object",
    "collectives.p2p": "iprobe irecv isend probe recv send sendrecv",
    "collectives.reduce": "ireduce reduce reduce_init",
    "collectives.reduce_scatter": "ireduce_scatter reduce_scatter reduce_scatter_init",
    "collectives.resilient": "resilient",
    "collectives.scan": "iscan scan scan_init",
    "collectives.scatter": "iscatter scatter scatter_init",
    "collectives.window": "Window",
    "engine.core.communicator": "CartesianCommunicator Communicator GraphCommunicator",
    "engine.core.proc_null": "PROC_NULL",
    "engine.core.topology": "dims_create",
    "engine.debug": "debug",
    "engine.plan": "Plan",
    "engine.core.request": "Request waitall waitany",
    "engine.selection.selector": "Choice algorithms",
    "engine.trace": "trace",
    "engine.run_local": "run_local",
    "engine.world": "world",
    "errors": (
        "AlgorithmError ArgumentError CommunicationError CommunicatorError DTypeError DeviceError FileError"
        " MismatchError MpicollError NumericsError RankError RankFailed ScheduleError SetupError ShapeError SpawnError"
        " Timeout TruncationError"
    ),
    "launch": "spawn",
}

_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return import_module("mpicoll.schedules")
    if name == "__version__":
        return _find_version()
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    # What modules create stays: the collector would look through all of it again and again.
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(f"mpicoll.{home}"), name)
    finally:
        if is_enabled:
            gc.enable()
    globals()[name] = value
    return value


def _find_version() -> str:
    """Return the version that was found when mpicoll was built; "0+unknown" for a checkout of which nothing was."""
    try:
        from mpicoll._version import __version__
    except ImportError:
        return "0+unknown"
    return __version__


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
