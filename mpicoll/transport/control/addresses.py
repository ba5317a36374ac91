"""Addresses of the ranks: how a rank describes its own, and what it knows of those of the others."""

from __future__ import annotations

import contextlib
import json
import socket
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from mpicoll.named_tuple import NamedTuple
from mpicoll.proc_files import read_file, read_link
from mpicoll.transport.control.events import PeerExit
from mpicoll.transport.control.interfaces import LOOPBACK, find_addresses
from mpicoll.transport.control.process_status import describe_process


class _Host(NamedTuple):
    """The part that the addresses of all ranks of a host have in common."""

    place: str
    name: str
    addresses: tuple[str, ...]


class AddressBook:
    """The addresses at which the ranks listen, as rank `rank` uses them. It is empty at first.

    It has those of all ranks, as each may become the hub of any other: about 20 bytes for each rank, and more for each
    host.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._hosts: list[_Host] = []
        self._host_of = array("I")  # of each rank, its index in _hosts
        self._ports = array("H")
        self._pids = array("Q")
        self._inodes: dict[int, list[int]] = {}  # of ranks of this host
        self._own: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def set(self, entries: Sequence[dict[str, Any]]) -> None:
        """Set the result of :func:`describe_address` of each rank, by rank."""
        numbers: dict[_Host, int] = {}
        place = entries[self._rank]["place"]
        for rank, entry in enumerate(entries):
            host = _Host(entry["place"], entry["host"], tuple(entry["addresses"]))
            self._host_of.append(numbers.setdefault(host, len(numbers)))
            self._ports.append(entry["port"])
            self._pids.append(entry["pid"])
            if host.place == place:
                self._inodes[rank] = list(entry.get("inodes", ()))
        self._hosts = list(numbers)
        if any(host.place != place for host in self._hosts):
            self._own = {one.address for one in find_addresses()}

    def _host(self, rank: int) -> _Host:
        return self._hosts[self._host_of[rank]]

    def addresses_of(self, rank: int) -> list[str]:
        """Return the IP addresses at which this rank may reach `rank`.

        An address that this host has too, such as that of a bridge for containers, would lead to a process of this
        host, which may be that of another user. Only ranks of the same network whose :func:`place` differs, such as in
        containers with names of their own, have no other address.
        """
        if self.is_local(rank):
            return [LOOPBACK]
        addresses = list(self._host(rank).addresses)
        return [address for address in addresses if address not in self._own] or addresses

    def describe_paths(self, ranks: Sequence[int]) -> str:
        """Return where the first ones of `ranks` on other hosts listen, and what selects that, for messages."""
        own, other = self._host(self._rank).name, [rank for rank in ranks if not self.is_local(rank)][:3]
        paths = [
            f"{own} to {self._host(rank).name} at {', '.join(self.addresses_of(rank)) or 'no address'}"
            for rank in other
        ]
        return f"; MPICOLL_INTERFACE selects the interface ({'; '.join(paths)})" if paths else ""

    def is_local(self, rank: int) -> bool:
        """Return True if `rank` is on the host of this rank."""
        return rank in self._inodes

    def share_host(self, rank: int, other: int) -> bool:
        """Return True if two ranks are on the same host."""
        return self._host(rank).place == self._host(other).place

    def port(self, rank: int) -> int:
        """Return the port at which `rank` listens."""
        return self._ports[rank]

    def inodes(self, rank: int) -> list[int]:
        """Return the inodes of the sockets at which `rank`, of this host, listens."""
        return self._inodes[rank]

    def exit_of(self, rank: int, why: str, crash_output: str = "") -> PeerExit:
        """Return the event of the exit of `rank`."""
        if not self:
            return PeerExit(rank, why, crash_output, 0, "")
        return PeerExit(rank, why, crash_output, self._pids[rank], self._host(rank).name)


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


def read_addresses(texts: Iterable[str], own_place: str) -> list[dict[str, Any]]:
    """Return the addresses that all ranks have described in JSON, by rank.

    Ranks of a host share the objects that they have in common, and of ranks other than 0 that are not at `own_place`
    there is only what :class:`AddressBook` takes: a job may have many of them.
    """
    addresses: list[dict[str, Any]] = []
    hosts: dict[_Host, dict[str, Any]] = {}
    for rank, text in enumerate(texts):
        entry = json.loads(text)
        host = _Host(entry["place"], entry["host"], tuple(entry["addresses"]))
        common = hosts.setdefault(host, {name: entry[name] for name in ("place", "host", "addresses")})
        if rank == 0 or host.place == own_place:
            addresses.append(entry | common)
        else:
            addresses.append({**common, "port": entry["port"], "pid": entry["pid"]})
    return addresses


def place() -> str:
    """Return a text that is the same for processes that reach each other by 127.0.0.1, and for no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(read_file("/proc/sys/kernel/random/boot_id").strip())
    with contextlib.suppress(OSError):
        parts.append(read_link("/proc/self/ns/net"))
    return " ".join(parts)
