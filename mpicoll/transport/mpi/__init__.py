"""MPI through mpi4py. Importing this package initialises MPI."""

import sys

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    # mpi4py would finalise MPI in forked children too, where that hangs; see session.py.
    mpi4py.rc.finalize = False

from mpicoll.transport.mpi.fault_tolerance import mourn, survives
from mpicoll.transport.mpi.native import MpiNative
from mpicoll.transport.mpi.ops import reduce_in_place, reduce_local
from mpicoll.transport.mpi.pending import MpiPending, _under_way  # noqa: F401  engine.report looks at it
from mpicoll.transport.mpi.session import abort, library, world, world_rank, world_size
from mpicoll.transport.mpi.transport import MpiTransport
from mpicoll.transport.mpi.user_comms import attached, duplicate, is_communicator

__all__ = [
    "MpiNative",
    "MpiPending",
    "MpiTransport",
    "abort",
    "attached",
    "duplicate",
    "is_communicator",
    "library",
    "mourn",
    "reduce_in_place",
    "reduce_local",
    "survives",
    "world",
    "world_rank",
    "world_size",
]
