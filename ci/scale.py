"""What the control network of a large job costs, measured on one machine: the constants of docs/scale.md.

    python ci/scale.py                       # stars of 16, 64, 256, 512 and 1000 ranks
    python ci/scale.py --ranks 2000 --shapes star,tree/32

The ranks are control networks of this process, polled by two threads, of which one is that of rank 0: the hub of a
star, the root of a tree. For each number of ranks it prints the processor seconds of that thread until all ranks are
connected and it has a message of each, until all know of a death, and until all have left, which they do at once, with
those of all ranks; and of the addresses that each rank receives of all ranks the bytes on the wire, the bytes of memory
and the seconds to read them, and the bytes that it keeps of them.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import tracemalloc
from itertools import product
from typing import Any

from mpicoll.transport.control import timing
from mpicoll.transport.control.addresses import AddressBook, read_addresses
from mpicoll.transport.control.events import Message, PeerExit
from mpicoll.transport.control.network import ControlNetwork
from mpicoll.transport.control.sockets import allow_descriptors

LIMIT = 100.0
"""Seconds that each part may take."""

_PER_HOST = 64
"""Ranks of a host, in the measurement of addresses."""

_FAREWELL = 300
"""Bytes of a farewell, more or less, as it has the last operations of a rank."""

_DESCRIPTORS = 8
"""Descriptors of one rank, and more."""


def measure_addresses(ranks: int, address: dict[str, Any]) -> str:
    """Return what the addresses of `ranks` ranks cost each rank."""
    texts = [json.dumps(address | {"place": f"host {rank // _PER_HOST}"}) for rank in range(ranks)]
    begin = time.process_time()
    AddressBook(0).set(read_addresses(texts, "host 0"))
    seconds = time.process_time() - begin
    tracemalloc.start()
    read = read_addresses(texts, "host 0")
    held = tracemalloc.get_traced_memory()[0]
    book = AddressBook(0)
    book.set(read)
    del read
    in_book = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert book
    return (
        f"{sum(map(len, texts)) / ranks:.0f} bytes, {held / ranks:.0f} bytes of memory, {in_book / ranks:.0f} kept,"
        f" {seconds / ranks * 1e6:.1f} us for each rank"
    )


class Hub:
    """The thread of rank 0, with the events that it receives and its processor time."""

    def __init__(self, network: ControlNetwork) -> None:
        self._network = network
        self._is_over = False
        self.seconds = 0.0
        self.messages = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            self.messages += sum(isinstance(event, Message) for event in self._network.poll(0.05))
            self.seconds = time.thread_time()

    def end(self) -> None:
        """End the thread."""
        self._is_over = True
        self._network.wake()
        self._thread.join()


def measure_end(hub: Hub, networks: list[ControlNetwork]) -> tuple[float, float]:
    """Let all ranks leave at once; return the processor seconds of the hub's thread, and those of all."""
    body = {"kind": "left", "calls": "x" * _FAREWELL}
    before, begin, until = hub.seconds, time.process_time(), time.monotonic() + LIMIT
    for one in networks:
        one.leave(body, timeout=0)
    left: set[ControlNetwork] = set()
    while len(left) < len(networks):
        if time.monotonic() > until:
            raise SystemExit(f"{len(networks) - len(left)} of {len(networks)} ranks have not left after {LIMIT:g} s")
        for one in networks:
            if one in left:
                continue
            if one is not networks[0]:
                one.poll(0)
            if one.flush(0):
                if one is networks[0]:
                    hub.end()
                one.close()
                left.add(one)
    return hub.seconds - before, time.process_time() - begin


def measure_network(ranks: int, shape: str) -> tuple[list[float], dict[str, Any]]:
    """Return the hub's processor seconds until all are connected, those of a death's notice and those of the end, the
    ones of the end of all ranks, and an address."""
    allow_descriptors(_DESCRIPTORS * ranks)
    # A probe reads the table of all sockets of its host: here of those of all ranks.
    timing.PROBE_AFTER = LIMIT
    # All other ranks share one thread, so that each leaves later than with a core of its own.
    timing.LINGER = timing.LINGER_AT_MOST = LIMIT
    networks = [ControlNetwork(rank, ranks, bytes(16), listen_at=["127.0.0.1"], shape=shape) for rank in range(ranks)]
    addresses = [one.address for one in networks]
    for one in networks:
        one.connect(addresses)
    hub = Hub(networks[0])
    try:
        until = time.monotonic() + LIMIT
        # The message of a rank is delivered when its connection is made.
        for one in networks[1:]:
            one.send({}, to=0)
        while hub.messages < ranks - 1:
            if time.monotonic() > until:
                raise SystemExit(f"{ranks - 1 - hub.messages} of {ranks} ranks are not connected after {LIMIT:g} s")
            for one in networks[1:]:
                one.poll(0)
        connected = hub.seconds
        networks[-1].close()
        waiting = networks[1:-1]
        while waiting:
            if time.monotonic() > until:
                raise SystemExit(f"{len(waiting)} of {ranks} ranks do not know of a death after {LIMIT:g} s")
            told = {one for one in networks[1:-1] if any(isinstance(event, PeerExit) for event in one.poll(0))}
            waiting = [one for one in waiting if one not in told]
        time.sleep(0.1)
        died = hub.seconds - connected
        return [connected, died, *measure_end(hub, networks[:-1])], addresses[0]
    finally:
        hub.end()
        for one in networks:
            one.close()


def main() -> None:
    """Measure what the arguments state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="16,64,256,512,1000", help="numbers of ranks (16,64,256,512,1000)")
    parser.add_argument("--shapes", default="star", help="shapes of the control network, such as star,tree/32 (star)")
    arguments = parser.parse_args()
    for ranks, shape in product(map(int, arguments.ranks.split(",")), arguments.shapes.split(",")):
        (connected, died, left, all_left), address = measure_network(ranks, shape)
        print(
            f"{ranks:6d} ranks, {shape:7s}  rank 0:"
            f" connected {connected * 1e3:.1f} ms ({connected / ranks * 1e6:.0f} us a rank),"
            f" a death {died * 1e3:.1f} ms ({died / ranks * 1e6:.0f} us a rank),"
            f" the end {left * 1e3:.1f} ms, of all ranks {all_left:.2f} s ({all_left / ranks * 1e6:.0f} us a rank);"
            f" addresses: {measure_addresses(ranks, address)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
