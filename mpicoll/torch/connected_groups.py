"""Process groups whose ranks no MPI launcher has started: they connect by the group's store.

The world that a default group has made lives as long as that group, so that a program may destroy it and make another.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mpicoll.engine import world
from mpicoll.engine.core.communicator import Communicator, core_of
from mpicoll.engine.core.communicator_core import CommunicatorCore
from mpicoll.transport import tcp

_roots: WeakKeyDictionary[CommunicatorCore, Communicator] = WeakKeyDictionary()
"""The communicators that hold the connections, by those of their process groups."""


def connect(store: dist.Store, rank: int, size: int, ranks: Sequence[int]) -> Communicator:
    """Return the communicator of a new group, whose ranks connect by its `store`. Collective over the group.

    `ranks` are its global ranks; empty for the default group, whose ranks become the world.
    """
    own_store = dist.PrefixStore("mpicoll", store)
    root = world.connect_world(lambda: tcp.connect(own_store, rank, size, ranks or None), "group" if ranks else "world")
    # Not the communicator itself: calls of mpicoll's own functions are not ordered with those of the group.
    comm = root.group(range(size))
    assert comm is not None
    _roots[core_of(comm)] = root
    return comm


def disconnect(comm: Communicator, *, abort: bool = False) -> None:
    """Close the connections that were made for the group of `comm`, which is not used any more, if there are any.

    With `abort`, operations may be running: they fail.
    """
    root = _roots.pop(core_of(comm), None)
    if root is not None:
        world.disconnect(root, abort=abort)
