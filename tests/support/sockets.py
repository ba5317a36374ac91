"""Waiting for sockets whose descriptors may be over 1,023, which ``select.select`` does not take."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence


def wait_readable(socks: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Return those of `socks` that can be read from, as soon as there is one, or after `seconds`."""
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds) if isinstance(key.fileobj, socket.socket)]
