"""Round trips of messages of device memory between two ranks of a node: from device to device, and through the host.

    mpirun -np 2 python ci/gpu_messages.py [--sizes 64k,1m,16m,64m] [--calls 20]

Prints the median of a round trip in microseconds by each way, the calls of which alternate, and their ratio. Needs
cupy and a GPU; more ranks than two wait.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import cupy
import numpy as np

import mpicoll
from mpicoll.engine.executors import peer_messages
from mpicoll.engine.executors.peer_messages import PeerMessages

UNITS = {"k": 1 << 10, "m": 1 << 20}


def parse_size(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def measure(x: cupy.ndarray, out: cupy.ndarray) -> float:
    """Return the microseconds of a round trip of `x` between ranks 0 and 1, checked by its elements."""
    rank = mpicoll.world().rank
    mpicoll.barrier()
    begin = time.perf_counter()
    if rank == 0:
        mpicoll.send(x, 1)
        mpicoll.recv(source=1, out=out)
    elif rank == 1:
        mpicoll.recv(source=0, out=out)
        mpicoll.send(out, 0)
    took = time.perf_counter() - begin
    if rank < 2 and not bool((out == 3).all()):
        raise SystemExit(f"rank {rank} has received wrong elements")
    out.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    return took * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64k,1m,16m,64m", help="bytes of a message")
    parser.add_argument("--calls", type=int, default=20, help="round trips by each way")
    given = parser.parse_args()
    world = mpicoll.world()
    if world.size < 2:
        raise SystemExit("two ranks are needed: mpirun -np 2 python ci/gpu_messages.py")
    cupy.cuda.Device(world.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    mpicoll.allreduce(cupy.ones(1))  # in which the ranks find out if they reach each other's memory
    announce = PeerMessages.send
    least = peer_messages.MIN_SHARED_BYTES
    ways: dict[str, Callable[..., object]] = {"ipc": announce, "host": lambda *arguments: None}
    for nbytes in map(parse_size, given.sizes.split(",")):
        x, out = (cupy.asarray(np.full(nbytes // 4, value, np.float32)) for value in (3, 0))
        peer_messages.MIN_SHARED_BYTES = least
        choice = mpicoll.explain("send", x.nbytes, root=1 - world.rank % 2, like=x)
        peer_messages.MIN_SHARED_BYTES = 0
        times: dict[str, list[float]] = {way: [] for way in ways}
        for call in range(given.calls + 2):
            for way, send in ways.items():
                PeerMessages.send = send  # type: ignore[method-assign,assignment]
                took = measure(x, out)
                if call >= 2:
                    times[way].append(took)
        if world.rank == 0:
            direct, host = (median(times[way]) for way in ways)
            print(f"{nbytes:>10} bytes: ipc {direct:10.0f} us, through the host {host:10.0f} us: {host / direct:.2f} x")
            print(f"           {choice}", flush=True)


if __name__ == "__main__":
    main()
