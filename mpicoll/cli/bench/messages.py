"""The contestants of ``mpicoll bench send`` and of the other messages: pairs of ranks that exchange one array.

A call is a round trip: the first rank of a pair sends and then receives, the second one receives and then sends. Calls
that do both at once, such as sendrecv, are one exchange. With an odd number of ranks, the last one does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import mpicoll
from mpicoll.cli.bench.cases import AT_ONCE, MESSAGES, ArrayKind, Case
from mpicoll.cli.bench.peers import Contestant, Ready, TimedCall, Unavailable, create_group
from mpicoll.engine.core.communicator import Communicator

_TAG = 7


@dataclass(frozen=True, slots=True)
class Trip:
    """Exchange of a rank with its `peer`: it sends `x` and receives into `out`, and sends first if it is `first`."""

    peer: int
    first: bool
    x: Any
    out: Any

    def alternate(self, send: TimedCall, recv: TimedCall) -> TimedCall:
        """Return the calls of a round trip, in the order of this rank."""
        one, other = (send, recv) if self.first else (recv, send)

        def call() -> None:
            one()
            other()

        return call


MakeCall: TypeAlias = "Callable[[Trip], TimedCall]"
"""Function that returns the calls of a trip."""


def _wait_each(send: TimedCall, recv: TimedCall, trip: Trip) -> TimedCall:
    return trip.alternate(lambda: send().wait(), lambda: recv().wait())


def _send(trip: Trip) -> TimedCall:
    return trip.alternate(
        partial(mpicoll.send, trip.x, trip.peer, _TAG), partial(mpicoll.recv, None, trip.peer, _TAG, out=trip.out)
    )


def _isend(trip: Trip) -> TimedCall:
    return _wait_each(
        partial(mpicoll.isend, trip.x, trip.peer, _TAG),
        partial(mpicoll.irecv, None, trip.peer, _TAG, out=trip.out),
        trip,
    )


def _sendrecv(trip: Trip) -> TimedCall:
    return partial(mpicoll.sendrecv, trip.x, trip.peer, trip.peer, sendtag=_TAG, recvtag=_TAG, out=trip.out)


class _Mpi4py:
    """The messages of mpi4py on a duplicated communicator. Making it is collective."""

    def __init__(self, comm: Communicator) -> None:
        self._own = comm.mpi.Dup()

    def send(self, trip: Trip) -> TimedCall:
        own = self._own
        return trip.alternate(partial(own.Send, trip.x, trip.peer, _TAG), partial(own.Recv, trip.out, trip.peer, _TAG))

    def isend(self, trip: Trip) -> TimedCall:
        own = self._own
        return trip.alternate(
            lambda: own.Isend(trip.x, trip.peer, _TAG).Wait(), lambda: own.Irecv(trip.out, trip.peer, _TAG).Wait()
        )

    def sendrecv(self, trip: Trip) -> TimedCall:
        return partial(self._own.Sendrecv, trip.x, trip.peer, _TAG, trip.out, trip.peer, _TAG)


class _Torch:
    """The messages of torch.distributed, or of its drop-in `functions`, on a process group."""

    def __init__(self, functions: Any, group: Any) -> None:
        self._functions, self._group = functions, group

    def send(self, trip: Trip) -> TimedCall:
        dist, group = self._functions, self._group
        return trip.alternate(
            partial(dist.send, trip.x, trip.peer, group=group), partial(dist.recv, trip.out, trip.peer, group=group)
        )

    def isend(self, trip: Trip) -> TimedCall:
        dist, group = self._functions, self._group
        return _wait_each(
            partial(dist.isend, trip.x, trip.peer, group=group),
            partial(dist.irecv, trip.out, trip.peer, group=group),
            trip,
        )

    def batch(self, trip: Trip) -> TimedCall:
        dist, group = self._functions, self._group

        def call() -> None:
            operations = [
                dist.P2POp(dist.isend, trip.x, trip.peer, group),
                dist.P2POp(dist.irecv, trip.out, trip.peer, group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return call


OF_TORCH = MESSAGES[MESSAGES.index("torch_send") :]
"""Messages of tensors."""

PEERS = ("mpi4py", "gloo")


class Messages:
    """The contestants for some messages. Making it is collective, as is :meth:`close`."""

    def __init__(self, comm: Communicator, names: tuple[str, ...], against: tuple[str, ...], like: ArrayKind) -> None:
        self._size = comm.size
        self._pipe: Any = None
        ours: dict[str, MakeCall] = {"send": _send, "isend": _isend, "sendrecv": _sendrecv}
        if set(names) & {"torch_send", "torch_isend", "dropin_send", "batch"}:
            ours |= self._make_torch()
        if "pipeline" in names:
            from mpicoll.parallel.p2p import PipeP2P

            self._pipe = PipeP2P(comm)
            ours["pipeline"] = self._send_in_pipe
        tensors = {name: ours[name] for name in OF_TORCH if name in ours}
        self.contestants = [Contestant("mpicoll", self._prepare(ours, like, tensors), like, ours=True)]
        if "mpi4py" in against:
            mpi = _Mpi4py(comm)
            blocking = dict.fromkeys(("send", "torch_send", "dropin_send", "pipeline"), mpi.send)
            calls = blocking | {"isend": mpi.isend, "torch_isend": mpi.isend} | dict.fromkeys(AT_ONCE, mpi.sendrecv)
            self.contestants.append(Contestant("mpi4py", self._prepare(calls, "numpy", {}), "numpy"))
        if "gloo" in against:
            import torch.distributed as dist

            group = create_group(dist, "gloo")
            gloo = _Torch(dist, group)
            calls = dict.fromkeys(("send", "torch_send", "dropin_send", "pipeline"), gloo.send)
            calls |= {"isend": gloo.isend, "torch_isend": gloo.isend, "batch": gloo.batch}
            self.contestants.append(
                Contestant(
                    "gloo",
                    self._prepare(calls, "torch", calls),
                    "torch",
                    phase="gloo",
                    barrier=partial(dist.barrier, group=group),
                )
            )

    def _make_torch(self) -> dict[str, MakeCall]:
        import torch.distributed as dist

        from mpicoll import torch as dropin

        group = create_group(dist, "mpicoll")
        torch, other = _Torch(dist, group), _Torch(dropin, group)
        return {
            "torch_send": torch.send,
            "torch_isend": torch.isend,
            "dropin_send": other.send,
            "batch": torch.batch,
        }

    def _send_in_pipe(self, trip: Trip) -> TimedCall:
        pipe = self._pipe
        return trip.alternate(partial(pipe.send, trip.x, trip.peer), partial(pipe.recv, trip.out, trip.peer))

    def _prepare(
        self, calls: Mapping[str, MakeCall], like: ArrayKind, tensors: Mapping[str, MakeCall]
    ) -> Callable[[Case], Ready]:
        """Return the function that prepares a case of arrays `like` by one of `calls`; those of `tensors` get tensors
        also where the arrays are numpy's."""

        def prepare(case: Case) -> Ready:
            name, peer = case.workload.collective, case.workload.find_partner(case.rank)
            if name not in calls:
                raise Unavailable(f"it has no {name}")
            if peer is None:
                return Ready(lambda: None)
            x, out = case.x, case.out
            if name in tensors and like == "numpy":
                import torch

                x, out = torch.from_numpy(x), torch.from_numpy(out)
            return Ready(calls[name](Trip(peer, case.rank < peer, x, out)), out)

        return prepare

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
