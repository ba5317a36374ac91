"""Addresses of the ranks: how a rank describes its own, and what it knows of those of the others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from mpicoll.proc_files import read_file, read_link
from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.interfaces import LOOPBACK, find_addresses
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
        if not all(self.is_local(rank) for rank in range(len(self._entries))):
            self._own = {one.address for one in find_addresses()}

    def addresses_of(self, rank: int) -> list[str]:
        """Return the IP addresses at which this rank may reach `rank`.

        An address that this host has too, such as that of a bridge for containers, would lead to a process of this
        host, which may be that of another user. Only ranks of the same network whose :func:`place` differs, such as in
        containers with names of their own, have no other address.
        """
        if self.is_local(rank):
            return [LOOPBACK]
        addresses = list(self._entries[rank]["addresses"])
        return [address for address in addresses if address not in self._own] or addresses

    def describe_paths(self, ranks: Sequence[int]) -> str:
        """Return where the first ones of `ranks` on other hosts listen, and what selects that, for messages."""
        own, other = self._entries[self._rank]["host"], [rank for rank in ranks if not self.is_local(rank)][:3]
        paths = [
            f"{own} to {self._entries[rank]['host']} at {', '.join(self.addresses_of(rank)) or 'no address'}"
            for rank in other
        ]
        return f"; MPICOLL_INTERFACE selects the interface ({'; '.join(paths)})" if paths else ""

    def is_local(self, rank: int) -> bool:
        """Return True if `rank` is on the host of this rank."""
        return bool(self._entries[rank]["place"] == self._entries[self._rank]["place"])

    def port(self, rank: int) -> int:
        """Return the port at which `rank` listens."""
        return int(self._entries[rank]["port"])

    def inodes(self, rank: int) -> list[int]:
        """Return the inodes of the sockets at which `rank` listens."""
        return list(self._entries[rank]["inodes"])

    def exit_of(self, rank: int, why: str, crash_output: str = "") -> PeerExit:
        """Return the event of the exit of `rank`."""
        entry = self._entries[rank] if self._entries else {}
        return PeerExit(rank, why, crash_output, int(entry.get("pid", 0)), str(entry.get("host", "")))


def describe_address(port: int, addresses: Sequence[str]) -> dict[str, Any]:
    """Return the address of this process for the other ranks' :class:`AddressBook`.

    It listens at `port` of the IP addresses `addresses`, or of all if there are none.
    """
    outer = [address for address in addresses if address != LOOPBACK]
    return {
        "host": socket.gethostname(),
        "place": place(),
        **describe_process(),
        "port": port,
        "addresses": outer if addresses else [one.address for one in find_addresses()],
    }


def place() -> str:
    """Return a text that is the same for processes that reach each other by 127.0.0.1, and for no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(read_file("/proc/sys/kernel/random/boot_id").strip())
    with contextlib.suppress(OSError):
        parts.append(read_link("/proc/self/ns/net"))
    return " ".join(parts)
