"""Facts that the ranks of a communicator exchange when it is made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from mpi4py import MPI

from mpicoll.transport.group_facts import GroupFacts
from mpicoll.transport.group_facts import find_facts as find_group_facts
from mpicoll.transport.mpi import ops
from mpicoll.transport.mpi.fault_tolerance import allgather_objects

_drawn_numbers = itertools.count()


def find_facts(comm: MPI.Intracomm, node: Sequence[int]) -> GroupFacts:
    """Return the facts about `comm`. Collective. `node` are the ranks on the node of this rank."""
    # All ranks of a node load the same library, so one of them answers for the node.
    defects = ops.find_defects() if comm.rank == node[0] else {}
    place = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return find_group_facts(partial(allgather_objects, comm), comm.rank, node, partial(draw_key, comm), place, defects)


def draw_key(comm: MPI.Intracomm) -> str:
    """Return a key for `comm` if this is its rank 0, otherwise an empty string.

    It is the rank in the job of its rank 0, and a number that this one has drawn for no other communicator.
    """
    return "" if comm.rank else f"{MPI.COMM_WORLD.rank}.{next(_drawn_numbers)}"
