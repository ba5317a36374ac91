"""The transport over MPI, through mpi4py. Importing this package initialises MPI.

Modules, lowest first: :mod:`~mpicoll.transport.mpi.ops` (predefined reductions),
:mod:`~mpicoll.transport.mpi.native` (MPI's own collectives), :mod:`~mpicoll.transport.mpi.translation` (envelopes and
exceptions), :mod:`~mpicoll.transport.mpi.fault_tolerance` (failed ranks, ULFM), :mod:`~mpicoll.transport.mpi.pending`
(non-blocking transfers), :mod:`~mpicoll.transport.mpi.messages` (point-to-point and rounds),
:mod:`~mpicoll.transport.mpi.comm_facts` (what the ranks of a communicator find out together),
:mod:`~mpicoll.transport.mpi.connections` (connections beside MPI, for large messages between hosts),
:mod:`~mpicoll.transport.mpi.transport` (the transport), :mod:`~mpicoll.transport.mpi.user_comms` (the program's
communicators), :mod:`~mpicoll.transport.mpi.session` (start and end of this process in the job).
"""

import sys

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    # mpi4py would finalise MPI in forked children too, which hangs there; session.py finalises instead.
    mpi4py.rc.finalize = False

from mpicoll.transport.mpi.fault_tolerance import fault_tolerant, find_undetected_failures, mark_dead
from mpicoll.transport.mpi.native import MpiNative
from mpicoll.transport.mpi.ops import reduce_in_place, reduce_local
from mpicoll.transport.mpi.pending import MpiPending, active_transfers
from mpicoll.transport.mpi.session import (
    abort,
    expect_exits,
    finalize,
    is_finalizing,
    library,
    world,
    world_rank,
    world_size,
)
from mpicoll.transport.mpi.transport import MpiTransport, world_ranks
from mpicoll.transport.mpi.user_comms import cached_communicator, duplicate, is_communicator

__all__ = [
    "MpiNative",
    "MpiPending",
    "MpiTransport",
    "abort",
    "active_transfers",
    "cached_communicator",
    "duplicate",
    "expect_exits",
    "fault_tolerant",
    "finalize",
    "find_undetected_failures",
    "is_communicator",
    "is_finalizing",
    "library",
    "mark_dead",
    "reduce_in_place",
    "reduce_local",
    "world",
    "world_rank",
    "world_ranks",
    "world_size",
]
