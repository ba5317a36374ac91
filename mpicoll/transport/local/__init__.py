"""Ranks as threads of one process: the same engine without an MPI library, and with faults on demand.

Messages are copied into the mailbox of the receiver when they are sent (so a send never waits), and are matched with
receives as MPI does: in the order of posting.

Modules, lowest first: :mod:`~mpicoll.transport.local.faults`, :mod:`~mpicoll.transport.local.mailbox` (matching),
:mod:`~mpicoll.transport.local.job` (the state that the threads share), :mod:`~mpicoll.transport.local.transport`.
"""

from mpicoll.transport.local.faults import Delay, Drop, Fault, Kill, Killed
from mpicoll.transport.local.job import LocalJob
from mpicoll.transport.local.transport import LocalTransport, transports

__all__ = ["Delay", "Drop", "Fault", "Kill", "Killed", "LocalJob", "LocalTransport", "transports"]
