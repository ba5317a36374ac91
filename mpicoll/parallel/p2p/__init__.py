"""Messages between pipeline stages: values of any shape.

A value is a tensor, None, or tuples, lists, dicts and namedtuples of these, nested to any depth; all other objects in
it are pickled. The receiver needs no advance knowledge: a header (structure, dtypes, shapes, requires_grad, plain
values) is sent before a value whose header differs from the previous one's, and only then.

Values are sent on *lines*: for each pair of stages, direction and ``channel`` (0 to 255) there are three, one for
:meth:`PipeP2P.send`, :meth:`PipeP2P.recv` and their variants, one for the ``forward`` forms and one for the
``backward`` forms. On a line the n-th receive gets the n-th value. Lines are independent of each other.

Example:
    ::

        with init_process_groups(grid) as p2p:
            if p2p.stage == 0:
                p2p.send((activations, mask), 1)
            elif p2p.stage == 1:
                activations, mask = p2p.recv(0)
"""

from mpicoll.parallel.p2p.default_pipe import (
    can_send_recv,
    init_process_groups,
    irecv,
    isend,
    recv,
    recv_obj,
    send,
    send_obj,
    wait,
)
from mpicoll.parallel.p2p.pipe import PipeP2P

__all__ = [
    "PipeP2P",
    "can_send_recv",
    "init_process_groups",
    "irecv",
    "isend",
    "recv",
    "recv_obj",
    "send",
    "send_obj",
    "wait",
]
