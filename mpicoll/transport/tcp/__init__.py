"""The transport of ranks that no MPI launcher has started: TCP connections between all of them.

The ranks find each other by a store of torch.distributed, or anything like it. Ranks of one node share memory as under
MPI. There are no native algorithms, and a job does not go on after a death.

The connections are those of Python's own :mod:`multiprocessing.connection`, which frames and authenticates messages.
gloo would be another carrier, but a message that is larger than its receive ends the process there, and a timeout
closes all connections of a group; it can't probe either.

Modules, lowest first: :mod:`~mpicoll.transport.tcp.mailbox` (matching), :mod:`~mpicoll.transport.tcp.mesh` (the
connections of this process), :mod:`~mpicoll.transport.tcp.posted_round`, :mod:`~mpicoll.transport.tcp.messages`,
:mod:`~mpicoll.transport.tcp.transport` (the transport),
:mod:`~mpicoll.transport.tcp.rendezvous` (how the ranks find each other),
:mod:`~mpicoll.transport.tcp.environment` (the ranks that the variables of ``env://`` describe).
"""

from mpicoll.transport.tcp.mesh import Mesh
from mpicoll.transport.tcp.rendezvous import Store, connect
from mpicoll.transport.tcp.transport import TcpTransport

__all__ = ["LIBRARY", "Mesh", "Store", "TcpTransport", "connect"]

LIBRARY = "TCP without MPI"
"""Name in tables of measured algorithms, in place of that of the MPI library."""
