"""Sockets at which the processes of a job listen, for ``mpicoll doctor --ports``."""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LISTEN = "0A"
"""State of a listening TCP socket in /proc/net/tcp."""

_ACCEPTS = 0x10000
"""Flag of a listening socket in /proc/net/unix."""

MPI, LAUNCHER, CONTROL, STORE = "MPI library", "launcher", "control connections", "torch's store"
"""Owners of sockets."""

_SETTINGS = {
    MPI: "OMPI_MCA_btl=^tcp closes it (for jobs on one node that share memory and start no other job);"
    " OMPI_MCA_btl_tcp_if_include=INTERFACE selects the interface of connections, but the port stays open on all;"
    " OMPI_MCA_btl_tcp_port_min_v4 and OMPI_MCA_btl_tcp_port_range_v4 (and _v6) select the ports, for a firewall",
    LAUNCHER: "no setting of Open MPI 5 closes it: use a firewall; PRTE_MCA_prte_if_include=INTERFACE selects the"
    " interface of connections to other nodes",
}
"""Settings that close or narrow a port of Open MPI 5."""

_OWN_SETTINGS = {
    CONTROL: "MPICOLL_INTERFACE selects the interface",
    STORE: "MPICOLL_INTERFACE selects the interface, MASTER_ADDR the address",
}


@dataclass(frozen=True, slots=True)
class Listening:
    """The listening sockets of one owner: a description, the setting that closes or narrows them, and whether other
    hosts can reach one of them."""

    owner: str
    text: str
    setting: str
    is_open: bool


def list_sockets(pid: int | str = "self") -> list[str]:
    """Return the addresses at which a process of this user listens: ``ADDRESS:PORT``, or ``unix:NAME``.

    Names of abstract Unix sockets begin with ``@``. Returns an empty list for a process that can't be read.
    """
    folder, inodes = Path(f"/proc/{pid}"), set()
    with suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    inodes.add(match[1])
    found = []
    for table in ("tcp", "tcp6"):
        for _, local, _, state, _, _, _, _, _, inode, *_ in _read_table(folder / "net" / table):
            if state == _LISTEN and inode in inodes:
                found.append(_format_address(local))
    for _, _, _, flags, _, _, inode, *name in _read_table(folder / "net" / "unix"):
        if int(flags, 16) & _ACCEPTS and inode in inodes:
            found.append(f"unix:{' '.join(name) or '(no name)'}")
    return sorted(found)


def _read_table(path: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines()[1:]:
            yield line.split()


def _format_address(text: str) -> str:
    """Format an address of /proc/net: words of 32 bits in the order of this machine, in hexadecimal digits."""
    digits, _, port = text.partition(":")
    words = [int(digits[begin : begin + 8], 16) for begin in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return f"{f'[{address}]' if address.version == 6 else address}:{int(port, 16)}"


def is_outer(address: str) -> bool:
    """Return True if other hosts may reach the address of :func:`list_sockets`."""
    if address.startswith("unix:"):
        return False
    host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    return not (getattr(host, "ipv4_mapped", None) or host).is_loopback


def describe(report: Mapping[str, Any], library: str) -> Iterator[Listening]:
    """Yield the sockets by owner.

    `report` has for each owner the addresses by process, or None if it was not examined. `library` is the name of the
    MPI library.
    """
    known = _OWN_SETTINGS | (_SETTINGS if library.startswith("Open MPI") else {})
    for owner, by_process in report.items():
        if by_process is None:
            yield Listening(owner, "not examined: torch is not installed", "", is_open=False)
            continue
        listed = {process: addresses for process, addresses in by_process.items() if addresses}
        is_open = any(is_outer(one) for addresses in listed.values() for one in addresses)
        text = "; ".join(f"{process} at {', '.join(addresses)}" for process, addresses in listed.items())
        yield Listening(owner, text or "no port", known.get(owner, "use a firewall") if is_open else "", is_open)
