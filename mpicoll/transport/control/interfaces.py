"""The network interfaces of this host, and those that the user has selected."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import re
import socket
import struct
from collections.abc import Iterator, Sequence

from mpicoll.named_tuple import NamedTuple
from mpicoll.proc_files import read_file

LOOPBACK = "127.0.0.1"

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_SIOCGIFNETMASK = 0x891B
_IFF_UP = 1

_IFCONF = struct.Struct("iP")

_IFREQ = struct.Struct(f"16s4x4s{struct.calcsize('2LH3B0L') - 8}x")
"""A struct ifreq with the label of an IPv4 address and a sockaddr_in. Its union is as large as the struct ifmap."""


class InterfaceAddress(NamedTuple):
    """An address of this host, the name of its interface, and the prefix length of its subnet."""

    interface: str
    address: str
    prefix: int

    @property
    def network(self) -> str:
        """The subnet, such as "10.1.0.0/16"."""
        import ipaddress  # late: jobs on one host do not need it

        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


def find_addresses() -> list[InterfaceAddress]:
    """Return the addresses of this host that other hosts may reach: those of interfaces that are up.

    That of the default route comes first, those of bridges and of IPv6 last.
    """
    found: list[tuple[int, InterfaceAddress]] = []
    likely = find_default_address()
    found += (
        (0 if one.address == likely else 2 if is_bridge(one) else 1, one)
        for one in _find_ipv4_addresses()
        if not one.address.startswith(("127.", "169.254."))
    )
    with contextlib.suppress(OSError):
        for line in read_file("/proc/net/if_inet6").splitlines():
            digits, _, prefix, scope, _, name = line.split()
            if scope == "00":  # global
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                found.append((3, InterfaceAddress(name, address, int(prefix, 16))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def is_bridge(one: InterfaceAddress) -> bool:
    """Return True if the interface has the name of a bridge for containers or virtual machines of this host."""
    return re.match("docker|podman|br-|virbr|cni|veth|lxc", one.interface) is not None


def _find_ipv4_addresses() -> Iterator[InterfaceAddress]:
    """Yield the IPv4 addresses of interfaces of this host that are up, the secondary ones included."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # A struct ifconf: the length of the answer, and where it is to be written; without that, the kernel only says
        # its length.
        length, _ = _IFCONF.unpack(fcntl.ioctl(sock, _SIOCGIFCONF, _IFCONF.pack(0, 0)))
        answer = ctypes.create_string_buffer(length)
        request = _IFCONF.pack(length, ctypes.addressof(answer))
        length, _ = _IFCONF.unpack(fcntl.ioctl(sock, _SIOCGIFCONF, request))
        for start in range(0, length, _IFREQ.size):
            entry = answer.raw[start : start + _IFREQ.size]
            label, address = _IFREQ.unpack(entry)
            with contextlib.suppress(OSError):  # it is gone meanwhile
                (flags,) = struct.unpack_from("H", fcntl.ioctl(sock, _SIOCGIFFLAGS, entry), 16)
                _, mask = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFNETMASK, entry))
                if flags & _IFF_UP:
                    name = label.partition(b"\0")[0].decode().partition(":")[0]  # without an alias, as in "eth0:1"
                    yield InterfaceAddress(name, socket.inet_ntoa(address), int.from_bytes(mask).bit_count())


def select_addresses(selection: Sequence[str]) -> list[InterfaceAddress]:
    """Return the addresses of this host that the words of MPICOLL_INTERFACE select.

    Each word is the name of an interface, an address or a network. Raises ValueError, with what there is to select, if
    they select nothing.
    """
    there = find_addresses()
    selected: dict[str, InterfaceAddress] = {}
    for one in there:
        if any(_is_selected(one, word) for word in selection):
            selected.setdefault(one.address, one)  # two interfaces may have the same address
    if not selected:
        available = ", ".join(f"{one.interface} ({one.address})" for one in there) or "none"
        raise ValueError(
            f"MPICOLL_INTERFACE={','.join(selection)}: host {socket.gethostname()} has no such interface that other"
            f" hosts can reach; it has {available}"
        )
    return list(selected.values())


def _is_selected(one: InterfaceAddress, word: str) -> bool:
    if one.interface == word:
        return True
    import ipaddress  # late, see above

    try:
        return ipaddress.ip_address(one.address) in ipaddress.ip_network(word, strict=False)
    except ValueError:  # a name
        return False


def find_default_address() -> str:
    """Return the source address of the default route, or an empty string."""
    return find_source_address("192.0.2.1")


def find_source_address(destination: str) -> str:
    """Return the address of this host from which the kernel would send to `destination`, or an empty string."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((destination, 9))  # sends nothing: only looks up the route
            return str(sock.getsockname()[0])
    except OSError:
        return ""
