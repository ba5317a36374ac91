"""Addresses of the ranks: how a rank describes its own, and what it knows of those of the others."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.process_status import describe_process


class AddressBook:
    """The addresses at which the ranks listen, as rank `rank` uses them. It is empty at first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._entries: Sequence[dict[str, Any]] = ()
        self._own: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def set(self, entries: Sequence[dict[str, Any]]) -> None:
        """Set the result of :func:`describe_address` of each rank, by rank."""
        self._entries = list(entries)
        self._own = set(_addresses())

    def addresses_of(self, rank: int) -> list[str]:
        """Return the IP addresses at which this rank may reach `rank`.

        An address that this host has too, such as that of a bridge for containers, would lead to a process of this
        host, which may be that of another user. Only ranks that share a network without knowing it, such as in
        containers with names of their own, have no other address.
        """
        if self.is_local(rank):
            return ["127.0.0.1"]
        addresses = list(self._entries[rank]["addresses"])
        return [address for address in addresses if address not in self._own] or addresses

    def is_local(self, rank: int) -> bool:
        """Return True if `rank` is on the host of this rank."""
        return bool(self._entries[rank]["place"] == self._entries[self._rank]["place"])

    def port(self, rank: int) -> int:
        """Return the port at which `rank` listens."""
        return int(self._entries[rank]["port"])

    def exit_of(self, rank: int, why: str, crash_output: str = "") -> PeerExit:
        """Return the event of the exit of `rank`."""
        entry = self._entries[rank] if self._entries else {}
        return PeerExit(rank, why, crash_output, int(entry.get("pid", 0)), str(entry.get("host", "")))


def describe_address(port: int) -> dict[str, Any]:
    """Return the address of this process, which listens at `port`, for the other ranks' :class:`AddressBook`."""
    return {
        "host": socket.gethostname(),
        "place": place(),
        **describe_process(),
        "port": port,
        "addresses": _addresses(),
    }


def place() -> str:
    """Return a text that is the same for processes that reach each other by 127.0.0.1, and for no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return " ".join(parts)


def _addresses() -> list[str]:
    """Return this host's addresses: that of the default route first, those of bridges and of IPv6 last."""
    found: list[tuple[int, str]] = []
    likely = _outward()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith(("127.", "169.254.")):
                bridge = re.match("docker|br-|virbr|cni|veth|lxc", name) is not None
                found.append((0 if address == likely else 2 if bridge else 1, address))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == "00":  # global
                found.append((3, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return [address for _, address in sorted(found, key=lambda one: one[0])]


def _outward() -> str:
    """Return the source address of the default route, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing: only looks up the route
            return str(sock.getsockname()[0])
        except OSError:
            return ""
