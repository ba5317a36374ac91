"""What the control network of a large job costs, measured on one machine: the constants of docs/scale.md.

    python ci/scale.py                       # jobs of 16, 64, 256, 512 and 1000 ranks
    python ci/scale.py --ranks 2000

The hub and its clients are control networks of this process, polled by two threads. For each number of ranks it prints
the processor seconds of the hub's thread until all ranks are connected, and until all know of a death; and of the
addresses that each rank has of all ranks the bytes on the wire, the bytes of memory and the seconds to read them.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import tracemalloc
from typing import Any

from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.network import ControlNetwork
from mpicoll.transport.control.sockets import allow_descriptors

LIMIT = 100.0
"""Seconds that each part may take."""

_DESCRIPTORS = 8
"""Descriptors of one rank, and more."""


def measure_addresses(ranks: int, address: dict[str, Any]) -> str:
    """Return what the addresses of `ranks` ranks cost each rank."""
    texts = [json.dumps(address) for _ in range(ranks)]
    begin = time.process_time()
    kept = [json.loads(text) for text in texts]
    seconds = time.process_time() - begin
    del kept
    tracemalloc.start()
    kept = [json.loads(text) for text in texts]
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(kept) == ranks
    return (
        f"{sum(map(len, texts)) / ranks:.0f} bytes, {held / ranks:.0f} bytes of memory,"
        f" {seconds / ranks * 1e6:.1f} us for each rank"
    )


class Hub:
    """The thread of rank 0, with the events that it receives and its processor time."""

    def __init__(self, network: ControlNetwork) -> None:
        self._network = network
        self._is_over = False
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            self._network.poll(0.05)
            self.seconds = time.thread_time()

    def end(self) -> None:
        """End the thread."""
        self._is_over = True
        self._network.wake()
        self._thread.join()


def measure_network(ranks: int) -> tuple[float, float, dict[str, Any]]:
    """Return the hub's processor seconds until all are connected, those of a death's notice, and an address."""
    allow_descriptors(_DESCRIPTORS * ranks)
    networks = [ControlNetwork(rank, ranks, bytes(16), listen_at=["127.0.0.1"]) for rank in range(ranks)]
    addresses = [one.address for one in networks]
    for one in networks:
        one.connect(addresses)
    hub = Hub(networks[0])
    try:
        until = time.monotonic() + LIMIT
        # The message of a rank is delivered when its connection is made.
        for one in networks[1:]:
            one.send({}, to=0)
        waiting = networks[1:]
        while waiting:
            if time.monotonic() > until:
                raise SystemExit(f"{len(waiting)} of {ranks} ranks are not connected after {LIMIT:g} s")
            for one in waiting:
                one.poll(0)
            waiting = [one for one in waiting if not one.flush(0)]
        connected = hub.seconds
        networks[-1].close()
        waiting = networks[1:-1]
        while waiting:
            if time.monotonic() > until:
                raise SystemExit(f"{len(waiting)} of {ranks} ranks do not know of a death after {LIMIT:g} s")
            waiting = [one for one in waiting if not any(isinstance(event, PeerExit) for event in one.poll(0))]
        time.sleep(0.1)
        return connected, hub.seconds - connected, addresses[0]
    finally:
        hub.end()
        for one in networks:
            one.close()


def main() -> None:
    """Measure what the arguments state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64,256,512,1000", help="numbers of ranks (16,64,256,512,1000)")
    for ranks in map(int, parser.parse_args().ranks.split(",")):
        connected, died, address = measure_network(ranks)
        print(
            f"{ranks:6d} ranks  hub: connected {connected * 1e3:.1f} ms ({connected / ranks * 1e6:.0f} us a rank),"
            f" a death {died * 1e3:.1f} ms ({died / ranks * 1e6:.0f} us a rank);"
            f" addresses: {measure_addresses(ranks, address)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
