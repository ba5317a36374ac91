"""Sockets and descriptors, as the control network needs them. Linux."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import socket
import struct
import termios
from collections.abc import Collection, Iterator, Sequence

from mpicoll.proc_files import read_file
from mpicoll.transport.control import timing
from mpicoll.transport.control.connection import WINDOW

_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, of Linux 6.15
RESERVED_DESCRIPTORS = 128
"""Descriptors that are left for the program."""
_DESCRIPTORS = resource.RLIMIT_NOFILE


def listen(size: int, addresses: Sequence[str]) -> list[socket.socket]:
    """Return sockets that listen at one free port: of these IP addresses, or of all interfaces if there are none.

    On all interfaces it is for IPv6 and IPv4, or for IPv4 only where there is no IPv6.
    """
    backlog = min(size + 64, 65535)
    if addresses:
        listening = _listen_at(addresses, backlog)
    else:
        try:
            listening = [socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)]
        except (OSError, ValueError):
            listening = [socket.create_server(("", 0), backlog=backlog)]
    for sock in listening:
        sock.setblocking(False)
    return listening


def _listen_at(addresses: Sequence[str], backlog: int, retries: int = 20) -> list[socket.socket]:
    listening: list[socket.socket] = []
    port = 0
    try:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening.append(socket.create_server((address, port), family=family, backlog=backlog))
            port = listening[0].getsockname()[1]
    except OSError as error:
        for sock in listening:
            sock.close()
        if error.errno != errno.EADDRINUSE or not retries:
            raise
        return _listen_at(addresses, backlog, retries - 1)  # another process has the port at one of the addresses
    return listening


def is_taken(port: int, inodes: Collection[int]) -> bool:
    """Return True if sockets listen at `port` of this host, and none of them has one of these inodes: another process
    has the port now. Returns False if the kernel does not say which sockets listen."""
    try:
        found = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(f"/proc/net/{table}", port)}
    except OSError:
        return False
    return bool(found) and found.isdisjoint(inodes)


def _listening_inodes(table: str, port: int) -> Iterator[int]:
    try:
        lines = read_file(table).splitlines()
    except FileNotFoundError:
        return  # there is no IPv6
    for line in lines[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            yield int(inode)


def tune(sock: socket.socket, outage: float) -> None:
    """Set the options of a connection, on which the peer counts as lost after an outage of `outage` seconds."""
    sock.setblocking(False)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < 4 * WINDOW:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * WINDOW)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, timing.KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, timing.KEEPALIVE_INTERVAL)
    if _retries_steadily():
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, timing.KEEPALIVE_INTERVAL * 1000)
    # It applies to keepalive probes without an answer and to data without an acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after(outage) * 1000))


def start_connecting(sock: socket.socket, address: str, port: int, outage: float) -> int:
    """Begin to connect to a port. Returns 0, or an error number if that has failed already."""
    try:
        tune(sock, outage)
        code = sock.connect_ex((address, port))
    except OSError as error:
        return error.errno or errno.EHOSTUNREACH
    return 0 if code == errno.EINPROGRESS else code


def connecting_error(sock: socket.socket) -> int:
    """Return 0 if the connection that was begun has been made, or the error number if that has failed."""
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        return code
    try:
        # A connection to a free port of the same host may, by chance, be connected to itself.
        return errno.ECONNREFUSED if sock.getsockname() == sock.getpeername() else 0
    except OSError as error:
        return error.errno or errno.ECONNREFUSED


@functools.lru_cache(maxsize=1)
def _retries_steadily() -> bool:
    """Return True if the kernel can be set to retransmit lost data each second.

    Otherwise it doubles the interval after each attempt.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)
        except OSError:
            return False
    return True


def lost_after(outage: float) -> float:
    """Return the seconds of silence of the other host's kernel after which the host counts as lost."""
    # The silence may have begun before the outage, and ends only with the answer to the first probe or retransmission
    # after it, which may come late on a busy machine.
    until_next = timing.KEEPALIVE_INTERVAL if _retries_steadily() else timing.KEEPALIVE_INTERVAL + outage
    return timing.KEEPALIVE_IDLE + outage + until_next + timing.KEEPALIVE_INTERVAL


def is_connected(sock: socket.socket) -> bool:
    """Return True if the connection has been made."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def unacknowledged_bytes(sock: socket.socket) -> int:
    """Return the number of sent bytes that the other host's kernel has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


def silence(sock: socket.socket) -> float:
    """Return the seconds since the last acknowledgement of the other host's kernel."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return float(struct.unpack_from("I", info, 56)[0]) / 1000  # tcpi_last_ack_recv


def query_descriptor_limit() -> int:
    """Return the number of descriptors that this process may have."""
    return _query_descriptor_limits()[0]


def query_hard_descriptor_limit() -> int:
    """Return the number of descriptors that this process may allow itself."""
    return _query_descriptor_limits()[1]


def allow_descriptors(more: int) -> None:
    """Raise the limit, as far as possible, if `more` descriptors beside those in use would leave few for the program.

    Only for connections that the job needs: a program that uses select(2) can't wait for descriptors above 1023.
    """
    soft, hard = _query_descriptor_limits()
    number = len(os.listdir("/proc/self/fd")) + more  # noqa: PTH208
    if soft < min(number + 4 * RESERVED_DESCRIPTORS, hard):
        enough = min(number + 8 * RESERVED_DESCRIPTORS, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(_DESCRIPTORS, (enough, resource.getrlimit(_DESCRIPTORS)[1]))


def _query_descriptor_limits() -> tuple[int, int]:
    soft, hard = (1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_DESCRIPTORS))
    return soft, hard
