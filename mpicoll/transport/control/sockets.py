"""Sockets and descriptors, as the control network needs them. Linux."""

from __future__ import annotations

import fcntl
import functools
import os
import resource
import socket
import struct
import termios

from mpicoll.transport.control.connection import _WINDOW

KEEPALIVE_IDLE = 2
KEEPALIVE_INTERVAL = 1
"""Seconds of silence before the kernel asks the other host whether it is there, and between such questions."""
_RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, of Linux 6.15
_RESERVE = 128  # descriptors left for the program
_DESCRIPTORS = resource.RLIMIT_NOFILE


def _listen(size: int) -> socket.socket:
    """A listening socket for IPv6 and IPv4, or for IPv4 where there is no other."""
    backlog = min(size + 64, 65535)
    try:
        sock = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    except (OSError, ValueError):
        sock = socket.create_server(("", 0), backlog=backlog)
    sock.setblocking(False)
    return sock


def _tune(sock: socket.socket, outage: float) -> None:
    sock.setblocking(False)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < 4 * _WINDOW:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _WINDOW)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL)
    if _retries_steadily():
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, KEEPALIVE_INTERVAL * 1000)
    # It counts for both: questions without an answer, and data that nobody acknowledges.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_lost_after(outage) * 1000))


@functools.lru_cache(maxsize=1)
def _retries_steadily() -> bool:
    """Whether the kernel can be told to send lost data again after a second each time; else it waits twice as long
    after each attempt."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)
        except OSError:
            return False
    return True


def _lost_after(outage: float) -> float:
    """Seconds of silence of the other host's kernel after which it counts as lost."""
    # When the outage began nothing may have come for a while; when it is over, it takes until the next attempt to send
    # something for an answer to come, and a moment more on a busy machine.
    until_next = KEEPALIVE_INTERVAL if _retries_steadily() else KEEPALIVE_INTERVAL + outage
    return KEEPALIVE_IDLE + outage + until_next + KEEPALIVE_INTERVAL


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _under_way(sock: socket.socket) -> int:
    """Bytes that the other host's kernel has not acknowledged."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


def _silence(sock: socket.socket) -> float:
    """Seconds since the other host's kernel was last heard."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return float(struct.unpack_from("I", info, 56)[0]) / 1000  # tcpi_last_ack_recv


def _allow_descriptors(number: int) -> int:
    """How many descriptors this process may have; raised, as far as possible, if so many leave few for the program."""
    soft, hard = (1 << 30 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(_DESCRIPTORS))
    enough = min(number + 8 * _RESERVE, hard)
    if soft >= min(number + 4 * _RESERVE, hard):
        return soft
    try:
        resource.setrlimit(_DESCRIPTORS, (enough, resource.getrlimit(_DESCRIPTORS)[1]))
    except (OSError, ValueError):
        return soft
    return enough


def _stderr() -> int:
    """A descriptor of its own that leads to stderr."""
    fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    _to_stderr(fd)
    return fd


def _to_stderr(fd: int) -> None:
    try:
        os.dup2(2, fd, inheritable=False)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, fd, inheritable=False)
        os.close(null)
