"""Collectives between hosts, beside what their links can carry. As root:

    python ci/hosts.py --rate 1gbit 2 2 python ci/between_hosts.py --rate 1gbit allreduce bcast --sizes 32m,64m

`mpicoll` is what is chosen without a request: not timed are the calls that try other algorithms, after which one stays.
The others are what `--algorithms` names, and `sockets` is a control: plain TCP connections, one of each rank with a
rank of the next host, that carry the bytes of the law and combine nothing. All take turns, each call begins with a
barrier, and a time is the median over calls of the slowest rank.

* law: bytes that each host has to send, for H hosts of L ranks and n bytes: 2(H-1)/H n of an allreduce, (H-1)/H n of an
  allgather or reduce_scatter, L(H-1)/H n of an alltoall, n of a bcast.
* link: the time in which a link of `--rate` carries that, with 66 bytes of headers in each frame of 1,514, divided by
  the measured time: the share of the link that is used.
* sent: bytes that left the busiest host, by the counters of its interface, divided by the law. Headers are up to 4.6 %.
* cores: processor time of all ranks divided by the measured time; and busy: the same of all that runs on this machine,
  which plays all hosts. Where that is near the number of its cores, these are the limit; what it is above `cores` is
  mostly the kernel, which moves the frames, where no other programs run.

With `--order cyclic`, consecutive ranks are on different hosts.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from hosts import PAYLOAD, parse_rate

import mpicoll
from mpicoll.cli import formatting
from mpicoll.cli.bench.cases import Case, Workload
from mpicoll.collectives.explain import make_call_query
from mpicoll.engine.world import resolve
from mpicoll.errors import AlgorithmError

_LAWS: dict[str, Callable[[int, int], float]] = {
    "allreduce": lambda hosts, ranks: 2 * (hosts - 1) / hosts,
    "allgather": lambda hosts, ranks: (hosts - 1) / hosts,
    "reduce_scatter": lambda hosts, ranks: (hosts - 1) / hosts,
    "alltoall": lambda hosts, ranks: ranks * (hosts - 1) / hosts,
    "bcast": lambda hosts, ranks: 1.0,
}
"""Bytes that each of so many hosts, with so many ranks, has to send of a collective of one byte."""

_ROW = "{:15} {:>7} {:22} {:>6} {:>6} {:>6} {:>6} {:>6}"

_BLOCK = 1 << 18
"""Most bytes that the control passes to the kernel at a time."""

_LEARNING_CALLS = 50
"""Calls after which a choice has to stay."""


class Call(NamedTuple):
    """Seconds of the slowest rank, bytes that left the busiest host, and seconds of processor time, of all ranks and of
    the whole machine."""

    seconds: float
    sent: int
    processor: float
    busy: float


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collectives", nargs="*", choices=[*_LAWS, []], help="all if left out")
    parser.add_argument("--rate", default="1gbit", help="of the links, such as 1gbit: as passed to ci/hosts.py")
    parser.add_argument("--sizes", type=formatting.sizes, default=(32 << 20,), help="in bytes (32m)")
    parser.add_argument("--algorithms", default="native,ring,halving_doubling,hierarchical")
    parser.add_argument("--order", choices=["block", "cyclic"], default="block")
    parser.add_argument("--calls", type=int, default=9, help="timed calls of each (9)")
    return parser.parse_args()


def make_comm(order: str) -> Any:
    """Return the ranks of the job, in this order of hosts. Collective."""
    world = mpicoll.world()
    if order == "block":
        return world
    hosts = mpicoll.allgather_object(socket.gethostname())
    return world.split(0, hosts[: world.rank].count(hosts[world.rank]) * world.size + world.rank)


class Sockets:
    """Connections by TCP of each rank with the ranks of equal number on the hosts before and after its own, over which
    :meth:`move` sends and receives. Collective."""

    def __init__(self, comm: Any) -> None:
        hosts = mpicoll.allgather_object(socket.gethostname(), comm=comm)
        names = list(dict.fromkeys(hosts))
        self.hosts, self.host = len(names), names.index(hosts[comm.rank])
        self.ranks = hosts.count(hosts[0])
        lane = hosts[: comm.rank].count(hosts[comm.rank])
        with socket.create_server(("", 0)) as listener:
            place = socket.gethostbyname(socket.gethostname()), listener.getsockname()[1]
            everyone = mpicoll.allgather_object((self.host, lane, place), comm=comm)
            places = {(host, number): where for host, number, where in everyone}
            self._following = socket.create_connection(places[(self.host + 1) % self.hosts, lane])
            self._preceding, _ = listener.accept()
        self._data, self._memory = memoryview(bytearray(_BLOCK)), memoryview(bytearray(_BLOCK))
        for connection in (self._following, self._preceding):
            connection.setblocking(False)

    def move(self, nbytes: int, *, chain: bool) -> None:
        """Send `nbytes` to the next host and receive as many; in a `chain`, not from the last one to the first."""
        unsent = 0 if chain and self.host == self.hosts - 1 else nbytes
        missing = 0 if chain and self.host == 0 else nbytes
        with selectors.DefaultSelector() as selector:
            if unsent:
                selector.register(self._following, selectors.EVENT_WRITE)
            if missing:
                selector.register(self._preceding, selectors.EVENT_READ)
            while unsent or missing:
                for key, _ in selector.select(60) or _fail():
                    if key.fileobj is self._following:
                        unsent -= self._following.send(self._data[: min(unsent, _BLOCK)])
                    else:
                        missing -= self._preceding.recv_into(self._memory[: min(missing, _BLOCK)])
                    if not (unsent if key.fileobj is self._following else missing):
                        selector.unregister(key.fileobj)


def _fail() -> Any:
    raise TimeoutError("nothing has moved between the hosts for 60 s")


def make_calls(workload: Workload, names: Sequence[str], comm: Any, sockets: Sockets) -> dict[str, Callable[[], Any]]:
    """Return the function that carries out the workload by each of `names` that can, with right results."""
    case = Case(workload, comm.rank, "numpy")
    arguments = (case.x, "sum") if workload.collective in ("allreduce", "reduce_scatter") else (case.x,)
    function = getattr(mpicoll, workload.collective)
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        keywords = {} if name == "mpicoll" else {"algorithm": name}
        call = partial(function, *arguments, out=case.out, comm=comm, **keywords)
        case.reset()
        try:
            call()
        except AlgorithmError:
            continue
        fault = workload.check(comm.rank, case.out)
        if fault is not None:
            raise SystemExit(f"rank {comm.rank}: {workload.collective} by {name}: {fault}")
        calls[name] = call
    nbytes = int(_LAWS[workload.collective](sockets.hosts, sockets.ranks) * workload.nbytes) // sockets.ranks
    calls["sockets"] = partial(sockets.move, nbytes, chain=workload.collective == "bcast")
    return calls


def let_learn(workload: Workload, comm: Any, call: Callable[[], Any]) -> None:
    """Make the calls that try algorithms, until one stays. Collective."""
    core = resolve(comm)
    query = make_call_query(workload.collective, workload.nbytes, "sum", "float32", 0, None, core, None)
    for _ in range(_LEARNING_CALLS):
        trials = core.trials.get(query)
        if trials is None or trials.settled:
            return
        call()
    raise SystemExit(f"{workload.collective} of {workload.nbytes} bytes still tries algorithms")


def measure(comm: Any, call: Callable[[], Any]) -> Call:
    """Carry out a call, and return what it took. Collective."""
    mpicoll.barrier(comm=comm)
    sent, busy, processor, begin = _count_sent(), _read_busy(), time.process_time(), time.perf_counter()
    call()
    seconds, used = time.perf_counter() - begin, time.process_time() - processor
    mpicoll.barrier(comm=comm)
    most = mpicoll.allreduce(np.array([seconds, _count_sent() - sent, _read_busy() - busy]), "max", comm=comm)
    return Call(most[0], int(most[1]), float(mpicoll.allreduce(np.array([used]), comm=comm)[0]), most[2])


def _count_sent() -> int:
    """Return the bytes that have left this host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if "eth0:" in line).partition(":")[2].split()[8])


