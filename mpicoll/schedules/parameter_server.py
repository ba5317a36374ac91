"""A step of a synchronous parameter server as a schedule: not a collective of MPI, so it is not registered as one.

Of P ranks the first S are servers, and the others are workers. The segments of the algorithm are the shards of the
model: chunk s is what server s holds, its weights before the step. Workers begin with their gradients in all chunks,
and end with the new weights, into which each server has reduced the gradients of all workers.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpicoll.schedules.model import Algorithm, Recv, Round, Send


def _generate(rank: int, size: int, *, segments: int) -> Iterator[Round]:
    """Push all gradients to the servers at the same time, and pull all weights when they are updated.

    2 rounds; a worker sends n bytes and receives as many, a server n(P-S)/S each way. Li et al. 2014.
    """
    workers = range(segments, size)
    if not workers:
        return
    if rank in workers:
        # Workers begin with different servers, so that not all of them send to the first one at the same time.
        servers = [(rank + step) % segments for step in range(segments)]
        yield Round(sends=tuple(Send(server, (server,)) for server in servers))
        yield Round(recvs=tuple(Recv(server, (server,)) for server in servers))
    else:
        yield Round(recvs=tuple(Recv(worker, (rank,), reduce=True) for worker in workers))
        yield Round(sends=tuple(Send(worker, (rank,)) for worker in workers))


PARAMETER_SERVER = Algorithm(
    collective="parameter_server",
    name="synchronous",
    generate=_generate,
    chunks=lambda size, segments: segments,
    scratch=lambda size, segments: 0,
    segmented=True,
    uneven=True,
    ordered=False,
    any_root=False,
    rounds="2 if P > S else 0",
    sent="max(1, (P - S) / S) if P > S else 0",
    doc=_generate.__doc__ or "",
)
"""Step of a synchronous parameter server, an :class:`Algorithm` that is not registered; ``segments`` are its servers.

Example:
    >>> report = mpicoll.schedules.verify(mpicoll.schedules.PARAMETER_SERVER, 6, segments=2)
    >>> report.rounds, report.messages
    (2, 16)
"""
