"""How near the all-reduce between hosts comes to what their links allow. To be run across hosts:

    python ci/hosts.py --rate 1gbit 2 1 python ci/between_hosts.py --rate 1 native ring halving_doubling
    python ci/hosts.py --rate 1gbit 2 2 python ci/between_hosts.py --rate 1 ring hierarchical hierarchical+ring

``hierarchical+ring`` takes ring between the nodes. The algorithms take turns; a time is that of the slowest rank, and
shown are the median and the least. The bound is 2(H-1)/H n for H hosts at the rate of a link. Of that rate the headers
of Ethernet, IP and TCP take 4.4 % with packets of 1500 bytes; what is left is measured first, by exchanges of large
messages between neighbours.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import mpicoll


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="+")
    parser.add_argument("--mib", type=float, default=64.0)
    parser.add_argument("--rate", type=float, required=True, help="of a link, in Gbit/s")
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def _timed(call: Callable[[], object]) -> float:
    mpicoll.barrier()
    begin = time.perf_counter()
    call()
    return float(mpicoll.allreduce(time.perf_counter() - begin, "max"))


def _exchange(nbytes: int) -> float:
    """Bits per second of payload that links carry both ways at once: the first ranks of the hosts pass on in a ring."""
    world = mpicoll.world()
    first = [world.nodes.index(node) for node in range(world.num_nodes)]
    out, into = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def shift() -> None:
        if world.rank in first:
            here = first.index(world.rank)
            mpicoll.sendrecv(out, first[(here + 1) % len(first)], first[here - 1], out=into)

    return nbytes * 8 / min(_timed(shift) for _ in range(4))


def _allreduce(algorithm: str, x: np.ndarray, out: np.ndarray) -> None:
    name, _, between = algorithm.partition("+")
    if between:
        # The first that can serve: the other one between the nodes.
        with mpicoll.algorithms(allreduce=f"0-inf:{name},0-inf:{between}"):
            mpicoll.allreduce(x, out=out)
    else:
        mpicoll.allreduce(x, out=out, algorithm=name)


def main() -> None:
    arguments = _arguments()
    world = mpicoll.world()
    x = np.ones(int(arguments.mib * (1 << 20)) // 4, np.float32)
    out = np.empty_like(x)
    carried = _exchange(x.nbytes)
    times: dict[str, list[float]] = {name: [] for name in arguments.algorithms}
    for turn in range(arguments.repeat + 1):
        for name, measured in times.items():
            out[:] = 0
            seconds = _timed(lambda name=name: _allreduce(name, x, out))
            if not (out == world.size).all():
                raise SystemExit(f"{name}: wrong result on rank {world.rank}")
            if turn:
                measured.append(seconds)
    if world.rank:
        return
    hosts = world.num_nodes
    bound = 2 * (hosts - 1) / hosts * x.nbytes * 8 / (arguments.rate * 1e9)
    print(f"{hosts} hosts, {world.size} ranks, {arguments.mib:g} MiB, bound {bound * 1e3:.1f} ms", end="; ")
    print(f"links carry {carried / arguments.rate / 1e7:.1f} % as payload; load {os.getloadavg()[0]:.1f}")
    for name, measured in times.items():
        mid, least = median(measured), min(measured)
        print(
            f"{name:32} median {mid * 1e3:7.1f} ms {bound / mid:6.1%}, least {least * 1e3:7.1f} ms {bound / least:6.1%}"
        )


if __name__ == "__main__":
    main()