def _read_busy() -> float:
    """Return the seconds that the cores of this machine have been busy."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = read_arguments()
    os.environ.setdefault("MPICOLL_TUNED", "off")
    comm = make_comm(arguments.order)
    sockets = Sockets(comm)
    rate = parse_rate(arguments.rate)
    if comm.rank == 0:
        print(f"{sockets.hosts} hosts of {sockets.ranks}, {arguments.rate}, {arguments.order} order")
        print(_ROW.format("collective", "size", "by", "ms", "link", "sent", "cores", "busy"), flush=True)
    for collective in arguments.collectives or _LAWS:
        for size in arguments.sizes:
            workload = Workload(collective, size, "float32", "sum", comm.size)
            law = _LAWS[collective](sockets.hosts, sockets.ranks) * workload.nbytes
            calls = make_calls(workload, ["mpicoll", *arguments.algorithms.split(",")], comm, sockets)
            let_learn(workload, comm, calls["mpicoll"])
            found: dict[str, list[Call]] = {name: [] for name in calls}
            for _ in range(arguments.calls):
                for name, call in calls.items():
                    found[name].append(measure(comm, call))
            chosen = mpicoll.explain(collective, workload.nbytes, dtype="float32", comm=comm).name
            for name, measured in found.items():
                seconds, sent, processor, busy = (median(one) for one in zip(*measured, strict=True))
                row = (
                    collective,
                    formatting.nbytes(workload.nbytes),
                    f"{name}: {chosen}" if name == "mpicoll" else name,
                    f"{seconds * 1e3:.0f}",
                    f"{100 * law / (PAYLOAD * rate) / seconds:.0f} %",
                    f"{sent / law:.3f}",
                    f"{processor / seconds:.2f}",
                    f"{busy / seconds:.2f}",
                )
                if comm.rank == 0:
                    print(_ROW.format(*row), flush=True)


if __name__ == "__main__":
    main()
