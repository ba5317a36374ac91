"""A process between a rank and the hub, which has no token."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

from support.sockets import wait_readable
from support.star import SOON, Star


class Relay:
    """Passes on what two ranks send each other, and from :meth:`hold` on collects what one of them sends.

    `passed` is all that each of the two has sent and the other has received.
    """

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.inodes = [os.fstat(self._listener.fileno()).st_ino]
        self._target = port
        self._ends: list[socket.socket] = []
        self.passed = (bytearray(), bytearray())
        self._held: int | None = None
        self._parts: list[bytes] = []
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._ends = [client, socket.create_connection(("127.0.0.1", self._target))]
            while True:
                for ready in wait_readable(self._ends, SOON):
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    source = self._ends.index(ready)
                    if source == self._held:
                        self._parts.append(data)
                        self._arrived.set()
                    else:
                        self.passed[source].extend(data)
                        self._ends[1 - source].sendall(data)

    def hold(self, source: int) -> None:
        """Collect what the rank sends from now on: 0 is the one that has connected, 1 the other."""
        self._held = source

    def take(self) -> bytes:
        """What has been sent since, and is not passed on."""
        assert self._arrived.wait(SOON)
        self._arrived.clear()
        return self._parts[-1]

    def send(self, data: bytes) -> None:
        """Send it in the name of the rank of which :meth:`hold` collects."""
        assert self._held is not None
        self._ends[1 - self._held].sendall(data)

    def cut(self) -> None:
        """End both connections in an orderly way."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        self._thread.join(SOON)
        for sock in (*self._ends, self._listener):
            sock.close()


def start_with_relay(job: Star) -> Relay:
    """Start the ranks of `job`; rank 1 reaches the hub through the relay that is returned."""
    relay = Relay(job.lines[0].address["port"])
    addresses = json.loads(json.dumps([line.address for line in job.lines]))
    job.lines[0].connect(addresses)
    for line in job.lines[2:]:
        line.connect(addresses)
    job.lines[1].connect([addresses[0] | {"port": relay.port, "inodes": relay.inodes}, *addresses[1:]])
    for thread in job.threads:
        thread.start()
    return relay
